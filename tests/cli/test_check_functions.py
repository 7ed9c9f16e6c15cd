"""`opsmith check` of Functions: on samples that are named, or on guessed arguments, which it says."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

Write = Callable[..., Path]
Run = Callable[..., Result]
FAST = ("--only", "forward", "--only", "gradient")

FUNCTIONS = """
import os
import torch
from torch.autograd import Function

class Swish(Function):
    @staticmethod
    def forward(ctx, x, beta=1.0):
        ctx.save_for_backward(x)
        ctx.beta = beta
        return x * torch.sigmoid(beta * x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(ctx.beta * x)
        return grad * (s + ctx.beta * x * s * (1 - s)), None

class Forgetful(Swish):
    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(ctx.beta * x)
        return grad * (s + x * s * (1 - s)), None

class Mapped(Function):
    @staticmethod
    def forward(ctx, x, fn):
        return fn(x)

    @staticmethod
    def backward(ctx, grad):
        return grad, None

class Sinking(Function):
    @staticmethod
    def forward(ctx, x):
        os._exit(9)

    @staticmethod
    def backward(ctx, grad):
        return grad

SWISH = [(torch.randn(4, dtype=torch.float64), 2.0)]

def drawn():
    return [(torch.randn(2, 3, dtype=torch.float64), 0.5)]

MAPPED = [(torch.randn(3), torch.clone)]
"""


def test_a_function_without_samples_is_checked_on_guessed_arguments_and_says_so(
    opsmith: Run, write: Write
) -> None:
    file = write(FUNCTIONS)
    done = opsmith("check", f"{file}:Swish", *FAST)
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("Swish: passed\n  note: its arguments were guessed: x [3, 4], beta=1.0 and")
    read = json.loads(opsmith("check", f"{file}:Swish", "--json", *FAST).stdout)
    (remark,) = read["reports"][0]["remarks"]
    assert "its arguments were guessed: x [3, 4], beta=1.0 and x [2, 5], beta=1.75." in remark
    assert f"run `opsmith check {file}:Swish --samples SAMPLES`" in remark


@pytest.mark.slow
def test_a_gradient_that_forgets_a_number_which_is_1_by_default_is_found(opsmith: Run, write: Write) -> None:
    done = opsmith("check", f"{write(FUNCTIONS)}:Forgetful", *FAST)
    assert done.exit_code == 1
    assert "Forgetful: FAILED: gradient" in done.stdout


@pytest.mark.slow
@pytest.mark.every(8)
@pytest.mark.parametrize("samples", ["SWISH", "drawn", "{file}:drawn"])
def test_samples_are_named_on_the_command_line(opsmith: Run, write: Write, samples: str) -> None:
    file = write(FUNCTIONS)
    done = opsmith("check", f"{file}:Swish", "--samples", samples.replace("{file}", str(file)), *FAST)
    assert done.exit_code == 0, done.output
    assert "guessed" not in done.stdout


@pytest.mark.slow
def test_without_a_name_every_function_is_checked_where_there_is_no_operator(
    opsmith: Run, write: Write
) -> None:
    text = FUNCTIONS.partition("class Sinking")[0]
    done = opsmith("check", str(write(text)), *FAST)
    assert done.exit_code == 2
    assert "Swish: passed" in done.stdout
    assert "Forgetful: FAILED: gradient" in done.stdout
    assert done.stdout.splitlines()[-1] == "3 operators: 1 passed, 1 not passed, 1 could not be checked"
    assert (
        "Mapped: there are no samples to check it on, and the values of `fn` cannot be guessed" in done.stderr
    )
    assert "--samples SAMPLES`" in done.stderr


@pytest.mark.slow
def test_functions_beside_operators_are_told(opsmith: Run, write: Write, space: str) -> None:
    text = FUNCTIONS.partition("class Mapped")[0] + (
        "\nimport opsmith\n"
        "swish = opsmith.adopt(Swish, '{space}::swish', samples=lambda: [(torch.randn(3).double(),)])\n"
    )
    file = write(text)
    done = opsmith("check", str(file), *FAST)
    assert done.exit_code == 0, done.output
    assert f"{space}::swish: passed" in done.stdout
    assert done.stderr.strip() == (
        f"opsmith: {file} also has the Function `Forgetful`, which is not adopted; check it with "
        f"`opsmith check {file}:Forgetful`"
    )


@pytest.mark.slow
def test_an_operator_of_torch_library_can_be_named(opsmith: Run, write: Write, space: str) -> None:
    text = (
        "import torch\n"
        "@torch.library.custom_op('{space}::twice', mutates_args=())\n"
        "def twice(x: torch.Tensor) -> torch.Tensor:\n    return x * 2\n"
        "twice.register_fake(torch.empty_like)\n"
        "twice.register_autograd(lambda ctx, grad: grad * 2)\n"
        "SAMPLES = [(torch.randn(3).double(),)]\n"
    )
    file = write(text)
    done = opsmith("check", f"{file}:twice", "--samples", "SAMPLES", *FAST)
    assert f"{space}::twice: passed" in done.stdout, done.output
    assert opsmith("check", f"{file}:twice", *FAST).exit_code == 2


CUSTOM = """
import torch
from torch.autograd import Function
{imported}
@torch.library.custom_op("{space}::thrice", mutates_args=())
def thrice(x: torch.Tensor) -> torch.Tensor:
    return x * 3

thrice.register_fake(torch.empty_like)
thrice.register_autograd(lambda ctx, grad: grad * 3)
again = thrice

class Twice(Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2

SAMPLES = [(torch.randn(3).double(),)]
"""


@pytest.mark.slow
def test_custom_ops_of_a_file_are_found_as_its_functions_are(opsmith: Run, write: Write, space: str) -> None:
    file = write(CUSTOM.replace("{imported}", ""))
    done = opsmith("check", str(file), *FAST)
    assert done.exit_code == 2
    assert "Twice: passed" in done.stdout
    assert done.stdout.splitlines()[-1] == "2 operators: 1 passed, 0 not passed, 1 could not be checked"
    assert f"opsmith: {space}::thrice: there are no samples to check it on" in done.stderr
    assert f"run `opsmith check {file}:thrice --samples SAMPLES`" in done.stderr
    alone = write(
        CUSTOM.replace("{imported}", "").replace("Twice(Function)", "Twice").replace("::th", "::Th"),
        name=f"{space}_alone.py",
    )
    done = opsmith("check", str(alone), "--samples", "SAMPLES", *FAST)
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith(f"{space}::Thrice: passed")
    importing = write(f"from {file.stem} import thrice\n", name=f"{space}_importing.py")
    assert "declares no operator, Function or custom op" in opsmith("check", str(importing)).stderr


@pytest.mark.slow
def test_an_operator_of_torch_library_is_named_by_its_own_name(
    opsmith: Run, write: Write, space: str
) -> None:
    defined = 'lib = torch.library.Library("{space}", "FRAGMENT")\nlib.define("half(Tensor x) -> Tensor")\n'
    defined += 'lib.impl("half", lambda x: x / 2, "CompositeExplicitAutograd")\n'
    file = write(CUSTOM.replace("{imported}", defined))
    for name in ("thrice", "half"):
        done = opsmith("check", f"{file}:{space}::{name}", "--samples", "SAMPLES", "--only", "forward")
        assert done.exit_code == 0, done.output
        assert f"{space}::{name}: passed" in done.stdout
    done = opsmith("check", f"{file}:{space}::none")
    assert done.exit_code == 2
    assert "expected: one of `Twice`, `thrice`" in done.stderr


def test_what_is_not_checked_beside_operators_is_told(opsmith: Run, write: Write, space: str) -> None:
    declared = """
import opsmith

@opsmith.operator("{space}::right")
def right(x: torch.Tensor) -> torch.Tensor:
    return x * x

right.samples(lambda make: [(make(3),)])
"""
    file = write(CUSTOM.replace("{imported}", declared))
    done = opsmith("check", str(file), *FAST)
    assert done.exit_code == 0, done.output
    assert done.stderr == (
        f"opsmith: {file} also has the Function `Twice`, which is not adopted; check it with "
        f"`opsmith check {file}:Twice`\n"
        f"opsmith: {file} also has the custom op `thrice`, which is not adopted; check it with "
        f"`opsmith check {file}:thrice --samples SAMPLES`\n"
    )


def test_samples_are_for_one(opsmith: Run, write: Write, space: str) -> None:
    done = opsmith("check", str(write()), "--samples", "SAMPLES")
    assert (done.exit_code, done.stdout) == (2, "")
    assert "`--samples` is for one operator, but " in done.stderr
    assert f"expected: one of `{space}::right`, `{space}::wrong`" in done.stderr


@pytest.mark.parametrize(
    ("samples", "says"),
    [
        ("NONE", "has no samples named `NONE`"),
        ("no_module_here:NONE", "there is no module `no_module_here`"),
    ],
)
def test_samples_that_are_not_there(opsmith: Run, write: Write, samples: str, says: str) -> None:
    done = opsmith("check", f"{write(FUNCTIONS)}:Swish", "--samples", samples)
    assert (done.exit_code, done.stdout) == (2, "")
    assert says in done.stderr


def test_a_function_that_ends_the_process_on_a_guess_ends_no_isolated_check(
    opsmith: Run, write: Write
) -> None:
    file = write(FUNCTIONS)
    done = opsmith("check", f"{file}:Sinking", "--isolate", "--limit", "60", *FAST)
    assert (done.exit_code, done.stdout) == (2, "")
    words = "there are no samples to check it on, and on guessed arguments the operator ends the process"
    assert f"Sinking: {words}" in done.stderr


def test_a_name_that_is_neither_lists_functions_too(opsmith: Run, write: Write) -> None:
    done = opsmith("check", f"{write(FUNCTIONS)}:Swihs")
    assert done.exit_code == 2
    assert "expected: one of `Swish`, `Forgetful`, `Mapped`, `Sinking`" in done.stderr


POOL = """
import torch


class Pool(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.shape = x.shape
        return x[..., : x.shape[-1] // 2 * 2].unflatten(-1, (-1, 2)).mean(-1)

    @staticmethod
    def backward(ctx, grad):
        by_x = grad.new_empty(ctx.shape)
        by_x[..., : 2 * grad.shape[-1]] = grad.repeat_interleave(2, -1) / 2
        return by_x
"""


def test_guessed_arguments_come_in_two_sizes_so_that_what_is_left_over_shows(
    opsmith: Run, write: Write
) -> None:
    done = opsmith("check", str(write(POOL)), "--quick", "--only", "determinism")
    assert done.exit_code == 1
    assert "its arguments were guessed: x [3, 4] and x [2, 5]." in " ".join(done.stdout.split())
    assert "reads memory that it has not written" in done.stdout
