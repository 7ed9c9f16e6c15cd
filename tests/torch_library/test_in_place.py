"""Operators that write in place do what torch's own do: eagerly, compiled and under transforms."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.func as F
from torch import Tensor
from torch._inductor.utils import run_and_get_code

import opsmith
from opsmith import errors
from opsmith.torch_library import capabilities
from opsmith.torch_library.in_place import InPlaceRegistration

GENERATOR = torch.Generator().manual_seed(0)
CACHE = torch.randn(3, 4, generator=GENERATOR, dtype=torch.float64)
X = torch.randn(4, generator=GENERATOR, dtype=torch.float64)


def decay(cache: Tensor, x: Tensor, by: float = 0.5) -> None:
    cache.mul_(by).add_(x)


def mix(cache: Tensor, x: Tensor) -> Tensor:
    before = cache.sum()
    cache.mul_(x).sin_()
    return before * x


def mix_gradients(grad_cache: Tensor, grad: Tensor, cache: Tensor, x: Tensor) -> dict[str, Tensor]:
    inner = grad_cache * (cache * x).cos()
    return {"cache": inner * x + (grad * x).sum(), "x": (inner * cache).sum(0) + grad * cache.sum()}


def mix_kernel(cache: Tensor, x: Tensor) -> Tensor:
    made = cache.sum() * x
    cache.copy_(torch.from_numpy((cache * x).detach().sin().numpy()) if type(cache) is Tensor else cache)
    return made


def decay_(cache: Tensor, x: Tensor) -> Tensor:
    return cache.mul_(0.5).add_(x)


def decay_kernel(cache: Tensor, x: Tensor) -> Tensor:
    cache.copy_(torch.from_numpy((cache / 2 + x).detach().numpy()) if type(cache) is Tensor else cache)
    return cache


def declare(name: str, reference: Callable[..., Any], **options: Any) -> Any:
    return opsmith.operator(f"in_place::{name}", mutates=["cache"], **options)(reference)


derived = declare("derived", decay)
with_formula = declare("with_formula", mix).gradients(mix_gradients)
with_after = declare("with_after", decay).gradients(
    cache=lambda grad_cache, by: by * grad_cache, x=lambda grad: grad.sum(0)
)
with_kernel = declare("with_kernel", mix).kernel("cpu", mix_kernel)
with_both = declare("with_both", mix).kernel("cpu", mix_kernel).gradients(mix_gradients)
MIX = """
template <class T>
void {name}(View<T, 2> cache, View<const T, 1> x, View<T, 1> made) {{
  T before = 0;
  for (int64_t i = 0; i < cache.size(0); i++)
    for (int64_t j = 0; j < cache.size(1); j++) {{
      before += cache(i, j);
      cache(i, j) = std::sin(cache(i, j) * x(j));
    }}
  for (int64_t j = 0; j < x.size(0); j++) made(j) = before * x(j);
}}
"""


def in_cpp(operator: Any) -> Any:
    text = "#include <cmath>\n" + MIX.format(name=operator.name.partition("::")[2])
    return operator.kernel("cpu", cpp=text)


with_cpp = in_cpp(declare("with_cpp", mix))
cpp_and_formula = in_cpp(declare("cpp_and_formula", mix)).gradients(mix_gradients)
returned_ = declare("returned_", decay_, returns="cache")
returned_with_both_ = (
    declare("returned_with_both_", decay_, returns="cache")
    .kernel("cpu", decay_kernel)
    .gradients(cache=lambda grad_cache: grad_cache / 2, x=lambda grad_cache: grad_cache.sum(0))
)
DECAY = """
void {name}(View<double, 2> cache, View<const double, 1> x) {{
  for (int64_t i = 0; i < cache.size(0); i++)
    for (int64_t j = 0; j < cache.size(1); j++) cache(i, j) = cache(i, j) / 2 + x(j);
}}
"""
returned_by_cpp_ = declare("returned_by_cpp_", decay_, returns="cache").kernel(
    "cpu", cpp=DECAY.format(name="returned_by_cpp_")
)
OPERATORS = [
    *(derived, with_formula, with_after, with_kernel, with_both, with_cpp, cpp_and_formula),
    *(returned_, returned_with_both_, returned_by_cpp_),
]
every_operator = pytest.mark.parametrize("operator", OPERATORS, ids=lambda each: each.name.partition("::")[2])


def program(operator: Callable[..., Any]) -> Callable[[Tensor, Tensor], Tensor]:
    """A function of `cache` and `x` that writes into a tensor of its own, twice, and into a part of it."""

    def run(cache: Tensor, x: Tensor) -> Tensor:
        own = cache * 2
        made = operator(own, x)
        operator(own[1:], x)
        return (own * own).sum() + (0 if made is None or made is own else made.sum())

    return run


TRANSFORMS: dict[str, Callable[[Callable[..., Any]], Any]] = {
    "eager": lambda f: f(CACHE, X),
    "autograd": lambda f: differentiated(f),
    "second_order": lambda f: torch.autograd.functional.hessian(f, (CACHE, X)),
    "grad": lambda f: F.grad(f, (0, 1))(CACHE, X),
    "vmap": lambda f: F.vmap(f)(torch.stack([CACHE, 2 * CACHE]), torch.stack([X, -X])),
    "vmap_of_grad": lambda f: F.vmap(F.grad(f))(torch.stack([CACHE, 2 * CACHE]), torch.stack([X, -X])),
    "jvp": lambda f: F.jvp(f, (CACHE, X), (X * CACHE, X)),
    "jacfwd": lambda f: F.jacfwd(f)(CACHE, X),
    "hessian": lambda f: F.hessian(f)(CACHE, X),
    "checkpoint": lambda f: differentiated(
        lambda *args: torch.utils.checkpoint.checkpoint(f, *args, use_reentrant=False)
    ),
}


def differentiated(function: Callable[..., Tensor]) -> Any:
    inputs = CACHE.clone().requires_grad_(), X.clone().requires_grad_()
    return torch.autograd.grad(function(*inputs), inputs)


@pytest.mark.every(8)
@every_operator
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms(operator: Any, name: str) -> None:
    transform = TRANSFORMS[name]
    torch.testing.assert_close(transform(program(operator)), transform(program(operator.reference)))


def by_functional(operator: Any) -> Callable[[Tensor, Tensor], Tensor]:
    def run(cache: Tensor, x: Tensor) -> Tensor:
        found = operator.functional(cache * 2, x)
        new, *made = found if isinstance(found, tuple) else (found,)
        total: Tensor = (new * new).sum() + sum(each.sum() for each in made)
        return total

    return run


def once(operator: Callable[..., Any]) -> Callable[[Tensor, Tensor], Tensor]:
    def run(cache: Tensor, x: Tensor) -> Tensor:
        own = (cache * 2).expand(*torch.broadcast_shapes(cache.shape, x.shape)).clone()
        made = operator(own, x)
        return (own * own).sum() + (0 if made is None or made is own else made.sum())

    return run


@pytest.mark.every(8)
@every_operator
@pytest.mark.parametrize("name", TRANSFORMS)
def test_functional_form(operator: Any, name: str) -> None:
    transform = TRANSFORMS[name]
    torch.testing.assert_close(transform(by_functional(operator)), transform(once(operator.reference)))


@every_operator
def test_a_mapped_value_is_not_written_into_a_tensor_that_is_not_mapped(operator: Any) -> None:
    with pytest.raises(errors.TransformError) as caught:
        F.vmap(operator, in_dims=(None, 0))(CACHE.clone(), torch.stack([X, -X]))
    assert "cannot write a mapped value into `cache`" in str(caught.value)


def test_functional_form_maps_what_is_written() -> None:
    mapped = F.vmap(derived.functional, in_dims=(None, 0))(CACHE, torch.stack([X, -X]))
    torch.testing.assert_close(mapped, torch.stack([CACHE / 2 + X, CACHE / 2 - X]))
    assert derived.functional(CACHE, X) is not CACHE


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.every(8)
@pytest.mark.compile
def test_the_functional_form_is_first_named_in_compiled_code() -> None:
    operator = declare("first_in_compiled_code", decay)
    torch.compiler.reset()
    compiled = torch.compile(lambda *given: operator.functional(*given), fullgraph=True, backend="aot_eager")
    before = CACHE.clone()
    torch.testing.assert_close(compiled(CACHE, X), operator.functional(CACHE, X))
    assert torch.equal(CACHE, before)


@pytest.mark.every(6)
@pytest.mark.compile
@every_operator
def test_compiled(operator: Any, fresh_compiler: None) -> None:
    compiled = torch.compile(program(operator), backend="aot_eager", fullgraph=True)
    for name in ("eager", "autograd"):
        torch.testing.assert_close(TRANSFORMS[name](compiled), TRANSFORMS[name](program(operator.reference)))


@pytest.mark.every(6)
@pytest.mark.compile
@every_operator
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_code_writes_into_what_it_takes(operator: Any, fresh_compiler: None) -> None:
    def write(cache: Tensor, x: Tensor) -> Tensor:
        operator(cache[1:], x)
        return cache * 3

    compiled = torch.compile(write, backend="aot_eager", fullgraph=True)
    for function in (compiled, write):
        cache = CACHE.clone()
        function(cache, X)
        expected = CACHE.clone()
        operator.reference(expected[1:], X)
        torch.testing.assert_close(cache, expected)
    leaf, x = CACHE.clone().requires_grad_(), X.clone().requires_grad_()
    found, expected = (
        torch.autograd.grad(function(leaf.clone(), x).sum(), (leaf, x)) for function in (compiled, write)
    )
    torch.testing.assert_close(found, expected)


@pytest.mark.slow
@pytest.mark.every(5)
@pytest.mark.compile
@pytest.mark.parametrize("operator", [derived, with_kernel], ids=lambda each: each.name)
def test_two_views_of_one_tensor_with_sizes_that_change(operator: Any, fresh_compiler: None) -> None:
    def both(x: Tensor) -> Tensor:
        first, second = (x * 2).chunk(2, -1)
        operator(first, second[0])
        return first + second

    compiled = torch.compile(both, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (3, 5):
        x = torch.randn(rows, 8, dtype=torch.float64)
        torch.testing.assert_close(compiled(x), both(x))
    rows = torch.export.Dim("rows", min=2)
    program = torch.export.export(Both(operator), (x,), dynamic_shapes={"x": {0: rows}})
    torch.testing.assert_close(program.module()(x[:3]), both(x[:3]))


class Both(torch.nn.Module):
    """A write into one half of a tensor, of the other half."""

    def __init__(self, operator: Any) -> None:
        super().__init__()
        self.operator = operator

    def forward(self, x: Tensor) -> Tensor:
        first, second = (x * 2).chunk(2, -1)
        self.operator(first, second[0])
        return first + second


def test_a_captured_tensor_is_not_written_under_grad() -> None:
    cache = CACHE.clone()
    for operator in (derived, with_kernel):
        with pytest.raises(
            errors.TransformError, match="`cache` cannot be written under this transform"
        ) as caught:
            F.grad(lambda x, operator=operator: (operator(cache, x), cache.sum())[1])(X)
        assert "vmap" not in str(caught.value)
        assert f"call `{operator.specification.short_name}.functional`" in (caught.value.hint or "")
    assert torch.equal(cache, CACHE)


def test_an_optional_result_that_is_none(name: str) -> None:
    @opsmith.operator(name, mutates=["x"])
    def scaled(x: Tensor, told: bool) -> Tensor | None:
        x.mul_(2)
        return x.sum() if told else None

    x = torch.ones(3)
    assert scaled(x, False) is None
    new, nothing = scaled.functional(x, False)
    assert nothing is None
    assert new.tolist() == [4.0] * 3
    assert scaled(x, True).item() == 12.0


def parts(x: Tensor, count: int) -> list[Tensor]:
    x.mul_(2)
    return [x[at:] + 1 for at in range(count)]


def total(x: Tensor, count: int) -> Tensor | None:
    x.mul_(2)
    return x.sum() if count else None


def both(x: Tensor, count: int) -> tuple[Tensor, list[Tensor]]:
    return x.mul_(2).sum(), [x[at:] + 1 for at in range(count)]


@pytest.mark.compile
@pytest.mark.parametrize(
    ("function", "recorded"),
    [
        (parts, False),
        (total, True),
        (both, False),
        pytest.param(parts, True, marks=pytest.mark.slow),
        pytest.param(total, False, marks=pytest.mark.slow),
        pytest.param(both, True, marks=pytest.mark.slow),
    ],
)
def test_compiled_code_returns_lists_beside_a_write(
    function: Callable[..., Any], recorded: bool, name: str, fresh_compiler: None
) -> None:
    operator = opsmith.operator(name, mutates=["x"])(function)
    operator.kernel("cpu")(function)

    def write(given: Tensor, call: Callable[..., Any]) -> Any:
        x = given * 1
        return call(x, 2), x * 3

    compiled = torch.compile(write, backend="aot_eager", fullgraph=True)
    if not (recorded or function is total or capabilities.on("inlining")):
        with pytest.raises(RuntimeError, match="whose outputs do not have alias annotations"):
            compiled(torch.rand(4), operator)  # as docs/in-place.md says
        return
    for size in (4, 5):
        x = torch.rand(size, requires_grad=recorded)
        torch.testing.assert_close(compiled(x, operator), write(x, function))


class Stores(torch.nn.Module):
    """A write into two layers of one cache."""

    def __init__(self, operator: Any) -> None:
        super().__init__()
        self.operator = operator

    def forward(self, caches: Tensor, x: Tensor) -> Tensor:
        self.operator(caches[1], x)
        self.operator(caches[2], x * 2)
        return x * 3


CACHES = torch.stack([CACHE, CACHE * 2, CACHE * 3])


def stored() -> Tensor:
    """The caches after a call of `Stores`."""
    caches = CACHES.clone()
    caches[1] = caches[1] * 0.5 + X
    caches[2] = caches[2] * 0.5 + 2 * X
    return caches


def in_cpp_alone(name: str) -> Any:
    operator = opsmith.operator(f"in_place::{name}", mutates=["cache"])(decay_by_half)
    return operator.kernel("cpu", cpp=DECAY.format(name=name))


def decay_by_half(cache: Tensor, x: Tensor) -> None:
    cache.mul_(0.5).add_(x)


@pytest.mark.compile
def test_compiled_code_copies_nothing(fresh_compiler: None) -> None:
    operator, caches = in_cpp_alone("no_copies"), CACHES.clone()
    with torch.no_grad():
        _, (code,) = run_and_get_code(torch.compile(Stores(operator), fullgraph=True), caches, X)
    torch.testing.assert_close(caches, stored())
    body = code.partition("def call(")[2].partition("return")[0]
    assert body.count("torch.ops.in_place.no_copies.default(reinterpret_tensor(") == 2
    assert body.count("empty_strided_cpu((4, )") == body.count("empty_strided") == 2  # x * 2 and x * 3
    assert "copy_" not in body


@pytest.mark.slow
@pytest.mark.compile
@pytest.mark.parametrize("kind", ["reference", "kernel"])
@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated")
def test_a_package_of_aotinductor_writes_in_place(kind: str, fresh_compiler: None, tmp_path: Path) -> None:
    operator = in_cpp_alone("packaged") if kind == "kernel" else declare("packaged_reference", decay_by_half)
    with torch.no_grad():
        program = torch.export.export(Stores(operator), (CACHES, X))
        file = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
        caches = CACHES.clone()
        torch.testing.assert_close(torch._inductor.aoti_load_package(file)(caches, X), X * 3)
    torch.testing.assert_close(caches, stored())


def test_history_and_versions_are_those_of_an_operation_in_place() -> None:
    for operator in (derived, with_formula, with_kernel):
        x = X.clone().requires_grad_()
        own = CACHE.clone()
        operator(own, x)
        assert own.requires_grad
        assert own.grad_fn is not None
        saved = x * 1
        kept = saved.sin().sum()
        version = saved._version
        operator(saved[None].expand(1, 4), X)
        assert saved._version > version
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            kept.backward()


def test_a_kernel_that_writes_past_torch_raises_the_version() -> None:
    operator = declare("past_torch", decay).kernel("cpu", lambda cache, x, by: past_torch(cache, x, by))
    for context in (torch.enable_grad(), torch.no_grad(), torch.inference_mode()):
        own = CACHE.clone()
        before = own._version
        with context:
            operator(own, X)
        assert own._version == before + 1
        torch.testing.assert_close(own, CACHE / 2 + X)


def past_torch(cache: Tensor, x: Tensor, by: float) -> None:
    cache.detach().numpy()[...] = cache.detach().numpy() * by + x.numpy()


def test_tensors_of_inference_mode_are_written_there() -> None:
    with torch.inference_mode():
        own = CACHE.clone()
        with_formula(own, X)
        expected = CACHE.clone()
        mix(expected, X)
        torch.testing.assert_close(own, expected)
    with pytest.raises(errors.MutationError, match=r"`cache` was made in inference mode"):
        with_formula(own, X)


def refused(call: Callable[[], Any]) -> str:
    with pytest.raises(errors.MutationError) as caught:
        call()
    return caught.value.message().splitlines()[0].partition(": ")[2]


def test_what_cannot_be_written_is_refused_before_anything_is_written() -> None:
    leaf = CACHE.clone().requires_grad_()
    assert refused(lambda: with_formula(leaf, X)) == "`cache` is a leaf that requires a gradient"
    assert refused(lambda: with_kernel(leaf[0], X)) == "`cache` is a view of a leaf that requires a gradient"
    torch.testing.assert_close(leaf.detach(), CACHE)
    with torch.no_grad():
        with_formula(leaf, X)
    row = X.clone()
    assert (
        refused(lambda: derived(row.expand(3, 4), X)) == "several elements of `cache` share the same memory"
    )
    assert refused(lambda: derived(row, row)) == "the written `cache` shares elements with `x`"
    assert refused(lambda: derived(row[:3], row[1:])) == "the written `cache` shares elements with `x`"
    torch.testing.assert_close(row, X)
    numbers = torch.complex(X, X)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            negated, conjugate = numbers.conj().imag, numbers.conj()
            assert refused(lambda: derived(negated, X)).startswith("`cache` is a negated view")  # noqa: B023
            assert refused(lambda: derived(conjugate, X)).startswith("`cache` is a conjugate view")  # noqa: B023
            own = torch.zeros_like(X)
            derived(own, negated)
            torch.testing.assert_close(own, -X)
    torch.testing.assert_close(numbers, torch.complex(X, X))
    both = torch.stack([X, X], dim=1)
    first, second = both.unbind(1)
    derived(first, second)
    torch.testing.assert_close(both, torch.stack([1.5 * X, X], dim=1))
    derived(row[:0], row[0:0])


def test_a_write_that_is_not_declared_is_refused() -> None:
    @opsmith.operator("in_place::undeclared", mutates=["cache"])
    def undeclared(cache: Tensor, x: Tensor) -> None:
        cache.add_(x)
        x.zero_()

    with pytest.raises(errors.MutationError, match="an input that it does not declare") as caught:
        undeclared(CACHE.clone(), X.clone())
    assert caught.value.argument == "x"
    assert caught.value.hint is not None
    assert 'mutates=("x",)' in caught.value.hint


def test_what_is_returned_shares_no_memory() -> None:
    @opsmith.operator("in_place::returns_alias", mutates=["cache"])
    def returns_alias(cache: Tensor) -> Tensor:
        return cache.zero_()[0]

    with pytest.raises(errors.AliasError):
        returns_alias(CACHE.clone())

    @opsmith.operator("in_place::returns_something", mutates=["cache"])
    def returns_something(cache: Tensor) -> None:
        return cache.zero_()  # type: ignore[return-value]

    with pytest.raises(errors.ResultCountError):
        returns_something(CACHE.clone())


RETURNED = [each for each in OPERATORS if each.name.endswith("_")]


@pytest.mark.every(8)
@pytest.mark.parametrize("operator", RETURNED, ids=lambda each: each.name.partition("::")[2])
def test_the_argument_that_is_returned_is_the_one_that_is_given(operator: Any) -> None:
    schema = operator.torch_operator._schema
    assert str(schema).endswith("(Tensor(a!) cache, Tensor x) -> Tensor(a!)")
    if hasattr(torch.Tag, "inplace"):
        assert torch.Tag.inplace in operator.torch_operator.tags
    expected = (CACHE / 2 + X) / 2 + X
    for gradients in (False, True):
        own = CACHE.clone().requires_grad_(gradients) * 1
        assert operator(cache=own, x=X) is own
        assert operator(own, X) is own
        torch.testing.assert_close(own.detach(), expected)
        assert own.requires_grad is gradients
    assert operator.functional(CACHE, X) is not CACHE
    report = opsmith.check(operator, samples=[(CACHE, X)], effort="quick")
    assert report.passed_as_asked, str(report)


@pytest.mark.every(6)
@pytest.mark.compile
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("operator", RETURNED, ids=lambda each: each.name.partition("::")[2])
def test_compiled_code_uses_what_is_returned(operator: Any, backend: str, fresh_compiler: None) -> None:
    def chained(cache: Tensor, x: Tensor) -> Tensor:
        return operator(operator(cache[1], x), x) * 2

    own = CACHE.clone()
    found = torch.compile(chained, backend=backend, fullgraph=True)(own, X)
    new = (CACHE[1] / 2 + X) / 2 + X
    torch.testing.assert_close(found, new * 2)
    torch.testing.assert_close(own, torch.stack([CACHE[0], new, CACHE[2]]))


def test_another_tensor_than_the_one_that_was_written_is_refused() -> None:
    @opsmith.operator("in_place::returns_another_", mutates=["cache"], returns="cache")
    def returns_another_(cache: Tensor) -> Tensor:
        return cache.zero_() * 2

    with pytest.raises(errors.AliasError, match="it did not return `cache`") as caught:
        returns_another_(CACHE.clone())
    assert caught.value.expected == "`cache` itself, as declared by `returns='cache'`"
    assert caught.value.hint == "write `return cache`"


def test_only_the_first_argument_alone_may_be_returned() -> None:
    def both(cache: Tensor, x: Tensor) -> Tensor:
        return cache

    def several(cache: list[Tensor]) -> Tensor:
        return cache[0]

    def nothing(cache: Tensor, x: Tensor) -> None:
        cache.add_(x)

    for reference, mutates, returns in (
        (both, ["cache", "x"], "cache"),
        (both, ["x"], "x"),
        (both, ["cache"], "x"),
        (both, [], "cache"),
        (several, ["cache"], "cache"),
    ):
        with pytest.raises(errors.UnknownInputError, match=f"it cannot return `{returns}`") as caught:
            opsmith.operator("in_place::cannot_return", mutates=mutates, returns=returns)(reference)
        assert caught.value.expected == "the first argument, a `Tensor`, which is the only written argument"
        likely = mutates == ["cache"] and reference is both
        hint = 'write `returns="cache"`' if likely else "leave `returns=` out"
        if not mutates:
            assert str(caught.value.got).endswith("and it writes into nothing")
            hint = 'write `mutates=("cache",)`, too'
        assert str(caught.value.hint).startswith(hint)
        if likely:
            assert (
                caught.value.got
                == "`x`, where the first argument is `cache: Tensor`, and it writes into `cache`"
            )
    with pytest.raises(
        errors.UnsupportedTypeError,
        match="an operator that returns `cache` needs the return type hint `Tensor`",
    ):
        opsmith.operator("in_place::cannot_return", mutates=["cache"], returns="cache")(nothing)


def test_lists_and_optional_tensors() -> None:
    @opsmith.operator("in_place::step", mutates=["parameters", "buffer"])
    def step(parameters: list[Tensor], slopes: list[Tensor], buffer: Tensor | None, rate: float) -> None:
        for parameter, slope in zip(parameters, slopes, strict=True):
            parameter.sub_(rate * slope)
        if buffer is not None:
            buffer.add_(1)

    assert str(step.torch_operator._schema) == (
        "in_place::step(Tensor(a!)[] parameters, Tensor[] slopes, Tensor(b!)? buffer, float rate) -> ()"
    )
    parameters, count = [CACHE.clone(), X.clone()], torch.zeros(())
    step(parameters, [CACHE, X], count, 0.5)
    torch.testing.assert_close(parameters, [CACHE / 2, X / 2])
    assert count == 1
    step(parameters, [CACHE, X], None, 0.5)
    torch.testing.assert_close(parameters, [torch.zeros(3, 4, dtype=torch.float64), 0 * X])
    new, kept = step.functional([CACHE, X], [X + CACHE, X], None, 1.0)
    torch.testing.assert_close(new, [-X.expand(3, 4), 0 * X])
    assert kept is None
    gradients = F.grad(lambda x: step.functional([x], [x * x], None, 1.0)[0][0].sum())(X)
    torch.testing.assert_close(gradients, 1 - 2 * X)


def test_a_view_is_written_where_an_optional_tensor_is_not_given() -> None:
    def move(cache: Tensor, x: Tensor, count: Tensor | None = None) -> None:
        cache.mul_(2).add_(x)
        if count is not None:
            count.add_(1)

    operator = opsmith.operator("in_place::move", mutates=["cache", "count"])(move).kernel("cpu", move)
    leaf, x = CACHE.clone().requires_grad_(), X.clone().requires_grad_()
    own = leaf * 1
    operator(own[1], x)
    found = torch.autograd.grad(own.sum(), (leaf, x))
    rows = torch.tensor([1.0, 2.0, 1.0], dtype=torch.float64)
    torch.testing.assert_close(found, (rows[:, None].expand(3, 4), torch.ones_like(X)))


def test_autocast_never_casts_what_is_written() -> None:
    own = CACHE.float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with_formula(own, X.float())
    assert own.dtype is torch.float32
    expected = CACHE.float()
    mix(expected, X.float())
    torch.testing.assert_close(own, expected)


def test_handles() -> None:
    assert pickle.loads(pickle.dumps(derived.functional)) is derived.functional
    assert derived.functional.functional is derived.functional
    assert str(derived.torch_operator._schema) == (
        "in_place::derived(Tensor(a!) cache, Tensor x, float by=0.5) -> ()"
    )
    with pytest.raises(errors.UsageError, match="nothing can be attached to it"):
        derived.functional.gradients(cache=lambda grad: grad)
    changing = declare("changing", decay)
    form = changing.functional
    changing.gradients(cache=lambda grad: 7 * grad)
    assert changing.functional is form
    gradient = F.grad(lambda cache: form(cache, X).sum())(CACHE)
    torch.testing.assert_close(gradient, torch.full_like(CACHE, 7))


@pytest.mark.parametrize("name", ["missing", "by"])
def test_only_tensors_are_written(name: str) -> None:
    with pytest.raises(errors.UnknownInputError, match=f"cannot write into `{name}`"):
        opsmith.operator("in_place::bad", mutates=[name])(decay)


def test_the_closest_tensor_is_named() -> None:
    def of(state: Tensor, x: Tensor) -> None:
        state.mul_(x)

    def without(rate: float) -> float:
        return rate

    for reference, name, hint in (
        (of, "stat", 'write `mutates=("state",)`, or another tensor that the reference writes into'),
        (of, "xx", 'write `mutates=("x",)`, or another tensor that the reference writes into'),
        (without, "rate", "leave `mutates=` out: it has no tensor to write into"),
    ):
        with pytest.raises(errors.UnknownInputError) as caught:
            opsmith.operator("in_place::closest", mutates=[name])(reference)
        assert caught.value.hint == hint


def test_explained() -> None:
    found = with_formula.explain(CACHE, X)
    assert found.saved == ("cache", "x")
    assert found.copies == ("`cache`: the backward needs its value before the call",)


def test_a_notebook_cell_that_is_run_again_changes_the_kind() -> None:
    sources = {
        "def op(x: Tensor) -> None:\n    x.add_(1)\n": ["x"],
        "def op(x: Tensor) -> Tensor:\n    return x + 2\n": [],
    }
    handle: Any = None
    for _ in range(2):
        for source, mutates in sources.items():
            names: dict[str, Any] = {"Tensor": Tensor, "__name__": __name__}
            exec(source, names)
            handle = opsmith.operator("in_place::cell", mutates=mutates)(names["op"])
            x = torch.zeros(2)
            made = handle(x)
            assert (made is None) == bool(mutates)
            assert x.tolist() == ([1, 1] if mutates else [0, 0])
            assert handle.functional(torch.zeros(2)).tolist() == ([1, 1] if mutates else [2, 2])


@pytest.mark.slow
def test_what_is_written_is_checked_as_a_result() -> None:
    def doubles(cache: Tensor, x: Tensor, by: float) -> None:
        cache.mul_(2 * by).add_(x)

    wrong = declare("wrong_kernel", decay).kernel("cpu", doubles)
    report = opsmith.check(wrong, samples=[(CACHE, X)], effort="quick", only=["forward", "gradient"])
    assert {(each.property, each.input, each.cause) for each in report.failures} >= {
        ("forward", "result_cache", "kernel-mismatch")
    }
    right = opsmith.check(with_formula, samples=[(CACHE, X)], effort="quick")
    assert right.passed, str(right)
    assert not right.failures
    assert opsmith.find_operator(right.operator) is with_formula


def test_a_benchmark_is_refused_and_the_functional_form_is_measured() -> None:
    with pytest.raises(errors.UsageError, match="cannot be benchmarked yet") as caught:
        opsmith.benchmark(with_formula, samples=[(CACHE, X)])
    assert caught.value.hint == "benchmark `with_formula.functional`"


class Writes(torch.nn.Module):
    def __init__(self, functional: bool) -> None:
        super().__init__()
        self.functional = functional

    def forward(self, cache: Tensor, x: Tensor) -> Tensor:
        own = cache * 1
        if self.functional:
            made: Tensor = derived.functional(own, x)
            return made
        derived(own, x)
        return own


@pytest.mark.slow
@pytest.mark.compile
def test_exports(tmp_path: Path) -> None:
    program = torch.export.export(Writes(functional=False), (CACHE, X))
    called = [node.target for node in program.graph.nodes if node.op == "call_function"]
    assert derived.torch_operator in called
    torch.testing.assert_close(program.module()(CACHE, X), CACHE / 2 + X)
    file = tmp_path / "model.onnx"
    with pytest.raises(errors.ExportError, match="that writes into its arguments") as caught:
        opsmith.export_onnx(Writes(functional=False).eval(), (CACHE, X), file)
    assert "`op.functional`" in (caught.value.hint or "")
    opsmith.export_onnx(Writes(functional=True).eval(), (CACHE.float(), X.float()), file)
    assert file.exists()


def test_a_result_beside_a_list_that_is_written(name: str) -> None:
    """Under gradients, where a kernel computes: the result is not one of the new values."""

    @opsmith.operator(name, mutates=["xs"])
    def scale_all(xs: list[Tensor], by: Tensor) -> Tensor:
        for each in xs:
            each.mul_(by)
        return by * 3

    scale_all.kernel("cpu", scale_all.reference)
    by = torch.tensor(2.0, requires_grad=True)
    xs = [torch.ones(3), torch.ones(2)]
    assert scale_all(xs, by).item() == 6.0
    assert [each.tolist() for each in xs] == [[2.0] * 3, [2.0] * 2]


def test_a_view_that_is_not_the_first_tensor_is_written_with_all_gradients() -> None:
    """Torch differentiates a write into a view by the first tensor of a node alone."""

    @opsmith.operator("in_place::scaled_view", mutates=["x"])
    def scaled_view(scale: Tensor, x: Tensor) -> None:
        x.mul_(scale)

    scaled_view.gradients(scale=lambda grad_x, x: (grad_x * x).sum(0), x=lambda grad_x, scale: grad_x * scale)
    scale, leaf = (each.clone().requires_grad_() for each in (X, CACHE))
    base = leaf * 1
    scaled_view(scale, base[1:])
    gradients = torch.autograd.grad(base.sum(), [scale, leaf])
    torch.testing.assert_close(
        gradients, (CACHE[1:].sum(0), torch.cat([torch.ones_like(CACHE[:1]), X.expand(2, 4)]))
    )


@pytest.mark.skipif(not capabilities.on("known_calls"), reason="no call is known in conservative mode")
def test_what_compiled_code_calls_has_routes(monkeypatch: pytest.MonkeyPatch) -> None:
    operator = declare("fast_void", decay_, returns="cache")
    void, cache = torch.ops.in_place.fast_void_void.default, CACHE.clone()
    for _ in range(2):
        assert operator(cache, X) is cache
        assert void(cache, X) is None
    slow: list[Any] = []
    validate = InPlaceRegistration._values
    monkeypatch.setattr(
        InPlaceRegistration, "_values", lambda self, *given: slow.append(given) or validate(self, *given)
    )
    expected, version = decay_(cache.clone(), X), cache._version
    assert void(cache, X) is None
    assert torch.equal(cache, expected)
    assert cache._version > version
    assert slow == []
    with pytest.raises(errors.MutationError):
        void(cache[:1].expand(3, 4), X)
