"""Every error that opsmith raises: one class for each failure, and one format for all messages.

A message states the operator and the problem. Its lines give the argument, the expected value, the value that
was found, the location, the hint, and the command that prints the page of the class.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self, TypeVar

from opsmith.display import LONGEST, shortened

_PICTURES = {
    **{code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"},
    0x7F: 0x2421,
    **dict.fromkeys([*range(0x80, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A)], 0xFFFD),
    **dict.fromkeys(range(0xD800, 0xE000), 0xFFFD),
}
"""Visible characters that replace control characters, marks of text direction, and surrogates."""


def printable(text: str) -> str:
    """Replace the characters that a terminal would obey or cannot print by visible characters.

    Example:
        >>> printable("red: \\x1b[31m")
        'red: ␛[31m'
    """
    return text.translate(_PICTURES)


def xml_text(text: str) -> str:
    """Return a text in which the characters that XML 1.0 forbids (production 2) are replaced.

    Example:
        >>> xml_text("a" + chr(0)) == "a" + chr(0xFFFD)
        True
    """
    return _FORBIDDEN.sub("\N{REPLACEMENT CHARACTER}", text)


_FORBIDDEN = re.compile("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def address(rule: str) -> str:
    """Return the command that prints the page of an error class, a cause or a property.

    Example:
        >>> address("missing-term")
        'opsmith rule missing-term'
    """
    return f"opsmith rule {rule}"


class OpsmithError(Exception):
    """Base of all errors of this package.

    Args:
        problem: One sentence about the failure.
        operator: Name of the operator, `namespace::name`.
        argument: Name of the argument or result at fault.
        expected: Description of a valid value.
        got: The value that was found.
        where: `file:line` of the declaration or formula at fault.
        hint: Advice on what to write instead.
    """

    fault = ""
    """The cause that `check` names for this error; empty if the class of the error decides the cause."""

    def __init__(
        self,
        problem: str,
        *,
        operator: str | None = None,
        argument: str | None = None,
        expected: str | None = None,
        got: str | None = None,
        where: str | None = None,
        hint: str | None = None,
    ) -> None:
        self.problem = problem
        self.operator = operator
        self.argument = argument
        self.expected = expected
        self.got = got
        self.where = where
        self.hint = hint
        self.args = (self.message(),)  # not by `super`, which torch.compile cannot trace

    def __str__(self) -> str:
        """The message, and in its last line the command that prints the page of the error."""
        # A class of a different module, such as a user's, has the page of its base class in this module.
        named = next(each.__name__ for each in type(self).__mro__ if each.__module__ == __name__)
        page = "" if named == OpsmithError.__name__ else f"\n  more: {address(named)}"
        return f"{self.message()}{page}"

    def message(self) -> str:
        """Return the text of the error without the command for its page, for use inside a longer text."""
        lines = [f"{self.operator}: {self.problem}" if self.operator else self.problem]
        for label in ("argument", "expected", "got", "where", "hint"):
            text = getattr(self, label)
            lines += [] if text is None else [f"  {label}: {text}"]
        return printable("\n".join(lines))

    def __repr__(self) -> str:
        name = type(self).__name__
        return shortened(f"{name}({shortened(str(self.args[0]), LONGEST - len(name) - len('()') - 2)!r})")

    def of(self, operator: str, where: str | None = None, hint: str | None = None) -> Self:
        """Add operator, location and hint to an error that names no operator yet; return the error."""
        if self.operator is None:
            self.operator, self.where, self.hint = operator, self.where or where, self.hint or hint
            self.args = (self.message(),)
        return self


def message_of(error: BaseException) -> str:
    """Return the text of an exception for use inside a message, which names a page itself."""
    return error.message() if isinstance(error, OpsmithError) else str(error)


@contextmanager
def about(operator: str, where: str | None = None) -> Iterator[None]:
    """Context manager that adds an operator's name and a location to errors that name no operator.

    Example:
        >>> with about("demo::linear", "demo.py:7"):
        ...     raise UsageError("`inline` has an invalid value", got="3")
        Traceback (most recent call last):
        opsmith.errors.UsageError: demo::linear: `inline` has an invalid value
          got: 3
          where: demo.py:7
          more: opsmith rule UsageError
    """
    try:
        yield
    except OpsmithError as error:
        error.of(operator, where)
        raise


E = TypeVar("E", bound=OpsmithError)


class ErrorSubject:
    """Base class of the parts of an operator that an error can be about."""

    @property
    def _subject(self) -> tuple[str, str]:
        """Name of the operator, and `file:line` of the part."""
        raise NotImplementedError

    def error(self, kind: type[E], problem: str, **details: Any) -> E:
        """Return an error about the operator, at the location of this part unless another one is given."""
        operator, where = self._subject
        return kind(problem, **{"operator": operator, "where": where, **details})


class NameFormatError(OpsmithError, ValueError):
    """The operator's name does not have the form `namespace::name`."""


class NameTakenError(OpsmithError, ValueError):
    """A different module, or torch itself, already has an operator of this name."""


class NotAFunctionError(OpsmithError, TypeError):
    """A value is not a function, or cannot be called with the operator's arguments."""


class MissingAnnotationError(OpsmithError, TypeError):
    """A parameter, or the return value, of the reference has no annotation."""


class UnsupportedTypeError(OpsmithError, TypeError):
    """An annotation has a type that an operator's schema cannot carry."""


class ParameterKindError(OpsmithError, TypeError):
    """The reference takes `*args`, `**kwargs` or a positional-only parameter."""


class ReservedNameError(OpsmithError, ValueError):
    """A name begins with `grad` or `result`, which formulas use, or names a part of an argument."""


class DefaultError(OpsmithError, ValueError):
    """A default value does not fit its annotation, or a schema cannot carry it."""


class ResultNameError(OpsmithError, ValueError):
    """The names in `results=` or `hidden=` do not match the results of the reference."""


class ShapePatternError(OpsmithError, ValueError):
    """The text of `shapes=` cannot be read, or does not fit the signature."""


class SignatureMismatchError(OpsmithError, TypeError):
    """The reference of an adopted operator does not have the operator's signature."""


class UnknownInputError(OpsmithError, ValueError):
    """A gradient is given for a name that is not an input."""


class UnknownResultError(OpsmithError, ValueError):
    """A tangent is given for a name that is not a result."""


class NotDifferentiableError(OpsmithError, TypeError):
    """A gradient is given for a value that is not a tensor, or a tangent for a non-differentiable result."""


class FormulaError(OpsmithError, TypeError):
    """A formula is neither a function with named parameters nor a value that can replace one."""


class FormulaParameterError(OpsmithError, ValueError):
    """A formula has a parameter that is not an input, result, gradient or tangent."""


class GradientConflictError(OpsmithError, ValueError):
    """True and surrogate gradients are declared for one operator."""


class DeviceNameError(OpsmithError, ValueError):
    """A device is not one of the device types that torch knows."""


class KernelDtypeError(OpsmithError, TypeError):
    """A kernel is declared for a value that is not a dtype."""


class MissingSamplesError(OpsmithError, LookupError):
    """The operator has no samples to run on."""


class SampleError(OpsmithError, ValueError):
    """A sample does not fit the operator's signature."""


class OperatorNotFoundError(OpsmithError, LookupError):
    """A name, file or module has no operator."""


class ModuleImportError(OpsmithError, ImportError):
    """A file or module that should declare operators cannot be imported."""


class ModuleDeclarationError(OpsmithError, ValueError):
    """The arguments of `op.module(...)` do not fit the operator, or contradict each other."""


class SizeError(OpsmithError, ValueError):
    """A module is made with an invalid size, or the shape of a parameter does not follow from its sizes."""


class InitializerError(OpsmithError, TypeError):
    """An initialiser did not fill its tensor."""


class ModulePicklingError(OpsmithError, TypeError):
    """A module cannot be pickled, because its class cannot be found by its name."""


class UnsupportedTorchError(OpsmithError, RuntimeError):
    """The installed torch lacks a private function that opsmith needs."""


class MissingExtraError(OpsmithError, ImportError):
    """An optional package is not installed."""


class UsageError(OpsmithError, ValueError):
    """A function of opsmith, or a command, was called with invalid arguments."""


class ArgumentError(OpsmithError, TypeError):
    """An argument is missing, unknown, or of the wrong type."""


class ShapeError(OpsmithError, ValueError):
    """A tensor's shape does not match `shapes=`, or a result's shape is not that of the reference."""


class LayoutError(OpsmithError, TypeError):
    """A tensor is sparse, nested, quantised or mkldnn, which operators do not take."""


class CapturedTensorError(OpsmithError, RuntimeError):
    """A reference uses a tensor that requires a gradient and is not an argument."""


class AliasError(OpsmithError, RuntimeError):
    """A reference or kernel returned one of its inputs, or a view of one."""


class MutationError(OpsmithError, RuntimeError):
    """An operator writes into an argument that it does not declare, or that cannot be written."""


class MetadataError(MutationError):
    """A reference or kernel changed the shape, the strides or the memory of an argument that it writes."""

    moved = False
    """True if only the memory was replaced: shape and strides are the same."""


class NondeterministicError(OpsmithError, RuntimeError):
    """A nondeterministic operator was called under `torch.use_deterministic_algorithms(True)`."""


class ResultCountError(OpsmithError, RuntimeError):
    """A reference or kernel returned a wrong number of results."""

    observed: Any = None  # the value that the forward of an adopted class returned instead


class ResultTypeError(OpsmithError, TypeError):
    """A reference or kernel returned a value that is not a tensor, or a tensor of another dtype or device."""

    observed: Any = None  # as that of `ResultCountError`


class IntegerResultError(OpsmithError, TypeError):
    """A gradient is needed through a result whose dtype has no gradient."""


class MissingFakeError(OpsmithError, NotImplementedError):
    """An opaque operator was traced, and no fake kernel was given."""


class MissingGradientError(OpsmithError, NotImplementedError):
    """An opaque operator was differentiated, and no gradient was given."""


class GradientNotImplementedError(OpsmithError, NotImplementedError):
    """The author declared this gradient as not implemented."""


class GradientTypeError(OpsmithError, TypeError):
    """A formula returned a value that is not a tensor."""


class GradientShapeError(OpsmithError, ValueError):
    """A formula returned a gradient or tangent whose shape is not that of its input or result."""


class GradientDtypeError(OpsmithError, TypeError):
    """A formula returned a gradient or tangent whose dtype is not that of its input or result."""


class GradientDeviceError(OpsmithError, ValueError):
    """A formula returned a gradient or tangent that is not on the device of its input or result."""


class GradientCountError(OpsmithError, ValueError):
    """A joint formula, or the formula of a list, returned too few or too many gradients or tangents."""


class SavedTensorModifiedError(OpsmithError, RuntimeError):
    """A formula wrote into a saved tensor or into grad_output."""


class GraphCutError(OpsmithError, RuntimeError):
    """Autograd did not record a part of the computation, so that a derivative would be silently wrong."""


class HiddenResultError(OpsmithError, RuntimeError):
    """A second derivative needs the gradient of a hidden result, which cannot be derived."""


class ForwardModeError(OpsmithError, NotImplementedError):
    """Forward mode cannot be derived for this operator."""


class PlacementError(OpsmithError, NotImplementedError):
    """The placement of the result cannot be derived from the placements of the DTensors."""


class TransformError(OpsmithError, NotImplementedError):
    """A transform of `torch.func`, or a compiler, does not support this operator."""


class CacheError(OpsmithError, RuntimeError):
    """Built kernels cannot be stored, or other users could change the stored kernels."""


class CompileError(OpsmithError, RuntimeError):
    """A compiler refuses the source of a kernel."""


class ToolchainError(OpsmithError, RuntimeError):
    """No compiler is found for a kernel's source, or the compiler does not run."""


class LanguageError(OpsmithError, RuntimeError):
    """A kernel language of another package raises an exception, or returns what opsmith cannot use."""


class KernelSourceError(OpsmithError, ValueError):
    """The source of a kernel cannot be read, or has no function of the kernel's name."""


class KernelSignatureError(OpsmithError, TypeError):
    """The parameters of a C++ or CUDA kernel are not the operator's arguments and results."""


class LaunchError(OpsmithError, ValueError):
    """The launch of a kernel cannot be computed from a call, or exceeds the limits of a GPU."""


class KernelRefusedError(OpsmithError, RuntimeError):
    """A kernel with `strict=True` does not take a call, or a result is too large for a kernel's indices."""


class KernelError(OpsmithError, RuntimeError):
    """A kernel threw an exception, or the CUDA driver did not launch it."""


class KernelFaultError(OpsmithError, RuntimeError):
    """A CUDA kernel, run on the CPU, has a fault: a race, an access out of bounds or a similar one."""


class NotEmulatedError(OpsmithError, NotImplementedError):
    """A CUDA kernel has code that cannot be run on the CPU."""


class ExportError(OpsmithError, RuntimeError):
    """A model or an operator cannot be exported to ONNX."""


class DynamicAxisError(OpsmithError, ValueError):
    """The code allows only one size for a dynamic axis, or the axis has several sizes or none."""


class ExportMismatchError(OpsmithError, RuntimeError):
    """An exported file computes results that differ from PyTorch's."""


class OnnxRuntimeError(OpsmithError, RuntimeError):
    """ONNX Runtime does not load a file, or does not run it on these tensors."""


class ServingError(OpsmithError, RuntimeError):
    """An operator cannot be served without Python."""


class ReportFormatError(OpsmithError, ValueError):
    """A file is not a report that this version of opsmith reads."""


class NotPassedError(OpsmithError, RuntimeError):
    """An operator that fails its check cannot be benchmarked."""


class BenchmarkFormatError(OpsmithError, ValueError):
    """A file to compare is not a benchmark that this version of opsmith reads."""


class NoGraphError(OpsmithError, ValueError):
    """A tensor to draw has no autograd graph."""


class FreedGraphError(OpsmithError, RuntimeError):
    """A backward has freed the saved tensors of the graph to draw."""


class DrawingError(OpsmithError, RuntimeError):
    """Graphviz fails to lay out a graph, or takes too long."""


__all__ = sorted(
    name for name, value in globals().items() if isinstance(value, type) and issubclass(value, OpsmithError)
)
