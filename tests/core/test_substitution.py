"""A copy of a function, in which other functions stand for some that it names."""

from __future__ import annotations

import functools
import math
import math as mathematics
from math import sqrt
from typing import Any

import pytest

from opsmith.core.substitution import Substitution

COPY = Substitution(
    values={id(math.sqrt): lambda x: ("root", x), id(len): lambda x: ("length", x)},
    called={id(float): lambda x: ("float", x), id(map): lambda *given: ("map", *given)},
    modules=(math,),
).copy


def helper(x: Any) -> Any:
    return sqrt(x)


@functools.cache
def kept(x: Any) -> Any:
    return helper(x)


bound = functools.partial(helper, 9)


class Holder:
    def method(self, x: Any) -> Any:
        return sqrt(x)


method = Holder().method
rooted = 0


def counts(x: Any) -> Any:
    global rooted
    rooted += 1
    return sqrt(x)


def tallied(x: Any) -> Any:
    tallied.calls = getattr(tallied, "calls", 0) + 1  # type: ignore[attr-defined]
    return sqrt(x)


def recursive(x: int) -> Any:
    return recursive(x - 1) if x else sqrt(x)


def imports(x: Any) -> Any:
    import math as inside
    from math import sqrt as root

    return inside.sqrt(x), root(x)


def generates(x: Any) -> Any:
    yield float(x)
    yield from (float(each) for each in [x])


def outer(root: Any) -> Any:
    def inner(x: int) -> Any:
        return root(x) if x else inner(1)

    return inner


FUNCTIONS = {
    "by module": (lambda: math.sqrt(4), ("root", 4)),
    "by another name of the module": (lambda: mathematics.sqrt(4), ("root", 4)),
    "imported by name": (lambda: sqrt(4), ("root", 4)),
    "imported inside": (lambda: imports(4), (("root", 4), ("root", 4))),
    "as a value": (lambda: [each(4) for each in (math.sqrt,)], [("root", 4)]),
    "other attributes": (lambda: math.pi, math.pi),
    "a builtin": (lambda: len([]), ("length", [])),
    "a class that is called": (lambda: float(2), ("float", 2)),
    "the same class as a value": (lambda: (float, isinstance(1.0, float)), (float, True)),
    "called in a lambda": (lambda: (lambda x: float(x))(2), ("float", 2)),
    "called in a comprehension": (lambda: {float(x) for x in (1, 2)}, {("float", 1), ("float", 2)}),
    "in a function that it calls": (lambda: helper(4), ("root", 4)),
    "in a cache around one": (lambda: kept(4), ("root", 4)),
    "in a partial of one": (lambda: bound(), ("root", 9)),
    "in a method of the module": (lambda: method(4), ("root", 4)),
    "in a closure that refers to itself": (lambda: outer(sqrt)(0), ("root", 1)),
    "in a recursion": (lambda: recursive(3), ("root", 0)),
    "in a generator": (lambda: list(generates(3)), [("float", 3)] * 2),
    "a method of an object": (lambda: Holder().method(4), 2.0),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_replaces(name: str) -> None:
    function, expected = FUNCTIONS[name]
    before = function()
    assert COPY(function)() == expected
    after = function()
    if not isinstance(before, list):
        assert after == before, "the original has changed"


def test_a_closure_is_copied() -> None:
    assert COPY(outer(sqrt))(0) == ("root", 1)
    assert outer(sqrt)(0) == 1.0


def test_defaults_attributes_and_names_stay() -> None:
    def original(x: int, y: int = 2, *, z: int = 3) -> Any:
        """Text."""
        return sqrt(x), y, z

    original.mark = "kept"  # type: ignore[attr-defined]
    copy: Any = COPY(original)
    assert copy(1) == (("root", 1), 2, 3)
    assert (copy.__name__, copy.__qualname__, copy.__module__) == (
        original.__name__,
        original.__qualname__,
        __name__,
    )
    assert (copy.__doc__, copy.mark) == ("Text.", "kept")


def test_globals_are_those_of_each_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    copy = COPY(lambda: helper(4))
    monkeypatch.setitem(globals(), "helper", lambda x: -x)
    assert copy() == -4


def test_code_that_writes_globals_is_left_as_it_is() -> None:
    before = rooted
    assert COPY(counts)(4) == 2.0
    assert rooted == before + 1


def test_what_a_function_keeps_as_attributes_is_kept() -> None:
    assert [COPY(tallied)(4), COPY(tallied)(9)] == [("root", 4), ("root", 9)]
    assert tallied.calls == 2  # type: ignore[attr-defined]


def test_installed_libraries_are_left_as_they_are() -> None:
    assert COPY(functools.wraps) is functools.wraps
    assert COPY(len)([]) == ("length", [])
    assert Substitution({}, {}).copy(math.sqrt) is math.sqrt
    package = Substitution({id(functools.partial): None}, {}, package="functools")
    assert package.copy(functools.wraps) is not functools.wraps  # the author's own package, installed


def test_errors_show_the_author_s_line() -> None:
    def fails() -> None:
        raise ValueError(unknown)  # type: ignore[name-defined]  # noqa: F821

    with pytest.raises(NameError, match="name 'unknown' is not defined") as caught:
        COPY(fails)()
    last = caught.tb
    while last.tb_next is not None:
        last = last.tb_next
    frames = [frame.name for frame in caught.traceback if str(frame.path) == __file__]
    assert frames[-1] == "fails"


def test_a_function_with_many_names_runs_as_it_is() -> None:
    """An argument of more than one byte is left as it is: the call is not replaced, and right."""
    names = [f"name_{i}" for i in range(140)]
    scope: dict[str, Any] = dict.fromkeys(names, 1)
    exec(f"def many():\n    return {' + '.join(names)} + float(2)", scope)
    assert COPY(scope["many"])() == 142.0


@pytest.mark.parametrize(
    "read", ["eval('TABLE')", "globals().get('TABLE')", "'TABLE' in globals() and TABLE"]
)
def test_code_that_takes_its_globals_as_a_dictionary_keeps_them(read: str) -> None:
    scope: dict[str, Any] = {"TABLE": 7, "__name__": "somebody_s"}
    exec(f"import math\ndef root(x):\n    return math.sqrt(x) + ({read})", scope)
    copied = Substitution({id(math.sqrt): abs}, {}, (math,)).copy(scope["root"])
    assert copied(4) == 9.0, "it is left as it is"
