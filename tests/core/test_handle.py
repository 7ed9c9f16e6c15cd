"""The handle: a callable that stays the same object, is found by name, and can be copied and pickled."""

from __future__ import annotations

import copy
import inspect
import io
import os
import pickle
import pydoc
import re
import subprocess
import sys
import threading
import typing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import opsmith

DOCS = Path(__file__).parents[2] / "docs"


@opsmith.operator("handle::scaled")
def scaled(x: Tensor, by: float = 2.0, *, shift: int = 0) -> Tensor:
    """Scale x and shift it."""
    return x * by + shift


@opsmith.operator("handle::hides_last", hidden=("seen",))
def hides_last(x: Tensor) -> tuple[Tensor, Tensor]:
    return x + 1, x * 2


@opsmith.operator("handle::hides_first", results=("seen", "low", "parts"), hidden=("seen",))
def hides_first(x: Tensor, *, n: int = 2) -> tuple[Tensor, Tensor, list[Tensor]]:
    return x * n, x.floor(), [x + 1]


@opsmith.operator("handle::adds", mutates=("x",))
def adds(x: Tensor, y: Tensor) -> None:
    x.add_(y)


class Cubed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, n: int = 3) -> Tensor:
        ctx.n = n
        return x * n

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.n, None


@opsmith.operator("handle::returns_it", mutates=("x",), returns="x")
def returns_it(x: Tensor) -> Tensor:
    return x.add_(1)


@torch.library.custom_op("handle::registered", mutates_args=())
def registered_elsewhere(x: Tensor, n: int = 2) -> Tensor:
    return x * n


registered = opsmith.adopt(torch.ops.handle.registered, reference=lambda x, n=2: x * n)
by_torch = opsmith.adopt(Cubed, "handle::by_torch", reference=torch.mul)
cubed = opsmith.adopt(Cubed, "handle::cubed")


def test_it_looks_like_its_reference() -> None:
    assert scaled.__name__ == "scaled"
    assert scaled.__doc__ == "Scale x and shift it."
    assert scaled.__module__ == __name__
    assert inspect.signature(scaled) == inspect.signature(scaled.reference)
    assert scaled.name == "handle::scaled"
    assert repr(scaled) == (
        "<opsmith operator handle::scaled(Tensor x, float by=2.0, *, SymInt shift=0) -> Tensor>"
    )


HANDLES = [
    pytest.param(scaled, "(x: Tensor, by: float = 2.0, *, shift: int = 0) -> Tensor", id="as its reference"),
    pytest.param(hides_last, "(x: Tensor) -> torch.Tensor", id="one result, one hidden"),
    pytest.param(
        hides_first,
        "(x: Tensor, *, n: int = 2) -> tuple[torch.Tensor, list[torch.Tensor]]",
        id="the first hidden",
    ),
    pytest.param(adds.functional, "(x: Tensor, y: Tensor) -> torch.Tensor", id="functional form"),
    pytest.param(adds, "(x: Tensor, y: Tensor) -> None", id="in place"),
    pytest.param(cubed, "(x: Tensor, n: int = 3) -> torch.Tensor", id="adopted"),
    pytest.param(by_torch, "(x: Tensor, n: int = 3) -> torch.Tensor", id="reference of torch"),
    pytest.param(returns_it, "(x: Tensor) -> Tensor", id="returns what it writes"),
    pytest.param(registered, "(x: Tensor, n: int = 2) -> torch.Tensor", id="of torch.library"),
]


@pytest.mark.parametrize(("handle", "expected"), HANDLES)
def test_its_signature_is_that_of_a_call(handle: opsmith.Operator[..., Any], expected: str) -> None:
    assert str(inspect.signature(handle)).replace("'", "") == expected
    parameters = inspect.signature(handle).parameters
    assert [*handle.__annotations__] == [*parameters, "return"]


def test_types_are_resolved_from_it() -> None:
    assert typing.get_type_hints(hides_last) == {"x": Tensor, "return": Tensor}


def test_a_redeclared_operator_has_the_new_signature() -> None:
    def name_once(x: Tensor) -> Tensor:
        """First."""
        return x + 1

    def again(x: Tensor, by: int) -> tuple[Tensor, Tensor]:
        """Second."""
        return x + by, x

    again.__qualname__ = name_once.__qualname__
    handle = opsmith.operator("handle::described_again")(name_once)
    opsmith.operator("handle::described_again", hidden=("seen",))(again)
    assert str(inspect.signature(handle)).replace("'", "") == "(x: Tensor, by: int) -> torch.Tensor"
    assert "Second." in pydoc.render_doc(handle)


@pytest.mark.parametrize("handle", [scaled, cubed], ids=["declared", "adopted"])
def test_dir_lists_what_pages_name(handle: opsmith.Operator[..., Any]) -> None:
    pages = "".join(page.read_text() for page in sorted(DOCS.glob("*.md")))
    listed = [name for name in dir(handle) if not name.startswith("__")]
    assert {"gradients", "kernel", "samples", "out", "functional"} < {*listed}
    assert [name for name in listed if not re.search(rf"\.{name}\b", pages)] == []


def test_help_shows_the_docstring_and_the_methods() -> None:
    shown = pydoc.plain(pydoc.render_doc(scaled))
    assert "scaled(x: 'Tensor', by: 'float' = 2.0, *, shift: 'int' = 0) -> 'Tensor'" in shown
    assert "Scale x and shift it." in shown
    for method in ("gradients", "kernel", "samples", "explain"):
        assert f" |  {method}(self" in shown


def test_reference_is_the_function_as_written() -> None:
    assert inspect.isfunction(scaled.reference)
    assert_close(scaled.reference(torch.ones(2), 3.0, shift=1), torch.full((2,), 4.0))


def test_it_is_an_operator_of_torch() -> None:
    x = torch.ones(2)
    assert scaled.torch_operator is torch.ops.handle.scaled.default
    assert_close(torch.ops.handle.scaled(x, 3.0, shift=1), scaled(x, 3.0, shift=1))
    assert_close(torch.ops.handle.scaled.default(x), scaled(x))
    assert torch.Tag.pt2_compliant_tag in scaled.torch_operator.tags


def test_gradients_through_torch_ops_are_the_same(name: str) -> None:
    def marked(x: Tensor) -> Tensor:
        return x * 2

    opsmith.operator(name)(marked).surrogate_gradients(x=lambda grad: 7 * grad)
    namespace, _, short = name.partition("::")
    x = torch.ones(2, requires_grad=True)
    getattr(getattr(torch.ops, namespace), short)(x).sum().backward()
    assert_close(x.grad, torch.full((2,), 7.0))


def test_it_is_found_by_name() -> None:
    assert opsmith.find_operator("handle::scaled") is scaled
    assert scaled in opsmith.declared_operators()
    assert scaled in opsmith.declared_operators(__name__)
    assert opsmith.declared_operators("json") == []


def test_a_module_that_declares_it_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "declaring_module.py").write_text(
        "import opsmith\nfrom torch import Tensor\n\n"
        "@opsmith.operator('handle_imported::same')\ndef same(x: Tensor) -> Tensor:\n    return x.clone()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    found = opsmith.find_operator("handle_imported::same", "declaring_module")
    assert found.specification.module == "declaring_module"
    assert opsmith.declared_operators("declaring_module") == [found]


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy], ids=["copy", "deepcopy"])
def test_copies_are_the_handle_itself(duplicate: Any) -> None:
    assert duplicate(scaled) is scaled

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.operator = scaled

    assert duplicate(Scale()).operator is scaled


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickle(protocol: int) -> None:
    assert pickle.loads(pickle.dumps(scaled, protocol)) is scaled


def test_torch_save() -> None:
    file = io.BytesIO()
    torch.save({"operator": scaled}, file)
    file.seek(0)
    assert torch.load(file, weights_only=False)["operator"] is scaled


@pytest.mark.slow
def test_unpickling_imports_the_module_that_declares_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pickled_module.py").write_text(
        "import opsmith\nfrom torch import Tensor\n\n"
        "@opsmith.operator('handle_pickled::twice')\ndef twice(x: Tensor) -> Tensor:\n    return x * 2\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    handle = opsmith.find_operator("handle_pickled::twice", "pickled_module")
    (tmp_path / "twice.pickle").write_bytes(pickle.dumps(handle))
    program = "import pickle, torch; print(pickle.load(open('twice.pickle', 'rb'))(torch.ones(1)).item())"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(opsmith.__file__).parents[1])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "2.0\n"), done.stderr


@pytest.mark.slow
def test_unpickling_says_what_to_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the module no longer declares the operator, or is gone, loading raises an error that names it."""
    module = tmp_path / "emptied_module.py"
    module.write_text(
        "import opsmith\nfrom torch import Tensor\n\n"
        "@opsmith.operator('handle_emptied::twice')\ndef twice(x: Tensor) -> Tensor:\n    return x * 2\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    handle = opsmith.find_operator("handle_emptied::twice", "emptied_module")
    (tmp_path / "twice.pickle").write_bytes(pickle.dumps({"inside": [handle]}))
    module.write_text("")
    told = load(tmp_path)
    assert "OperatorNotFoundError: handle_emptied::twice: no operator of this name is declared\n" in told
    assert "got: module `emptied_module`, which does not declare it" in told
    assert "hint: import the module that declares it first" in told
    module.unlink()
    told = load(tmp_path)
    assert "the module that declared this operator cannot be found" in told
    assert "got: No module named 'emptied_module'" in told
    assert "hint: install the package of `emptied_module`, or put it where Python looks for modules" in told


def load(folder: Path) -> str:
    """The error of a process that loads a pickle."""
    done = subprocess.run(
        [sys.executable, "-B", "-c", "import pickle; pickle.load(open('twice.pickle', 'rb'))"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(Path(opsmith.__file__).parents[1])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    return done.stderr


def test_specification_is_frozen() -> None:
    with pytest.raises(AttributeError):
        scaled.specification.name = "other::name"  # type: ignore[misc]


def test_attaching_replaces_the_specification_and_keeps_the_handle(name: str) -> None:
    def square(x: Tensor) -> Tensor:
        return x * x

    operator = opsmith.operator(name)(square)
    before = operator.specification
    assert operator.gradients(x=lambda grad, x: 2 * grad * x) is operator
    assert operator.kernel("cpu", square) is operator
    assert operator.specification is not before
    assert (before.gradients.given, before.kernels) == (False, ())
    assert list(operator.specification.gradients.rules) == ["x"]


def test_decorators_return_the_function(name: str) -> None:
    def square(x: Tensor) -> Tensor:
        return x * x

    operator = opsmith.operator(name)(square)
    function = lambda *args: None
    assert operator.samples(function) is function
    assert operator.fake(square) is square
    assert operator.kernel("cpu")(square) is square
    joint = lambda grad, x: {"x": 2 * grad * x}
    assert operator.gradients("x")(joint) is joint
    assert operator.gradients(joint) is operator


def test_later_rules_win_and_others_stay(name: str) -> None:
    def product(x: Tensor, y: Tensor) -> Tensor:
        return x * y

    operator = opsmith.operator(name)(product)
    operator.surrogate_gradients(x=lambda grad: 1 * grad, y=lambda grad: 2 * grad)
    operator.surrogate_gradients(x=lambda grad: 3 * grad)
    x, y = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
    operator(x, y).backward()
    assert (x.grad, y.grad) == (torch.tensor([3.0]), torch.tensor([2.0]))


def test_method_of_a_class_is_declared_like_a_function(name: str) -> None:
    class Kernels:
        @staticmethod
        def square(x: Tensor) -> Tensor:
            return x * x

    assert_close(opsmith.operator(name)(Kernels.square)(torch.full((1,), 3.0)), torch.full((1,), 9.0))


def test_stringified_annotations_are_resolved(name: str) -> None:
    def reference(x: Tensor, by: float | None = None) -> tuple[Tensor, Tensor]:
        return x + 1, x * (by or 1)

    assert str(opsmith.operator(name)(reference)).endswith("(Tensor x, float? by=None) -> (Tensor, Tensor)>")


def test_calls_from_several_threads(variant: opsmith.Operator[..., Any], reference: Any) -> None:
    make = opsmith.Make()
    cases = [(make(3, 2).requires_grad_(), make(2).requires_grad_()) for _ in range(4)]
    found: dict[int, tuple[Tensor, ...]] = {}

    def work(i: int) -> None:
        for _ in range(5):
            found[i] = torch.autograd.grad(variant(*cases[i]).sum(), cases[i])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, case in enumerate(cases):
        assert_close(found[i], torch.autograd.grad(reference(*case).sum(), case))


def test_modes_and_subclasses_see_the_operator(variant: opsmith.Operator[..., Any], inputs: Any) -> None:
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    seen: list[str] = []

    class Dispatch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    class Function(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(f"function {func}")
            return func(*args, **(kwargs or {}))

    values = [value.detach() for value in inputs]
    with Dispatch():
        variant(*values)
    assert seen[0].startswith("variants.")
    seen.clear()
    with Function():
        variant(*values)
    assert seen[0].startswith("function variants.")


def test_data_parallel_of_the_profiler_names_it(name: str) -> None:
    def named(x: Tensor) -> Tensor:
        return x * 2

    operator = opsmith.operator(name)(named).gradients(x=lambda grad: 2 * grad)
    x = torch.ones(2, requires_grad=True)
    with torch.profiler.profile() as profile:
        result = operator(x)
        result.sum().backward()
    names = {event.name for event in profile.events()}
    assert name in names
    short = name.partition("::")[2]
    assert type(result.grad_fn).__name__ == f"{short}Backward"
    assert any(f"{short}Backward" in each for each in names)
