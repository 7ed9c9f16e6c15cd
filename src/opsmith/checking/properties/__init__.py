"""Properties of a correct operator, each in a module of its own."""

from __future__ import annotations

from opsmith import errors
from opsmith.checking.properties.behaviour.backward_again import BACKWARD_AGAIN, SAVED_HOOKS
from opsmith.checking.properties.behaviour.determinism import DETERMINISM
from opsmith.checking.properties.behaviour.effects import EFFECTS
from opsmith.checking.properties.behaviour.layouts import LAYOUTS
from opsmith.checking.properties.behaviour.memory import MEMORY
from opsmith.checking.properties.behaviour.mutation import MUTATION
from opsmith.checking.properties.behaviour.randomness import RANDOMNESS
from opsmith.checking.properties.behaviour.serialization import SERIALIZATION
from opsmith.checking.properties.behaviour.state import STATE
from opsmith.checking.properties.kernels.on_cpu import on_cpu_property
from opsmith.checking.properties.kernels.resources import RESOURCES
from opsmith.checking.properties.kernels.sanitized import SANITIZED
from opsmith.checking.properties.numeric.forward import FORWARD
from opsmith.checking.properties.numeric.forward_mode import FORWARD_MODE
from opsmith.checking.properties.numeric.gradient import GRADIENT
from opsmith.checking.properties.numeric.linearity import LINEARITY
from opsmith.checking.properties.numeric.second_order import SECOND_ORDER
from opsmith.checking.properties.numeric.surrogate import SURROGATE
from opsmith.checking.properties.numeric.values import VALUES
from opsmith.checking.properties.torch.autocast import AUTOCAST
from opsmith.checking.properties.torch.compile import COMPILE, EXPORT
from opsmith.checking.properties.torch.fake import FAKE
from opsmith.checking.properties.torch.opcheck import OPCHECK
from opsmith.checking.properties.torch.vmap import BATCHED_GRADIENTS, BATCHING, VMAP
from opsmith.checking.property import Property
from opsmith.kernels.languages import OWN, Language, observe_languages, own_languages

__all__ = ["GROUPS", "PROPERTIES", "USUAL"]

PROPERTIES: dict[str, Property] = {
    known.name: known
    for known in (
        FORWARD,
        MUTATION,
        FAKE,
        LINEARITY,
        GRADIENT,
        SURROGATE,
        LAYOUTS,
        *filter(None, map(on_cpu_property, own_languages())),
        VALUES,
        FORWARD_MODE,
        SECOND_ORDER,
        BATCHING,
        VMAP,
        BATCHED_GRADIENTS,
        RANDOMNESS,
        DETERMINISM,
        EFFECTS,
        STATE,
        BACKWARD_AGAIN,
        SAVED_HOOKS,
        MEMORY,
        AUTOCAST,
        SERIALIZATION,
        COMPILE,
        EXPORT,
        OPCHECK,
        RESOURCES,
        SANITIZED,
    )
}
"""Every property by its name, in the order of reports."""

GROUPS = {"integration": tuple(name for name, each in PROPERTIES.items() if "integration" in each.traits)}
"""Names by which `only` and `skip` select several properties."""

USUAL = [name for name, known in PROPERTIES.items() if "on-request" not in known.traits]
"""Names of the properties that run by default."""


_of_languages = dict.fromkeys(OWN)


def _add(language: Language) -> None:
    """Add the property of a kernel language, which a package may register at any time."""
    known = on_cpu_property(language)
    if known is None:
        return
    if known.name not in PROPERTIES:
        USUAL.append(known.name)
    elif known.name not in _of_languages:
        raise errors.UsageError(
            f"the kernel language `{known.name}` has the name of a property of `check`",
            argument="key",
            expected="a key that is not the name of a property",
            got=f"`{known.name}`: {PROPERTIES[known.name].title}",
            hint="give the language another key",
        )
    _of_languages[known.name] = None
    PROPERTIES[known.name] = known


observe_languages(_add)
