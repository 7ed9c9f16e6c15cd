"""Source for what is asked of every result: a new dense tensor, made without writing into an input."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from opsmith.core.specification import Specification
from opsmith.torch_library import capabilities
from opsmith.torch_library.unwritten import always_new, never_writes

CONTRACT_NAMES: dict[str, Any] = {
    "_op_Tensor": Tensor,
    "_op_type": type,
    "_op_strided": torch.strided,
}
"""What the source below names."""


class ContractSource:
    """What an operator's kernels are held to, as conditions on `_op_result` and the tensors given.

    Args:
        specification: The operator.
    """

    def __init__(self, specification: Specification) -> None:
        kernels = (specification.reference, *(kernel.function for kernel in specification.kernels))
        self._tensors = [each for each in specification.schema.arguments if each.kind.is_tensor]
        self.may_write = not all(never_writes(kernel) for kernel in kernels)
        self._may_alias = not all(always_new(kernel) for kernel in kernels)

    def before(self) -> str:
        """What is to be known before a kernel runs that may write: how often tensors were written to."""
        return self._versions()

    def held(self) -> str:
        """A condition: the contract is kept, at first sight."""
        return self.fresh() + (f" and _op_before == {self._versions()}" if self.may_write else "")

    def fresh(self) -> str:
        """A condition: the result is a dense tensor, no part of one, and begins where no input does.

        Not every alias says that it is a view: a tensor that was detached does not, nor do those of inference
        mode. But a part of a tensor does not begin where its storage does.
        """
        if not self._may_alias:
            return "_op_type(_op_result) is _op_Tensor"
        begins = "".join(
            f"-1 if {each.name} is None else {each.name}.data_ptr(), "
            if each.kind.optional
            else f"{each.name}.data_ptr(), "
            for each in self._tensors
        )
        plain = "_op_type(_op_result) is _op_Tensor and _op_result.layout is _op_strided"
        return (
            f"{plain} and not _op_result.is_nested and _op_result.storage_offset() == 0"
            f" and _op_result.data_ptr() not in ({begins})"
        )

    def _versions(self) -> str:
        return capabilities.versions_source([each.name for each in self._tensors])
