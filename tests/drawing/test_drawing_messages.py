"""Every message of drawing, in full."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from drawn import Square, network, plain

import opsmith
from opsmith import errors


def leaf() -> torch.Tensor:
    return torch.ones(2, requires_grad=True)


def freed() -> torch.Tensor:
    y = leaf().exp()
    y.sum().backward()
    return y


@opsmith.operator("drawn::bare")
def bare(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@opsmith.operator("drawn::sampleless")
def sampleless(x: torch.Tensor) -> torch.Tensor:
    return x * 2


sampleless.samples(lambda make: [])

UNWRITABLE = """no file can be written to `{path}`
  argument: path
  expected: a file in an existing folder that can be written to
  got: {got}
  hint: {hint}"""

CASES: dict[str, tuple[Callable[[], Any], dict[str, Any], type[Exception], str]] = {
    "no graph": (
        lambda: torch.ones(2),
        {},
        errors.NoGraphError,
        """`given` has no graph: none of its inputs requires a gradient
  argument: given
  expected: a tensor with a `grad_fn`
  got: [2] float32, requires_grad=False
  hint: call `requires_grad_()` on an input before the computation, and leave `torch.no_grad()` and \
`detach()` out""",
    ),
    "leaf": (
        lambda: {"w": leaf()},
        {},
        errors.NoGraphError,
        """`w` has no graph: it is a leaf, not the result of a computation
  argument: w
  expected: a tensor with a `grad_fn`
  got: [2] float32, requires_grad=True
  hint: draw a result that is computed from it""",
    ),
    "training without a graph": (
        torch.nn.Flatten,
        {"inputs": torch.ones(2, 2), "training": True},
        errors.NoGraphError,
        """`output` has no graph: none of its inputs requires a gradient
  argument: output
  expected: a tensor with a `grad_fn`
  got: [2, 2] float32, requires_grad=False
  hint: call `requires_grad_()` on an input before the computation, and leave `torch.no_grad()` and \
`detach()` out""",
    ),
    "freed": (
        freed,
        {},
        errors.FreedGraphError,
        """the graph was freed: the tensors that `ExpBackward0` saved are gone
  expected: a graph before its `backward()`
  got: a graph whose saved tensors were freed
  hint: draw before `backward()`, or call `backward(retain_graph=True)`; `memory=False` draws the nodes \
alone""",
    ),
    "nothing to draw": (
        lambda: 3,
        {},
        errors.UsageError,
        """this cannot be drawn
  argument: subject
  expected: a tensor, a tuple or dict of tensors, a module, a function or an operator
  got: int
  hint: draw the graph of a loss or an output: `opsmith.draw(loss, "graph.svg")`""",
    ),
    "title": (
        leaf,
        {"title": 3},
        errors.UsageError,
        """the title of a graph must be a text
  argument: title
  expected: str or None
  got: int
  hint: write `title="a network"`, or leave it out""",
    ),
    "no tensors": (
        list,
        {},
        errors.UsageError,
        """this cannot be drawn
  argument: subject
  expected: a tensor, a tuple or dict of tensors, a module, a function or an operator
  got: list
  hint: draw the graph of a loss or an output: `opsmith.draw(loss, "graph.svg")`""",
    ),
    "Function": (
        lambda: Square,
        {},
        errors.UsageError,
        """this cannot be drawn
  argument: subject
  expected: a tensor, a tuple or dict of tensors, a module, a function or an operator
  got: the class `Square`
  hint: adopt it with `opsmith.adopt(...)`, or draw a tensor that it has computed""",
    ),
    "a class of modules": (
        lambda: torch.nn.Linear,
        {},
        errors.UsageError,
        """this cannot be drawn
  argument: subject
  expected: a tensor, a tuple or dict of tensors, a module, a function or an operator
  got: the class `Linear`
  hint: draw an instance: `opsmith.draw(Linear(...), path, inputs=...)`""",
    ),
    "inputs of tensors": (
        lambda: leaf() * 2,
        {"inputs": 3},
        errors.UsageError,
        """tensors cannot be called
  argument: inputs
  expected: a module, a function or an operator to call
  got: Tensor
  hint: leave this argument out, or draw the function that computes the tensors""",
    ),
    "keyword arguments of tensors": (
        lambda: leaf() * 2,
        {"kwargs": {"x": 3}},
        errors.UsageError,
        """tensors cannot be called
  argument: kwargs
  expected: a module, a function or an operator to call
  got: Tensor
  hint: leave this argument out, or draw the function that computes the tensors""",
    ),
    "training of tensors": (
        lambda: leaf() * 2,
        {"training": True},
        errors.UsageError,
        """tensors cannot be called
  argument: training
  expected: a module, a function or an operator to call
  got: Tensor
  hint: leave this argument out, or draw the function that computes the tensors""",
    ),
    "training of an operator": (
        lambda: plain,
        {"training": True},
        errors.UsageError,
        """drawn::plain: an operator is drawn with its gradient formulas, and has no training graph
  argument: training
  expected: a module or a function
  hint: leave `training` out, or draw a function that calls the operator""",
    ),
    "no inputs": (
        network,
        {},
        errors.UsageError,
        """`inputs` do not fit the module: missing a required argument: 'x'
  argument: inputs
  expected: the arguments of `forward(x: 'Tensor') -> 'dict[str, Tensor]'`
  got: nothing
  hint: write `inputs=(x, y)`, or `inputs={"x": x}` by name""",
    ),
    "no tensor returned": (
        lambda: lambda x: 3,
        {"inputs": torch.ones(2)},
        errors.UsageError,
        """`<lambda>` returns no tensor
  expected: a tensor, or tuples, lists and dicts of tensors
  hint: return the tensors to draw""",
    ),
    "inputs of an operator": (
        lambda: plain,
        {"inputs": (1, 2)},
        errors.UsageError,
        """drawn::plain: `inputs` do not fit the operator: it takes 1 positional argument, but 2 were given
  argument: inputs
  hint: give `inputs=` the arguments of `plain(x)`""",
    ),
    "names": (
        lambda: leaf() * 2,
        {"names": 3},
        errors.UsageError,
        """`names` must name tensors
  argument: names
  expected: a module, or a dict from names to tensors and modules
  got: int
  hint: write `names=model`, or `names={"x": x, "model": model}`""",
    ),
    "depth": (
        lambda: leaf() * 2,
        {"depth": -1},
        errors.UsageError,
        """`depth` must be a number of levels
  argument: depth
  expected: 0 or more, or None
  got: -1
  hint: leave it out: as many levels as fit are then unfolded""",
    ),
    "a lazy module": (
        lambda: torch.nn.Sequential(torch.nn.LazyLinear(3), torch.nn.LazyBatchNorm1d()),
        {"inputs": torch.ones(4, 2)},
        errors.UsageError,
        """`0.weight` of the module has no shape yet
  argument: subject
  expected: a module whose parameters and buffers have shapes
  got: 6 uninitialized tensors
  hint: call it once before you draw it: the call gives a lazy module its shapes""",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_message_in_full(case: str, tmp_path: Path) -> None:
    subject, options, kind, message = CASES[case]
    given = subject()
    with pytest.raises(errors.OpsmithError) as caught:
        opsmith.draw(given, tmp_path / "graph.svg", **options)
    assert caught.value.message() == message
    assert type(caught.value) is kind
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("operator", "has"),
    [(bare, "it has no samples"), (sampleless, "its samples are empty")],
    ids=["none", "empty"],
)
def test_an_operator_without_samples(operator: Any, has: str, tmp_path: Path) -> None:
    with pytest.raises(errors.MissingSamplesError) as caught:
        opsmith.draw(operator, tmp_path / "graph.svg")
    assert has in caught.value.problem
    assert caught.value.hint == (
        f"write `@{operator.specification.short_name}.samples` over a function of `make` that yields tuples "
        "of arguments, or give `inputs=`"
    )
    opsmith.draw(operator, tmp_path / "graph.json", inputs=torch.ones(2))


def test_paths_that_cannot_be_written(tmp_path: Path) -> None:
    def said(path: Any) -> str:
        with pytest.raises(errors.UsageError) as caught:
            opsmith.draw(leaf() * 2, path)
        return caught.value.message()

    there = tmp_path / "there.svg"
    there.mkdir()
    gone = tmp_path / "gone" / "a.svg"
    assert said(there) == UNWRITABLE.format(
        path=there, got="a folder", hint="name a file in this folder, `graph.svg`"
    )
    assert said(gone) == UNWRITABLE.format(
        path=gone, got=f"there is no folder `{gone.parent}`", hint="make the folder first"
    )
    assert said("a\0.svg") == UNWRITABLE.format(
        path="'a\\x00.svg'", got="a name with a null character", hint="name another file"
    )
    assert said(3) == UNWRITABLE.format(path="3", got="int", hint="give the name of a file, `graph.svg`")


def test_a_disk_that_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    path = tmp_path / "a.json"
    with pytest.raises(errors.UsageError) as caught:
        opsmith.draw(leaf() * 2, path)
    assert caught.value.message() == UNWRITABLE.format(
        path=path, got="No space left on device", hint="name another file"
    )


@pytest.mark.parametrize(("name", "hint"), [("graph.xyz", "graph.svg"), ("graph", "graph.svg")])
def test_a_format_that_is_none(name: str, hint: str) -> None:
    with pytest.raises(errors.UsageError) as caught:
        opsmith.draw(leaf() * 2, name)
    assert caught.value.message() == (
        "a graph is not drawn in this format\n"
        "  argument: path\n"
        "  expected: a name that ends in .svg, .png, .pdf, .dot, .gv, .html, .htm, .json\n"
        f"  got: `{name}`\n"
        f"  hint: write `{hint}`"
    )


def test_a_freed_graph_is_drawn_without_its_memory(tmp_path: Path) -> None:
    graph = opsmith.draw(freed(), tmp_path / "graph.svg", memory=False)
    assert graph.summary() == "4 nodes; saved tensors were not recorded"


def test_what_a_function_raises_is_raised(tmp_path: Path) -> None:
    def failing(x: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError("of its own")

    with pytest.raises(ZeroDivisionError, match="of its own"):
        opsmith.draw(failing, tmp_path / "graph.svg", inputs=torch.ones(2))
