"""Each use of torch's private names: what it is for, and what happens where it does not work."""

from __future__ import annotations

from opsmith.torch_library.capabilities.capability import Capability

CAPABILITIES = {
    each.name: each
    for each in (
        Capability(
            name="dispatch",
            purpose="compute below autograd, see writes, replace an operator",
            instead=None,
            provides=(
                "below_autograd",
                "redispatch_below_autograd",
                "version",
                "operator_exists",
                "destroy",
            ),
        ),
        Capability(
            name="front_door",
            purpose="calls that go past the dispatcher where it has nothing to do",
            instead="every call goes through the dispatcher, and takes longer",
            provides=(
                "front_door_checks",
                "FRONT_DOOR_CONDITIONS",
                "answer_calls",
                "any_autocast",
                "direct_apply",
                "direct_backward",
                "direct_call",
                "nothing_active",
                "returns_new",
                "tensor_guard",
                "versions_source",
                "watched_source",
                "writes_nowhere",
            ),
        ),
        Capability(
            name="torch_func",
            purpose="transforms of `torch.func`, layer by layer",
            instead="`torch.autograd.Function` serves `grad`, `vjp`, and `vmap` by the reference; "
            "forward mode, autocast, `functionalize`, and `vmap` of an opaque operator or over nothing are "
            "refused",
            provides=(
                "Layer",
                "innermost_layer",
                "SingleLevelFunction",
                "single_level_nodes",
                "unwrap_dead",
                "over_examples",
                "reduce_to_dim",
                "transform_kernel",
                "is_gradient_batch",
            ),
        ),
        Capability(
            name="forward_mode",
            purpose="tangents at the level in force, in compiled code too",
            instead="`torch.autograd.forward_ad` serves eager code, and takes longer",
            provides=(
                "forward_mode_active",
                "forward_mode_allowed",
                "forward_mode_on",
                "primal_of",
                "outside_graph",
                "unpack_dual",
                "make_dual",
            ),
        ),
        Capability(
            name="autocast",
            purpose="autocast's dispatch keys, in a trace too",
            instead="`torch.autocast(..., enabled=False)` around the operator",
            provides=("autocast_key", "without_autocast", "serve_autocast_while_tracing"),
        ),
        Capability(
            name="inlining",
            purpose="compiled code that sees the reference in an operator's place, and fuses it",
            instead="the operator is opaque in compiled code, which runs it whole",
            provides=("FUNCTIONALIZATION", "exporting", "only_stand_ins"),
        ),
        Capability(
            name="compiled_code",
            purpose="an operator's sources in the keys of the caches of compiled code",
            instead="torch's caches on disk are turned off in a process that compiles an operator",
            provides=("mark_compiled_code", "compiler_imported"),
        ),
        Capability(
            name="sharding",
            purpose="operators on the shards of DTensors, where a trial proves that right",
            instead="an operator on DTensors is its reference on DTensors; an implicit replication that the "
            "caller has asked for is not seen",
            provides=("replicates_implicitly", "implicit_replication", "watching_shards"),
        ),
        Capability(
            name="fake_tensors",
            purpose="the check of fake kernels, devices included",
            instead="the check uses tensors on the device `meta`, and does not see a wrong device, nor a "
            "size that a fake kernel fixes",
            provides=("fake_mode", "symbolic_mode"),
        ),
        Capability(
            name="watching",
            purpose="the check's list of the operations of a reference that draw random numbers, and of "
            "those of a backward that take fewer digits than it is given",
            instead="the check finds undeclared randomness only where two runs differ, and no constant of "
            "float32 in a class's backward",
            provides=("tracing_imported", "watching"),
        ),
        Capability(
            name="registered",
            purpose="operators that others registered: their schemas, and what they have",
            instead="`opsmith.adopt` refuses operators of `torch.ops`",
            provides=(
                "MISSING",
                "Declared",
                "Signature",
                "overloads_of",
                "signature_of",
                "registers_kernel",
                "kernel_at",
                "registrations",
                "CustomParts",
                "custom_parts",
                "add_fake",
                "shards_itself",
            ),
        ),
        Capability(
            name="onnx_registry",
            purpose="one registry of translations for the model and the bodies of an export to ONNX",
            instead="torch makes it twice, and an export takes longer",
            provides=("onnx_translator",),
        ),
        Capability(
            name="recorded_graph",
            purpose="pictures of autograd's graph: forms of results, and what is saved, without unpacking it",
            instead="nodes are drawn without the forms of their results, what hooks have packed is unpacked, "
            "no output is told to be a view, nor what TorchScript takes by keyword",
            provides=(
                "forward_class",
                "result_forms",
                "saved_tensors",
                "overwritten",
                "view_base",
                "after_modules",
            ),
        ),
    )
}
"""By name; `instead` is None where opsmith cannot do without."""

PROVIDERS = {name: each for each in CAPABILITIES.values() for name in each.provides}
"""Which capability a name of this package belongs to."""
