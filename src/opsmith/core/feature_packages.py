"""Methods of a handle that are implemented by feature packages.

The core does not know feature packages. Only `opsmith/__init__.py` knows them all: it connects each method to
a function of a package, which is imported when the method is first called.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from torch import Tensor

from opsmith.core.location import call_site

if TYPE_CHECKING:
    from opsmith.modules import OperatorModule  # for editors only

R = TypeVar("R")

Shapes = Mapping[str, Sequence[int | str]] | Iterable[str]

_functions: dict[str, tuple[str, str]] = {}


def connect_feature(method: str, module: str, function: str) -> None:
    """Connect a method to a function of a feature package; the first use imports the package."""
    _functions[method] = module, function


def feature_function(method: str) -> Callable[..., Any]:
    """Return the function that implements a method; its package is imported now."""
    module, function = _functions[method]
    implementation: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return implementation


class FeatureMethods(Generic[R]):
    """Methods of a handle that are implemented by feature packages."""

    def module(
        self,
        *,
        sizes: Iterable[str] | Mapping[str, str] = (),
        parameters: Shapes = (),
        buffers: Shapes = (),
        init: Mapping[str, Callable[[Tensor], Any]] | Callable[[Tensor], Any] | None = None,
        non_persistent: Iterable[str] = (),
        forward: Iterable[str] = (),
        name: str | None = None,
        doc: str | None = None,
    ) -> type[OperatorModule[R]]:
        """Make a `torch.nn.Module` class around the operator, which owns its parameters and buffers.

        Args:
            sizes: Names of the sizes, in the constructor's order; or a mapping from letters of `shapes=`.
            parameters: Shape of each parameter: sizes, numbers, `"a // b"`; or only names: as in `shapes=`.
            buffers: The same for buffers; the operator only reads them.
            init: Functions that fill parameters and buffers, by name, or one for all: see `opsmith.init`.
            non_persistent: Buffers that are left out of the state_dict.
            forward: Arguments other than tensors that are given in each call, not to the constructor.
            name: Name of the class; by default the operator's, in CamelCase.
            doc: Text added to the generated docstring, such as an example.

        Returns:
            A subclass of `torch.nn.Module`. Bind it under its name, at the top of a module, to pickle it.

        Raises:
            ModuleDeclarationError: If the arguments do not fit the operator, or do not fit one another.

        Example:
            >>> @opsmith.operator("demo::scaled", shapes="x: B M, weight: M -> B M")
            ... def scaled(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            ...     return x * weight
            >>> scaled.module(sizes={"M": "features"}, parameters=["weight"], init=opsmith.init.ones)(3)
            Scaled(features=3)
        """
        frame = inspect.currentframe()
        generated: type[OperatorModule[R]] = feature_function("module")(
            self,
            site=call_site(None if frame is None else frame.f_back),
            sizes=sizes,
            parameters=parameters,
            buffers=buffers,
            init=init,
            non_persistent=non_persistent,
            forward=forward,
            name=name,
            doc=doc,
        )
        return generated
