"""What the suite expects of itself under OPSMITH_CONSERVATIVE=1, test function by test function.

An entry names a test function, or one case of it in brackets. A test in `REFUSED` passes, or ends in an
opsmith error that says which capability it needs. A test in `OTHERWISE` looks at what only the capability
does; without it the same answers come in another way. Every other test passes.
"""

from __future__ import annotations

REFUSED = {
    "torch_func": (
        "core/test_encoded_kinds.py::test_derivatives_and_transforms",
        "core/test_kinds_together.py::test_transforms",
        "core/test_result_forms.py::test_a_whole_batch_of_lists",
        "core/test_result_forms.py::test_an_opaque_operator",
        "core/test_result_forms.py::test_examples_with_different_numbers_of_results",
        "core/test_result_forms.py::test_tangent_formulas",
        "core/test_result_forms.py::test_transforms",
        "core/test_tangents.py::test_answers_and_constants",
        "core/test_tangents.py::test_formula_is_in_force",
        "core/test_tangents.py::test_forward_over_reverse_uses_it_for_the_operator_inside",
        "core/test_tangents.py::test_joint_formula_by_result_and_hidden_results",
        "core/test_tangents.py::test_lists_options_and_inputs_without_a_tangent",
        "core/test_tangents.py::test_results_without_a_formula_are_derived",
        "core/test_tangents.py::test_smaller_and_real_tangents_fit_their_result",
        "core/test_torch_func.py::test_answers_under_transforms",
        "core/test_torch_func.py::test_lists_under_transforms",
        "core/test_torch_func.py::test_nothing_is_left_behind_by_a_formula_that_raises",
        "core/test_torch_func.py::test_opaque_operator_under_transforms",
        "core/test_torch_func.py::test_several_results_under_transforms",
        "core/test_torch_func.py::test_surrogate_gradient_stays_in_force_under_transforms",
        "core/test_torch_func.py::test_surrogate_stand_in_stays_in_force_under_transforms",
        "core/test_torch_func.py::test_transform",
        "errors/test_differentiating.py::test_numbers_that_cannot_be_drawn_again",
        "errors/test_differentiating.py::test_opaque_random_operator_under_vmap",
        "errors/test_differentiating.py::test_transform_of_an_opaque_operator_without_a_gradient",
        "transforms/test_autocast_contexts.py::test_transforms",
        "transforms/test_batch_dimensions.py::test_dimensions",
        "transforms/test_batch_dimensions.py::test_structure",
        "transforms/test_batch_dimensions.py::test_the_gradient_of_a_random_operator_sees_what_was_drawn",
        "transforms/test_compiled_matrix.py::test_composition",
        "transforms/test_contexts.py::test_context",
        "transforms/test_in_force.py::test_compiled",
        "transforms/test_in_force.py::test_eager",
        "transforms/test_parameters_under_vmap.py::test_module",
        "transforms/test_threads.py::test_transforms_belong_to_a_thread",
        "transforms/test_transforms.py::test_nesting_of_three",
        "transforms/test_transforms.py::test_transform",
        "transforms/test_whole_batch.py::test_an_opaque_operator_runs_once_too",
        "transforms/test_whole_batch.py::test_hidden_results_come_with_their_batch",
        "transforms/test_whole_batch.py::test_one_call",
        "transforms/test_whole_batch.py::test_the_same_answer",
    ),
}
OTHERWISE = {
    "compiled_code": ("transforms/test_stale_code.py::test_the_same_sources_find_their_code",),
    "front_door": (
        "core/test_call_forms.py::test_each_form_is_met_once",
        "core/test_call_forms.py::test_more_forms_than_are_kept",
        "core/test_call_forms.py::test_one_tensor_twice",
        "core/test_call_forms.py::test_grad_mode_is_no_part_of_a_form",
        "core/test_call_forms.py::test_kernels_are_chosen_by_form",
        "core/test_call_forms.py::test_what_is_captured_out_of_sight",
    ),
    "fake_tensors": (
        "checking/test_mutants.py::test_a_wrong_operator_is_rejected[fake_device]",
        "checking/test_mutants.py::test_a_wrong_operator_is_rejected[reference_looks_at_numbers]",
    ),
    "watching": ("checking/test_mutants.py::test_a_wrong_operator_is_rejected[undeclared_randomness]",),
    "sharding": ("distribution/test_placements.py::test_a_kernel_runs_on_shards_where_that_is_right",),
    "torch_func": (
        "core/test_encoded_kinds.py::test_derivatives_and_transforms",
        "core/test_kinds_together.py::test_transforms",
        "core/test_result_forms.py::test_a_whole_batch_of_lists",
        "core/test_result_forms.py::test_an_opaque_operator",
        "core/test_result_forms.py::test_examples_with_different_numbers_of_results",
        "core/test_result_forms.py::test_tangent_formulas",
        "core/test_result_forms.py::test_transforms",
        "checking/test_mutants.py::test_a_wrong_operator_is_rejected[kernel_mixes_rows]",
        "errors/test_shape_messages.py::test_batch_dimension_lost",
        "errors/test_shape_messages.py::test_not_elementwise_after_all",
        "transforms/test_whole_batch.py::test_one_call",
    ),
    "inlining": (
        "transforms/test_in_force.py::test_fused_into_one_kernel_with_what_stands_around_it",
        "transforms/test_in_force.py::test_inline_is_as_the_author_says",
    ),
}
