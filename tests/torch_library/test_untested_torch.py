"""On a torch that nobody has tested, what lacks a private name warns once, and plain use stays right."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import opsmith
from opsmith.torch_library.capabilities.capability import CAPABILITIES, TESTED, examine

# What is taken away from torch before opsmith is imported, for each capability.
CALLS = "opsmith.torch_library.capabilities.private.calls_in_cpp"
LOSSES = {
    "known_calls": "del torch._C._is_any_autocast_enabled",
    # Where it is not built, nothing is lost, and nothing is said.
    "calls_in_cpp": f"import sys; sys.modules[{CALLS!r}] = None",
    "torch_func": "del torch._functorch.autograd_function.reductify_leaf",
    "forward_mode": "del torch.autograd.forward_ad._set_fwd_grad_enabled",
    "autocast": "del torch._C._ExcludeDispatchKeyGuard",
    # torch itself needs most of its names to leave modes.
    "inlining": "import torch._functorch.config as c; del c._config['decompose_custom_triton_ops']",
    "compiled_code": "import torch._inductor.config as c; del c._config['unsafe_marked_cacheable_functions']",
    "sharding": "import torch.distributed.tensor as d; del d.DTensor._op_dispatcher",
    "fake_tensors": "del torch._subclasses.fake_tensor.FakeTensorMode",
    # torch's own counter of operations, by which opsmith counts, cannot be imported afterwards.
    "dispatch_mode": "import torch.utils.flop_counter; del torch.utils._python_dispatch.TorchDispatchMode",
    "fused_graphs": "import torch._functorch.partitioners as p; del p.min_cut_rematerialization_partition",
    "onnx_registry": "from torch.onnx._internal.exporter import _registration as r; "
    "del r.ONNXRegistry.from_torchlib",
    # Torch itself registers by the same function, with `file:line` as the place.
    "fake_registration": "import torch._library.fake_impl as f; register = f.FakeImplHolder.register; "
    "f.FakeImplHolder.register = lambda self, fake, place, **rest: "
    "register(self, fake, f'{place}' if ':' in place else 1 / 0, **rest)",
    "library_operators": "del torch._library.custom_ops._maybe_get_opdef",
    # Attributes of C++ classes cannot be deleted: one that cannot be read hides the other.
    "autograd_graph": "torch.autograd.function.BackwardCFunction._raw_saved_tensors = property()",
}
PROGRAM = """
import json, sys, warnings
import torch, torch._dynamo  # which needs the names itself
torch.__version__ = "2.99.0"
{loss}
import opsmith
said = []
warnings.showwarning = lambda message, *rest: said.append(str(message))
warnings.simplefilter("always")

@opsmith.operator("untested::cube")
def cube(x: torch.Tensor) -> torch.Tensor:
    return x**3

cube.gradients(x=lambda grad, x: 3 * grad * x**2)
x = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)
for _ in range(3):
    y = cube(x)
    (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
assert y.tolist() == [1.0, 8.0], y
assert first.tolist() == [3.0, 12.0], first
assert second.tolist() == [6.0, 12.0], second
with torch.autograd.forward_ad.dual_level():
    dual = torch.autograd.forward_ad.make_dual(x.detach(), torch.ones_like(x))
    moved = torch.autograd.forward_ad.unpack_dual(cube(dual)).tangent
    assert moved.tolist() == [3.0, 12.0], moved
with torch.autocast("cpu", dtype=torch.bfloat16):
    assert cube(x.detach().float()).tolist() == [1.0, 8.0]

from opsmith.torch_library.capabilities.capability import decide
from opsmith.torch_library.capabilities.capability import CAPABILITIES
for name in {names}:
    decide(CAPABILITIES[name])
if "torch_func" in {names}:
    assert torch.func.grad(lambda x: cube(x).sum())(x.detach()).tolist() == [3.0, 12.0]
    assert torch.func.vmap(cube)(x.detach()).tolist() == [1.0, 8.0]
    try:
        torch.func.jvp(cube, (x.detach(),), (x.detach(),))
    except opsmith.errors.TransformError as error:
        assert "needs the capability `torch_func`, which is off" in str(error)
    else:
        raise AssertionError("forward mode was not refused")
print(json.dumps([text for text in said if text.startswith("opsmith: ")]))
"""


def run(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    paths = {"PYTHONPATH": str(Path(opsmith.__file__).parents[1])}
    clean = {name: value for name, value in os.environ.items() if name != "OPSMITH_CONSERVATIVE"}
    return subprocess.run(
        [sys.executable, "-c", program],
        env={**clean, **paths, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_every_capability_with_another_way_is_taken_away() -> None:
    assert set(LOSSES) == {each.name for each in CAPABILITIES.values() if each.instead is not None}


def warned_of(done: subprocess.CompletedProcess[str]) -> list[str]:
    """The capabilities that a program was warned of, each in the words of its row."""
    assert done.returncode == 0, done.stderr
    names = []
    for text in json.loads(done.stdout):
        names.append(text.partition("the capability `")[2].partition("`")[0])
        assert text.startswith("opsmith: with torch 2.99.0, ")
        assert f"Instead: {CAPABILITIES[names[-1]].instead}. " in text
        assert "opsmith is tested with torch 2.11, 2.13, 2.14 and 2.15." in text
    return names


@pytest.mark.slow
def test_all_that_is_missing_warns_once_and_plain_use_stays_right() -> None:
    """Without several names at once, of those that torch itself does not need here."""
    names = ["autocast", "known_calls", "torch_func"]
    done = run(PROGRAM.format(loss="\n".join(LOSSES[name] for name in names), names=names))
    assert sorted(warned_of(done)) == names


@pytest.mark.slow
@pytest.mark.parametrize("name", LOSSES)
def test_what_is_missing_warns_once_and_plain_use_stays_right(name: str) -> None:
    names = warned_of(run(PROGRAM.format(loss=LOSSES[name], names=[name])))
    assert names.count(name) == 1
    assert len(names) == len(set(names))


@pytest.mark.slow
def test_nothing_is_said_where_everything_works() -> None:
    done = run(PROGRAM.format(loss="", names=["inlining"]))
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


@pytest.mark.slow
def test_without_the_dispatcher_there_is_one_error() -> None:
    program = PROGRAM.format(loss="del torch._C._AutoDispatchBelowAutograd", names=[])
    done = run(program)
    assert done.returncode == 1
    assert done.stderr.partition("UnsupportedTorchError: ")[2].splitlines() == [
        "opsmith cannot work with torch 2.99.0: compute below autograd, see writes, replace an operator",
        "  expected: torch 2.11, 2.13, 2.14 or 2.15, which opsmith is tested with",
        "  got: AttributeError: module 'torch._C' has no attribute '_AutoDispatchBelowAutograd'",
        "  hint: pip install 'torch==2.15.*'; `opsmith doctor` lists what works here",
        "  more: opsmith rule UnsupportedTorchError",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dispatch", "autocast"])
def test_doctor_lists_it(name: str) -> None:
    losses = {**LOSSES, "dispatch": "del torch._C._AutoDispatchBelowAutograd"}
    program = (
        f"import sys, torch\ntorch.__version__ = '2.99.0'\n{losses[name]}\n"
        "from opsmith.cli import main\nsys.argv = ['opsmith', 'doctor', '--json']\nmain()"
    )
    done = run(program)
    required = name == "dispatch"
    assert done.returncode == int(required), done.stderr
    answer = json.loads(done.stdout)
    assert answer["works"] is not required
    (row,) = [each for each in answer["capabilities"] if each["name"] == name]
    capability = CAPABILITIES[name]
    assert (row["on"], row["required"], row["instead"]) == (False, required, capability.instead)
    assert row["why"].split(":")[0] in ("AttributeError", "ImportError")


@pytest.mark.slow
def test_conservative_turns_off_what_has_another_way_and_warns_of_nothing() -> None:
    program = (
        "import torch, opsmith\nfrom opsmith.torch_library import capabilities\n"
        "print([name for name in capabilities.CAPABILITIES if capabilities.on(name)])"
    )
    done = run(program, OPSMITH_CONSERVATIVE="1")
    assert (done.returncode, done.stdout, done.stderr) == (0, "['dispatch']\n", "")


@pytest.mark.slow
def test_conservative_loads_torch_s_rules_of_forward_mode_only_for_it() -> None:
    """torch 2.15 warns of its own names when it loads them; a gradient alone must not make it."""
    program = (
        "import sys, torch, opsmith\n"
        "@opsmith.operator('untested::square')\n"
        "def square(x: torch.Tensor) -> torch.Tensor:\n"
        "    return x * x\n"
        "square.gradients(x=lambda grad, x: 2 * grad * x)\n"
        "x = torch.tensor([1.0, 2.0], requires_grad=True)\n"
        "square(x).sum().backward()\n"
        "print(x.grad.tolist(), 'torch._decomp.decompositions_for_jvp' in sys.modules)\n"
    )
    done = run(program, OPSMITH_CONSERVATIVE="1")
    assert (done.returncode, done.stdout, done.stderr) == (0, "[2.0, 4.0] False\n", "")


@pytest.mark.slow
def test_a_strange_value_of_the_variable_is_refused() -> None:
    program = "import opsmith.ops"
    done = run(program, OPSMITH_CONSERVATIVE="yes")
    assert done.returncode == 1
    assert done.stderr.partition("UsageError: ")[2].splitlines() == [
        "the environment variable OPSMITH_CONSERVATIVE has an invalid value",
        "  expected: 1 for on, 0 for off",
        "  got: 'yes'",
        "  hint: set OPSMITH_CONSERVATIVE=1, or unset it",
        "  more: opsmith rule UsageError",
    ]
    assert run("import opsmith", OPSMITH_CONSERVATIVE="yes").returncode == 0, "it is not read at import"


@pytest.mark.slow
def test_a_capability_is_decided_outside_of_whatever_runs() -> None:
    """The first use may be under a transform, a mode or inference: the self-test sees none of it."""
    program = (
        "import torch\ntorch.__version__ = '2.99.0'\n"
        "import opsmith, warnings\nwarnings.simplefilter('error')\n"
        "from opsmith.torch_library import capabilities\n"
        "from torch._subclasses.fake_tensor import FakeTensorMode\n"
        "def look(x):\n"
        "    print([name for name in capabilities.CAPABILITIES if not capabilities.on(name)])\n"
        "    return x\n"
        "with torch.inference_mode(), torch.autocast('cpu'), FakeTensorMode():\n"
        "    torch.func.vmap(look)(torch.ones(3))\n"
    )
    done = run(program)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


@pytest.mark.parametrize("name", CAPABILITIES)
def test_every_self_test_passes_on_this_torch(name: str) -> None:
    assert examine(CAPABILITIES[name]).why == ""


def test_this_torch_is_tested() -> None:
    assert ".".join(torch.__version__.split(".")[:2]) in TESTED
