"""`import opsmith` needs torch alone, and brings nothing heavy along."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import opsmith

PROGRAM = """
import sys
import torch

REFUSED = {"rich", "typer", "click", "sklearn", "scipy", "onnx", "onnxscript", "onnxruntime", "triton",
           "jinja2", "jsonschema", "pygraphviz", "matplotlib", "pytest", "pandas"}
if "numpy" not in sys.modules:
    REFUSED.add("numpy")

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in REFUSED:
            raise ImportError(f"{name} is not there")

for name in [name for name in sys.modules if name.partition(".")[0] in REFUSED]:
    del sys.modules[name]
sys.meta_path.insert(0, Refuse())
before = set(sys.modules)
import opsmith
import opsmith.ops

@opsmith.operator("alone::twice")
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2

twice.gradients(x=lambda grad: 2 * grad)
x = torch.ones(2, requires_grad=True)
twice(x).sum().backward()
opsmith.ops.exp(x).sum().backward()
assert x.grad.tolist() == [2 + 2.718281745910644] * 2, x.grad
loaded = {name for name in set(sys.modules) - before}
heavy = {"torch._dynamo", "torch._inductor", "torch.onnx", "torch.export", "torch.distributed"}
print(sorted(heavy & loaded), sorted({name.partition(".")[0] for name in loaded} & REFUSED))
"""


def run_alone(program: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run a program in a process of its own, with options of Python's."""
    done = subprocess.run(
        [sys.executable, *options, "-c", program],
        env={**os.environ, "PYTHONPATH": str(Path(opsmith.__file__).parents[1])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.slow
def test_torch_alone_is_enough() -> None:
    assert run_alone(PROGRAM).stdout == "[] []\n"


@pytest.mark.slow
def test_import_patches_nothing() -> None:
    """Names of torch are the same objects before and after, and no warning or output appears."""
    program = (
        "import torch\n"
        "modules = [torch, torch.library, torch.autograd, torch.compiler, torch.Tensor, torch.nn]\n"
        "before = [dict(vars(module)) for module in modules]\n"
        "import opsmith\n"
        "for module, names in zip(modules, before):\n"
        "    now = {name: value for name, value in vars(module).items() if name in names}\n"
        "    assert all(names[name] is now[name] for name in names), module\n"
    )
    done = run_alone(program, "-W", "error::UserWarning")
    assert (done.stdout, done.stderr) == ("", "")


WITH_THE_FIRST_CALL = (
    "opsmith.build.toolchain",
    "opsmith.core.origins.function_class",
    "opsmith.kernels.cpp.compiler",
    "opsmith.kernels.cpp.library",
    "opsmith.kernels.cuda.compiler",
    "opsmith.kernels.cuda.plan",
    "opsmith.kernels.runtime.loading",
    "opsmith.torch_library.origins",
    "opsmith.torch_library.autograd.formula_rule",
    "opsmith.torch_library.autograd.functorch",
    "opsmith.torch_library.autograd.node",
    "opsmith.torch_library.autograd.primitive",
    "opsmith.torch_library.calls.routes",
)
"""Modules that declarations do not need."""


def test_a_declaration_loads_what_it_needs_alone() -> None:
    """Every operator is in `torch.ops` at once, which programs that are loaded look up."""
    done = run_alone(
        "import sys, torch, opsmith.ops\n"
        "for operator in opsmith.declared_operators():\n"
        "    getattr(torch.ops.opsmith, operator.specification.short_name).default\n"
        f"print([name for name in {WITH_THE_FIRST_CALL} if name in sys.modules])\n"
    )
    assert done.stdout == "[]\n"


FIRST_CALLS = """
import sys, threading
import torch, opsmith

sys.setswitchinterval(1e-6)

@opsmith.operator("first::square")
def square(x: torch.Tensor) -> torch.Tensor:
    return x * x

square.gradients(x=lambda grad, x: 2 * grad * x)

@opsmith.operator("first::scale_", mutates=["x"])
def scale_(x: torch.Tensor, by: float) -> None:
    x.mul_(by)

barrier, found, failed = threading.Barrier(4), [], []

def call():
    try:
        x = torch.tensor([1.0, 3.0], requires_grad=True)
        barrier.wait()
        y = square(x)
        z = y * 1
        scale_(z, 3.0)
        z.sum().backward()
        found.append((y.tolist(), x.grad.tolist(), torch.func.vmap(square)(x.detach()).tolist()))
    except Exception as error:
        failed.append(repr(error))

threads = [threading.Thread(target=call) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(failed, found == [([1.0, 9.0], [6.0, 18.0], [1.0, 9.0])] * 4)
"""


@pytest.mark.slow
def test_the_first_calls_of_several_threads_at_once() -> None:
    """What the first call makes is made once, or twice alike."""
    assert run_alone(FIRST_CALLS).stdout == "[] True\n"


@pytest.mark.slow
def test_what_the_first_call_imports_keeps_no_tensor_of_a_mode() -> None:
    program = """
import torch
from torch._subclasses import FakeTensorMode
import opsmith
with FakeTensorMode():
    from opsmith.adopting import learned_types
    from opsmith.torch_library.origins import class_rule
    some, placed = learned_types.placeholder(torch.ones(2)), class_rule.placeholder()
    from opsmith.torch_library.capabilities import public
with torch.inference_mode():
    from opsmith.torch_library import capabilities
    made = capabilities.plain_tensor()
tensors = [placed, some, made, public._FORWARD_MODE_PROBE, public._TORCH_FUNC_PROBE]
print({(type(each).__name__, each.is_inference()) for each in tensors})
"""
    assert run_alone(program).stdout == "{('Tensor', False)}\n"


@pytest.mark.slow
def test_a_file_in_a_cycle_is_written_when_the_command_ends(tmp_path: Path) -> None:
    """What a module of the user makes is collected at the end; what was loaded before it is frozen."""
    path, module = tmp_path / "written", tmp_path / "operators.py"
    module.write_text(f"""
class Log:
    pass
log = Log()
log.itself, log.file = log, open({str(path)!r}, "w")
log.file.write("whole")
""")
    program = f"""
import gc, sys
from contextlib import suppress
from opsmith_command import main
sys.argv = ["opsmith", "check", {str(module)!r}, "--quick"]
with suppress(SystemExit):
    main()
assert gc.get_freeze_count()
"""
    run_alone(program)
    assert path.read_text() == "whole"
