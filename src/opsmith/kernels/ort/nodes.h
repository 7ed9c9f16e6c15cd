// Tables of a library: kernels, the operators that they compute, the nodes that call them.
#pragma once
#include "recipe.h"

namespace opsmith {

// Division that rounds down, as in Python. Sets `bad` on a division by zero.
inline int64_t floor_divided(int64_t dividend, int64_t divisor, bool& bad) {
  if (divisor == 0) {
    bad = true;
    return 0;
  }
  return dividend / divisor - (dividend % divisor != 0 && (dividend < 0) != (divisor < 0));
}

struct NodeArgument {
  const char* name;
  int32_t type;      // one of ParameterType
  bool optional;
  const char* bits;  // attribute with the bits of floats that single precision cannot represent
};

struct NodeOperator {
  const char* name;                 // `namespace::name`
  const Exported* const* kernels;   // in the order in which they are tried
  int32_t kernel_count;
  const NodeArgument* arguments;
  int32_t argument_count;
  const int32_t* output_indices;  // for each result its output of the node; -1 for a hidden result
  int32_t result_count;
  const char* shapes;  // text of `shapes=` for messages; may be empty
  const int64_t* sizing;  // the sizes of the results by it: see recipe.h; null if it does not tell them
};

// One node type with one choice of element types.
struct NodeType {
  const char* domain;
  const char* op_type;
  const NodeOperator* op;
  const int32_t* inputs;    // ONNX's numbers of element types
  const bool* optional;     // of inputs
  int32_t input_count;
  const int32_t* outputs;
  int32_t output_count;
  SizesStatus (*sizes)(const Value* values, Shape* shapes);  // used where the kernel computes no sizes; may be null
};

struct NodeLibrary {
  const NodeType* types;
  int32_t count;
  uint32_t needs;  // instructions that the kernels were compiled to use: see processor.h
};
}  // namespace opsmith

extern "C" {
extern const opsmith::NodeLibrary opsmith_nodes;
}
