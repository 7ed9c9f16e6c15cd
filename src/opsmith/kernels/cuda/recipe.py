"""Recipe of a CUDA kernel's calls: programs that compute its scratch buffers and launches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from opsmith.core.expression import Expression
from opsmith.kernels.common.parameters import cpp_arguments
from opsmith.kernels.cuda.launch import LaunchRule, LaunchRules
from opsmith.kernels.cuda.plan import CudaPlan
from opsmith.kernels.runtime.recipe import (
    NotEncodedError,
    Program,
    Recipe,
    SizedLaunch,
    ValueLeaves,
    constant,
    contiguous_recipe,
    program,
)

if TYPE_CHECKING:
    from opsmith.kernels.cuda.kernel import CudaKernel


class RulePrograms:
    """Programs of a kernel's rules.

    Args:
        types: Type of each argument by its name; see `PARAMETER_TYPES`.
        made: Names of the results and the scratch buffers.
    """

    def __init__(self, types: Mapping[str, str], made: Iterable[str] = ()) -> None:
        self._leaves = ValueLeaves({**types, **dict.fromkeys(made, "Tensor")})

    def programs(self, rule: LaunchRule) -> tuple[Program, ...]:
        """Return a program for each part of a rule.

        Raises:
            NotEncodedError: If only Python can compute a part.
        """
        try:
            return tuple(map(self._program, rule.parts))
        except NotEncodedError as error:
            error.rule = f"`{rule.name}`"
            raise

    def launch(
        self,
        rules: LaunchRules,
        constants: Iterable[tuple[str, int]],
        most: tuple[int, int],
    ) -> SizedLaunch:
        """Return the parts of a launch that depend on the call.

        Args:
            rules: Rules of the launch.
            constants: Numbers of the launched template, by name.
            most: Maximum threads per block, and maximum bytes of dynamic shared memory.

        Raises:
            NotEncodedError: If only Python can compute a part.
        """
        return SizedLaunch(
            tuple((number, self.programs(rules.constants[name])[0]) for name, number in constants),
            self._three(rules.grid),
            self._three(rules.block),
            self.programs(rules.shared)[0],
            *most,
        )

    def _three(self, rule: LaunchRule) -> tuple[Program, Program, Program]:
        first, second, third = (*self.programs(rule), constant(1), constant(1))[:3]
        return first, second, third

    def _program(self, part: Any) -> Program:
        if isinstance(part, Expression):
            return program(part.tree, self._leaves)
        if isinstance(part, int):
            return constant(part)
        raise NotEncodedError(
            "is a function in Python: write it as an expression, such as `ceil(result.numel / 256)`"
        )


def launch_recipe(
    kernel: CudaKernel,
    call: CudaPlan,
    values: Sequence[Any],
    most: Sequence[tuple[int, int]],
) -> Recipe | None:
    """Return the recipe for all calls of the same kind as one call; None if Python must plan them.

    Args:
        kernel: The kernel.
        call: Plan of the call.
        values: Argument values of the call.
        most: For each launch, the maximum threads per block and bytes of dynamic shared memory.
    """
    rules, specification = kernel.rules, kernel.operator.specification
    schema = specification.schema
    views = [view for launch in call.launches for view in launch.views]
    plain = not call.copied and all(each.layout != "channels-last" for each in views)
    if not plain or len(call.launches) != len(rules.launches):
        return None
    recipe = contiguous_recipe(specification, values, [each.layout for each in call.results])
    if recipe is None or any(rule.depends_on_call for rule in rules.initial.values()):
        return None
    types = {name: each.type for name, each in zip(schema.names, cpp_arguments(kernel), strict=True)}
    made = RulePrograms(types, (each.name for each in (*call.results, *call.scratch)))
    try:
        scratch = tuple(made.programs(each.sizes) for each in rules.scratch)
        launches = tuple(
            made.launch(each, known.instance.constants, limits)
            for each, known, limits in zip(rules.launches, call.launches, most, strict=True)
        )
    except NotEncodedError:
        return None
    return replace(recipe, scratch=scratch, launches=launches)
