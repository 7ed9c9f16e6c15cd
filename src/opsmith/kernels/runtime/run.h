// A call by a plan: copies of its arguments, memory for its results, the kernel. The source of memory is a parameter.
#pragma once
#include "plan.h"

namespace opsmith {

// Returns the view of a copied tensor, which may be in a list.
inline RawTensor& view_of(const Copied& copied, const Signed& signature, CallValues& arguments) {
  RawTensor* found = nullptr;
  every(signature, arguments, [&](const RawTensor& raw, size_t tensor, size_t) {
    if (tensor == size_t(copied.tensor)) found = const_cast<RawTensor*>(&raw);
    return found == nullptr;
  });
  return *found;
}

// Runs a kernel by a plan. `Memory` has four functions:
// - `copied` returns memory with a copy of a tensor, in the strides of the plan;
// - `result` returns memory for the next result, in the strides in which the kernel writes it;
// - `copy_back` copies the copy at an index back;
// - `lay_out` copies the result at an index into its own strides.
//
// `counts` is called with the index of each argument that is copied into another layout; the index after the last
// argument means the results. `run` computes the results, which are the values after the arguments.
template <class Memory, class Counts, class Run>
void run_plan_in(Memory& memory, const Signed& signature, const Plan& plan, CallValues& arguments, Counts counts,
                 Run run) {
  // An argument with several copies in one call, such as a list, counts once.
  int64_t counted = -1;
  for (const Copied& copied : plan.copied) {
    RawTensor& raw = view_of(copied, signature, arguments);
    raw.data = memory.copied(copied, raw);
    raw.strides = copied.strides.data();
    if (copied.argument != counted) counts(size_t(copied.argument));
    counted = copied.argument;
  }
  for (const Result& result : plan.results) {
    const int64_t* strides = (result.written.empty() ? result.strides : result.written).data();
    Value value;
    value.given = true;
    value.tensor = {memory.result(result, strides), result.sizes.data(), strides, int64_t(result.sizes.size())};
    arguments.values.push(value);
  }
  run();
  for (size_t at = 0; at < plan.copied.size(); at++)
    if (plan.copied[at].back) memory.copy_back(plan.copied[at], at);
  for (size_t at = 0; at < plan.results.size(); at++) {
    if (plan.results[at].written.empty()) continue;
    memory.lay_out(plan.results[at], at);
    counts(signature.size());
  }
}

// Runs an instance. `threw` is called with the text of the kernel's exception, and throws.
template <class Threw>
void run_candidate(const Candidate& candidate, const CallValues& arguments, Threw threw) {
  char error[1000];
  if (candidate.run(arguments.values.data(), error, sizeof error)) threw(error);
}
}  // namespace opsmith
