"""Check of the operators that torch describes for its own tests: a table of verdicts, and each finding.

    python benchmarks/opinfo.py                      # 40 entries, drawn by the seed
    python benchmarks/opinfo.py --all --json sweep.jsonl
    python benchmarks/opinfo.py --only sort linalg.svd
    python benchmarks/opinfo.py --database custom_op_db

`op_db` holds torch's operators: each becomes an operator of opsmith whose reference is torch's own function,
so that an error is a fault of torch or a false alarm of `check`. `autograd_function_db` holds Function
classes, and `custom_op_db` operators of torch.library: these are checked as they are. A few small sample
inputs of the database are the samples. Each subject is checked in a process of its own, with a time limit.
With --json, finished subjects are appended to a file, and left out when the same is started again.
docs/found.md has the faults of torch that this found. The databases need the package expecttest.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import multiprocessing
import os
import random
import signal
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

import opsmith
from opsmith import errors
from opsmith.checking.properties.torch.compile import load_compiler

DATABASES = {
    "op_db": "torch.testing._internal.common_methods_invocations",
    "autograd_function_db": "torch.testing._internal.autograd_function_db",
    "custom_op_db": "torch.testing._internal.custom_op_db",
}
DTYPES = (torch.float32, torch.complex64, torch.int64, torch.bool)
"""Dtypes of sample inputs: the first that an operator takes."""
VERDICTS = ("errors", "broken", "warnings", "limits", "passed", "unfit")
"""Verdicts on a subject; `broken` is an exception of the checker, its death or no end."""


class UnfitError(Exception):
    """Refusal of a subject that is no operator without side effects from dense tensors to dense tensors."""


@dataclass(frozen=True)
class Call:
    """One sample input of the database.

    Args:
        values: What the operator is given as its arguments.
        form: What is the same for all samples of one operator: the structure, the types, other values.
        function: The torch operator as a function of these arguments.
    """

    values: tuple[Any, ...]
    form: str
    function: Callable[..., Any]

    def size(self) -> int:
        """Number of elements of all tensors."""
        return sum(leaf.numel() for leaf in tree_flatten(self.values)[0] if isinstance(leaf, Tensor))


def call_of(info: Any, sample: Any) -> Call:
    """Take a sample input apart: tensors, lists of tensors and numbers are arguments, the rest is fixed.

    The function is the one that torch's own tests differentiate: what makes matrices symmetric for an
    operator that reads one triangle, and what leaves the sign of an eigenvector out, is part of it.
    """
    whole = (sample.input, *sample.args, *sample.kwargs.values())
    leaves, structure = tree_flatten(whole, is_leaf=lambda value: value is not whole and bool(kind_of(value)))
    kinds = [kind_of(leaf) for leaf in leaves]
    count = 1 + len(sample.args)
    free = [position for position, kind in enumerate(kinds) if kind is not None]

    def call(*values: Any) -> Any:
        filled = list(leaves)
        for position, value in zip(free, values, strict=True):
            filled[position] = tuple(value) if isinstance(leaves[position], tuple) else value
        args = tree_unflatten(filled, structure)
        named = dict(zip(sample.kwargs, args[count:], strict=True))
        return sample.output_process_fn_grad(info.gradcheck_wrapper(info.op, *args[:count], **named))

    values = tuple(_value(leaves[position]) for position in free)
    form = repr(
        (
            str(structure),
            *sample.kwargs,
            [kind or repr(leaf) for kind, leaf in zip(kinds, leaves, strict=True)],
        )
    )
    return Call(values, form, call)


def kind_of(value: Any) -> str | None:
    """Annotation of an argument with this value; None where the value stays fixed."""
    if isinstance(value, Tensor):
        return "Tensor"
    if type(value) in (bool, int, float, complex, str):
        return type(value).__name__
    if isinstance(value, list | tuple) and value:
        kinds = {kind_of(item) for item in value}
        if kinds in ({"Tensor"}, {"int"}, {"float"}):
            return f"list[{kinds.pop()}]"
    return None


def _value(value: Any) -> Any:
    return list(value) if isinstance(value, list | tuple) else value


def operator_of(info: Any, limits: argparse.Namespace) -> tuple[Any, list[tuple[Any, ...]]]:
    """The operator whose reference is torch's, and its samples.

    Raises:
        UnfitError: With the reason.
    """
    calls = chosen_calls(info, limits)
    every = [results_of(call) for call in calls]
    results, copies = every[0], any(each.views for each in every)
    calls = [call for call, each in zip(calls, every, strict=True) if each.annotation == results.annotation]
    kinds = [kind_of(value) for value in calls[0].values]
    parameters = ", ".join(f"x{position}: {kind}" for position, kind in enumerate(kinds))
    names = ", ".join(f"x{position}" for position in range(len(kinds)))
    body = f"return own(call({names}), [{names}], {copies})"
    text = f"def reference({parameters}) -> {results.annotation}:\n    {body}\n"
    scope = {"Tensor": Tensor, "call": calls[0].function, "own": own_results, "__name__": __name__}
    exec(text, scope)
    declare = opsmith.operator(
        f"opinfo::{''.join(letter if letter.isalnum() else '_' for letter in info.formatted_name)}",
        results=results.roles,
        random=results.random,
    )
    return declare(scope["reference"]), [call.values for call in calls]


def chosen_calls(info: Any, limits: argparse.Namespace) -> list[Call]:
    """The samples: of one form, not too large, spread over the database's order."""
    if "empty" in info.name:
        raise UnfitError("its results are memory as it was")
    if "as_strided" in info.name:
        raise UnfitError("it is defined by the memory of its arguments, and not by their numbers")
    dtypes = info.supported_dtypes("cpu")
    dtype = next((dtype for dtype in DTYPES if dtype in dtypes), None)
    if dtype is None:
        raise UnfitError(f"none of its dtypes is among {', '.join(map(str, DTYPES))}")
    torch.manual_seed(limits.seed)
    forms: dict[str, list[Call]] = {}
    for position, sample in enumerate(info.sample_inputs("cpu", dtype)):
        if position == 200:
            break
        call = call_of(info, sample)
        if any(isinstance(value, Tensor) for value in tree_flatten(call.values)[0]) and call.size():
            forms.setdefault(call.form, []).append(call)
    small = {
        form: [call for call in calls if call.size() <= limits.elements] for form, calls in forms.items()
    }
    ranked = sorted((calls for calls in small.values() if calls), key=len, reverse=True)
    if not ranked:
        raise UnfitError(f"no sample has a tensor with elements, and no more than {limits.elements}")
    calls = ranked[limits.form % len(ranked)]
    step = max(1, len(calls) // limits.samples)
    return calls[::step][: limits.samples]


@dataclass(frozen=True)
class Results:
    """What an operator returns.

    Args:
        annotation: Its return type hint.
        roles: Names and roles of the results.
        random: True if it draws from torch's random state.
        views: True if results share memory with arguments or with one another.
    """

    annotation: str
    roles: Any
    random: bool
    views: bool


def own_results(returned: Any, values: Sequence[Any], copies: bool) -> Any:
    """Results in memory of their own, as an operator must return them: copies of views and of arguments."""
    results = returned if isinstance(returned, list | tuple) else [returned]
    own = [each.clone() if copies or _is_of(each, values) else each for each in results]
    return tuple(own) if isinstance(returned, list | tuple) else own[0]


def _is_of(result: Tensor, values: Sequence[Any]) -> bool:
    """True if a result shares memory with an argument, as of some operators for no elements."""
    with contextlib.suppress(RuntimeError, NotImplementedError):  # under a transform, which has no memory
        memory = {each.untyped_storage()._cdata for each in values if isinstance(each, Tensor)}
        return result.untyped_storage()._cdata in memory
    return False


def results_of(call: Call) -> Results:
    """Run an operator once, to see what it returns.

    Raises:
        UnfitError: If it returns something else than new dense tensors, or writes into its arguments.
    """
    given = tree_map(_with_gradient, call.values)
    inputs = [leaf for leaf in tree_flatten(given)[0] if isinstance(leaf, Tensor)]
    if any(each.layout != torch.strided for each in inputs):
        raise UnfitError("its samples are not dense")
    versions, state = [each._version for each in inputs], torch.random.get_rng_state()
    watched = Draws()
    try:
        with watched:
            returned = call.function(*given)
    except Exception as error:
        raise UnfitError(f"torch refuses it: {str(error).splitlines()[0]}") from error
    random_ = not torch.equal(state, torch.random.get_rng_state())
    if watched.drew and not random_:
        raise UnfitError("the database gives it a seed")
    if versions != [each._version for each in inputs]:
        raise UnfitError("it writes into its arguments")
    if isinstance(returned, Tensor):
        results, annotation = [returned], "Tensor"
    elif isinstance(returned, list | tuple) and returned and all(isinstance(x, Tensor) for x in returned):
        results, annotation = list(returned), f"tuple[{', '.join(['Tensor'] * len(returned))}]"
    else:
        raise UnfitError(f"it returns {type(returned).__name__}")
    if any(each.layout != torch.strided or each.is_quantized for each in results):
        raise UnfitError("its results are not dense")
    roles = {
        f"out{position}": ... if each.requires_grad or not _floating(each) else opsmith.non_differentiable
        for position, each in enumerate(results)
    }
    return Results(annotation, roles, random_, any(_shares(call, dtype) for dtype in CAST))


CAST = (None, torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""Dtypes of floating arguments, None for that of the sample, in which results may be views of arguments."""


def _shares(call: Call, dtype: torch.dtype | None) -> bool:
    """True if a result shares memory with an argument or with another result."""
    given = tree_map(lambda value: _cast(value, dtype), call.values)
    with contextlib.suppress(Exception):  # a dtype that the operator does not take
        tensors = [
            leaf for leaf in tree_flatten((given, call.function(*given)))[0] if isinstance(leaf, Tensor)
        ]
        return len({each.untyped_storage()._cdata for each in tensors}) < len(tensors)
    return False


def _cast(value: Any, dtype: torch.dtype | None) -> Any:
    is_real = isinstance(value, Tensor) and value.is_floating_point()
    return value.detach().clone().to(dtype or value.dtype) if is_real else value


class Draws(TorchDispatchMode):
    """Watch for random operations."""

    drew = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.drew |= torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


def _with_gradient(value: Any) -> Any:
    return value.detach().requires_grad_() if isinstance(value, Tensor) and _floating(value) else value


def _floating(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


MEANT = ("ScaleGradGenVmapAutogradFunction", "ZeroGradientsGenVmapAutogradFunction")
"""Classes whose gradients are wrong on purpose, which are adopted as such."""


def as_it_is(info: Any, limits: argparse.Namespace) -> tuple[Any, list[tuple[Any, ...]]]:
    """A Function class, or an operator of torch.library, and its samples."""
    torch.manual_seed(limits.seed)
    function, make = info.op, opsmith.Make()
    samples = [
        make.call(each.input, *each.args, **each.kwargs) if each.kwargs else (each.input, *each.args)
        for each in info.sample_inputs("cpu", torch.float32)
    ]
    owner = getattr(function, "__self__", None)
    if info.name in MEANT:
        return opsmith.adopt(owner, f"opinfo::{info.name}", kind="surrogate", samples=samples), samples
    if isinstance(owner, type) and issubclass(owner, torch.autograd.Function):
        return owner, samples
    if hasattr(function, "__code__"):  # a lambda around the `apply` of a class
        named = [function.__globals__.get(name) for name in function.__code__.co_names]
        return next(each for each in named if isinstance(each, type)), samples
    return function, samples


def judged(info: Any, limits: argparse.Namespace, isolate: float | bool) -> dict[str, Any]:
    """Check one subject; `isolate` is that of `check`."""
    build = operator_of if limits.database == "op_db" else as_it_is
    start = time.perf_counter()
    row: dict[str, Any] = {"name": info.formatted_name, "verdict": "broken", "findings": []}
    try:
        subject, samples = build(info, limits)
        report = opsmith.check(
            subject,
            samples=samples,
            seed=limits.seed,
            effort=limits.effort,
            skip=limits.skip or None,
            isolate=isolate,
        )
    except (UnfitError, errors.OpsmithError) as error:
        row |= {"verdict": "unfit", "reason": str(error).splitlines()[0]}
    except Exception as error:
        row |= {"reason": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
    else:
        found = json.loads(report.to_json())
        row["findings"] = [failure for outcome in found["outcomes"] for failure in outcome["failures"]]
        row["verdict"] = next(
            (f"{each}s" for each in ("error", "warning", "limit") if _has(row["findings"], each)), "passed"
        )
        row["shown"] = str(report)
    return row | {"seconds": round(time.perf_counter() - start, 1)}


def _has(findings: Iterable[dict[str, Any]], severity: str) -> bool:
    return any(each["severity"] == severity for each in findings)


def in_child(info: Any, limits: argparse.Namespace, isolate: float | bool = False) -> dict[str, Any]:
    """Check one subject in a forked process with a time limit; again with each property apart if it dies."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_answer, args=(sender, info, limits, isolate))
    child.start()
    sender.close()
    row = {"name": info.formatted_name, "verdict": "broken", "findings": [], "seconds": limits.limit}
    try:
        if receiver.poll(limits.limit):
            return receiver.recv()
        return row | {"reason": f"it did not finish within {limits.limit:g} s"}
    except EOFError:
        child.join()
        if not isolate:
            return in_child(info, limits, isolate=limits.limit / 4)
        return row | {"reason": f"the process died: {_death(child.exitcode)}"}
    finally:
        if child.is_alive() and not receiver.poll(0):
            child.kill()
        child.join()


def _answer(sender: Connection, info: Any, limits: argparse.Namespace, isolate: float | bool) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sender.send(judged(info, limits, isolate))


def _death(status: int | None) -> str:
    return signal.Signals(-status).name if status is not None and status < 0 else f"status {status}"


def database(name: str) -> list[Any]:
    """The entries of a database of torch's tests."""
    try:
        module = importlib.import_module(DATABASES[name])
    except ModuleNotFoundError as error:
        raise SystemExit(
            f"opinfo: torch's tests need the package {error.name}: pip install {error.name}"
        ) from None
    return list(getattr(module, name))


def wanted(infos: Sequence[Any], limits: argparse.Namespace) -> list[Any]:
    """The entries that the options choose, in the database's order."""
    if limits.only:
        infos = [info for info in infos if {info.name, info.formatted_name} & {*limits.only}]
    elif not limits.all and limits.number < len(infos):
        chosen = {id(info) for info in random.Random(limits.seed).sample(list(infos), limits.number)}
        infos = [info for info in infos if id(info) in chosen]
    return list(infos)


def finished(path: Path | None, heading: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of an earlier run with the same options.

    Raises:
        SystemExit: If the file is of a run with others.
    """
    if path is None or not path.exists() or not path.stat().st_size:
        return []
    first, *rows = [json.loads(line) for line in path.read_text().splitlines()]
    if first != heading:
        raise SystemExit(f"opinfo: {path} is of a run with other options: {first}; it would be {heading}")
    return rows


def table(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Lines with the number of subjects by verdict, and each finding that is an error or a warning."""
    counted = Counter(row["verdict"] for row in rows)
    yield f"{len(rows)} subjects: " + ", ".join(f"{counted[each]} {each}" for each in VERDICTS)
    for verdict in VERDICTS[:3]:
        for row in (each for each in rows if each["verdict"] == verdict):
            yield f"\n{row['name']}: {row.get('reason') or verdict}"
            for each in (each for each in row["findings"] if each["severity"] != "limit"):
                subject = f" of `{each['input']}`" if each["input"] else ""
                root = f" (follows from {each['follows']})" if each["follows"] else ""
                yield f"  {each['severity']}: {each['property']}{subject}: {each['cause']}{root}"
                yield f"    {each['message'].splitlines()[0][:200]}"
    reasons = Counter(row["reason"] for row in rows if row["verdict"] == "unfit")
    yield "\nunfit, by reason:"
    for reason, count in reasons.most_common(12):
        yield f"  {count:4d} {reason[:120]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--database", default="op_db", choices=DATABASES)
    parser.add_argument("--only", nargs="*", help="names of entries")
    parser.add_argument("--number", type=int, default=40, help="so many entries, drawn by the seed")
    parser.add_argument("--all", action="store_true", help="all entries: some 40 minutes on two cores")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--effort", default="quick", choices=["quick", "default", "thorough"])
    parser.add_argument("--skip", nargs="*", help="properties to leave out")
    parser.add_argument("--samples", type=int, default=3, help="samples of each subject")
    parser.add_argument("--elements", type=int, default=450, help="most elements of a sample, in all tensors")
    parser.add_argument("--form", type=int, default=0, help="which form of samples, by how many have it")
    parser.add_argument("--limit", type=float, default=240.0, help="seconds for each subject")
    parser.add_argument("--json", type=Path, help="file to which finished subjects are appended")
    limits = parser.parse_args()
    torch.set_num_threads(1)  # a forked child must not wait for threads that it does not have
    infos = wanted(database(limits.database), limits)
    options = ("database", "seed", "effort", "skip", "samples", "elements", "form")
    heading = {"torch": torch.__version__, **{name: getattr(limits, name) for name in options}}
    rows = finished(limits.json, heading)
    done = {row["name"] for row in rows}
    if limits.json is not None and not rows:
        limits.json.write_text(json.dumps(heading) + "\n")
    load_compiler()  # once here, and not in each child
    for position, info in enumerate(infos):
        if info.formatted_name in done:
            continue
        row = in_child(info, limits)
        rows.append(row)
        print(
            f"{position + 1} of {len(infos)} {row['name']}: {row['verdict']} {row['seconds']} s",
            file=sys.stderr,
        )
        if limits.json is not None:
            with limits.json.open("a") as file:
                file.write(json.dumps(row) + "\n")
    print("\n".join(table([row for row in rows if row["name"] in {info.formatted_name for info in infos}])))


if __name__ == "__main__":
    main()
