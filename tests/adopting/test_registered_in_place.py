"""Operators that others registered and that write into their arguments: adopted as they are, and checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.func as F
from foreign_operators import defined, name
from torch import Tensor
from torch.testing import assert_close

import opsmith
from opsmith import errors

x = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)
y = torch.tensor([3.0, 0.25, -0.5], dtype=torch.float64)


def numpy_scale(x: Tensor, y: Tensor, by: float = 2.0) -> None:
    values = x.detach().numpy()
    np.multiply(values, y.detach().numpy() * by, out=values)


def scale(x: Tensor, y: Tensor, by: float = 2.0) -> None:
    x.mul_(y).mul_(by)


def custom(kernel: Callable[..., Any], written: tuple[str, ...], **given: Any) -> Any:
    return torch.library.custom_op(f"elsewhere::{name()}", kernel, mutates_args=written, **given)


def by_schema() -> Any:
    return defined("(Tensor(a!) x, Tensor y, float by=2.) -> ()", numpy_scale)[0]


KINDS: dict[str, Callable[[], Any]] = {"custom": lambda: custom(numpy_scale, ("x",)), "defined": by_schema}
every_kind = pytest.mark.parametrize("kind", KINDS)


@every_kind
def test_a_call_writes_as_the_operator_does(kind: str) -> None:
    operator = KINDS[kind]()
    handle = opsmith.adopt(operator, reference=scale)
    assert str(handle).endswith("(Tensor(a!) x, Tensor y, float by=2.0) -> ()>")
    for call in (handle, operator):
        storage = torch.ones(3, 2, dtype=torch.float64)
        given = storage[:, 1]
        version = given._version
        assert call(given, y, 0.5) is None
        assert_close(storage, torch.stack([torch.ones(3, dtype=torch.float64), y * 0.5], 1))
        assert given._version == version + 1, (
            "a backward that saved the old value silently uses the new value"
        )
    assert handle.explain(x, y).forward == "the operator's own kernel"
    new = handle.functional(x, y)
    assert_close(new, x * y * 2)
    assert opsmith.find_operator(handle.functional.name) is handle.functional


@every_kind
def test_what_it_lacks_is_derived(kind: str) -> None:
    operator = KINDS[kind]()
    handle = opsmith.adopt(operator, reference=scale)
    for call in (handle, operator):

        def f(x: Tensor, y: Tensor, call: Any = call) -> Tensor:
            written = x * 1
            call(written, y)
            return written.sin()

        def right(x: Tensor, y: Tensor) -> Tensor:
            return (x * y * 2).sin()

        leaves = x.clone().requires_grad_(), y.clone().requires_grad_()
        assert torch.autograd.gradcheck(f, leaves)
        assert torch.autograd.gradgradcheck(f, leaves)
        assert_close(F.jvp(f, (x, y), (y, x)), F.jvp(right, (x, y), (y, x)))
        assert_close(F.jacrev(f)(x, y), F.jacrev(right)(x, y))
        assert_close(F.vmap(f)(x.expand(2, 3), y.expand(2, 3)), right(x.expand(2, 3), y.expand(2, 3)))
        compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
        for given in ((x, y), leaves):
            found = compiled(*given)
            assert_close(found, right(x, y))
        gradients = torch.autograd.grad(found.sum(), leaves)
        assert_close(gradients, torch.autograd.grad(right(*leaves).sum(), leaves))
        on_meta = torch.ones(3, device="meta")
        assert call(on_meta, on_meta) is None


def test_its_history_goes_on_from_the_write() -> None:
    handle = opsmith.adopt(custom(numpy_scale, ("x",)), reference=scale)
    leaf = y.clone().requires_grad_()
    given = x * 1
    before = given * leaf
    handle(given, leaf)
    assert given.requires_grad
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        before.sum().backward()
    with pytest.raises(errors.MutationError, match="is a leaf that requires a gradient"):
        handle(leaf, x)
    with torch.no_grad():
        handle(leaf, x)
    assert_close(leaf.detach(), y * x * 2)


def numpy_sine_(x: Tensor) -> Tensor:
    np.sin(x.detach().numpy(), out=x.detach().numpy())
    return x


def sine_out(x: Tensor, *, out: Tensor) -> Tensor:
    return out.copy_(x.sin())


def test_one_that_returns_what_it_writes() -> None:
    """As in `torch.library.custom_op`'s own documentation, and as `out=` of torch."""
    in_place, _ = defined("(Tensor(a!) x) -> Tensor(a!)", numpy_sine_)
    out, _ = defined("(Tensor x, *, Tensor(a!) out) -> Tensor(a!)", sine_out)
    handle = opsmith.adopt(in_place, reference=lambda x: x.sin_())
    assert str(handle).endswith("(Tensor(a!) x) -> Tensor(a!)>")
    leaf = x.clone().requires_grad_()
    for call in (handle, in_place):
        given = x.clone()
        assert call(given) is given
        recorded = leaf * 1
        assert call(recorded) is recorded
        (gradient,) = torch.autograd.grad(recorded.sum(), leaf)
        assert_close(gradient, x.cos())
        assert_close(F.vmap(F.grad(lambda x, call=call: call(x * 1)))(x), x.cos())
    other = opsmith.adopt(out, reference=sine_out)
    filled = torch.empty_like(x)
    assert other(x, out=filled) is filled
    assert_close(filled, x.sin())
    assert_close(other.functional(x, out=filled), x.sin())


def reshape_and_cache(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> None:
    """As inference engines write a step into a cache of blocks; a slot of -1 is padding."""
    size = key_cache.shape[1]
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            key_cache[slot // size, slot % size] = key[token]
            value_cache[slot // size, slot % size] = value[token]


def cached(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    size = key_cache.shape[1]
    kept = slot_mapping >= 0
    block, offset = slot_mapping[kept] // size, slot_mapping[kept] % size
    key_cache.index_put_((block, offset), key[kept])
    value_cache.index_put_((block, offset), value[kept])


def cache_samples(make: Any) -> Any:
    key, value, caches = make(3, 2, 4), make(3, 2, 4), (make(2, 4, 2, 4), make(2, 4, 2, 4))
    yield key, value, *caches, torch.tensor([5, -1, 2])


def fused_add_rms_norm(input: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> None:
    residual += input
    scale = torch.rsqrt(residual.pow(2).mean(-1, keepdim=True) + epsilon)
    input.copy_(residual * scale * weight)


def norm_samples(make: Any) -> Any:
    yield make(3, 4), make(3, 4), make(4), 1e-5


CHECKED: dict[str, tuple[Callable[[], Any], Callable[..., Any], Any]] = {
    "scale": (KINDS["defined"], scale, [(x.float(), y.float())]),
    "reshape-and-cache": (
        lambda: custom(reshape_and_cache, ("key_cache", "value_cache")),
        cached,
        cache_samples,
    ),
    "fused-add-rms-norm": (
        lambda: custom(fused_add_rms_norm, ("input", "residual")),
        fused_add_rms_norm,
        norm_samples,
    ),
    "sine_": (lambda: defined("(Tensor(a!) x) -> Tensor(a!)", numpy_sine_)[0], lambda x: x.sin_(), [(x,)]),
}


NUMPY_LACKS_IT = "TypeError: Got unsupported ScalarType BFloat16"


@pytest.mark.slow
@pytest.mark.every(6)
@pytest.mark.parametrize("case", CHECKED)
def test_no_false_alarms(case: str) -> None:
    make, reference, samples = CHECKED[case]
    handle = opsmith.adopt(make(), reference=reference)
    report = opsmith.check(handle, samples=samples)
    assert [each.heading() for each in report.failures if each.message != NUMPY_LACKS_IT] == []
    assert {each.property: each.status for each in report.outcomes}["mutation"] == "passed"


@pytest.mark.slow
def test_a_kernel_that_ignores_strides_is_found_at_its_own_line() -> None:
    def flat(x: Tensor, y: Tensor, by: float = 2.0) -> None:
        x.as_strided(x.shape, y.contiguous().stride(), x.storage_offset()).mul_(y * by)

    handle = opsmith.adopt(custom(flat, ("x",)), reference=scale)
    samples = [(torch.randn(3, 4), torch.randn(3, 4))]
    (failure, *_) = opsmith.check(handle, samples=samples, only=["mutation"], effort="quick").failures
    assert (failure.input, failure.cause) == ("x", "layout")
    assert failure.where.endswith(f":{flat.__code__.co_firstlineno}")


@pytest.mark.slow
def test_a_wrong_kernel_is_found() -> None:
    def wrong(x: Tensor, y: Tensor, by: float = 2.0) -> None:
        x.mul_(y).mul_(by + 1)

    handle = opsmith.adopt(custom(wrong, ("x",)), reference=scale)
    report = opsmith.check(handle, samples=[(x, y)], only=["forward"])
    assert report.failures


def test_adopting_again_keeps_the_functional_form() -> None:
    operator = custom(numpy_scale, ("x",))
    handle = opsmith.adopt(operator, reference=scale)
    form = handle.functional
    operator.register_fake(lambda x, y, by=2.0: None)  # so that it is inspected anew

    def other(x: Tensor, y: Tensor, by: float = 2.0) -> None:
        x.copy_(x * y * by)

    assert opsmith.adopt(operator, reference=other) is handle
    assert handle.functional is form
    assert_close(form(x, y), x * y * 2)
    handle.gradients(x=lambda grad_x, y, by: 7 * grad_x * y * by)
    leaf = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(form(leaf, y).sum(), leaf)
    assert_close(gradient, 14 * y)


def test_without_a_reference() -> None:
    operator = custom(numpy_scale, ("x",))
    with pytest.raises(errors.UsageError, match="adopted with a reference"):
        opsmith.adopt(operator)


def test_a_call_with_shared_elements_writes_as_before() -> None:
    """Only what is derived needs arguments that lie apart."""
    handle = opsmith.adopt(custom(numpy_scale, ("x",)), reference=scale)
    given = x.clone()
    handle(given, given)
    assert_close(given, x * x * 2)
    recorded = x.clone().requires_grad_() * 1
    with pytest.raises(errors.MutationError, match="shares elements with"):
        handle(recorded, recorded)


@pytest.mark.slow
def test_optional_arguments_and_lists() -> None:
    def kernel(xs: list[Tensor], y: Tensor | None, by: Tensor) -> Tensor:
        for each in (*xs, *([] if y is None else [y])):
            each.detach().numpy()[...] *= by.detach().numpy()
        return by.detach() * 3

    def reference(xs, y, by):  # type: ignore[no-untyped-def]
        for each in (*xs, *([] if y is None else [y])):
            each.mul_(by)
        return by * 3

    operator, _ = defined("(Tensor(a!)[] xs, Tensor(b!)? y, Tensor by) -> Tensor", kernel)
    handle = opsmith.adopt(operator, reference=reference)
    by = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    for given in (y, None):
        xs, optional = [x * 1, y * 1], None if given is None else given * 1
        result = operator(xs, optional, by)
        assert_close(xs, [x * 2, y * 2])
        total = result + sum(each.sum() for each in xs)
        (gradient,) = torch.autograd.grad(total, by)
        assert_close(gradient, 3 + x.sum() + y.sum())
        new = handle.functional([x, y], given, by)
        assert_close(new[0], [x * 2, y * 2])
    samples = [([x.clone(), y.clone()], y.clone(), x.clone())]
    report = opsmith.check(handle, samples=samples, only=["forward", "mutation", "gradient", "fake"])
    assert [each.heading() for each in report.failures if each.message != NUMPY_LACKS_IT] == []
