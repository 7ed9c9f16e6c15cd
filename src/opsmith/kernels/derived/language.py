"""The language of derived kernels: `op.kernel("cpu", derived=True)`, whose source is the reference."""

from __future__ import annotations

from opsmith import errors
from opsmith.kernels.derived.kernel import DerivedKernel
from opsmith.kernels.languages import Declaration, Language


class Derived(Language):
    """Kernels that Inductor compiles from the reference of an operator."""

    key, name, devices = "derived", "Inductor", ("cpu",)

    def kernel(self, declaration: Declaration) -> DerivedKernel:
        """Make a kernel; its forward and its backward are derived at the first call of each kind.

        Raises:
            UsageError: If nothing can be derived from the operator.
        """
        if declaration.source is not True:
            raise errors.UsageError(
                "`derived=` of a kernel has only one possible value",
                argument="derived",
                expected="`derived=True`",
                got=repr(declaration.source),
                hint="leave the call of `op.kernel` out for an operator without a derived kernel",
            )
        specification = declaration.operator.specification
        for unfit, reason, hint in (
            (
                specification.opaque,
                "it is opaque",
                "write a kernel, or declare a reference of torch operations",
            ),
            (
                bool(specification.schema.written),
                "it writes into its arguments",
                "declare an operator that returns new tensors, and derive its kernel",
            ),
            (specification.draws, "it draws random numbers", "leave the derived kernel out"),
        ):
            if unfit:
                raise specification.error(
                    errors.UsageError, f"no kernel can be derived: {reason}", argument="derived", hint=hint
                )
        return DerivedKernel(declaration)


LANGUAGE = Derived()
