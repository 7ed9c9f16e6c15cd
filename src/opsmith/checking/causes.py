"""Causes of failures: the name, the meaning and the evidence of each, in the order of precedence."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from types import MappingProxyType
from typing import Literal

UNKNOWN = "unknown"

Happened = Literal["wrong", "raises", "damage", "minor", "less"]
"""Kind of event that a cause stands for.

`wrong`: wrong numbers or shapes, or side effects. `raises`: an exception. `damage`: access to foreign memory,
memory that is never freed, or the end of a process. `minor`: lost digits, or memory that is held too long.
`less`: nothing is wrong, but the operator can do less.
"""


@dataclass(frozen=True)
class Cause:
    """A cause of a failure.

    Args:
        name: Value of `Failure.cause`.
        meaning: The fault, in a sentence.
        decided_by: The required evidence.
        fix: The usual repair, in one sentence that begins with a verb.
        numeric: True if numbers decide it; if samples disagree, the cause that fits all samples is named.
        compares: True if the numbers of two runs decide it; they also differ if the runs draw random numbers.
        unsteady: True if it means that two runs may give different numbers, so that comparing runs is
            useless.
        root: True if it explains every failure of tracing, mapping or copying the operator.
        broad: True if it names no reason, so that an earlier failure with a root cause explains it.
        meant: True if its author may intend it as a convention, although numbers do not decide it.
        happened: Kind of event that it is.
    """

    name: str
    meaning: str
    decided_by: str
    fix: str
    _: KW_ONLY
    numeric: bool = False
    compares: bool = False
    unsteady: bool = False
    root: bool = False
    broad: bool = False
    meant: bool = False
    happened: Happened = "wrong"


_WORDS = {
    "raises": ("The call raises an exception, or the process dies.", "The exception, or the signal."),
    "out-of-bounds": (
        "The operator reads or writes memory outside of its tensors and arrays, or memory that was freed.",
        "A call with different numbers in the memory around each tensor. In C++: AddressSanitizer, "
        "with guards around each argument. In Triton: each pointer, in the interpreter. In CUDA "
        "C++: each access, on the CPU. In an in-place call: the bits around its arguments.",
    ),
    "undefined": (
        "C++ does not define what the kernel does: a signed overflow, a null or misaligned pointer.",
        "UndefinedBehaviorSanitizer.",
    ),
    "uninitialized": (
        "A result depends on memory that the operator reads before it writes to that memory.",
        "The same call with different bytes in variables and in the memory of the results. In CUDA "
        "C++: each read of shared memory and of results.",
    ),
    "misaligned": (
        "A kernel in CUDA C++ uses a wide type at an address that is not a multiple of its size.",
        "The address of each access, on the CPU.",
    ),
    "divergent-barrier": (
        "Some threads of a block, or some lanes of a warp, wait at a barrier that the other threads "
        "or lanes do not reach.",
        "The barrier at which each thread waits, on the CPU; the masks of shuffles.",
    ),
    "race": (
        "Two threads access the same memory without synchronization, and one of them writes.",
        "Barriers, fences and atomics between each pair of accesses to an element, on the CPU.",
    ),
    "endless": (
        "A kernel in CUDA C++ does not end.",
        "The number of steps of a thread, on the CPU; or a state in which all threads wait.",
    ),
    "mutates-input": (
        "The operator writes into an argument, and does not declare the write.",
        "The bits of every argument before and after the call and the backward.",
    ),
    "not-written": (
        "The operator does not write all elements of an argument, or moves the argument to other memory.",
        "The bits of each element before and after the call, and after the reference.",
    ),
    "overwritten": (
        "The operator writes into elements of an argument that the reference does not change.",
        "The bits of each element before and after the call, and after the reference.",
    ),
    "version": (
        "The operator writes into an argument and does not raise its version counter: a backward "
        "uses the new value.",
        "The version counter before and after the call; a node that saved the argument before the call.",
    ),
    "half-written": (
        "A call writes into an argument before it raises an exception.",
        "Calls with one changed size, which the reference refuses before it writes.",
    ),
    "mutates-grad-output": (
        "The backward writes into grad_output.",
        "The bits of every grad_output before and after the backward.",
    ),
    "mutates-saved": (
        "The backward writes into a saved tensor.",
        "The bits of every saved tensor before and after the backward, and a second backward "
        "through the same graph.",
    ),
    "aliases-input": (
        "A result shares memory with an argument, and the operator does not declare the alias.",
        "The addresses of the storages.",
    ),
    "nondeterministic": (
        "Two runs on the same inputs differ, and the order of summation does not explain the difference.",
        "Two runs from the same random state; a random state that changes without a declaration.",
    ),
    "stale-state": (
        "The results depend on earlier calls, or on other threads.",
        "The same call alone, and after or between calls with other arguments, which may reuse the "
        "same tensors; the memory of two results.",
    ),
    "looks-at-caller": (
        "The results depend on the caller: on stack frames, modules, `sys.argv` or the environment.",
        "The same call from a thread that looks like a script: no stack frame and no module shows "
        "that a check runs.",
    ),
    "side-effect": (
        "The operator changes state outside of its results: `.grad` of a tensor, a global variable, "
        "a default of torch.",
        "The state outside of the operator before and after the call and the backward.",
    ),
    "gradient-count": (
        "The backward returns more or fewer gradients than the forward has inputs.",
        "The number of gradients that the backward returned, or an error of torch's engine.",
    ),
    "shape": ("A result or gradient has the wrong shape.", "Its shape, compared with the right shape."),
    "dtype": ("A result or gradient has the wrong dtype.", "Its dtype, compared with the right dtype."),
    "missing-gradient": (
        "The gradient is None or zero, but the right gradient is not zero.",
        "None or zeros, where finite differences are not zero.",
    ),
    "nan": (
        "A value is nan or infinite where the right value is finite, or finite where the right "
        "value is not finite.",
        "The indices of these elements.",
    ),
    "empty": (
        "The operator is wrong only for tensors without elements.",
        "The same call on samples with and without elements.",
    ),
    "layout": (
        "The operator is right for contiguous tensors, and wrong for the same numbers in a different layout.",
        "Calls with the same numbers, contiguous and in the other layout.",
    ),
    "ignores-grad-output": (
        "The gradient does not depend on grad_output.",
        "The gradient is the same for every grad_output, and right for a grad_output of ones.",
    ),
    "nonlinear-grad": (
        "The gradient is not linear in grad_output.",
        "The gradient for the grad_output a u + b v, compared with a times the gradient for u plus "
        "b times the gradient for v.",
    ),
    "input-needs-grad": (
        "The gradient is wrong only for some choices of the inputs that require a gradient.",
        "Gradients for every choice of inputs.",
    ),
    "precision": (
        "A value is computed in a narrower dtype than the dtype of the arguments.",
        "The error, compared with the rounding of the narrower dtype, on inputs that need more digits.",
    ),
    "sign": ("The gradient has the wrong sign.", "The negated gradient is right, on every fresh input."),
    "scale": (
        "The gradient is wrong by a factor.",
        "The same factor, or the same function of the sizes, on every fresh input.",
    ),
    "unreduced-broadcast": (
        "The gradient is not summed over the broadcast dimensions.",
        "The sum over these dimensions is right, or the gradient is one part of that sum.",
    ),
    "swapped-inputs": (
        "The gradients of two inputs are swapped.",
        "Each of the two gradients is right for the other input, on every fresh input.",
    ),
    "transposed": (
        "Two dimensions of the gradient are transposed.",
        "The gradient with these two dimensions transposed is right, on every fresh input.",
    ),
    "shifted": (
        "The elements of the gradient are shifted by some positions.",
        "The gradient is right if its elements are moved back by the same number of positions, on "
        "every fresh input.",
    ),
    "region": (
        "The gradient or result is wrong only at some indices, or only where a condition is true.",
        "On every fresh input, the condition is true for the wrong elements, and false for the "
        "right elements.",
    ),
    "approximate": (
        "The gradient is off by at most a thousandth of its largest element, in every sample.",
        "The largest error, compared with the largest right element.",
    ),
    "missing-term": (
        "A term of the gradient is missing.",
        "The gradient equals autograd's gradient if one path through the reference is cut, on every "
        "fresh input.",
    ),
    "second-order": (
        "The gradient is right, and its own derivatives are wrong.",
        "Derivatives of the gradient, compared with finite differences of the gradient.",
    ),
    "forward-mode": (
        "The gradient is right, and the tangent is wrong.",
        "The tangent, compared with finite differences; its product with the gradient.",
    ),
    "fake-mismatch": (
        "The fake kernel returns shapes, dtypes or strides that differ from the real results.",
        "Shapes, dtypes, strides and devices of the fake results and of the real results.",
    ),
    "kernel-mismatch": (
        "A kernel, or a rule for batches, returns wrong numbers, maybe in one mode only.",
        "Its results, compared with the reference's results in float64, in rounding units.",
    ),
    "not-refused": (
        "A kernel takes sizes that the reference refuses.",
        "A call that the kernel and the reference accept, then the same call with one changed size.",
    ),
    "leak": (
        "The operator never frees tensors that are no longer needed.",
        "Weak references after the backward and a run of the cycle collector.",
    ),
    "held": (
        "The operator keeps tensors longer than they are needed: in a reference cycle, or on the context.",
        "Weak references after the backward, before a run of the cycle collector; attributes of the context.",
    ),
    "resources": (
        "A kernel uses more registers, spills or shared memory than its author allows, or than a GPU has.",
        "Registers, spills and shared memory, as the assembler reports them, compared with the limits.",
    ),
    "narrow-index": (
        "An index of a kernel in C++ or CUDA C++ has 32 bits, and the kernel refuses tensors that "
        "need larger indices.",
        "The types of the indices, as the compiler names them.",
    ),
    "not-exercised": (
        "A formula, kernel or declaration was never tested: no sample reaches it, or time ran out.",
        "The samples do not reach the formula, kernel or declaration, or inputs were left out.",
    ),
    "frozen-size": (
        "A line turns a size into a number without need, and code is compiled again for each size.",
        "A run on symbolic sizes; the line at which a size is fixed.",
    ),
    "recompiles": (
        "Compiled code works for one size only, and is compiled again for each other size.",
        "A run on symbolic sizes that fixes a size or raises; the guard that fails in compiled code.",
    ),
    UNKNOWN: (
        "The values are wrong, and no other cause fits the evidence.",
        "The evidence for every other cause is missing.",
    ),
}
"""Meaning of each cause, and the evidence that decides it, in the order of precedence."""

_FIXES = {
    "raises": "Run the replay, and correct the line at which the traceback ends.",
    "out-of-bounds": "Compare each index with the size before the access: `if (i < n)`.",
    "undefined": "Compute in a wider type; test pointers and shifts before use.",
    "uninitialized": "Write each element before it is read; give each variable a first value.",
    "misaligned": "Use the wide type only where the address is a multiple of its size.",
    "divergent-barrier": "Move the barrier out of the branch: every thread must reach the barrier.",
    "race": "Put a barrier between the two accesses, or make the write atomic.",
    "endless": "Let every thread change the condition of its loop.",
    "mutates-input": "Write into a copy (`x.clone()`), or declare the write: `mutates=`.",
    "not-written": "Write every element that the reference writes, into the memory of the argument.",
    "overwritten": "Write only into the elements that the reference writes.",
    "version": "Write with in-place functions of torch, not through `.data`, NumPy or a pointer.",
    "half-written": "Test all sizes, dtypes and devices before the first write.",
    "mutates-grad-output": "Compute a new tensor (`grad * 2`), not in place (`grad.mul_(2)`).",
    "mutates-saved": "Write into a copy of the saved tensor.",
    "aliases-input": "Return a copy: `x.clone()`.",
    "nondeterministic": "Declare `random=True` or `deterministic=False`, or make the runs equal.",
    "stale-state": "Keep nothing between calls: no module-level buffer, no cache by `id` or by shape alone.",
    "looks-at-caller": "Take what the operator needs as an argument.",
    "side-effect": "Return the value, or restore the old state in the same call.",
    "gradient-count": "Return one gradient for each argument of forward; None where there is no gradient.",
    "shape": "Compare each step's shape with the right shape, beginning at the last reduction or broadcast.",
    "dtype": "Convert the result to the dtype that the reference returns.",
    "missing-gradient": "Write the formula; if there is no gradient, declare `opsmith.non_differentiable`.",
    "nan": "Look for a division by zero, a logarithm or a root at the index in the message.",
    "empty": "Return early if a size is 0, or begin reductions at their neutral element.",
    "layout": "Use the strides of the tensor, or make it contiguous first.",
    "ignores-grad-output": "Multiply by grad_output.",
    "nonlinear-grad": "Use grad_output once in each term, as a factor.",
    "input-needs-grad": "Use each flag of `ctx.needs_input_grad` for the gradient of its own input only.",
    "precision": "Compute in the dtype of the arguments; use no buffer, constant or cast with fewer digits.",
    "sign": "Negate the formula, or swap the two operands of its subtraction.",
    "scale": "Divide by the factor in the message; often a 2 is forgotten, or a mean replaces a sum.",
    "unreduced-broadcast": "Sum over the broadcast dimensions: `grad.sum_to_size(x.shape)`.",
    "swapped-inputs": "Exchange the two gradients.",
    "transposed": "Transpose the result (`.mT`), or swap the two factors of the product.",
    "shifted": "Correct the index, the offset or the padding by the number of places in the message.",
    "region": "Look for a branch or loop bound that treats the indices in the message differently.",
    "approximate": "Use the exact formula, and constants with all digits.",
    "missing-term": "Add the term that the message names.",
    "second-order": "Write the gradient with differentiable operations: no `.detach()`, no `.item()`.",
    "forward-mode": "Correct the tangent: it is the derivative along a direction, not the gradient.",
    "fake-mismatch": "Give the fake kernel the shapes, dtypes and strides of the real results.",
    "kernel-mismatch": "Run the replay, and compare kernel and reference at the index in the message.",
    "not-refused": "Test the sizes in the kernel as the reference does, and raise an error.",
    "leak": "Save tensors only by `save_for_backward`; keep none in a global variable or a closure.",
    "held": "Save tensors by `save_for_backward`, not as attributes of the context.",
    "resources": "Use fewer registers or less shared memory, or allow more.",
    "narrow-index": "Use `int64_t` for indices.",
    "not-exercised": "Add a sample that reaches the untested part, or raise the effort: `--thorough`.",
    "frozen-size": "Use an expression that stays symbolic: no `int()`, `range()` or `if` on a size.",
    "recompiles": "Remove the line that turns a size into a number.",
    UNKNOWN: "Compare the formula with its derivation at the index in the message, term by term.",
}
"""The usual repair of each cause, in one sentence."""

_TRAITS = {
    "numeric": "missing-gradient nan precision sign scale unreduced-broadcast swapped-inputs transposed "
    f"shifted region approximate missing-term {UNKNOWN}",
    "compares": "nondeterministic stale-state looks-at-caller second-order forward-mode kernel-mismatch",
    "unsteady": "mutates-input mutates-grad-output nondeterministic stale-state",
    "root": "raises mutates-input not-written overwritten version mutates-grad-output mutates-saved "
    "aliases-input nondeterministic stale-state side-effect gradient-count shape dtype layout fake-mismatch",
    "meant": "nonlinear-grad second-order",
    "broad": f"raises shape fake-mismatch kernel-mismatch {UNKNOWN}",
}
"""Traits of `Cause`, each with the causes that have it."""

_HAPPENED: dict[Happened, str] = {
    "raises": "raises",
    "damage": "out-of-bounds leak",
    "minor": "half-written precision approximate held frozen-size",
    "less": "narrow-index not-exercised recompiles",
}
"""Kinds of events, each with its causes; every other cause is of the kind `wrong`."""


def _cause(name: str, meaning: str, decided_by: str) -> Cause:
    happened: Happened = next((what for what, names in _HAPPENED.items() if name in names.split()), "wrong")
    traits = {trait: name in names.split() for trait, names in _TRAITS.items()}
    return Cause(name, meaning, decided_by, _FIXES[name], happened=happened, **traits)


CAUSES = MappingProxyType({name: _cause(name, *words) for name, words in _WORDS.items()})
"""Every cause by its name, in the order of precedence."""


def first_of(names: set[str]) -> str:
    """Cause of the highest precedence among several that the evidence supports.

    Example:
        >>> first_of({"region", "layout"})
        'layout'
    """
    return next(name for name in CAUSES if name in names)
