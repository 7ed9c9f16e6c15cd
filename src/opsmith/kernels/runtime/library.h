// Tables of a library for torch's dispatcher: its operators, and what they are registered by.
#pragma once
#include "operators.h"
#include "torch_memory.h"

namespace opsmith {

struct CudaOperator;  // see cuda_tables.h

using Entered = void (*)(uint64_t* stack, uint64_t, uint64_t);  // called by the dispatcher

struct ServedOperator {
  Operator op;
  const char* schema;  // in torch's language, with the name
  const char* digest;  // of what its author wrote
  Entered entry;
  Entered description_entry;  // of the second operator: see library.cpp
  OperatorKernels kernels;
  const int32_t* shown;  // indices of the results that callers get
  int32_t shown_count;
  const char* returning;  // schema of the operator that returns its first argument, which this one writes; or null
  Entered returning_entry;
  const CudaOperator* cuda;  // its kernels for a GPU; null if the library has none
  Entered cuda_entry;
};

struct ServedLibrary {
  const ServedOperator* operators;
  int32_t count;
  uint32_t needs;  // instructions that the kernels were compiled to use: see processor.h
  const char* cuda_key;  // key of the dispatcher for GPUs
  // Computes a call on a GPU; null if the library has no kernels for one.
  void (*compute_cuda)(const ServedOperator& op, const Signed& signature, Arguments& arguments, uint64_t* stack);
};

inline void hand_over(const ServedOperator& served, Made& results, uint64_t* stack) {
  for (int32_t at = 0; at < served.shown_count; at++) stack[at] = results.hand_over(size_t(served.shown[at]));
}

// Computes a call of an operator of the library.
void serve(int32_t index, uint64_t* stack);
// Computes a call of an operator of the library on a GPU.
void serve_cuda(int32_t index, uint64_t* stack);
// Computes a call of the second operator, which describes the first.
void describe(int32_t index, uint64_t* stack);
// Computes a call of the operator that returns what `index` writes.
void serve_returning(int32_t index, uint64_t* stack);
}  // namespace opsmith

extern "C" {
extern const opsmith::ServedLibrary opsmith_served;
}
