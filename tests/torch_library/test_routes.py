"""The table of known calls: which calls are validated in full, and which take a route."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from functions import Product
from torch import Tensor
from torch.testing import assert_close

import opsmith
from opsmith import errors
from opsmith.torch_library import capabilities
from opsmith.torch_library.calls import routes
from opsmith.torch_library.registration import DispatcherRegistration

pytestmark = pytest.mark.skipif(
    not capabilities.on("known_calls"), reason="no call is known in conservative mode"
)


@pytest.fixture
def in_full(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the operators whose calls are validated in full; no call goes past the dispatcher."""
    names: list[str] = []
    call = DispatcherRegistration._call_in_full

    def noted(self: DispatcherRegistration, *args: Any) -> Any:
        names.append(self.specification.name)
        return call(self, *args)

    monkeypatch.setattr(DispatcherRegistration, "_call_in_full", noted)
    return names


def scaled(x: Tensor, w: Tensor, by: float = 2.0) -> Tensor:
    return x * w * by


def declared(name: str) -> Any:
    operator = opsmith.operator(name)(scaled)
    return operator.gradients(x=lambda grad, w, by: grad * w * by, w=lambda grad, x, by: grad * x * by)


def right(operator: Any, x: Tensor, w: Tensor, **given: float) -> None:
    """Compare values and gradients with the plain function's."""
    assert_close(operator(x, w, **given), scaled(x, w, **given))
    inputs = [each for each in (x, w) if each.requires_grad]
    if inputs:
        found = torch.autograd.grad(operator(x, w, **given).sum(), inputs)
        assert_close(found, torch.autograd.grad(scaled(x, w, **given).sum(), inputs))


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "another dtype": lambda x: x.double(),
    "another rank": lambda x: x[None],
    "a parameter": torch.nn.Parameter,
    "one that requires a gradient": lambda x: x.clone().requires_grad_(),
    "a complex one": lambda x: x.cfloat(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_signature_is_validated_once(name: str, change: str, in_full: list[str]) -> None:
    operator, x, w = declared(name), torch.randn(3), torch.randn(3)
    for _ in range(3):
        right(operator, x, w)
    right(operator, torch.randn(5), torch.randn(1), by=3.0)  # sizes and numbers are no part of it
    right(operator, torch.randn(6)[::2], torch.randn(1).expand(3))
    assert in_full == [name]
    for _ in range(3):
        right(operator, CHANGES[change](x), w)
    assert in_full == [name] * 2


def test_grad_mode_is_part_of_a_signature(name: str, in_full: list[str]) -> None:
    operator, x = declared(name), torch.randn(3, requires_grad=True)
    for _ in range(3):
        right(operator, x, torch.randn(3))
        with torch.no_grad():
            assert not operator(x, torch.randn(3)).requires_grad
    assert in_full == [name] * 2


@pytest.mark.parametrize("context", [torch.inference_mode, lambda: torch.autograd.forward_ad.dual_level()])
def test_a_context_that_the_keys_do_not_tell_is_validated_each_time(
    name: str, context: Any, in_full: list[str]
) -> None:
    operator, x, w = declared(name), torch.randn(3), torch.randn(3)
    right(operator, x, w)
    with context():
        for _ in range(3):
            assert_close(operator(x, w), scaled(x, w))
    right(operator, x, w)
    assert len(in_full) in (1, 4)  # inference mode does not reach the key `Autograd`


def test_inference_tensors_take_a_route_of_their_own(name: str, in_full: list[str]) -> None:
    operator, w = declared(name), torch.randn(3)
    right(operator, w, w)
    with torch.inference_mode():
        x = torch.randn(3)
    for _ in range(2):
        assert_close(operator(x, w), scaled(x, w))
    assert in_full == [name] * 2


def test_lists_of_other_lengths(name: str, in_full: list[str]) -> None:
    @opsmith.operator(name)
    def paired(xs: list[Tensor], ys: list[Tensor]) -> Tensor:
        return torch.stack(xs).sum(0) - torch.stack(ys).sum(0)

    x, y, z = torch.randn(3, 4)
    for _ in range(3):
        assert_close(paired([x, y], [z]), x + y - z)
        assert_close(paired([x], [y, z]), x - (y + z))
    assert in_full == [name] * 2


def test_a_new_declaration_forgets_routes(name: str, in_full: list[str]) -> None:
    operator, x, w = declared(name), torch.randn(3), torch.randn(3)
    for _ in range(2):
        right(operator, x, w)
    operator.kernel("cpu", lambda x, w, by: x * w * by + 1)
    assert_close(operator(x, w), scaled(x, w) + 1)
    assert in_full == [name] * 2


def test_a_known_call_is_held_to_the_contract(name: str, in_full: list[str]) -> None:
    switch = {"writes": False, "returns": False}

    def reference(x: Tensor, w: Tensor) -> Tensor:
        if switch["writes"]:
            x.add_(1)
        return w.view_as(w) if switch["returns"] else x * w

    operator = opsmith.operator(name)(reference)
    for _ in range(2):
        operator(torch.ones(3), torch.ones(3))
    switch["writes"] = True
    with pytest.raises(errors.MutationError, match="argument: x"):
        operator(torch.ones(3), torch.ones(3))
    switch.update(writes=False, returns=True)
    with pytest.raises(errors.AliasError, match="shares memory with its input `w`"):
        operator(torch.ones(3), torch.ones(3))
    assert in_full == [name]


def test_shapes_are_compared_in_each_call(name: str, in_full: list[str]) -> None:
    operator = opsmith.operator(name, shapes="x: N, w: N -> N")(lambda_of_two)
    for _ in range(2):
        operator(torch.ones(3), torch.ones(3))
    with pytest.raises(errors.ShapeError):
        operator(torch.ones(3), torch.ones(2))
    assert in_full == [name] * 2


def lambda_of_two(x: Tensor, w: Tensor) -> Tensor:
    return x * w


def test_a_table_does_not_grow_for_ever(
    name: str, monkeypatch: pytest.MonkeyPatch, in_full: list[str]
) -> None:
    monkeypatch.setattr(routes, "MAX_ROUTES", 2)
    operator = declared(name)
    for _ in range(2):
        for rank in range(4):
            x = torch.randn([2] * rank)
            right(operator, x, x)
    assert len(operator._registration._routes._routes) <= 2


def test_a_reference_that_changes_its_list_changes_none_of_a_formula() -> None:
    @opsmith.operator("routes::first_size")
    def first_size(x: Tensor, sizes: list[int]) -> Tensor:
        return x * float(sizes.pop(0))

    first_size.gradients(x=lambda grad, sizes: grad * float(sizes[0]))
    x = torch.ones(1, requires_grad=True)
    for _ in range(4):
        y = first_size(x, [2, 5])
        assert (y.item(), *torch.autograd.grad(y, x)) == (2.0, 2.0)


def test_a_tensor_of_inference_mode_takes_another_route_beside_an_ordinary_one() -> None:
    operator = opsmith.adopt(Product, "routes::product")
    x, w = torch.ones(2, requires_grad=True), torch.ones(2)
    with torch.inference_mode():
        of_inference = torch.ones(2)
    for region in (torch.no_grad, torch.inference_mode):
        with region():
            for _ in range(3):
                assert operator(x, w).tolist() == [1.0, 1.0]
            for _ in range(3):
                assert operator(x, of_inference).tolist() == [1.0, 1.0]
    for _ in range(3):
        assert operator(w, w).tolist() == operator(w, of_inference).tolist() == [1.0, 1.0]
    for _ in range(3):
        operator(x, w)
        with pytest.raises(RuntimeError, match="Inference tensors cannot be saved"):
            operator(x, of_inference)


def test_a_kernel_that_is_declared_while_the_accelerator_is_made_computes_all_later_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @opsmith.operator("routes::stale")
    def stale(x: Tensor) -> Tensor:
        return x * 2

    made, declare = routes.Accelerator, [lambda: stale.kernel("cpu", lambda x: x * 2 + 100)]

    def late(*args: Any, **options: Any) -> Any:
        accelerator = made(*args, **options)
        if declare:
            thread = threading.Thread(target=declare.pop())
            thread.start()
            thread.join(0.2)  # it may wait for this one
            threads.append(thread)
        return accelerator

    threads: list[threading.Thread] = []
    monkeypatch.setattr(routes, "Accelerator", late)
    x = torch.ones(2)
    stale(x)
    for each in threads:
        each.join()
    assert not declare
    for _ in range(4):
        assert stale(x).tolist() == torch.ops.routes.stale(x).tolist() == [102.0, 102.0]


def test_a_route_that_is_added_after_a_redeclaration_computes_no_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @opsmith.operator("routes::added_late")
    def added_late(x: Tensor) -> Tensor:
        return x * 2

    accept = routes.Accelerator.accept
    declare = [lambda: added_late.kernel("cpu", lambda x: x * 2 + 100)]

    def late(self: Any, *args: Any) -> None:
        if declare:
            declare.pop()()
        accept(self, *args)

    monkeypatch.setattr(routes.Accelerator, "accept", late)
    x = torch.ones(2)
    added_late(x)
    assert not declare
    for _ in range(4):
        assert added_late(x).tolist() == torch.ops.routes.added_late(x).tolist() == [102.0, 102.0]


def test_two_threads_that_make_the_first_calls_share_one_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    operator = declared("routes::shared")
    made: list[Any] = []
    start, make = threading.Barrier(2), routes.Accelerator

    def noted(*args: Any, **options: Any) -> Any:
        made.append(make(*args, **options))
        return made[-1]

    def call() -> None:
        start.wait()
        operator(torch.ones(2), torch.ones(2))

    monkeypatch.setattr(routes, "Accelerator", noted)
    threads = [threading.Thread(target=call) for _ in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    operator(torch.ones(2), torch.ones(2))
    assert len(made) == 1


def test_a_device_is_a_part_of_a_signature() -> None:
    operator = declared("routes::on_meta")
    table = operator._registration._make_routes()
    x = torch.ones(2, requires_grad=True)
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
    with_meta = [x.to("meta"), x.to("meta")]
    assert table._signature(keys, [x, x], [x, x]) != table._signature(keys, with_meta, with_meta)


@pytest.mark.filterwarnings("ignore:.*quantized tensor creation functions:UserWarning")
@pytest.mark.parametrize("requires_grad", [False, True], ids=["no graph", "graph"])
def test_a_quantised_result_of_a_known_call_is_refused(requires_grad: bool) -> None:
    quantised = False

    @opsmith.operator(f"routes::quantised_{requires_grad}")
    def doubled(x: Tensor) -> Tensor:
        return torch.quantize_per_tensor(x.detach(), 0.1, 0, torch.qint8) if quantised else x * 2

    doubled.gradients(x=lambda grad: grad * 2)
    x = torch.ones(2, requires_grad=requires_grad)
    for _ in range(3):
        doubled(x)
    quantised = True
    for _ in range(2):
        with pytest.raises(errors.LayoutError, match="quantised"):
            doubled(x)


def test_a_class_may_give_its_context_a_list_in_each_call() -> None:
    as_list = False

    class Listing(Product):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
            ctx.save_for_backward(x, w)
            if as_list:
                ctx.to_save = [x, w]
            return x * w

    operator = opsmith.adopt(Listing, "routes::listing")
    x, w = torch.ones(2, requires_grad=True), torch.full((2,), 3.0)
    for number in range(4):
        as_list = number % 2 == 1
        (gradient,) = torch.autograd.grad(operator(x, w).sum(), x)
        assert gradient.tolist() == [3.0, 3.0]


def test_a_kernel_that_raises_after_a_write_that_torch_does_not_see() -> None:
    failing = False

    @opsmith.operator("routes::fives", mutates=["x"])
    def fives(x: Tensor) -> None:
        x.fill_(5)

    @fives.kernel("cpu")
    def _(x: Tensor) -> None:
        x.detach().numpy()[:] = 5
        if failing:
            raise ValueError("late")

    x, w = torch.ones(2), torch.ones(2, requires_grad=True)
    for _ in range(3):
        fives(x)
    failing, y = True, (w * x.fill_(1)).sum()
    with pytest.raises(ValueError, match="late"):
        fives(x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()
