"""Each private name of torch does what opsmith takes it to do: an upgrade of torch fails here first."""

from __future__ import annotations

import contextlib
import math
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

import opsmith
from opsmith import errors
from opsmith.build.elf import fault_of
from opsmith.build.toolchain import find_toolchain
from opsmith.torch_library import capabilities as queries
from opsmith.torch_library.capabilities import capability
from opsmith.torch_library.capabilities.capability import CAPABILITIES, PROVIDERS
from opsmith.torch_library.capabilities.operation import Operation

# The private means themselves, whatever is decided about them.
PRIVATE = {name: import_module(f"opsmith.torch_library.capabilities.private.{name}") for name in CAPABILITIES}
capabilities = SimpleNamespace(
    **{name: getattr(PRIVATE[each.name], name) for name, each in PROVIDERS.items()},
    **{
        name: getattr(queries, name)
        for name in ("AUTOCAST_DEVICES", "recording", "schema_fault", "shares_memory")
    },
)


@pytest.fixture
def library() -> Iterator[Any]:
    library = torch.library.Library("capabilities", "FRAGMENT")
    yield library
    capabilities.destroy(library)  # torch 2.11 lists the operators of one that is only dropped


@pytest.fixture
def mesh() -> Iterator[Any]:
    """A mesh of this process alone."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_steady_device_guard() -> None:
    """Threads that end may enter a fake mode one after the other, where that is the first use."""
    program = (
        "import threading\nfrom torch._subclasses.fake_tensor import FakeTensorMode\n"
        "from opsmith.torch_library.capabilities.private import steady_device_guard\n"
        "steady_device_guard()\n"
        "def enter():\n    with FakeTensorMode():\n        pass\n"
        "for _ in range(3):\n"
        "    thread = threading.Thread(target=enter)\n    thread.start()\n    thread.join()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_below_autograd() -> None:
    x = torch.ones(2, requires_grad=True)
    with capabilities.below_autograd():
        inside = x * 2
    assert not inside.requires_grad
    assert (x * 2).requires_grad


def test_below_autograd_still_counts_writes() -> None:
    x = torch.ones(2)
    with capabilities.below_autograd():
        x.add_(1)
    assert capabilities.version(x) == 1


def test_above_autograd_leaves_autocast_as_it_is() -> None:
    x = torch.ones(2, 2, requires_grad=True)
    with capabilities.below_autograd(), capabilities.above_autograd():
        assert (x * 2).requires_grad
        assert (x @ x).dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16), capabilities.above_autograd():
        assert (x @ x).dtype == torch.bfloat16


def test_resolving_bits() -> None:
    x = torch.ones(2, dtype=torch.complex64) * 1j
    seen = []

    class Handler(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append((x * x.conj()).real.tolist())
            with capabilities.resolving_bits():
                seen.append((x * x.conj()).real.tolist())
            return function(*args, **(kwargs or {}))

    with Handler():
        x.abs()
    assert seen == [[-1.0, -1.0], [1.0, 1.0]]
    with capabilities.resolving_bits():
        assert (x * x.conj()).real.tolist() == [1.0, 1.0]


def test_without_modes() -> None:
    with capabilities.fake_mode(), capabilities.without_modes():
        assert type(torch.ones(2)) is torch.Tensor


def test_seen_by_modes() -> None:
    assert not capabilities.seen_by_modes()
    with capabilities.fake_mode():
        assert capabilities.seen_by_modes()
        with capabilities.without_modes():
            assert not capabilities.seen_by_modes()


def test_without_data() -> None:
    mode = capabilities.fake_mode()
    real, fake, meta = torch.ones(2), mode.from_tensor(torch.ones(2)), torch.ones(2, device="meta")
    assert capabilities.without_data([fake, meta])
    assert not capabilities.without_data([real, fake])
    assert not capabilities.without_data([])


def test_fresh_symbols() -> None:
    mode = capabilities.symbolic_mode()
    fake = mode.from_tensor(torch.ones(2))
    assert capabilities.fresh_symbols([torch.ones(2)]) == []
    before = len(capabilities.fresh_symbols([fake]))
    with mode, contextlib.suppress(RuntimeError, NotImplementedError):
        fake.nonzero()
    assert len(capabilities.fresh_symbols([fake])) >= before
    del capabilities.fresh_symbols([fake])[before:]
    assert len(capabilities.fresh_symbols([fake])) == before


def test_is_a_size() -> None:
    fake = capabilities.symbolic_mode().from_tensor(torch.ones(2))
    (size,) = fake.shape
    assert capabilities.is_a_size(size.node.expr, [fake])
    assert not capabilities.is_a_size(size.node.expr, [torch.ones(2)])


def test_is_mapped() -> None:
    found: list[bool] = []

    def looks(x: Tensor) -> Tensor:
        found.append(capabilities.is_mapped())
        return x.sum()

    torch.func.grad(looks)(torch.ones(2))
    torch.vmap(torch.func.grad(looks))(torch.ones(2, 2))
    looks(torch.ones(2))
    assert found == [False, True, False]


def test_redispatch_below_autograd(library: Any) -> None:
    seen: list[str] = []
    library.define("redispatched(Tensor x) -> Tensor")
    operator = torch.ops.capabilities.redispatched.default

    def autograd(keyset: Any, x: Tensor) -> Tensor:
        seen.append("autograd")
        return capabilities.redispatch_below_autograd(operator, keyset, (x,), {})  # type: ignore[no-any-return]

    def kernel(x: Tensor) -> Tensor:
        seen.append("kernel")
        return x * 2

    library.impl("redispatched", kernel, "CompositeExplicitAutograd")
    library.impl("redispatched", autograd, "Autograd", with_keyset=True)
    assert_close(operator(torch.ones(2)), torch.full((2,), 2.0))
    assert seen == ["autograd", "kernel"]


def test_shares_memory() -> None:
    x = torch.arange(6)
    assert capabilities.shares_memory(x, x.view(2, 3)[1:])
    assert capabilities.shares_memory(x[:2], x[4:])
    assert not capabilities.shares_memory(x, x.clone())
    assert not capabilities.shares_memory(torch.empty(0), torch.empty(0))


def test_version() -> None:
    x = torch.ones(2)
    before = capabilities.version(x)
    x.view(-1)[0] = 3
    assert capabilities.version(x) != before
    with torch.inference_mode():
        assert capabilities.version(torch.ones(2)) is None


def test_versions() -> None:
    written, other = torch.ones(2), torch.ones(2)
    before = capabilities.versions([written, None, other])
    written.add_(1)
    after = capabilities.versions([written, None, other])
    assert [old == new for old, new in zip(before, after, strict=True)] == [False, True, True]


@pytest.mark.parametrize("name", ["states", "marks"])
def test_change_is_seen(name: str) -> None:
    states = getattr(capabilities, name)
    changes: list[Callable[[Tensor], object]] = [
        lambda x: x.add_(1),
        lambda x: x.t_(),
        lambda x: x.resize_(3, 2),
        lambda x: x.untyped_storage().resize_(400),
        lambda x: setattr(x, "data", x.data.clone()),
        lambda x: setattr(x, "data", x.data[:, 1:]),
        lambda x: x.set_(torch.ones(2, 3)),
    ]
    for change in changes:
        x = torch.ones(2, 3)
        before = states([x])
        assert states([x]) == before
        change(x)
        assert states([x]) != before
    with torch.inference_mode(), pytest.raises(RuntimeError, match="version"):
        states([torch.ones(2)])


def test_states() -> None:
    x = torch.ones(2, 3)
    assert capabilities.states([x])[0][:4] == (x._version, x.shape, x.stride(), 0)


def test_marks() -> None:
    x = torch.ones(2, 3)
    assert capabilities.marks([x, x]) == [x._version, x.shape, x.stride(), x.data_ptr()] * 2


def test_viewed() -> None:
    x = torch.ones(2, 3)
    assert capabilities.viewed(x) is None
    assert capabilities.viewed(x[0]) is x


def test_version_in_inference_mode() -> None:
    """An ordinary tensor is still counted there."""
    x = torch.ones(2)
    with torch.inference_mode():
        x.add_(1)
    assert capabilities.version(x) == 1


def test_schema_fault() -> None:
    assert capabilities.schema_fault("f(Tensor x, SymInt n=3) -> Tensor") is None
    for wrong in (
        "f(Tensr x) -> Tensor",
        "f(Tensor x, float y=inf) -> Tensor",
        "f(Tensor x, SymInt n=1e400)",
    ):
        assert capabilities.schema_fault(wrong)


def test_operator_exists(library: Any) -> None:
    assert capabilities.operator_exists("aten::sin")
    assert not capabilities.operator_exists("capabilities::nothing")
    library.define("defined_only(Tensor x) -> Tensor")
    assert capabilities.operator_exists("capabilities::defined_only")


def test_destroy() -> None:
    library = torch.library.Library("capabilities", "FRAGMENT")
    library.define("gone(Tensor x) -> Tensor")
    assert capabilities.operator_exists("capabilities::gone")
    capabilities.destroy(library)
    assert not capabilities.operator_exists("capabilities::gone")
    assert not hasattr(torch.ops.capabilities, "gone")


def test_forward_mode_active() -> None:
    assert not capabilities.forward_mode_active()
    with forward_ad.dual_level():
        assert capabilities.forward_mode_active()
    assert not capabilities.forward_mode_active()
    torch.func.jvp(lambda x: (_note(capabilities.forward_mode_active()), x)[1], (X,), (X,))
    assert NOTED.pop()


X = torch.tensor([1.0, 2.0])
NOTED: list[Any] = []


def _note(value: Any) -> None:
    NOTED.append(value)


def test_forward_mode_allowed() -> None:
    class Node(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            _note(capabilities.forward_mode_allowed())
            return x * 2

        @staticmethod
        def jvp(ctx: Any, t: Tensor) -> Tensor:
            _note(capabilities.forward_mode_allowed())
            with capabilities.forward_mode_on():
                _note(capabilities.forward_mode_allowed())
            return t * 2

    assert capabilities.forward_mode_allowed()
    with forward_ad.dual_level():
        Node.apply(forward_ad.make_dual(X, X))
    assert NOTED == [False, False, True]
    NOTED.clear()


def test_forward_mode_on() -> None:
    with capabilities.forward_mode_on(), forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(forward_ad.make_dual(X, X) * 3).tangent
        assert_close(tangent, 3 * X)


def test_primal_of() -> None:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(X, X)
        primal = capabilities.primal_of(dual)
        assert forward_ad.unpack_dual(primal).tangent is None
        assert_close(primal, X)
    assert_close(capabilities.primal_of(X), X)


def test_unpack_dual_and_make_dual() -> None:
    with forward_ad.dual_level():
        dual = capabilities.make_dual(X, X.cos())
        primal, tangent = capabilities.unpack_dual(dual)
        assert_close((primal, tangent), (X, X.cos()))
        assert capabilities.unpack_dual(X)[1] is None
    assert capabilities.unpack_dual(3) == (3, None)
    whole = torch.ones(2, dtype=torch.int64)
    assert capabilities.unpack_dual(whole)[0] is whole


def test_make_dual() -> None:
    with forward_ad.dual_level():
        assert_close(forward_ad.unpack_dual(capabilities.make_dual(X, X.cos())).tangent, X.cos())


def test_outside_graph() -> None:
    """It has its tangent and no graph."""
    x = X.clone().requires_grad_()
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, X.cos())
        outside = capabilities.outside_graph(dual)
        assert not outside.requires_grad
        assert_close(forward_ad.unpack_dual(outside).tangent, X.cos())
        outside.requires_grad_()
        (gradient,) = torch.autograd.grad((outside**3).sum(), outside)
        assert_close(forward_ad.unpack_dual(gradient).tangent, 6 * X * X.cos())
    assert not capabilities.outside_graph(x).requires_grad


def test_autocast_key() -> None:
    assert capabilities.autocast_key("cpu") == "AutocastCPU"
    assert capabilities.autocast_key("cuda") == "AutocastCUDA"
    assert capabilities.autocast_key("meta") is None
    assert capabilities.autocast_key("toaster") is None
    assert {"cpu", "cuda", "mps", "xpu"} <= set(capabilities.AUTOCAST_DEVICES)


def test_without_autocast() -> None:
    x = torch.ones(2, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (x @ x).dtype is torch.bfloat16
        with capabilities.without_autocast("cpu"):
            assert (x @ x).dtype is torch.float32
        assert (x @ x).dtype is torch.bfloat16


def test_serve_autocast_while_tracing(library: Any) -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    library.define("lowered(Tensor x) -> Tensor")
    library.impl("lowered", lambda x: x * 2, "CompositeExplicitAutograd")
    operator = torch.ops.capabilities.lowered.default

    def kernel(x: Tensor) -> Tensor:
        with capabilities.without_autocast("cpu"):
            return operator(x.bfloat16())

    library.impl("lowered", kernel, "AutocastCPU")
    capabilities.serve_autocast_while_tracing(operator, "AutocastCPU", kernel)

    def under_autocast(x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return operator(x)

    graph = make_fx(under_autocast, pre_dispatch=True)(X)
    assert graph(X).dtype is torch.bfloat16


@pytest.mark.compile
def test_run_in_traces() -> None:
    """Dynamo runs the function, which it cannot trace, and takes the result."""
    lock = threading.RLock()

    def locked() -> int:
        with lock:
            return 3

    capabilities.run_in_traces(locked)
    assert vars(locked) == {"_dynamo_marked_constant": True}
    compiled = torch.compile(lambda x: x * locked(), fullgraph=True, backend="eager")
    assert_close(compiled(torch.ones(2)), torch.full((2,), 3.0))


@pytest.mark.compile
def test_mark_compiled_code() -> None:
    from torch._inductor import config

    before = config.unsafe_marked_cacheable_functions
    capabilities.mark_compiled_code("capabilities::marked", "token")
    try:
        assert config.unsafe_marked_cacheable_functions["torch.ops.capabilities.marked"] == "token"
        assert config.unsafe_marked_cacheable_functions is not before
    finally:
        config.unsafe_marked_cacheable_functions = before


def test_compiler_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch._inductor.config", None)  # type: ignore[arg-type]
    assert capabilities.compiler_imported()
    monkeypatch.delitem(sys.modules, "torch._inductor.config")
    assert not capabilities.compiler_imported()


def test_tracing_imported() -> None:
    torch.compiler.reset()
    assert capabilities.tracing_imported()


def test_fake_mode() -> None:
    with capabilities.fake_mode() as mode:
        fake = mode.from_tensor(torch.ones(2, 3))
        assert (fake @ fake.mT).shape == (2, 2)
    assert type(fake).__name__ == "FakeTensor"


def test_symbolic_mode() -> None:
    real = torch.ones(2, 3, 1)
    with capabilities.symbolic_mode() as mode:
        fake = mode.from_tensor(real)
        made = fake.new_empty(fake.shape[0] + 1, int(fake.shape[1]))
        assert type(made.shape[0]) is torch.SymInt
        assert [mode.size(size) for size in made.shape] == [3, 3]
        assert [mode.fixed(size) for size in fake.shape] == [False, True, False]


def test_symbolic_mode_knows_no_size_that_depends_on_numbers() -> None:
    real = torch.ones(3)
    with capabilities.symbolic_mode() as mode:
        assert mode.size(mode.from_tensor(real).nonzero().shape[0]) is None


def test_observe_operators() -> None:
    seen: list[tuple[str, dict[str, Any]]] = []
    given: list[Any] = []
    with capabilities.observe_operators(
        lambda operator, kwargs: seen.append((str(operator), kwargs)),
        lambda operator, args: given.append((str(operator), args)),
    ):
        result = X.sum(dtype=torch.float64)
    assert_close(result, torch.tensor(3.0, dtype=torch.float64))
    assert seen == [("aten.sum.default", {"dtype": torch.float64})]
    assert given == [("aten.sum.default", (X,))]


def test_observe_writes() -> None:
    seen: list[Tensor] = []
    ours, out, listed = torch.zeros(3), torch.zeros(3), [torch.zeros(3), torch.zeros(3)]
    with capabilities.observe_writes(seen.append):
        ours.view(3, 1).mul_(X.sum())
        torch.add(ours, 1, out=out)
        torch._foreach_add_(listed, 1)
        (ours + out).add_(1)
    addresses = [each.data_ptr() for each in seen]
    assert addresses[:4] == [each.data_ptr() for each in (ours, out, *listed)]
    assert len(addresses) == 5


def test_operators_behind_modes() -> None:
    class Answers(TorchDispatchMode):
        def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return X if operator is torch.ops.aten.cos.default else operator(*args, **(kwargs or {}))

    with Answers() as outer, Answers(), capabilities.operators_behind_modes() as ran:
        X.sin().cos().exp()
    assert ran == [torch.ops.aten.sin.default, torch.ops.aten.exp.default]
    assert isinstance(outer, Answers)
    assert not capabilities.seen_by_modes()


def test_functionalization() -> None:
    """The mode that a trace of AOTAutograd puts tensors under."""
    from torch._subclasses.functional_tensor import FunctionalTensor

    mode: Any = capabilities.FUNCTIONALIZATION()
    with mode:
        wrapped: Any = FunctionalTensor.to_functional(X.clone())
        wrapped.add_(1)
        assert type(wrapped) is FunctionalTensor
        assert_close(torch.ops.aten.clone(FunctionalTensor.from_functional(wrapped)), X + 1)


def test_only_stand_ins() -> None:
    from torch._subclasses.functional_tensor import FunctionalTensor
    from torch.testing._internal.two_tensor import TwoTensor

    with capabilities.fake_mode() as mode:
        fake = mode.from_tensor(X)
    assert capabilities.only_stand_ins([Tensor, type(fake), FunctionalTensor])
    assert capabilities.only_stand_ins([])
    assert not capabilities.only_stand_ins([Tensor, TwoTensor])


def test_source_in_trace() -> None:
    """Inductor reads what a copy was made of, unless `copy_in_trace` has made it."""
    import torch._inductor.fx_passes.post_grad
    from torch._subclasses.functional_tensor import FunctionalTensor
    from torch.fx.experimental.proxy_tensor import make_fx

    seen: dict[str, tuple[str, bool]] = {}

    def function(x: Tensor) -> Any:
        with capabilities.FUNCTIONALIZATION():
            given: Any = FunctionalTensor.to_functional(x)
            kept, filled = given.clone(), torch.empty_like(given).copy_(given)
            values = {
                "itself": given,
                "a view": given[1:],
                "a clone": kept,
                "a view of a clone": kept[1:],
                "written": filled,
                "one of a list": torch.cat([given]),
                "two of a list": torch.cat([given, given]),
                "a product": given * 2,
                "a copy that stays": capabilities.copy_in_trace(kept),
            }
            for name, value in values.items():
                source, copied = capabilities.source_in_trace(value)
                seen[name] = source.name.rstrip("_01"), copied
            return FunctionalTensor.from_functional(kept)

    make_fx(function)(torch.ones(3))
    assert seen == {
        "itself": ("x", False),
        "a view": ("x", False),
        "a clone": ("x", True),
        "a view of a clone": ("x", True),
        "written": ("x", True),
        "one of a list": ("x", True),
        "two of a list": ("cat", False),
        "a product": ("mul", False),
        "a copy that stays": ("where", False),
    }
    assert capabilities.source_in_trace(torch.ones(1)) == (None, False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool, torch.complex64])
def test_copy_in_trace(dtype: torch.dtype) -> None:
    x = torch.tensor([0, 1, -1, 3]).to(dtype)
    copy = capabilities.copy_in_trace(x)
    assert torch.equal(copy, x)
    assert (copy.dtype, copy.data_ptr() == x.data_ptr()) == (dtype, False)


def test_shard_of(mesh: Any) -> None:
    x = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)]).requires_grad_()
    shard = capabilities.shard_of(x)
    assert type(shard) is Tensor
    assert_close(shard, torch.ones(4, 2))


def test_shard_key(mesh: Any) -> None:
    rows, again = (distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)]) for _ in range(2))
    others = [
        distribute_tensor(torch.ones(4, 2), mesh, [Shard(1)]),
        distribute_tensor(torch.ones(2, 4), mesh, [Shard(0)]),
        distribute_tensor(torch.ones(4, 2, dtype=torch.float64), mesh, [Shard(0)]),
    ]
    keys = {capabilities.shard_key(each) for each in (rows, again, *others)}
    assert len(keys) == 4


def test_placed_like(mesh: Any) -> None:
    example = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])
    place = capabilities.placed_like(example)
    placed = place(torch.zeros(4, 2))
    assert isinstance(placed, DTensor)
    assert (placed.placements, placed.shape, placed.requires_grad) == (example.placements, (4, 2), False)
    assert_close(placed.full_tensor(), torch.zeros(4, 2))
    assert (
        place(torch.zeros(2, 4).mT) is place(torch.zeros(3, 2)) is place(torch.zeros(4, 2).double()) is None
    )


def test_traced() -> None:
    from torch._subclasses.functional_tensor import FunctionalTensor

    mode: Any = capabilities.FUNCTIONALIZATION()
    with mode:
        functional = FunctionalTensor.to_functional(X.clone())
    with capabilities.fake_mode() as fakes:
        fake = fakes.from_tensor(X)
    symbolic = capabilities.symbolic_mode().from_tensor(X)
    for tensor in (functional, fake, symbolic):
        assert capabilities.traced([X, tensor])
    assert not capabilities.traced([X])


def test_symbolic_functions() -> None:
    """torch's own functions of `math` keep a symbol, and compute numbers as `math` does."""
    (size,) = capabilities.symbolic_mode().from_tensor(X).shape
    functions = capabilities.symbolic_functions()
    for name in ("sqrt", "cos", "sin", "tan", "log2"):
        assert type(functions[name](size)) is torch.SymFloat
        assert functions[name](0.5) == getattr(math, name)(0.5)


def inside(transform: Any, see: Any) -> None:
    """Look around inside a transform."""
    transform(lambda x: (see(x), x.sum())[1])(torch.ones(3, 2))


@pytest.mark.parametrize(
    ("kind", "transform"),
    [
        ("Grad", torch.func.grad),
        ("Vmap", torch.func.vmap),
        ("Jvp", lambda f: lambda x: torch.func.jvp(f, (x,), (x,))),
        ("Functionalize", torch.func.functionalize),
    ],
)
def test_innermost_transform(kind: str, transform: Any) -> None:
    assert capabilities.innermost_transform() is None
    inside(transform, lambda x: _note(capabilities.innermost_transform()))
    layer = NOTED.pop()
    assert (layer.kind, layer.level) == (kind, 1)
    inside(lambda f: torch.func.vmap(transform(f)), lambda x: _note(capabilities.innermost_transform()))
    layer = NOTED.pop()
    assert (layer.kind, layer.level) == (kind, 2)
    assert capabilities.innermost_transform() is None


def test_transform_of_grad() -> None:
    def see(x: Tensor) -> None:
        layer = capabilities.innermost_transform()
        assert layer is not None
        below = layer.unwrap(x)
        assert below.requires_grad is False
        assert_close(layer.unwrap(layer.wrap(below)), below)
        lifted = layer.lift(X)
        assert not lifted.requires_grad
        assert layer.unwrap(lifted) is not None
        assert layer.lift(3) == 3
        assert layer.unwrap(3) == 3
        with layer.interpreter.lower():
            assert capabilities.innermost_transform() is None
        _note("seen")

    inside(torch.func.grad, see)
    assert NOTED.pop() == "seen"


def test_transform_of_vmap() -> None:
    def see(x: Tensor) -> None:
        layer = capabilities.innermost_transform()
        assert layer is not None
        assert (layer.batch_size, layer.randomness) == (3, "same")
        values, dims = layer.unwrap_batched((x, X, 3.0, None))
        assert dims == (0, None, None, None)
        assert values[0].shape == (3, 2)
        (wrapped,) = layer.wrap_batched((values[0],), (0,))
        assert wrapped.shape == (2,)
        _note("seen")

    inside(lambda f: torch.func.vmap(f, randomness="same"), see)
    assert NOTED.pop() == "seen"


def test_single_level_nodes() -> None:
    class Node(capabilities.SingleLevelFunction):  # type: ignore[misc]
        @staticmethod
        def forward(layer: Any, x: Tensor) -> Tensor:
            with layer.interpreter.lower():
                result = layer.unwrap(x) * 2
            return layer.wrap(result)  # type: ignore[no-any-return]

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            pass

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            return None, grad * 7

    def function(x: Tensor) -> Tensor:
        with capabilities.single_level_nodes():
            return Node.apply(capabilities.innermost_transform(), x).sum()  # type: ignore[no-any-return]

    assert_close(torch.func.grad(function)(X), torch.full((2,), 7.0))


def test_single_level_function() -> None:
    assert issubclass(torch.autograd.Function, capabilities.SingleLevelFunction)


def test_below_transforms() -> None:
    seen: list[tuple[bool, bool]] = []

    def note(x: Tensor) -> Tensor:
        inner = capabilities.below_transforms(x)
        seen.append((capabilities.is_functional(inner), inner.shape == X.shape))
        return x * 2

    torch.func.vmap(note)(X)
    torch.func.functionalize(note)(X)
    note(X)
    assert seen == [(False, True), (True, True), (False, True)]


def test_is_functional() -> None:
    seen: list[bool] = []
    torch.func.functionalize(lambda x: (seen.append(capabilities.is_functional(x)), x * 2)[1])(X)
    assert [*seen, capabilities.is_functional(X)] == [True, False]


def test_innermost_value() -> None:
    seen: list[torch.Tensor] = []

    def noted(x: torch.Tensor) -> torch.Tensor:
        seen.append(capabilities.innermost_value(x * 2))
        return (x * 3).sum()

    torch.vmap(torch.func.grad(noted))(X)
    assert capabilities.innermost_value(X) is X
    assert type(seen[0]) is torch.Tensor
    if queries.on("torch_func"):
        assert_close(seen[0], X * 2)


@pytest.mark.parametrize("name", ["lost", "zeros"])
def test_a_second_order_without_a_graph_is_never_zero_in_silence(name: str) -> None:
    """A class may mean zeros; where their numbers cannot be seen, they are refused as others are."""

    class Cubed(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x: Tensor) -> Tensor:
            return x**3

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.save_for_backward(*inputs)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            return torch.zeros_like(grad) if name == "zeros" else (grad * 3 * x**2).detach()

    cubed = opsmith.adopt(Cubed, f"capability_tests::{name}")

    def first(x: Tensor) -> Tensor:
        gradient: Tensor = torch.func.grad(lambda x: cubed(x).sum())(x)
        return gradient

    assert_close(first(X), torch.zeros_like(X) if name == "zeros" else 3 * X**2)
    seconds = [lambda: torch.func.grad(lambda x: first(x).sum())(X)]
    seconds.append(lambda: torch.func.vmap(torch.func.grad(lambda x: first(x).sum()))(torch.stack([X, X])))
    for second in seconds:
        if name == "zeros" and queries.on("torch_func"):
            assert not second().any()
        else:
            with pytest.raises(errors.GraphCutError, match="cannot see that the gradient of `x` depends"):
                second()
    x = X.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(cubed(x).sum(), x, create_graph=True)
    if name == "zeros":
        assert not torch.autograd.grad((gradient + 0 * x).sum(), x)[0].any()
    else:
        with pytest.raises(errors.GraphCutError, match="cannot see that the gradients"):
            torch.autograd.grad((gradient + x).sum(), x)


def test_unwrap_dead() -> None:
    kept: list[Tensor] = []
    torch.func.grad(lambda x: (kept.append(x), x.sum())[1])(X)
    assert_close(capabilities.unwrap_dead(kept[0]), X)
    assert not capabilities.unwrap_dead(kept[0]).requires_grad
    assert capabilities.unwrap_dead(X) is X
    assert capabilities.unwrap_dead("text") == "text"


def test_over_examples() -> None:
    """It runs where no layer is left: that is why a rule for a batch can call it."""
    batch = torch.arange(6.0).reshape(3, 2)
    function = capabilities.over_examples(lambda x, y: (x.sum() * y, x), (1, None), 2, "error")
    (scaled, same), dims = function(batch, torch.tensor(2.0))
    assert dims == (0, 1)
    assert_close(scaled, batch.sum(0) * 2)
    assert_close(same, batch)


def test_reduce_to_dim() -> None:
    gradient = torch.arange(6.0).reshape(3, 2)
    assert_close(capabilities.reduce_to_dim(gradient, 0, 1, 3), gradient.mT)
    assert_close(capabilities.reduce_to_dim(gradient, 0, None, 3), gradient.sum(0))
    assert_close(capabilities.reduce_to_dim(gradient[0], None, 0, 3), gradient[0].expand(3, 2))


@pytest.mark.slow
@pytest.mark.compile
def test_exporting() -> None:
    def scaled(x: Tensor) -> Tensor:
        _note(capabilities.exporting())
        return x * 2

    operator = opsmith.operator("capabilities::exported")(scaled)

    class Module(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return operator(x)

    torch.export.export(Module(), (X,)).run_decompositions()
    assert not capabilities.exporting()
    NOTED.clear()
    torch.compile(Module(), backend="aot_eager", fullgraph=True)(X)
    assert not any(NOTED)
    NOTED.clear()


def test_recording() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    assert not capabilities.recording()
    make_fx(lambda x: (_note(capabilities.recording()), x * 2)[1])(X)
    assert NOTED.pop() is True
    assert not capabilities.recording()


def test_recording_before_anything_could(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch.fx.experimental.proxy_tensor", raising=False)
    assert not capabilities.recording()


def test_transform_kernel(library: Any) -> None:
    library.define("transformed(Tensor x) -> Tensor")
    library.impl("transformed", lambda x: x * 2, "CompositeExplicitAutograd")
    kernel = capabilities.transform_kernel("capabilities::transformed")
    seen: list[str] = []

    def front(keyset: Any, x: Tensor) -> Any:
        seen.append(str(capabilities.innermost_transform().kind))  # type: ignore[union-attr]
        return kernel.call_boxed(keyset, x)

    library.impl("transformed", front, "FuncTorchDynamicLayerFrontMode", with_keyset=True)
    operator = torch.ops.capabilities.transformed
    assert_close(torch.func.functionalize(operator)(X), 2 * X)
    assert seen == ["Functionalize"]
    assert_close(operator(X), 2 * X)
    assert seen == ["Functionalize"]


def test_is_gradient_batch() -> None:
    seen: list[bool] = []

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            seen.append(capabilities.is_gradient_batch(grad))
            return grad

    x = torch.ones(2, requires_grad=True)
    torch.autograd.grad(Watched.apply(x), x, torch.eye(2), is_grads_batched=True)
    torch.autograd.grad(Watched.apply(x), x, torch.ones(2))
    torch.func.vmap(lambda x: seen.append(capabilities.is_gradient_batch(x)) or x)(torch.ones(2, 2))
    assert seen == [True, False, False]


def test_replicates_implicitly() -> None:
    from torch.distributed.tensor.experimental import implicit_replication

    assert not capabilities.replicates_implicitly()
    with implicit_replication():
        assert capabilities.replicates_implicitly()


def test_implicit_replication_leaves_an_outer_region_in_force() -> None:
    with capabilities.implicit_replication():
        with capabilities.implicit_replication():
            pass
        assert capabilities.replicates_implicitly()
    assert not capabilities.replicates_implicitly()


def test_observe_shards() -> None:
    """Results made of other tensors are seen as those, with the tensors that are written or viewed."""
    seen: list[str] = []

    def see(operation: Operation) -> Any:
        effects = f"{len(operation.written)} {len(operation.viewed)}"
        seen.append(f"{operation.operator} {effects}")
        return operation.run()

    with torch.no_grad(), capabilities.observe_shards(see):
        torch.ones(2, 3).matmul(torch.ones(3, 2))
        torch.ones(2).add_(1)
        torch.add(torch.ones(2), 1, out=torch.ones(2)).view(2, 1)
    assert [each for each in seen if "ones" not in each] == [
        "aten.mm.default 0 0",
        "aten.add_.Tensor 1 0",
        "aten.add.out 1 0",
        "aten.view.default 0 1",
    ]


def test_observe_shards_of_dtensors(mesh: Any) -> None:
    """An operation on DTensors is seen, and then what it does on shards."""
    x = distribute_tensor(torch.ones(2, 3), mesh, [Shard(0)])
    seen: list[tuple[str, type]] = []

    def see(operation: Operation) -> Any:
        seen.append((str(operation.operator), type(operation.args[0])))
        return operation.run()

    with torch.no_grad(), capabilities.observe_shards(see, see):
        result = x.mul_(2)
    # Between the two, DTensor looks up the shape of the result on fake tensors.
    assert seen[0] == ("aten.mul_.Tensor", DTensor)
    assert seen[-1] == ("aten.mul_.Tensor", Tensor)
    assert result is x
    assert x.full_tensor().unique().tolist() == [2.0]


@pytest.mark.slow
def test_onnx_translator(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module and a program are what `torch.onnx.export` makes of them, by one registry."""
    onnxscript = pytest.importorskip("onnxscript")
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    opset, made, real = onnxscript.values.Opset("", 18), [], ONNXRegistry.from_torchlib
    monkeypatch.setattr(
        ONNXRegistry, "from_torchlib", lambda **options: (made.append(options), real(**options))[1]
    )

    class Module(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.nn.functional.hardswish(x * 2).relu()

    module, args, dims = Module().eval(), (torch.ones(2, 3),), ({0: torch.export.Dim.DYNAMIC},)
    table = {torch.ops.aten.relu.default: lambda x: opset.Abs(x)}
    program = torch.export.export(module, args, dynamic_shapes=dims)
    translate = capabilities.onnx_translator(20, table)
    found = [translate(module, args, dims), translate(program)]
    translate_again = capabilities.onnx_translator(20, {})
    assert translate_again is not translate
    assert len(made) <= 1  # once in a process: another test may have read this version before
    monkeypatch.undo()
    wanted = torch.onnx.export(
        module,
        args,
        dynamo=True,
        opset_version=20,
        dynamic_shapes=dims,
        custom_translation_table=table,
        verbose=False,
    )
    for each in found:
        assert [node.op_type for node in each.model.graph] == ["Mul", "HardSwish", "Abs"]
        assert str(each.model.graph) == str(wanted.model.graph)
        assert each.model.opset_imports == wanted.model.opset_imports


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x, None)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


def test_forward_class() -> None:
    leaf = torch.ones(2, requires_grad=True)
    doubled: Any = Doubled.apply
    assert capabilities.forward_class(doubled(leaf).grad_fn) is Doubled
    assert capabilities.forward_class(leaf.exp().grad_fn) is None


def test_result_metadata() -> None:
    result = torch.ones(2, 3, requires_grad=True).double().topk(2).values
    forms = [((2, 2), torch.float64, torch.device("cpu")), ((2, 2), torch.int64, torch.device("cpu"))]
    assert capabilities.result_metadata(result.grad_fn)[:1] == forms[:1]


def test_saved_tensors() -> None:
    leaf = torch.ones(2, requires_grad=True)
    doubled: Any = Doubled.apply
    result = doubled(leaf)  # with which, in torch 2.11, its node goes
    function = capabilities.saved_tensors(result.grad_fn)
    assert function["0"] is leaf
    assert function["1"] is None
    result = leaf.exp()
    assert capabilities.saved_tensors(result.grad_fn)["result"].tolist() == result.tolist()
    indexed = leaf[torch.tensor([0]),]
    assert capabilities.saved_tensors(indexed.grad_fn)["indices[0]"].tolist() == [0]
    plain = torch.nn.functional.batch_norm(torch.ones(2, 3, requires_grad=True), None, None, training=True)
    assert capabilities.saved_tensors(plain.grad_fn)["weight"] is None
    result.sum().backward()
    with pytest.raises(RuntimeError, match="freed"):
        capabilities.saved_tensors(result.grad_fn)


def test_saved_tensors_are_not_unpacked() -> None:
    unpacked: list[str] = []
    leaf = torch.ones(2, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: "packed", unpacked.append):
        result = leaf.exp()
    assert capabilities.saved_tensors(result.grad_fn) == {"result": "packed"}
    assert not capabilities.overwritten(result.grad_fn)
    assert unpacked == []


def test_after_modules() -> None:
    told: list[Any] = []
    remove = capabilities.after_modules(lambda *given: told.append(given[-1]))
    module, x = torch.nn.Identity(), torch.ones(2)
    module(x)
    remove()
    module(x)
    assert len(told) == 1
    assert told[0] is x
    assert not torch.nn.modules.module._has_any_global_hook()  # type: ignore[no-untyped-call]


def test_overwritten() -> None:
    middle = torch.ones(2, requires_grad=True) * 1
    doubled: Any = Doubled.apply
    for result in (middle * middle, doubled(middle)):
        assert not capabilities.overwritten(result.grad_fn)
    results = (middle * middle, doubled(middle))
    with torch.no_grad():
        middle.add_(1)
    assert all(capabilities.overwritten(result.grad_fn) for result in results)


def test_differentiated() -> None:
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    unused, grad = torch.ones(1, requires_grad=True), torch.tensor([1.0, -1.0])
    (slope, none) = capabilities.differentiated([x**3], [x, unused], [grad], create_graph=True)
    assert none is None
    (curve,) = capabilities.differentiated([slope], [x], [torch.ones(2)])
    assert (slope.tolist(), curve.tolist()) == ([3.0, -12.0], [6.0, -12.0])
    assert x.grad is None
    with pytest.raises(RuntimeError, match="second time"):
        capabilities.differentiated([slope], [x], [torch.ones(2)])


def test_differentiated_leaves_to_torch_what_it_refuses() -> None:
    x = torch.ones(2, requires_grad=True)
    for grad in (torch.ones(1), torch.ones(2, dtype=torch.complex64)):
        with pytest.raises(RuntimeError, match="Mismatch in"):
            capabilities.differentiated([x.exp()], [x], [grad])


@pytest.mark.parametrize("name", CAPABILITIES)
def test_a_self_test_may_need_another_capability(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On an untested torch each may be the first that is decided."""
    monkeypatch.setattr(capability, "_decided", {})
    monkeypatch.setattr(capability, "_is_tested", lambda version: False)
    monkeypatch.delenv("OPSMITH_CONSERVATIVE", raising=False)
    found: list[capability.CapabilityStatus] = []
    deciding = threading.Thread(
        target=lambda: found.append(capability.decide(CAPABILITIES[name])), daemon=True
    )
    deciding.start()
    deciding.join(timeout=300)
    assert [each.on for each in found] == [True], found


def test_fused_graphs() -> None:
    def function(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return x.exp() * y.sum(), (x > 0)

    graphs = capabilities.fused_graphs(function, [torch.randn(3, 4), torch.randn(2)], [0, 1])
    assert isinstance(graphs, capabilities.FusedGraphs)
    assert graphs.differentiable == (True, False)
    assert graphs.gradients == (0, 1)
    x, y = torch.randn(5, 6).requires_grad_(), torch.randn(7).requires_grad_()
    results = graphs.forward(x.detach(), y.detach())
    values = {"input": [x.detach(), y.detach()], "result": results[:2], "hidden": results[2:]}
    values["shape"] = values["input"]
    grad = torch.randn(5, 6)
    found = graphs.backward(*(values[kind][at] for kind, at in graphs.taken), grad)
    assert_close(found, torch.autograd.grad(function(x, y)[0], (x, y), grad))
    assert "L['t0'].size()[0]" in graphs.condition
    with torch.no_grad():  # a thread makes them, without the caller's grad mode
        assert capabilities.fused_graphs(function, [torch.randn(3, 4), torch.randn(2)], [0]).gradients == (0,)
    assert capabilities.fused_graphs(function, [torch.randn(3, 4), torch.randn(2)], []).backward is None


@pytest.fixture
def library_of_a_graph(tmp_path: Path) -> Path:
    """The library of the sum of exp(x) over the last dimension."""

    def function(x: Tensor) -> tuple[Tensor, ...]:
        return (x.exp().sum(-1),)

    graphs = capabilities.fused_graphs(function, [torch.randn(3, 4)], [])
    capabilities.compile_graph(graphs.forward, tmp_path / "graph.so", find_toolchain().command[0])
    return tmp_path / "graph.so"


@pytest.mark.slow
def test_compile_graph(library_of_a_graph: Path) -> None:
    assert fault_of(library_of_a_graph) is None


@pytest.mark.slow
def test_load_graph(library_of_a_graph: Path) -> None:
    run = capabilities.load_graph(library_of_a_graph)
    x = torch.randn(6, 9)
    assert_close(run([x]), [x.exp().sum(-1)])
