"""Source for `shapes=`: whether the sizes of tensors whose ranks are right agree."""

from __future__ import annotations

from opsmith.core.shapes import ANY
from opsmith.core.specification import Specification


def sizes_agree(specification: Specification) -> str:
    """A condition: sizes that the shapes call the same are the same; empty where nothing is to be asked."""
    shapes = specification.shapes
    if shapes is None:
        return ""
    everything = f"_op_in_shape(({', '.join(specification.schema.names)}, ))"
    if sum(dims.leading for dims in shapes.arguments.values()) > 1:
        return everything
    optional = {each.name for each in specification.schema.arguments if each.kind.optional}
    if shapes.integers & optional:
        return everything  # one that is None is no size
    first: dict[str, str] = {name: name for name in shapes.integers}
    conditions: list[str] = []
    for name in sorted(shapes.arguments, key=lambda name: name in optional):
        dims = shapes.arguments[name]
        agree: list[str] = []
        for place, size in enumerate(dims.sizes):
            found = f"{name}.size({place - len(dims.sizes)})"
            if size == ANY:
                continue
            if size.isdigit():
                agree.append(f"{found} == {size}")
            elif not size.isidentifier() or (size not in first and name in optional):
                return everything  # an expression, or a letter that only an argument that may be None has
            elif size in first:
                agree.append(f"{found} == {first[size]}")
            else:
                first[size] = found
        if agree and name in optional:
            conditions.append(f"({name} is None or {' and '.join(agree)})")
        else:
            conditions += agree
    return " and ".join(conditions)
