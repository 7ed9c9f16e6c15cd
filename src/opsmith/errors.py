"""Every error that opsmith raises: one class per failure, one form for the message.

A message names the operator, says what is wrong, and then, line by line, the argument, what was expected,
what came, where the operator (or formula) was written, and the hint.
"""

from __future__ import annotations

__all__ = [
    "AliasError",
    "ArgumentError",
    "BenchmarkFormatError",
    "CacheError",
    "CapturedTensorError",
    "CompileError",
    "DefaultError",
    "DeviceNameError",
    "DrawingError",
    "DynamicAxisError",
    "ExportError",
    "ExportMismatchError",
    "FormulaError",
    "FormulaParameterError",
    "ForwardModeError",
    "FreedGraphError",
    "GradientConflictError",
    "GradientCountError",
    "GradientDeviceError",
    "GradientDtypeError",
    "GradientNotImplementedError",
    "GradientShapeError",
    "GradientTypeError",
    "GraphCutError",
    "HiddenResultError",
    "InitializerError",
    "IntegerResultError",
    "KernelDtypeError",
    "KernelError",
    "KernelRefusedError",
    "KernelSignatureError",
    "KernelSourceError",
    "LaunchError",
    "LayoutError",
    "MissingAnnotationError",
    "MissingExtraError",
    "MissingFakeError",
    "MissingGradientError",
    "MissingSamplesError",
    "ModuleDeclarationError",
    "ModuleImportError",
    "ModulePicklingError",
    "MutationError",
    "NameFormatError",
    "NameTakenError",
    "NoGraphError",
    "NotAFunctionError",
    "NotDifferentiableError",
    "NotPassedError",
    "OnnxRuntimeError",
    "OperatorNotFoundError",
    "OpsmithError",
    "ParameterKindError",
    "PlacementError",
    "ReservedNameError",
    "ResultCountError",
    "ResultNameError",
    "ResultTypeError",
    "SampleError",
    "SavedTensorModifiedError",
    "ShapeError",
    "ShapePatternError",
    "SignatureMismatchError",
    "SizeError",
    "ToolchainError",
    "TransformError",
    "UnknownInputError",
    "UnknownResultError",
    "UnsupportedTorchError",
    "UnsupportedTypeError",
    "UsageError",
]


class OpsmithError(Exception):
    """Base of all errors of this package.

    Args:
        problem: One sentence that says what is wrong.
        operator: Name of the operator, `namespace::name`.
        argument: Name of the argument or result at fault.
        expected: What would have been right.
        got: What came instead.
        where: `file:line` of the declaration or formula at fault.
        hint: What to write instead.
    """

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
        lines = [f"{operator}: {problem}" if operator else problem]
        details = {"argument": argument, "expected": expected, "got": got, "where": where, "hint": hint}
        lines += [f"  {label}: {text}" for label, text in details.items() if text is not None]
        super().__init__("\n".join(lines))


class NameFormatError(OpsmithError, ValueError):
    """The operator's name is not `namespace::name`."""


class NameTakenError(OpsmithError, ValueError):
    """Another module, or torch itself, has an operator of this name."""


class NotAFunctionError(OpsmithError, TypeError):
    """Something is no function, or none that can be called as it has to be."""


class MissingAnnotationError(OpsmithError, TypeError):
    """A parameter, or the return value, of the reference has no type hint."""


class UnsupportedTypeError(OpsmithError, TypeError):
    """A type hint that an operator's schema cannot carry."""


class ParameterKindError(OpsmithError, TypeError):
    """The reference takes `*args`, `**kwargs` or a positional-only parameter."""


class ReservedNameError(OpsmithError, ValueError):
    """A name begins with `grad` or `result`, which formulas use for themselves, or is that of a part."""


class DefaultError(OpsmithError, ValueError):
    """A default value that does not fit its type hint or that a schema cannot carry."""


class ResultNameError(OpsmithError, ValueError):
    """The names in `results=` or `hidden=` do not fit what the reference returns."""


class ShapePatternError(OpsmithError, ValueError):
    """The text of `shapes=` cannot be read, or does not fit the signature."""


class SignatureMismatchError(OpsmithError, TypeError):
    """The reference of an adopted operator does not have the operator's signature."""


class UnknownInputError(OpsmithError, ValueError):
    """A gradient is given for something that is not an input."""


class UnknownResultError(OpsmithError, ValueError):
    """A tangent is given for something that is not a result."""


class NotDifferentiableError(OpsmithError, TypeError):
    """A gradient is given for what is not a tensor, or a tangent for a result that is non-differentiable."""


class FormulaError(OpsmithError, TypeError):
    """A formula is not a plain function of named parameters, nor one of the answers that stand for one."""


class FormulaParameterError(OpsmithError, ValueError):
    """A formula names a parameter that is no input, result, gradient or tangent."""


class GradientConflictError(OpsmithError, ValueError):
    """True and surrogate gradients are declared for one operator."""


class DeviceNameError(OpsmithError, ValueError):
    """A kernel is declared for a device type that torch does not know."""


class KernelDtypeError(OpsmithError, TypeError):
    """A kernel is declared for something that is no dtype."""


class MissingSamplesError(OpsmithError, LookupError):
    """Something needs the operator's samples and there are none."""


class SampleError(OpsmithError, ValueError):
    """A sample does not fit the operator's signature."""


class OperatorNotFoundError(OpsmithError, LookupError):
    """A name, file or module holds no operator."""


class ModuleImportError(OpsmithError, ImportError):
    """A file or module that should declare operators cannot be imported."""


class ModuleDeclarationError(OpsmithError, ValueError):
    """What `op.module(...)` says does not fit the operator, or itself."""


class SizeError(OpsmithError, ValueError):
    """A module is made with a size that is none, or from which a shape of a parameter does not follow."""


class InitializerError(OpsmithError, TypeError):
    """An initialiser did not fill the tensor that it was given."""


class ModulePicklingError(OpsmithError, TypeError):
    """A module is pickled whose class cannot be found under its name."""


class UnsupportedTorchError(OpsmithError, RuntimeError):
    """The torch that is installed lacks something private that opsmith cannot do without."""


class MissingExtraError(OpsmithError, ImportError):
    """A package that only one face needs is not installed."""


class UsageError(OpsmithError, ValueError):
    """A function of opsmith, or a command, was called with arguments that it cannot use."""


class ArgumentError(OpsmithError, TypeError):
    """An argument is missing, unknown, or of the wrong type."""


class ShapeError(OpsmithError, ValueError):
    """A tensor's shape is not what `shapes=` says."""


class LayoutError(OpsmithError, TypeError):
    """A sparse, nested, quantised or mkldnn tensor, which operators do not take."""


class CapturedTensorError(OpsmithError, RuntimeError):
    """A reference uses a tensor that requires a gradient and is none of its arguments."""


class AliasError(OpsmithError, RuntimeError):
    """A reference or kernel returned one of its inputs, or a view of one."""


class MutationError(OpsmithError, RuntimeError):
    """A reference or kernel wrote into one of its inputs."""


class ResultCountError(OpsmithError, RuntimeError):
    """A reference or kernel returned another number of results than declared."""


class ResultTypeError(OpsmithError, TypeError):
    """A reference or kernel returned something that is not a tensor."""


class IntegerResultError(OpsmithError, TypeError):
    """A gradient is asked through a result whose dtype has none."""


class MissingFakeError(OpsmithError, NotImplementedError):
    """An opaque operator was traced, and no fake kernel was given."""


class MissingGradientError(OpsmithError, NotImplementedError):
    """An opaque operator was differentiated, and no gradient was given."""


class GradientNotImplementedError(OpsmithError, NotImplementedError):
    """The author declared this gradient as not implemented."""


class GradientTypeError(OpsmithError, TypeError):
    """A formula returned something that is not a tensor."""


class GradientShapeError(OpsmithError, ValueError):
    """A formula returned a gradient, or tangent, whose shape is not that of its input, or result."""


class GradientDtypeError(OpsmithError, TypeError):
    """A formula returned a gradient, or tangent, whose dtype is not that of its input, or result."""


class GradientDeviceError(OpsmithError, ValueError):
    """A formula returned a gradient, or tangent, on another device than its input, or result."""


class GradientCountError(OpsmithError, ValueError):
    """A joint formula, or the formula of a list, returned too few or too many gradients or tangents."""


class SavedTensorModifiedError(OpsmithError, RuntimeError):
    """A formula wrote into a saved tensor or into the incoming gradient."""


class GraphCutError(OpsmithError, RuntimeError):
    """A formula lost the graph, so that a second order would be silently wrong."""


class HiddenResultError(OpsmithError, RuntimeError):
    """A second order needs the gradient of a hidden result, and it cannot be derived."""


class ForwardModeError(OpsmithError, NotImplementedError):
    """Forward mode cannot be derived for this operator."""


class PlacementError(OpsmithError, NotImplementedError):
    """DTensors placed in a way for which the operator's answer cannot be derived."""


class TransformError(OpsmithError, NotImplementedError):
    """A transform, of `torch.func` or of a compiler, that this operator does not support."""


class CacheError(OpsmithError, RuntimeError):
    """What is built from a kernel's source can be kept nowhere, or not where nobody else can change it."""


class CompileError(OpsmithError, RuntimeError):
    """A compiler refuses the source of a kernel."""


class ToolchainError(OpsmithError, RuntimeError):
    """No compiler is found for a kernel's source, or it does not run."""


class KernelSourceError(OpsmithError, ValueError):
    """The source of a kernel cannot be read, or has no such function."""


class KernelSignatureError(OpsmithError, TypeError):
    """The parameters of a kernel in C++ or CUDA are not the operator's arguments and results."""


class LaunchError(OpsmithError, ValueError):
    """How a CUDA kernel is launched cannot be told from a call, or is nothing that a GPU does."""


class KernelRefusedError(OpsmithError, RuntimeError):
    """A kernel that is declared with `strict=True` does not take a call on its device."""


class KernelError(OpsmithError, RuntimeError):
    """A kernel threw an exception, or the CUDA driver did not launch it."""


class ExportError(OpsmithError, RuntimeError):
    """A model or an operator cannot be written as a file of ONNX."""


class DynamicAxisError(OpsmithError, ValueError):
    """An axis that is to have any size is fixed by the code, or has several sizes or none."""


class ExportMismatchError(OpsmithError, RuntimeError):
    """A file that was exported computes something else than PyTorch."""


class OnnxRuntimeError(OpsmithError, RuntimeError):
    """ONNX Runtime does not load a file, or does not run it on these tensors."""


class NotPassedError(OpsmithError, RuntimeError):
    """An operator that fails its check was to be benchmarked."""


class BenchmarkFormatError(OpsmithError, ValueError):
    """What is to be compared with a benchmark is none that this version of opsmith reads."""


class NoGraphError(OpsmithError, ValueError):
    """A tensor is to be drawn that nothing which requires a gradient was computed into."""


class FreedGraphError(OpsmithError, RuntimeError):
    """A graph is to be drawn whose saved tensors a backward has freed."""


class DrawingError(OpsmithError, RuntimeError):
    """Graphviz does not lay a graph out: it fails, or takes too long."""
