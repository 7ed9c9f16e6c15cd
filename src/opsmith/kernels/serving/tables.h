// Tables of a library: kernels, and the operators that they compute.
#pragma once
#include "recipe.h"
#include "run.h"

namespace opsmith {

struct CudaOperator;  // see cuda_tables.h

// Layouts in which the reference returns contiguous results, as the kernels do here. Each takes in the one after it.
enum Accepted : int32_t { ANY_LAYOUT, NESTED_LAYOUT, CONTIGUOUS_LAYOUT };

struct ServedArgument {
  const char* name;
  int32_t type;  // one of ParameterType
  bool optional;
  bool written;
  int32_t accepted;  // one of Accepted
};

struct ServedOperator {
  const char* name_space;
  const char* name;
  const char* schema;  // in torch's language, with the name
  const char* digest;  // of what its author wrote
  void (*entry)(uint64_t* stack, uint64_t, uint64_t);              // called by the dispatcher
  void (*description_entry)(uint64_t* stack, uint64_t, uint64_t);  // the same, of the second operator
  const Exported* const* kernels;  // in the order in which they are tried
  const bool* copies_back;         // of each kernel, whether it may copy what it writes into a layout, and back
  int32_t kernel_count;
  const ServedArgument* arguments;
  int32_t argument_count;
  const int32_t* shown;  // indices of the results that callers get
  int32_t shown_count;
  int32_t result_count;
  const char* shapes;       // text of `shapes=`, for messages; may be empty
  const int64_t* sizing;    // the sizes of the results by it: see recipe.h; null if it does not tell them
  const char* returning;    // schema of the operator that returns its first argument, which this one writes; or null
  void (*returning_entry)(uint64_t* stack, uint64_t, uint64_t);
  const CudaOperator* cuda;  // its kernels for a GPU; null if the library has none
  void (*cuda_entry)(uint64_t* stack, uint64_t, uint64_t);
};

struct ServedLibrary {
  const ServedOperator* operators;
  int32_t count;
  uint32_t needs;  // instructions that the kernels were compiled to use: see processor.h
  const char* cuda_key;  // key of the dispatcher for GPUs
  // Computes a call on a GPU; null if the library has no kernels for one.
  void (*compute_cuda)(const ServedOperator& op, const Signed& signature, uint64_t* stack);
};

// Computes a call of an operator of the library.
void serve(int32_t index, uint64_t* stack);
// Computes a call of an operator of the library on a GPU.
void serve_cuda(int32_t index, uint64_t* stack);
// Computes a call of the second operator, which describes the first: see library.cpp.
void describe(int32_t index, uint64_t* stack);
// Computes a call of the operator that returns what `index` writes.
void serve_returning(int32_t index, uint64_t* stack);
}  // namespace opsmith

extern "C" {
extern const opsmith::ServedLibrary opsmith_served;
}
