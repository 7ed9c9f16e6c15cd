"""Every kind of argument reaches reference, kernel and formula as its author annotated it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum, StrEnum
from typing import Any, Literal, NamedTuple

import pytest
import torch
from matrices import diagonal
from torch import Tensor
from torch.autograd import grad, gradcheck
from torch.testing import assert_close

import opsmith

X = torch.tensor([1.0, -2.0])
STRIDED, FLAT, LAST = torch.strided, torch.contiguous_format, torch.channels_last
CPU = torch.device("cpu")
DTYPES, LAYOUTS, MEMORY_FORMATS = (
    sorted({each for each in vars(torch).values() if isinstance(each, kind)}, key=str)
    for kind in (torch.dtype, torch.layout, torch.memory_format)
)


class Mode(Enum):
    NEAREST = 1
    LINEAR = "linear"
    FIRST = 1  # noqa: PIE796


class Level(IntEnum):
    LOW = 0
    HIGH = 7


class Word(StrEnum):
    ONE = "one"
    TWO = "two"


@dataclass(frozen=True)
class Inner:
    scale: float = 0.5
    mode: Mode = Mode.LINEAR


@dataclass(frozen=True)
class Config:
    size: int
    inner: Inner = Inner()
    pads: int | tuple[int, int] = 1
    dtype: torch.dtype | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Slotted:
    names: list[str]
    ok: bool = False


class Window(NamedTuple):
    size: int
    kind: str = "hann"


CONFIG = Config(3, Inner(2.0), pads=(1, 2), dtype=torch.int8)
GENERATOR = torch.Generator().manual_seed(20260101)

# hint, default (... for none), what a caller gives, what the reference gets
KINDS: dict[str, tuple[Any, Any, Any, Any]] = {
    "int": (int, ..., 3, 3),
    "int-default": (int, -4, ..., -4),
    "int-large": (int, 2**62, 2**61, 2**61),
    "int-none": (int | None, None, ..., None),
    "int-optional": (int | None, None, 7, 7),
    "float": (float, ..., 2.5, 2.5),
    "float-default": (float, 1e-5, ..., 1e-5),
    "float-from-int": (float, ..., 2, 2.0),
    "float-inf": (float, 0.0, float("inf"), float("inf")),
    "float-none": (float | None, None, ..., None),
    "bool": (bool, ..., True, True),
    "bool-default": (bool, True, ..., True),
    "bool-given": (bool, True, False, False),
    "str": (str, ..., "mean", "mean"),
    "str-default": (str, 'a "b" \\n c', ..., 'a "b" \\n c'),
    "str-empty": (str, "", ..., ""),
    "str-unicode": (str, ..., "größe", "größe"),
    "str-optional": (str | None, None, "x", "x"),
    "complex": (complex, ..., 1 + 2j, 1 + 2j),
    "complex-default": (complex, 2j, ..., 2j),
    "complex-given": (complex, 2j, 1 + 2j, 1 + 2j),
    "complex-from-float": (complex, ..., 2.0, 2 + 0j),
    "number-int": (int | float, 2, 3, 3),
    "number-float": (int | float, 2, 2.0, 2.0),
    "number-default": (float | int, 2, ..., 2),
    "dtype": (torch.dtype, ..., torch.float16, torch.float16),
    "dtype-default": (torch.dtype, torch.bfloat16, ..., torch.bfloat16),
    "dtype-optional": (torch.dtype | None, None, torch.int8, torch.int8),
    "device": (torch.device, ..., CPU, CPU),
    "device-str": (torch.device, ..., "cpu", CPU),
    "device-default": (torch.device, CPU, ..., CPU),
    "layout": (torch.layout, ..., STRIDED, STRIDED),
    "layout-default": (torch.layout, STRIDED, ..., STRIDED),
    "memory-format": (torch.memory_format, ..., LAST, LAST),
    "memory-format-default": (torch.memory_format, FLAT, ..., FLAT),
    "generator": (torch.Generator | None, None, GENERATOR, GENERATOR),
    "generator-none": (torch.Generator | None, None, ..., None),
    "ints": (list[int], ..., [1, 2, 3], [1, 2, 3]),
    "ints-tuple": (list[int], ..., (1, 2, 3), [1, 2, 3]),
    "ints-size": (list[int], ..., torch.Size([4, 5]), [4, 5]),
    "ints-empty": (list[int], ..., [], []),
    "ints-default": (list[int], [1, 2], ..., [1, 2]),
    "ints-optional": (list[int] | None, None, [5], [5]),
    "ints-as-tuple": (tuple[int, ...], (1, 2), [3, 4, 5], (3, 4, 5)),
    "ints-fixed": (tuple[int, int], ..., [3, 4], (3, 4)),
    "ints-fixed-default": (tuple[int, int, int], (1, 2, 3), ..., (1, 2, 3)),
    "floats": (list[float], ..., [0.5, 1.5], [0.5, 1.5]),
    "floats-from-ints": (list[float], ..., [1, 2], [1.0, 2.0]),
    "floats-default": (list[float], [1e-3, -2.5], ..., [1e-3, -2.5]),
    "floats-fixed": (tuple[float, float], (1.0, 2.0), (3.0, 4.0), (3.0, 4.0)),
    "bools": (list[bool], ..., [True, False], [True, False]),
    "bools-default": (list[bool], [False, True], ..., [False, True]),
    "strs": (list[str], ..., ["a", "b"], ["a", "b"]),
    "strs-tuple": (tuple[str, ...], ..., ("a",), ("a",)),
    "strs-optional": (list[str] | None, None, ..., None),
    "complexes": (list[complex], ..., [1j, 2.0], [1j, 2 + 0j]),
    "dtypes": (list[torch.dtype], ..., [torch.int8, torch.float32], [torch.int8, torch.float32]),
    "dtypes-all": (list[torch.dtype], ..., DTYPES, DTYPES),
    "layouts": (list[torch.layout], ..., LAYOUTS, LAYOUTS),
    "memory-formats": (list[torch.memory_format], ..., MEMORY_FORMATS, MEMORY_FORMATS),
    "devices": (list[torch.device], ..., [CPU], [CPU]),
    "int-or-pair-int": (int | tuple[int, int], ..., 3, (3, 3)),
    "int-or-pair-tuple": (int | tuple[int, int], ..., (3, 4), (3, 4)),
    "int-or-pair-list": (int | tuple[int, int], ..., [3, 4], (3, 4)),
    "int-or-pair-size": (int | tuple[int, int], ..., torch.Size([3, 4]), (3, 4)),
    "int-or-pair-default-int": (int | tuple[int, int], 1, ..., (1, 1)),
    "int-or-pair-default-pair": (int | tuple[int, int], (1, 2), ..., (1, 2)),
    "int-or-pair-same-as-default": (int | tuple[int, int], 1, [1, 1], (1, 1)),
    "int-or-pair-optional": (int | tuple[int, int] | None, None, 3, (3, 3)),
    "int-or-pair-none": (int | tuple[int, int] | None, None, ..., None),
    "pair-or-int": (tuple[int, int] | int, 2, ..., (2, 2)),
    "int-or-triple": (int | tuple[int, int, int], ..., 5, (5, 5, 5)),
    "float-or-pair": (float | tuple[float, float], 1.5, 0.5, (0.5, 0.5)),
    "float-or-pair-ints": (float | tuple[float, float], 1.5, (1, 2), (1.0, 2.0)),
    "float-or-pair-default": (float | tuple[float, float], 1.5, ..., (1.5, 1.5)),
    "enum": (Mode, ..., Mode.LINEAR, Mode.LINEAR),
    "enum-default": (Mode, Mode.LINEAR, ..., Mode.LINEAR),
    "enum-alias": (Mode, ..., Mode.FIRST, Mode.NEAREST),
    "enum-optional": (Mode | None, None, Mode.LINEAR, Mode.LINEAR),
    "enum-none": (Mode | None, None, ..., None),
    "enum-of-ints": (Level, Level.LOW, Level.HIGH, Level.HIGH),
    "enum-of-strs": (Word, Word.ONE, ..., Word.ONE),
    "enums": (list[Mode], ..., [Mode.NEAREST, Mode.LINEAR], [Mode.NEAREST, Mode.LINEAR]),
    "enums-optional": (list[Mode] | None, None, ..., None),
    "enums-tuple": (tuple[Word, ...], ..., (Word.TWO,), (Word.TWO,)),
    "enums-pair": (tuple[Level, Level], ..., (Level.HIGH, Level.LOW), (Level.HIGH, Level.LOW)),
    "literal": (Literal["a", "b"], ..., "b", "b"),
    "literal-default": (Literal["a", "b"], "a", ..., "a"),
    "literal-ints": (Literal[1, 2], ..., 2, 2),
    "literal-optional": (Literal["a"] | None, None, "a", "a"),
    "literal-of-none": (Literal["a", None], None, ..., None),
    "literals": (list[Literal["a", "b"]], ..., ["b", "a"], ["b", "a"]),
    "dataclass": (Config, ..., CONFIG, CONFIG),
    "dataclass-default": (Config, CONFIG, ..., CONFIG),
    "dataclass-slots": (Slotted, ..., Slotted(names=["a"]), Slotted(names=["a"])),
    "named-tuple": (Window, ..., Window(3), Window(3)),
    "named-tuple-default": (Window, Window(3, "x"), ..., Window(3, "x")),
    "mixed-tuple": (tuple[int, float, str], ..., (1, 2.0, "x"), (1, 2.0, "x")),
    "mixed-tuple-default": (tuple[int, bool], (1, True), ..., (1, True)),
    "mixed-tuple-nested": (tuple[int, tuple[str, bool]], ..., (1, ("a", True)), (1, ("a", True))),
    "bools-optional": (list[bool] | None, None, [True], [True]),
    "complexes-optional": (list[complex] | None, None, [1j], [1j]),
    "dtypes-optional": (list[torch.dtype] | None, None, [torch.int8], [torch.int8]),
    "sequence": (Sequence[int], ..., (1, 2), [1, 2]),
    "sequence-of-strs": (Sequence[str], ..., ("a",), ["a"]),
}


def same(got: Any, wanted: Any) -> bool:
    """Equal, and of the same type throughout."""
    if type(got) is not type(wanted):
        return False
    if isinstance(wanted, list | tuple):
        return len(got) == len(wanted) and all(map(same, got, wanted))
    if isinstance(wanted, torch.Generator):  # torch makes another Python object of the same generator
        return bool(got.initial_seed() == wanted.initial_seed())
    return bool(got == wanted)


@pytest.mark.every(8)
@pytest.mark.parametrize(
    ("kind", "way"), diagonal(KINDS, ["plain", "ordinary", "formula", "derived", "autocast"], every=3)
)
def test_value_arrives_as_annotated(kind: str, way: str, name: str) -> None:
    check_arrival(kind, way, name, keyword_only=False)


@pytest.mark.every(8)
@pytest.mark.parametrize("kind", KINDS)
def test_value_given_by_keyword_alone_arrives_as_annotated(kind: str, name: str) -> None:
    check_arrival(kind, "formula", name, keyword_only=True)


def check_arrival(kind: str, way: str, name: str, *, keyword_only: bool) -> None:
    hint, default, given, wanted = KINDS[kind]
    seen: list[Any] = []

    def reference(x: Tensor, extra: Any) -> Tensor:
        seen.append(extra)
        return x * 2

    def with_keyword(x: Tensor, *, extra: Any) -> Tensor:
        seen.append(extra)
        return x * 2

    def formula(grad: Tensor, extra: Any) -> Tensor:
        seen.append(extra)
        return grad * 2

    function: Any = with_keyword if keyword_only else reference
    function.__annotations__ = {"x": Tensor, "extra": hint, "return": Tensor}
    if default is not ...:
        if keyword_only:
            function.__kwdefaults__ = {"extra": default}
        else:
            function.__defaults__ = (default,)
    operator = opsmith.operator(name)(function)
    if way == "formula":
        operator.gradients(x=formula)
    if way == "derived":
        operator.kernel("cpu", function)
    x = X.clone().requires_grad_(way in ("ordinary", "formula", "derived"))
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=way == "autocast"):
        result = operator(x) if given is ... else operator(x, extra=given)
    assert_close(result.detach(), X * 2)
    if result.requires_grad:
        assert_close(grad(result.sum(), x)[0], torch.full((2,), 2.0))
    assert [same(value, wanted) for value in seen] == [True] * len(seen), seen
    assert len(seen) == {"plain": 1, "ordinary": 1, "formula": 2, "derived": 2, "autocast": 1}[way]


def test_positional_values(name: str) -> None:
    def reference(x: Tensor, by: float, mode: str = "a", size: int | tuple[int, int] = 1) -> Tensor:
        assert (mode, size) == ("b", (2, 3))
        return x * by

    assert_close(opsmith.operator(name)(reference)(X, 3.0, "b", (2, 3)), X * 3)


def test_names_that_torch_uses_itself(name: str) -> None:
    """Arguments may have any name, also as keywords: `self`, or what code in between calls its own."""

    def reference(
        self: Tensor, *, kernel: Tensor, keyset: float, _keyset: int, args: int = 1, mode: str = ""
    ) -> Tensor:
        return self * kernel * keyset * _keyset * args

    operator = opsmith.operator(name)(reference).gradients(
        kernel=lambda grad, self, keyset, _keyset: grad * self * keyset * _keyset
    )
    kernel = torch.ones(2, requires_grad=True)
    keywords: Any = {"self": X, "kernel": kernel, "keyset": 2.0, "_keyset": 3}
    assert_close(grad(operator(**keywords).sum(), kernel)[0], 6 * X)
    with torch.autocast("cpu"):
        assert_close(operator(**keywords), 6 * X * kernel)
    assert "kernel" in str(operator.explain(**keywords))


@pytest.mark.parametrize("needs", [(True, True), (True, False), (False, True)])
def test_keyword_only_tensors(needs: tuple[bool, bool], name: str) -> None:
    def reference(x: Tensor, *, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return x * weight if bias is None else x * weight + bias

    operator = opsmith.operator(name)(reference).gradients(
        weight=lambda grad, x: grad * x, bias=lambda grad: grad
    )
    make = opsmith.Make()
    x, weight = (make(3).requires_grad_(need) for need in needs)
    bias = make(3).requires_grad_()
    assert gradcheck(lambda x, w: operator(x, weight=w), (x, weight), check_forward_ad=True)
    assert gradcheck(lambda x, w, b: operator(x, weight=w, bias=b), (x, weight, bias))
    assert gradcheck(lambda w, b: operator(weight=w, x=x, bias=b), (weight, bias))


@pytest.mark.parametrize("way", ["ordinary", "derived", "formulas"])
def test_optional_tensor(way: str, name: str) -> None:
    def affine(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return x @ weight.mT if bias is None else x @ weight.mT + bias

    operator = opsmith.operator(name)(affine)
    if way == "derived":
        operator.kernel("cpu", affine)
    if way == "formulas":
        operator.gradients(
            x=lambda grad, weight: grad @ weight,
            weight=lambda grad, x: grad.mT @ x,
            bias=lambda grad: grad.sum(0),
        )
    make = opsmith.Make()
    x, weight, bias = (make(*shape).requires_grad_() for shape in ((4, 3), (2, 3), (2,)))
    assert gradcheck(operator, (x, weight), check_forward_ad=True)
    assert gradcheck(lambda x, weight: operator(x, weight, None), (x, weight))
    assert gradcheck(operator, (x, weight, bias), check_forward_ad=True)


def test_operator_without_tensors(name: str) -> None:
    def filled(size: list[int], value: float = 1.0, device: torch.device = CPU) -> Tensor:
        return torch.full(size, value, device=device)

    operator = opsmith.operator(name)(filled)
    assert_close(operator([2, 3]), torch.ones(2, 3))
    with torch.autocast("cpu"):
        assert operator([2], 3.0).dtype is torch.float32
    assert operator([2], device="meta").device.type == "meta"


def test_schema_is_what_torch_shows(name: str) -> None:
    def reference(
        x: Tensor,
        xs: list[Tensor],
        maybe: Tensor | None,
        size: int | tuple[int, int] = 1,
        *,
        mode: str = "a",
        by: int | float = 2,
        dtype: torch.dtype = torch.float32,
    ) -> tuple[Tensor, Tensor]:
        return x + 1, x + 2

    operator = opsmith.operator(name)(reference)
    assert str(operator.torch_operator._schema) == (
        f"{name}(Tensor x, Tensor[] xs, Tensor? maybe, SymInt[2] size=[1, 1], *, "
        'str mode="a", Scalar by=2, ScalarType dtype=6) -> (Tensor, Tensor)'
    )
