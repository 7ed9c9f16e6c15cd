"""Messages of declarations that are wrong: the name, the type hints, the defaults, the results."""

from __future__ import annotations

import collections
import dataclasses
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import opsmith
from opsmith import errors

Place = Callable[[Callable[..., Any]], str]


def identity(x: Tensor) -> Tensor:
    return x.clone()


@pytest.mark.parametrize(
    "bad",
    [
        "linear",
        "demo:linear",
        "demo::",
        "::linear",
        "demo::a::b",
        "demo::a.b",
        "demo::1a",
        "demo::a b",
        "démo::a",
    ],
)
def test_bad_name(bad: str, says: Any) -> None:
    with says(
        errors.NameFormatError,
        f"""
        an operator's name is `namespace::name`
          expected: two identifiers with `::` between them, which torch does not use for itself
          got: {bad!r}
          hint: write `@opsmith.operator("mylib::linear")`
        """,
    ):
        opsmith.operator(bad)


@pytest.mark.parametrize(
    ("bad", "word"),
    [
        ("demo::class", "class"),
        ("demo::__class__", "__class__"),
        ("demo::__init__", "__init__"),
        ("demo::name", "name"),  # torch.ops.demo.name is the name of the namespace
        ("prim::twice", "prim"),
        ("aten::twice", "aten"),
        ("higher_order::twice", "higher_order"),
        ("torch::twice", "torch"),
        ("load_library::twice", "load_library"),
        ("loaded_libraries::twice", "loaded_libraries"),
    ],
)
def test_a_word_with_another_use_is_named(bad: str, word: str, says: Any) -> None:
    with says(
        errors.NameFormatError,
        f"""
        `{word}` cannot be part of an operator's name: torch or Python uses this word
          expected: two identifiers with `::` between them, which torch does not use for itself
          got: {bad!r}
          hint: replace `{word}` by another word
        """,
    ):
        opsmith.operator(bad)


NAMESPACES = """
import torch
import torch.distributed._functional_collectives
from torch import _C
names = [*_C._dispatch_get_all_op_names(), *(each.name for each in _C._jit_get_all_schemas())]
print(*{name.partition("::")[0] for name in names})
"""


@pytest.mark.parametrize("space", ["aten", "prims", "c10d", "quantized"])
def test_no_operator_is_declared_in_a_namespace_of_torch(space: str) -> None:
    with pytest.raises(errors.NameFormatError, match=f"`{space}` cannot be part of an operator's name"):
        opsmith.operator(f"{space}::opsmith_twice")


@pytest.mark.slow  # a process of its own imports torch alone
def test_no_operator_is_declared_in_any_namespace_of_torch() -> None:
    found = subprocess.run([sys.executable, "-c", NAMESPACES], check=True, capture_output=True, text=True)
    spaces = found.stdout.split()
    assert {"aten", "prims", "c10d", "quantized"} <= {*spaces}
    for space in spaces:
        with pytest.raises(errors.NameFormatError, match=f"`{space}` cannot be part of an operator's name"):
            opsmith.operator(f"{space}::opsmith_twice")


def test_the_hint_for_a_namespace_of_torch_works() -> None:
    with pytest.raises(errors.NameFormatError, match="replace `aten` by another word"):
        opsmith.operator("aten::opsmith_twice")
    operator = opsmith.operator("not_aten::opsmith_twice")(identity)
    assert operator(torch.ones(2)).tolist() == identity(torch.ones(2)).tolist()


def test_decorator_without_a_name(place: Place, says: Any) -> None:
    with says(
        errors.NameFormatError,
        f"""
        an operator's name is `namespace::name`
          expected: two identifiers with `::` between them, which torch does not use for itself
          got: {place(identity)}
          hint: write `@opsmith.operator("mylib::linear")`
        """,
    ):
        opsmith.operator(identity)  # type: ignore[call-overload]


def test_name_of_the_wrong_type(says: Any) -> None:
    with says(
        errors.NameFormatError,
        """
        an operator's name is `namespace::name`
          expected: two identifiers with `::` between them, which torch does not use for itself
          got: 3
          hint: write `@opsmith.operator("mylib::linear")`
        """,
    ):
        opsmith.operator(3)  # type: ignore[call-overload]


def test_name_taken_by_another_module(name: str, place: Place, says: Any) -> None:
    opsmith.operator(name)(identity)
    elsewhere: dict[str, Any] = {"__name__": "elsewhere", "Tensor": Tensor}
    exec(compile("def other(x: Tensor) -> Tensor:\n    return x + 1\n", "elsewhere.py", "exec"), elsewhere)
    with says(
        errors.NameTakenError,
        f"""
        {name}: the name is taken by `{__name__}.identity`
          got: elsewhere.other, elsewhere.py:1
          where: {place(identity)}
          hint: choose another name, best with the name of your package as its namespace
        """,
    ):
        opsmith.operator(name)(elsewhere["other"])


VERSION = """
import opsmith
from torch import Tensor

@opsmith.operator(NAME)
def scale(x: Tensor) -> Tensor:
    return x * FACTOR
"""


def test_two_versions_of_a_package(name: str, says: Any) -> None:
    """Two copies of a package in one process, each of its own version: refused, and served by the hint."""

    def imported(module: str, factor: int, declared: str) -> dict[str, Any]:
        names = {"__name__": module, "FACTOR": factor}
        source = VERSION.replace("NAME", declared)
        exec(compile(source, f"{module}.py", "exec"), names)
        return names

    imported("scales.ops", 2, repr(name))
    short = name.partition("::")[2]
    with says(
        errors.NameTakenError,
        f"""
        {name}: the name is taken by `scales.ops.scale`, which looks like another copy of the same package
          got: app.vendored.scales.ops.scale, app.vendored.scales.ops.py:5
          where: scales.ops.py:5
          hint: import only one of the two copies; if you need both, give this one its own namespace: `@opsmith.operator(__name__.replace(".", "_") + "::{short}")`
        """,  # noqa: E501
    ):
        imported("app.vendored.scales.ops", 3, repr(name))
    followed = f'__name__.replace(".", "_") + "::{short}"'
    modules = {"scales.ops": 2, "app.vendored.scales.ops": 3}
    copies = [imported(module, factor, followed) for module, factor in modules.items()]
    assert [each["scale"](torch.ones(1)).item() for each in copies] == [2.0, 3.0]
    assert copies[1]["scale"].name == f"app_vendored_scales_ops::{short}"


def test_name_taken_by_another_function_of_the_module(name: str, place: Place, says: Any) -> None:
    def other(x: Tensor) -> Tensor:
        return x + 1

    opsmith.operator(name)(identity)
    with says(
        errors.NameTakenError,
        f"""
        {name}: the name is taken by `{__name__}.identity`
          got: {__name__}.{other.__qualname__}, {place(other)}
          where: {place(identity)}
          hint: choose another name, best with the name of your package as its namespace
        """,
    ):
        opsmith.operator(name)(other)


def test_name_taken_outside_opsmith(name: str, place: Place, says: Any) -> None:
    library = torch.library.Library("messages", "FRAGMENT")
    library.define(f"{name.partition('::')[2]}(Tensor x) -> Tensor")
    with says(
        errors.NameTakenError,
        f"""
        {name}: torch already has an operator `{name}`, which opsmith did not declare
          where: {place(identity)}
          hint: choose another name, best with the name of your package as its namespace
        """,
    ):
        opsmith.operator(name)(identity)


def test_name_of_the_sibling_with_hidden_results_taken(name: str, place: Place, says: Any) -> None:
    def halves(x: Tensor) -> tuple[Tensor, Tensor]:
        return x / 2, x / 2

    library = torch.library.Library("messages", "FRAGMENT")
    library.define(f"{name.partition('::')[2]}_and_hidden(Tensor x) -> Tensor")
    with says(
        errors.NameTakenError,
        f"""
        {name}: torch already has an operator `{name}_and_hidden`, which opsmith did not declare
          where: {place(halves)}
          hint: choose another name, best with the name of your package as its namespace
        """,
    ):
        opsmith.operator(name, hidden=("other",))(halves)


def test_unknown_rule_for_autocast(name: str, says: Any) -> None:
    with says(
        errors.UsageError,
        f"""
        {name}: unknown rule for autocast
          argument: autocast
          expected: `promote`, `lower`, `float32`
          got: 'float16'
          hint: leave it out, or write `autocast="lower"`
        """,
    ):
        opsmith.operator(name, autocast="float16")  # type: ignore[call-overload]


@pytest.mark.parametrize("given", [None, True, 3, [0], ["x", None]])
def test_written_arguments_that_are_no_names(given: Any, name: str, says: Any) -> None:
    with says(
        errors.UsageError,
        f"""
        {name}: `mutates` must contain names of arguments
          argument: mutates
          expected: names of arguments
          got: {given!r}
          hint: write `mutates=("x",)`, or leave it out if the operator writes into no argument
        """,
    ):
        opsmith.operator(name, mutates=given)


@pytest.mark.parametrize(
    ("flag", "value", "expected"),
    [
        ("opaque", "no", "False or True"),
        ("random", 3, "False or True"),
        ("inline", "always", "None or False or True"),
    ],
)
def test_flag_that_means_nothing(name: str, flag: str, value: Any, expected: str, says: Any) -> None:
    flags: dict[str, Any] = {flag: value}
    with says(
        errors.UsageError,
        f"""
        {name}: `{flag}` has an invalid value
          argument: {flag}
          expected: {expected}
          got: {value!r}
          hint: write `{flag}=True`, or leave it out
        """,
    ):
        opsmith.operator(name, **flags)


def test_parameter_without_a_hint(name: str, place: Place, says: Any) -> None:
    def scaled(x: Tensor, by) -> Tensor:  # type: ignore[no-untyped-def]
        return x * by

    with says(
        errors.MissingAnnotationError,
        f"""
        {name}: parameter `by` has no type hint
          argument: by
          expected: a type hint on every parameter
          where: {place(scaled)}
          hint: write `by: Tensor`, or `int`, `float`, `bool`, `str`, ...
        """,
    ):
        opsmith.operator(name)(scaled)


def test_return_value_without_a_hint(name: str, place: Place, says: Any) -> None:
    def scaled(x: Tensor):  # type: ignore[no-untyped-def]
        return x * 2

    with says(
        errors.MissingAnnotationError,
        f"""
        {name}: the reference has no return type hint
          expected: a return type hint
          where: {place(scaled)}
          hint: write `-> Tensor` or `-> tuple[Tensor, Tensor]`
        """,
    ):
        opsmith.operator(name)(scaled)


@dataclasses.dataclass
class Writable:
    size: int


@dataclasses.dataclass(frozen=True)
class Plain:
    size: int


@dataclasses.dataclass(frozen=True)
class WithTensor:
    weight: Tensor


@dataclasses.dataclass(frozen=True)
class WithDict:
    inside: dict[str, int]


@dataclasses.dataclass(frozen=True)
class Derived:
    size: int
    area: int = dataclasses.field(init=False, default=0)


@dataclasses.dataclass(frozen=True)
class Unknown:
    size: nowhere  # type: ignore[name-defined]  # noqa: F821


class UnknownTuple(NamedTuple):
    size: nowhere  # type: ignore[name-defined]  # noqa: F821


Untyped = collections.namedtuple("Untyped", "size")  # type: ignore[misc]

OTHERWISE = "use Tensor, int, float, bool, str, complex, torch.dtype, torch.device, a list or `| None` of one"
BY_PARTS = "take its parts as separate arguments, each with `| None`"
BY_VALUES = "pass each of its values as a separate argument"
BY_FUNCTION = "declare one operator per function, or pass a `str` that selects the function"
BY_ITEMS = "add the type of its items: `list[int]`"
BY_KIND = "write an exact type, such as `Tensor` or `float`"


@pytest.mark.parametrize(
    ("annotation", "shown", "hint"),
    [
        pytest.param(dict[str, Tensor], "dict[str, Tensor]", BY_VALUES, id="dict-of-tensors"),
        pytest.param(dict, "dict", BY_VALUES, id="dict"),
        pytest.param(
            Callable[[Tensor], Tensor],
            "collections.abc.Callable[[Tensor], Tensor]",
            BY_FUNCTION,
            id="callable-with-types",
        ),
        pytest.param(Callable, "Callable", BY_FUNCTION, id="callable"),
        pytest.param(
            np.ndarray, "ndarray", "take a `Tensor` and convert inside with `.numpy()`", id="numpy-array"
        ),
        pytest.param(
            np.float32, "float32", "take a `Tensor` and convert inside with `.numpy()`", id="numpy-scalar"
        ),
        pytest.param(
            nn.Parameter, "Parameter", "annotate it as `Tensor`; a Parameter is a Tensor", id="parameter"
        ),
        pytest.param(nn.Module, "Module", "take its parameters as `Tensor` arguments", id="module"),
        pytest.param(list, "list", BY_ITEMS, id="bare-list"),
        pytest.param(tuple, "tuple", BY_ITEMS, id="bare-tuple"),
        pytest.param(
            Literal["sum", 1],
            "Literal['sum', 1]",
            "make all its values strings, or all whole numbers",
            id="literal",
        ),
        pytest.param(
            re.RegexFlag, "RegexFlag", "annotate it as `int`, and call it with `flags.value`", id="flag"
        ),
        pytest.param(Writable, "Writable", "write `@dataclass(frozen=True)` over `Writable`", id="dataclass"),
        pytest.param(
            WithTensor,
            "WithTensor",
            "take the tensors of `WithTensor` as separate arguments",
            id="dataclass-with-tensor",
        ),
        pytest.param(
            WithDict,
            "WithDict",
            "`inside` of `WithDict`: pass each of its values as a separate argument",
            id="dataclass-with-dict",
        ),
        pytest.param(
            Derived,
            "Derived",
            "give `Derived` no other arguments than its fields",
            id="dataclass-with-a-derived-field",
        ),
        pytest.param(
            Unknown,
            "Unknown",
            "use only names of its module in the type hints of `Unknown`: name 'nowhere' is not defined",
            id="dataclass-with-an-unknown-annotation",
        ),
        pytest.param(
            UnknownTuple,
            "UnknownTuple",
            "use only names of its module in the type hints of `UnknownTuple`: name 'nowhere' is not defined",
            id="namedtuple-with-an-unknown-annotation",
        ),
        pytest.param(Plain | None, "test_declaring.Plain | None", BY_PARTS, id="optional-dataclass"),
        pytest.param(tuple[int, str] | None, "tuple[int, str] | None", BY_PARTS, id="optional-mixed-tuple"),
        pytest.param(
            Untyped,
            "Untyped",
            "give every field of `Untyped` a type hint: derive it from `NamedTuple`",
            id="namedtuple-without-hints",
        ),
        pytest.param(Any, "Any", BY_KIND, id="any"),
        pytest.param(object, "object", BY_KIND, id="object"),
        pytest.param(set[int], "set[int]", OTHERWISE, id="set"),
        pytest.param(list[list[int]], "list[list[int]]", OTHERWISE, id="nested-list"),
        pytest.param(list[int | None], "list[int | None]", OTHERWISE, id="list-of-optional-ints"),
        pytest.param(list[Plain], "list[test_declaring.Plain]", OTHERWISE, id="list-of-dataclasses"),
        pytest.param(
            tuple[Tensor, Tensor],
            "tuple[Tensor, Tensor]",
            "take the tensors of `tuple[Tensor, Tensor]` as separate arguments",
            id="tuple-of-tensors",
        ),
        pytest.param(Tensor | float, "Tensor | float", OTHERWISE, id="tensor-or-float"),
        pytest.param(int | str | bool, "int | str | bool", OTHERWISE, id="three-types"),
    ],
)
def test_unsupported_type(annotation: Any, shown: str, hint: str, name: str, place: Place, says: Any) -> None:
    def reference(x: Tensor, extra: Any) -> Tensor:
        return x.clone()

    reference.__annotations__ = {"x": Tensor, "extra": annotation, "return": Tensor}
    with says(
        errors.UnsupportedTypeError,
        f"""
        {name}: parameter `extra` has a type that an operator's schema cannot carry
          argument: extra
          got: {shown}
          where: {place(reference)}
          hint: {hint}
        """,
    ):
        opsmith.operator(name)(reference)


NUMBER = "return a tensor without dimensions, `torch.tensor(value)`"
NOTHING = "return a tensor; if the operator writes into an argument, declare it with `mutates=`"
VARIES = "write `-> list[Tensor]` if the number of results varies"
TENSORS = "write `-> Tensor` or `-> tuple[Tensor, Tensor]`"


@pytest.mark.parametrize(
    ("annotation", "shown", "hint"),
    [
        pytest.param(float, "float", NUMBER, id="float"),
        pytest.param(int, "int", NUMBER, id="int"),
        pytest.param(bool, "bool", NUMBER, id="bool"),
        pytest.param(None, "None", NOTHING, id="none"),
        pytest.param(list[Tensor] | None, "list[Tensor] | None", TENSORS, id="optional-list"),
        pytest.param(list[Tensor | None], "list[Tensor | None]", TENSORS, id="list-of-optionals"),
        pytest.param(tuple[Tensor, ...], "tuple[Tensor, ...]", VARIES, id="any-number-of-tensors"),
        pytest.param(tuple[Tensor], "tuple[Tensor]", TENSORS, id="tuple-of-one"),
        pytest.param(tuple[Tensor, int], "tuple[Tensor, int]", TENSORS, id="tensor-and-int"),
        pytest.param(dict[str, Tensor], "dict[str, Tensor]", TENSORS, id="dict"),
    ],
)
def test_unsupported_return_type(
    annotation: Any, shown: str, hint: str, name: str, place: Place, says: Any
) -> None:
    def reference(x: Tensor) -> Any:
        return x.clone()

    reference.__annotations__ = {"x": Tensor, "return": annotation}
    with says(
        errors.UnsupportedTypeError,
        f"""
        {name}: an operator must return a tensor, a list of tensors, or a tuple of two or more of these
          argument: return
          got: {shown}
          where: {place(reference)}
          hint: {hint}
        """,
    ):
        opsmith.operator(name)(reference)


@pytest.mark.parametrize(
    ("annotation", "problem"),
    [
        ("Tenser", "name 'Tenser' is not defined"),
        ("torch.Tenser", "module 'torch' has no attribute 'Tenser'"),
    ],
    ids=["name", "attribute"],
)
def test_hint_that_cannot_be_resolved(
    annotation: str, problem: str, name: str, place: Place, says: Any
) -> None:
    def reference(x: Tensor) -> Tensor:
        return x.clone()

    reference.__annotations__["x"] = annotation
    with says(
        errors.UnsupportedTypeError,
        f"""
        {name}: a type hint cannot be resolved: {problem}
          where: {place(reference)}
          hint: import the name at the top of the module that declares the operator
        """,
    ):
        opsmith.operator(name)(reference)


@pytest.mark.parametrize("form", ["*xs", "**options", "x, /"])
def test_parameter_that_cannot_be_named(form: str, name: str, says: Any) -> None:
    module: dict[str, Any] = {"__name__": __name__, "Tensor": Tensor}
    typed = form.replace("xs", "xs: Tensor").replace("options", "options: float").replace("x,", "x: Tensor,")
    exec(compile(f"def reference({typed}) -> Tensor: ...", "forms.py", "exec"), module)
    with says(
        errors.ParameterKindError,
        f"""
        {name}: an operator cannot take `{form}`
          argument: {form.strip("*, /")}
          where: forms.py:1
          hint: name every argument; for a varying number of tensors take `list[Tensor]`
        """,
    ):
        opsmith.operator(name)(module["reference"])


@pytest.mark.parametrize("reserved", ["grad", "grad_scale", "result", "results"])
def test_reserved_name_of_an_argument(reserved: str, name: str, says: Any) -> None:
    module: dict[str, Any] = {"__name__": __name__, "Tensor": Tensor}
    exec(compile(f"def reference({reserved}: Tensor) -> Tensor: ...", "reserved.py", "exec"), module)
    with says(
        errors.ReservedNameError,
        f"""
        {name}: in formulas, names that begin with `grad` or `result` mean gradients and results
          argument: {reserved}
          where: reserved.py:1
          hint: rename the argument, for example to `given_{reserved}`
        """,
    ):
        opsmith.operator(name)(module["reference"])


def test_reserved_name_of_a_result(name: str, place: Place, says: Any) -> None:
    with says(
        errors.ReservedNameError,
        f"""
        {name}: in formulas, names that begin with `grad` or `result` mean gradients and results
          argument: gradient
          where: {place(identity)}
          hint: rename the result in `results=`
        """,
    ):
        opsmith.operator(name, results=("gradient",))(identity)


def test_default_of_the_wrong_type(name: str, place: Place, says: Any) -> None:
    def scaled(x: Tensor, by: float = "two") -> Tensor:  # type: ignore[assignment]
        return x * by

    with says(
        errors.DefaultError,
        f"""
        {name}: the default of `by` does not fit its type hint
          argument: by
          expected: float
          got: 'two'
          where: {place(scaled)}
          hint: change the default or the type hint
        """,
    ):
        opsmith.operator(name)(scaled)


def test_default_none_without_optional(name: str, place: Place, says: Any) -> None:
    def affine(x: Tensor, bias: Tensor = None) -> Tensor:  # type: ignore[assignment]
        return x if bias is None else x + bias

    with says(
        errors.DefaultError,
        f"""
        {name}: the default of `bias` does not fit its type hint
          argument: bias
          expected: Tensor
          got: None
          where: {place(affine)}
          hint: write `bias: Tensor | None = None`
        """,
    ):
        opsmith.operator(name)(affine)


def test_default_of_the_wrong_length(name: str, place: Place, says: Any) -> None:
    def pooled(x: Tensor, size: tuple[int, int] = (1, 2, 3)) -> Tensor:  # type: ignore[assignment]
        return x.clone()

    with says(
        errors.DefaultError,
        f"""
        {name}: the default of `size` does not fit its type hint
          argument: size
          expected: tuple[int, int]
          got: (1, 2, 3)
          where: {place(pooled)}
          hint: change the default or the type hint
        """,
    ):
        opsmith.operator(name)(pooled)


@pytest.mark.parametrize(
    ("annotation", "default"),
    [
        pytest.param(float, float("inf"), id="inf"),
        pytest.param(float, float("-inf"), id="minus-inf"),
        pytest.param(float, float("nan"), id="nan"),
        pytest.param(float, 1e-320, id="denormal"),
        pytest.param(int, 2**63, id="int-of-64-bits"),
        pytest.param(str, "a\nb", id="str-of-two-lines"),
        pytest.param(list[str], ["a"], id="list-of-str"),
        pytest.param(complex, 1 + 2j, id="complex"),
        pytest.param(complex, 1, id="complex-that-is-real"),
    ],
)
def test_default_that_a_schema_cannot_write(
    annotation: Any, default: Any, name: str, place: Place, says: Any
) -> None:
    def reference(x: Tensor, extra: Any = default) -> Tensor:
        return x.clone()

    reference.__annotations__ = {"x": Tensor, "extra": annotation, "return": Tensor}
    shown = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    with says(
        errors.DefaultError,
        f"""
        {name}: torch's schema language cannot write the default of `extra`
          argument: extra
          got: {default!r}
          where: {place(reference)}
          hint: write `extra: {shown} | None = None` and set the value inside the function
        """,
    ):
        opsmith.operator(name)(reference)


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    return x / 2, x / 2


@pytest.mark.parametrize(
    ("options", "got"),
    [
        pytest.param({"results": ("y",)}, "y", id="too-few"),
        pytest.param({"results": ("y", "z", "w")}, "y, z, w", id="too-many"),
        pytest.param({"results": {"y": ..., "z": ...}, "hidden": ("w",)}, "y, z, w", id="hidden-is-a-third"),
        pytest.param({"hidden": ("y", "z")}, "y, z", id="all-hidden"),
        pytest.param({"hidden": ("y", "z", "w")}, "y, z, w", id="more-hidden-than-returned"),
        pytest.param({"results": ()}, "none", id="none"),
    ],
)
def test_names_that_do_not_fit_the_results(
    options: dict[str, Any], got: str, name: str, place: Place, says: Any
) -> None:
    with says(
        errors.ResultNameError,
        f"""
        {name}: the names of the results do not fit the results of the reference
          expected: 2 names, at least one of them not hidden
          got: {got}
          where: {place(halves)}
          hint: give one name in `results=` or `hidden=` for each result, in order
        """,
    ):
        opsmith.operator(name, **options)(halves)


def test_unknown_role(name: str, place: Place, says: Any) -> None:
    with says(
        errors.ResultNameError,
        f"""
        {name}: `z` has an unknown role
          argument: z
          expected: `...` or `opsmith.non_differentiable`
          got: opsmith.zero
          where: {place(halves)}
          hint: write `results={{'z': ...}}`
        """,
    ):
        opsmith.operator(name, results={"y": ..., "z": opsmith.zero})(halves)  # type: ignore[dict-item]


def test_result_named_as_an_argument(name: str, place: Place, says: Any) -> None:
    with says(
        errors.ResultNameError,
        f"""
        {name}: `x` names both an argument and a result
          argument: x
          where: {place(halves)}
          hint: rename the result in `results=`
        """,
    ):
        opsmith.operator(name, results=("y", "x"))(halves)


def test_hidden_result_named_as_an_argument(name: str, place: Place, says: Any) -> None:
    with says(
        errors.ResultNameError,
        f"""
        {name}: `x` names both an argument and a result
          argument: x
          where: {place(halves)}
          hint: rename the result in `hidden=`
        """,
    ):
        opsmith.operator(name, hidden=("x",))(halves)


def test_reference_without_a_signature(name: str, says: Any) -> None:
    with says(
        errors.NotAFunctionError,
        f"""
        {name}: the reference is not a Python function with a readable signature
          expected: a function with type hints
          got: sin
          hint: write a function around it: `def f(x: Tensor) -> Tensor: ...`
        """,
    ):
        opsmith.operator(name)(torch.sin)


@pytest.mark.parametrize("thing", [partial(identity), 3, nn.ReLU()], ids=["partial", "int", "module"])
def test_reference_that_is_no_function(thing: Any, name: str, says: Any) -> None:
    with says(
        errors.NotAFunctionError,
        f"""
        {name}: the reference is not a Python function with a readable signature
          expected: a function with type hints
          got: {type(thing).__name__}
          hint: write a function around it: `def f(x: Tensor) -> Tensor: ...`
        """,
    ):
        opsmith.operator(name)(thing)


def test_argument_whose_name_a_schema_cannot_write(name: str, place: Place, says: Any) -> None:
    def scaled(x: Tensor, α: float) -> Tensor:
        return x * α

    with says(
        errors.NameFormatError,
        f"""
        {name}: torch's schema language cannot write the name of `α`
          argument: α
          expected: ASCII letters, digits and `_`
          where: {place(scaled)}
          hint: rename the argument
        """,
    ):
        opsmith.operator(name)(scaled)


def test_a_default_that_utf_8_cannot_encode() -> None:
    def reference(x: torch.Tensor, mode: str = "\ud800") -> torch.Tensor:
        return x * 2

    with pytest.raises(errors.DefaultError, match="cannot write the default of `mode`") as caught:
        opsmith.operator("demo::surrogate")(reference)
    assert caught.value.got == "'\\ud800'"
