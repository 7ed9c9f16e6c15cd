"""`opsmith.core.dataclass` against the decorator of the standard library, on the same classes."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import KW_ONLY, FrozenInstanceError, field
from pathlib import Path
from typing import Any, ClassVar, get_type_hints

import pytest
import torch

import opsmith
from opsmith.core import dataclass as late

OPTIONS: dict[str, dict[str, bool]] = {
    "plain": {},
    "frozen": {"frozen": True},
    "frozen-slots": {"frozen": True, "slots": True},
    "slots": {"slots": True},
    "identity": {"frozen": True, "eq": False},
    "keywords": {"frozen": True, "kw_only": True},
    "order": {"frozen": True, "order": True},
}
Renamed = dataclasses.InitVar
made: dict[tuple[bool, str], Any] = {}
"""The classes by which `pickle` finds them: of this module's decorator or the standard one, by options."""


def declared(decorate: Callable[..., Any], options: dict[str, bool]) -> Any:
    """Declare a class with every kind of field."""

    @decorate(**options)
    class Sample:
        """A class."""

        first: int
        listed: list[int] = field(default_factory=list)
        unseen: str = field(default="u", repr=False, compare=False)
        counted: int = field(default=0, init=False)
        made: list[int] = field(default_factory=lambda: [7], init=False, hash=False)
        _: KW_ONLY
        named: str = "n"

        def total(self) -> int:
            return self.first + len(self.listed)

    return Sample


def of_module(name: str) -> Any:
    """Return both classes with these options, under names that `pickle` finds."""
    for ours, decorate in ((True, late.dataclass), (False, dataclasses.dataclass)):
        if (ours, name) not in made:
            kind = declared(decorate, OPTIONS[name])
            kind.__qualname__ = kind.__name__ = f"Sample_{name}_{ours}".replace("-", "_")
            globals()[kind.__name__] = made[ours, name] = kind
    return made[True, name], made[False, name]


def outcome(run: Callable[[], Any], kind: Any) -> Any:
    """Return the value, or the class and text of the error; the class under test is named `Sample`."""
    try:
        return str(run()).replace(kind.__qualname__, "Sample")
    except Exception as error:
        text = str(error).replace(kind.__qualname__, "Sample").replace("<locals>.", "")
        return type(error), text.replace("declared.", "")


USES: dict[str, Callable[[Any], Any]] = {
    "repr": lambda kind: repr(kind(first=1, listed=[2])),
    "defaults": lambda kind: dataclasses.asdict(kind(first=1)),
    "new list": lambda kind: kind(first=1).listed is kind(first=1).listed,
    "equal": lambda kind: (kind(first=1) == kind(first=1, unseen="x"), kind(first=1) == kind(first=2)),
    "other class": lambda kind: kind(first=1) == (1,),
    "hashable": lambda kind: kind.__hash__ is None,
    "hash": lambda kind: hash(kind(first=1, listed=())) == hash(kind(first=1, listed=())),
    "less": lambda kind: kind(first=1) < kind(first=2),
    "replace": lambda kind: dataclasses.replace(kind(first=1), first=5, named="m"),
    "fields": lambda kind: [each.name for each in dataclasses.fields(kind)],
    "is a dataclass": lambda kind: dataclasses.is_dataclass(kind),
    "match": lambda kind: kind.__match_args__,
    "signature": lambda kind: inspect.signature(kind),
    "hints": lambda kind: sorted(get_type_hints(kind.__init__)),
    "init": lambda kind: (kind.__init__.__qualname__.split(".")[-1], kind.__init__.__annotations__),
    "missing": lambda kind: kind(),
    "unknown": lambda kind: kind(first=1, other=2),
    "set": lambda kind: setattr(kind(first=1), "first", 2),
    "delete": lambda kind: delattr(kind(first=1), "first"),
    "too many": lambda kind: kind(1, [], "u", 0, [], "n"),
    "by name alone": lambda kind: kind(1, [], "u", "n"),
    "defaults of the method": lambda kind: (kind.__init__.__defaults__, kind.__init__.__kwdefaults__),
    "method": lambda kind: kind(first=1, listed=[1]).total(),
    "dictionary": lambda kind: hasattr(kind(first=1), "__dict__"),
    "pickle": lambda kind: pickle.loads(pickle.dumps(kind(first=1, named="m"))),
    "copy": lambda kind: copy.copy(kind(first=1)),
    "deep copy": lambda kind: copy.deepcopy(kind(first=1, listed=[3])),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("options", OPTIONS)
def test_it_does_what_the_standard_decorator_does(options: str, use: str) -> None:
    ours, standard = of_module(options)
    assert outcome(lambda: USES[use](ours), ours) == outcome(lambda: USES[use](standard), standard)


WRITTEN: dict[str, Callable[[Any], Any]] = {
    "bare": lambda decorate: decorate(type("Sample", (), {})),
    "self": lambda decorate: decorate(made_of(self=int, object=int, create=int)),
    "factories": lambda decorate: decorate(frozen=True)(
        made_of(
            **{name: (int, field(default_factory=lambda: 7)) for name in ("self", "object", "has_factory")}
        )
    ),
    "names alone": lambda decorate: decorate(kw_only=True)(made_of(a=(int, 1), b=int)),
    "slots": lambda decorate: decorate(frozen=True, slots=True)(made_of(a=int, b=(int, 2))),
    "one field": lambda decorate: decorate(frozen=True)(made_of(a=int)),
}
"""Classes whose methods have another form, by a decorator."""


def made_of(**annotated: Any) -> type:
    """Return a class with these annotations: the type alone, or with a default."""
    defaults = {name: given[1] for name, given in annotated.items() if isinstance(given, tuple)}
    types = {name: given[0] if isinstance(given, tuple) else given for name, given in annotated.items()}
    return type("Sample", (), {"__annotations__": types, **defaults})


@pytest.mark.parametrize("values", [(), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)], ids=len)
@pytest.mark.parametrize("form", WRITTEN)
def test_methods_are_written_as_the_standard_ones(form: str, values: tuple[int, ...]) -> None:
    def used(decorate: Any) -> Any:
        kind = WRITTEN[form](decorate)
        made = kind(*values)
        parameters = str(inspect.signature(kind.__init__)), inspect.signature(kind.__eq__)
        hashed = None if kind.__hash__ is None else hash(made)
        return repr(made), made == kind(*values), made == 1, hashed, parameters

    ours, standard = (outcome(lambda d=d: used(d), d) for d in (late.dataclass, dataclasses.dataclass))
    assert ours == standard


REFUSED: dict[str, Callable[[Any], Any]] = {
    "order of defaults": lambda decorate: decorate(made_of(a=(int, 1), b=int, c=(int, 2))),
    "order without equality": lambda decorate: decorate(order=True, eq=False)(made_of(a=int)),
    "mutable default": lambda decorate: decorate(made_of(a=(list, []))),
    "a field without a type": lambda decorate: decorate(type("Sample", (), {"a": field(default=1)})),
}
"""Classes that are refused, by a decorator."""


@pytest.mark.parametrize("form", REFUSED)
def test_a_class_is_refused_as_by_the_standard_decorator(form: str) -> None:
    ours, standard = (
        outcome(lambda d=d: REFUSED[form](d), d) for d in (late.dataclass, dataclasses.dataclass)
    )
    assert ours[0] is standard[0]
    assert ours[1]
    assert standard[1].startswith(ours[1])  # since Python 3.12 one of them is longer


def test_a_method_that_a_base_leaves_abstract_is_written() -> None:
    class Base(ABC):
        @abstractmethod
        def __repr__(self) -> str: ...

        @abstractmethod
        def __eq__(self, other: object) -> bool: ...

    for decorate in (late.dataclass, dataclasses.dataclass):
        kind: Any = decorate(type("Sample", (Base,), {"__annotations__": {"x": int}}))
        assert (repr(kind(3)), kind(3) == kind(3)) == ("Sample(x=3)", True)


def test_a_class_below_a_frozen_one_sets_what_is_no_field() -> None:
    @late.dataclass(frozen=True)
    class Base:
        x: int
        shared: ClassVar[int] = 0

    class Derived(Base):
        """No dataclass itself."""

    derived = Derived(1)
    derived.shared = 5  # type: ignore[misc]
    assert vars(derived) == {"x": 1, "shared": 5}


def test_each_instance_has_a_value_of_its_own_from_a_factory() -> None:
    @late.dataclass(frozen=True)
    class Sample:
        seen: list[int] = field(default_factory=list, kw_only=True)
        hidden: list[int] = field(default_factory=list, init=False)
        total: int = field(default=0, init=False)

        def __post_init__(self) -> None:
            object.__setattr__(self, "total", len(self.seen))

    given = [1, 2]
    first, second, third = Sample(), Sample(), Sample(seen=given)
    assert first.seen is not second.seen
    assert first.hidden is not second.hidden
    assert third.seen is given
    assert (first.total, third.total) == (0, 2)
    assert dataclasses.replace(third, seen=[5]).total == 1


def test_an_instance_that_holds_itself_is_shown() -> None:
    @late.dataclass
    class Sample:
        held: list[Any]

    sample = Sample([])
    sample.held.append(sample)
    assert repr(sample).endswith("Sample(held=[...])")


def test_a_class_derives_from_a_standard_one_and_the_other_way_round() -> None:
    for first, second in ((late.dataclass, dataclasses.dataclass), (dataclasses.dataclass, late.dataclass)):

        @first(frozen=True)
        class Base:
            x: int
            y: list[int] = field(default_factory=list)

        @second(frozen=True)
        class Derived(Base):
            z: int = 3

        derived = Derived(1)
        assert (derived.x, derived.y, derived.z) == (1, [], 3)
        assert derived == Derived(1, [], z=3) != Base(1)
        with pytest.raises(
            TypeError, match=r"Derived\.__init__\(\) missing 1 required positional argument: 'x'"
        ):
            Derived()  # type: ignore[call-arg]


def test_own_methods_and_inherited_fields_stay() -> None:
    @late.dataclass(frozen=True)
    class Base:
        x: int
        seen: list[str] = field(default_factory=list, compare=False)

        def __post_init__(self) -> None:
            self.seen.append(type(self).__name__)

    @late.dataclass(frozen=True)
    class Derived(Base):
        y: int = 0

        def __repr__(self) -> str:
            return f"<{self.x}, {self.y}>"

        def __eq__(self, other: object) -> bool:
            return True

        def __hash__(self) -> int:
            return 5

    class Plain(Base):
        """No dataclass itself: it may have attributes of its own."""

    derived, plain = Derived(1, y=2), Plain(4)
    assert repr(derived) == "<1, 2>"
    assert derived == Derived(9)
    assert hash(derived) == 5
    assert derived.seen == ["Derived"]
    object.__setattr__(plain, "x", 6)
    plain.more = 3  # type: ignore[attr-defined]
    assert (plain.x, vars(plain)["more"]) == (6, 3)
    with pytest.raises(FrozenInstanceError, match="cannot assign to field 'x'"):
        plain.x = 1  # type: ignore[misc]


@pytest.mark.parametrize("frozen", [True, False])
def test_a_class_and_its_base_are_both_frozen_or_neither(frozen: bool) -> None:
    base = declared(late.dataclass, {"frozen": not frozen})
    for decorate in (late.dataclass, dataclasses.dataclass):
        with pytest.raises(TypeError, match="frozen"):
            decorate(frozen=frozen)(type("Derived", (base,), {}))


@pytest.mark.parametrize("name", ["__setattr__", "__delattr__"])
def test_a_frozen_class_has_no_own_way_to_change_attributes(name: str) -> None:
    for decorate in (late.dataclass, dataclasses.dataclass):
        with pytest.raises(TypeError, match=name):
            decorate(frozen=True)(type("Own", (), {name: lambda *_: None}))


def test_own_pickling_of_a_frozen_class_with_slots_stays() -> None:
    @late.dataclass(frozen=True, slots=True)
    class Own:
        x: int

        def __getstate__(self) -> str:
            return "own"

        def __setstate__(self, state: str) -> None:
            object.__setattr__(self, "x", f"set from {state}")

    own = Own(1)
    assert own.__getstate__() == "own"
    own.__setstate__("there")
    assert str(own.x) == "set from there"


def test_a_value_for_post_init_alone_is_refused() -> None:
    with pytest.raises(TypeError, match=r"Given\.x is an InitVar"):

        @late.dataclass
        class Given:
            x: Renamed[int]


@pytest.mark.parametrize("options", ["frozen", "frozen-slots"])
def test_a_frozen_instance_takes_no_other_attribute(options: str) -> None:
    """With slots, the standard decorator raises a TypeError before Python 3.12."""
    ours, _ = of_module(options)
    with pytest.raises(FrozenInstanceError, match="cannot assign to field 'other'"):
        ours(1).other = 2
    with pytest.raises(FrozenInstanceError, match="cannot delete field 'other'"):
        del ours(1).other


def test_torch_compile_traces_it_once_it_is_written() -> None:
    kind = of_module("frozen")[0]
    kind(first=1, listed=[])

    def scaled(x: torch.Tensor) -> torch.Tensor:
        return x * kind(first=3, listed=[x]).first

    compiled = torch.compile(scaled, fullgraph=True, backend="eager")
    assert compiled(torch.ones(2)).tolist() == [3.0, 3.0]


@pytest.mark.parametrize("folder", ["autograd", "adopted"])
def test_what_autograd_nodes_make_has_the_standard_decorator(folder: str) -> None:
    """torch.compile may trace a backward before any instance was made."""
    sources = (Path(opsmith.__file__).parent / "torch_library" / folder).glob("*.py")
    assert [each.name for each in sources if "core.dataclass" in each.read_text(encoding="utf-8")] == []


def test_nothing_is_compiled_before_the_first_instance() -> None:
    ours = declared(late.dataclass, {"frozen": True})
    assert not inspect.isfunction(vars(ours)["__init__"])
    ours(1)
    assert inspect.isfunction(vars(ours)["__init__"])
    assert not inspect.isfunction(vars(ours)["__eq__"])


def test_the_first_instances_of_several_threads() -> None:
    for _ in range(20):
        kind = declared(late.dataclass, {"frozen": True})
        barrier, found = threading.Barrier(4), []

        def make(kind: Any = kind, barrier: Any = barrier, found: Any = found) -> None:
            barrier.wait()
            found.append((kind(3, named="m"), hash(kind(3, ())), kind(3) == kind(3)))

        threads = [threading.Thread(target=make) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [(str(each).partition(".")[2], equal) for each, _, equal in found] == [
            (str(kind(3, named="m")).partition(".")[2], True)
        ] * 4
