"""Child process of a tool for agents: it runs a check, or explains or emulates a call, and prints JSON."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

from opsmith import errors
from opsmith.cli.app import app
from opsmith.cli.output import answering
from opsmith.core.call_arguments import CallArguments
from opsmith.core.forked_child import end_with_parent
from opsmith.core.functional_form import on_copies
from opsmith.core.location import shown_line, user_line_of_traceback
from opsmith.core.operator import Operator
from opsmith.core.samples import sample_calls
from opsmith.targets import Target


def main() -> None:
    """Run the task that the arguments name: `check ...`, `explain TARGET SAMPLE`, `emulate ... ORDER`."""
    if sys.argv[1] == "check":
        app(prog_name="opsmith")  # a check may end the process
    task, text, at, *more = sys.argv[1:]
    with answering(as_json=True) as output:
        try:
            operator = _operator(text)
            answer = _TASKS[task](operator, _sample(operator, task, int(at)), *more)
        except errors.OpsmithError:
            raise
        except Exception as error:
            place, code = shown_line(user_line_of_traceback(traceback.format_exc()))
            raise errors.ModuleImportError(
                f"`{text}` raises {type(error).__name__}: {error}",
                got=code or None,
                where=place or None,
                hint="correct the line; `opsmith check` on the file says more",
            ) from error
        output.write_json(answer)


def _explain(operator: Operator[..., Any], call: CallArguments) -> dict[str, Any]:
    return {"explanation": str(operator.explain(*call.args, **call.kwargs))}


def _emulate(operator: Operator[..., Any], call: CallArguments, order: str) -> dict[str, Any]:
    from opsmith.kernels.cuda.emulation.call import emulate

    schema = operator.specification.schema
    right = repr(on_copies(operator.reference, schema)(*call.args, **call.kwargs))
    emulated = on_copies(partial(emulate, operator, order=order), schema, operator.reference)
    return {"results": repr(emulated(*call.args, **call.kwargs)), "reference": right}


_TASKS: dict[str, Callable[..., dict[str, Any]]] = {"explain": _explain, "emulate": _emulate}
_DONE = {"explain": "explained", "emulate": "emulated"}


def _operator(text: str) -> Operator[..., Any]:
    found = Target.of(text).operators()
    if len(found) > 1:
        raise errors.UsageError(
            f"`{text}` has {len(found)} operators",
            expected=f"one of {', '.join(f'`{each.name}`' for each in found)}",
            hint=f"name it: `{text}:{found[0].specification.short_name}`",
        )
    return found[0]


def _sample(operator: Operator[..., Any], task: str, at: int) -> CallArguments:
    found = sample_calls(operator.specification, _DONE[task])
    if at not in range(len(found)):
        raise errors.UsageError(
            f"`{operator.name}` has {len(found)} samples, but no sample {at}",
            expected=f"0 to {len(found) - 1}",
            hint="the first sample is number 0",
        )
    return found[at]


if __name__ == "__main__":
    end_with_parent(int(sys.argv.pop(1)))
    main()
