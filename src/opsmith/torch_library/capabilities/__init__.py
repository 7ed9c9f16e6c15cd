"""Everything that opsmith uses torch's private names for: a capability each, which can be off.

A name is looked up here when it is first used: its capability is tested then, and from then on the name is an
ordinary one of this module, bound to what uses private names or to what does without. Nothing else in the
package touches torch's private names, so that another torch breaks here or nowhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from opsmith.torch_library.capabilities.asking import AUTOCAST_DEVICES as AUTOCAST_DEVICES
from opsmith.torch_library.capabilities.asking import recording as recording
from opsmith.torch_library.capabilities.asking import schema_fault as schema_fault
from opsmith.torch_library.capabilities.asking import shares_memory as shares_memory
from opsmith.torch_library.capabilities.capability import decide, means
from opsmith.torch_library.capabilities.table import CAPABILITIES, PROVIDERS

if TYPE_CHECKING:  # the types of all names; what they stand for is looked up below
    from opsmith.torch_library.capabilities.private.autocast import autocast_key as autocast_key
    from opsmith.torch_library.capabilities.private.autocast import (
        serve_autocast_while_tracing as serve_autocast_while_tracing,
    )
    from opsmith.torch_library.capabilities.private.autocast import without_autocast as without_autocast
    from opsmith.torch_library.capabilities.private.compiled_code import (
        compiler_imported as compiler_imported,
    )
    from opsmith.torch_library.capabilities.private.compiled_code import (
        mark_compiled_code as mark_compiled_code,
    )
    from opsmith.torch_library.capabilities.private.dispatch import below_autograd as below_autograd
    from opsmith.torch_library.capabilities.private.dispatch import destroy as destroy
    from opsmith.torch_library.capabilities.private.dispatch import operator_exists as operator_exists
    from opsmith.torch_library.capabilities.private.dispatch import (
        redispatch_below_autograd as redispatch_below_autograd,
    )
    from opsmith.torch_library.capabilities.private.dispatch import version as version
    from opsmith.torch_library.capabilities.private.fake_tensors import fake_mode as fake_mode
    from opsmith.torch_library.capabilities.private.fake_tensors import symbolic_mode as symbolic_mode
    from opsmith.torch_library.capabilities.private.forward_mode import (
        forward_mode_active as forward_mode_active,
    )
    from opsmith.torch_library.capabilities.private.forward_mode import (
        forward_mode_allowed as forward_mode_allowed,
    )
    from opsmith.torch_library.capabilities.private.forward_mode import forward_mode_on as forward_mode_on
    from opsmith.torch_library.capabilities.private.forward_mode import make_dual as make_dual
    from opsmith.torch_library.capabilities.private.forward_mode import outside_graph as outside_graph
    from opsmith.torch_library.capabilities.private.forward_mode import primal_of as primal_of
    from opsmith.torch_library.capabilities.private.forward_mode import unpack_dual as unpack_dual
    from opsmith.torch_library.capabilities.private.front_door import (
        FRONT_DOOR_CONDITIONS as FRONT_DOOR_CONDITIONS,
    )
    from opsmith.torch_library.capabilities.private.front_door import answer_calls as answer_calls
    from opsmith.torch_library.capabilities.private.front_door import any_autocast as any_autocast
    from opsmith.torch_library.capabilities.private.front_door import direct_apply as direct_apply
    from opsmith.torch_library.capabilities.private.front_door import direct_backward as direct_backward
    from opsmith.torch_library.capabilities.private.front_door import direct_call as direct_call
    from opsmith.torch_library.capabilities.private.front_door import front_door_checks as front_door_checks
    from opsmith.torch_library.capabilities.private.front_door import nothing_active as nothing_active
    from opsmith.torch_library.capabilities.private.front_door import returns_new as returns_new
    from opsmith.torch_library.capabilities.private.front_door import tensor_guard as tensor_guard
    from opsmith.torch_library.capabilities.private.front_door import versions_source as versions_source
    from opsmith.torch_library.capabilities.private.front_door import watched_source as watched_source
    from opsmith.torch_library.capabilities.private.front_door import writes_nowhere as writes_nowhere
    from opsmith.torch_library.capabilities.private.inlining import FUNCTIONALIZATION as FUNCTIONALIZATION
    from opsmith.torch_library.capabilities.private.inlining import exporting as exporting
    from opsmith.torch_library.capabilities.private.inlining import only_stand_ins as only_stand_ins
    from opsmith.torch_library.capabilities.private.onnx_registry import onnx_translator as onnx_translator
    from opsmith.torch_library.capabilities.private.recorded_graph import after_modules as after_modules
    from opsmith.torch_library.capabilities.private.recorded_graph import forward_class as forward_class
    from opsmith.torch_library.capabilities.private.recorded_graph import overwritten as overwritten
    from opsmith.torch_library.capabilities.private.recorded_graph import result_forms as result_forms
    from opsmith.torch_library.capabilities.private.recorded_graph import saved_tensors as saved_tensors
    from opsmith.torch_library.capabilities.private.recorded_graph import view_base as view_base
    from opsmith.torch_library.capabilities.private.registered import MISSING as MISSING
    from opsmith.torch_library.capabilities.private.registered import CustomParts as CustomParts
    from opsmith.torch_library.capabilities.private.registered import Declared as Declared
    from opsmith.torch_library.capabilities.private.registered import Signature as Signature
    from opsmith.torch_library.capabilities.private.registered import add_fake as add_fake
    from opsmith.torch_library.capabilities.private.registered import custom_parts as custom_parts
    from opsmith.torch_library.capabilities.private.registered import kernel_at as kernel_at
    from opsmith.torch_library.capabilities.private.registered import overloads_of as overloads_of
    from opsmith.torch_library.capabilities.private.registered import registers_kernel as registers_kernel
    from opsmith.torch_library.capabilities.private.registered import registrations as registrations
    from opsmith.torch_library.capabilities.private.registered import shards_itself as shards_itself
    from opsmith.torch_library.capabilities.private.registered import signature_of as signature_of
    from opsmith.torch_library.capabilities.private.sharding import (
        implicit_replication as implicit_replication,
    )
    from opsmith.torch_library.capabilities.private.sharding import (
        replicates_implicitly as replicates_implicitly,
    )
    from opsmith.torch_library.capabilities.private.sharding import watching_shards as watching_shards
    from opsmith.torch_library.capabilities.private.torch_func import Layer as Layer
    from opsmith.torch_library.capabilities.private.torch_func import (
        SingleLevelFunction as SingleLevelFunction,
    )
    from opsmith.torch_library.capabilities.private.torch_func import innermost_layer as innermost_layer
    from opsmith.torch_library.capabilities.private.torch_func import is_gradient_batch as is_gradient_batch
    from opsmith.torch_library.capabilities.private.torch_func import over_examples as over_examples
    from opsmith.torch_library.capabilities.private.torch_func import reduce_to_dim as reduce_to_dim
    from opsmith.torch_library.capabilities.private.torch_func import single_level_nodes as single_level_nodes
    from opsmith.torch_library.capabilities.private.torch_func import transform_kernel as transform_kernel
    from opsmith.torch_library.capabilities.private.torch_func import unwrap_dead as unwrap_dead
    from opsmith.torch_library.capabilities.private.watching import tracing_imported as tracing_imported
    from opsmith.torch_library.capabilities.private.watching import watching as watching


def on(name: str) -> bool:
    """Whether a capability is on; its self-test is run the first time."""
    return decide(CAPABILITIES[name]).on


def __getattr__(name: str) -> Any:
    capability = PROVIDERS.get(name)
    if capability is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(means(capability), name)
    return value
