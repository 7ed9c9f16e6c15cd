// Tables of a library of custom operators: the nodes that call its operators.
#pragma once
#include "operators.h"

namespace opsmith {

// One node type with one choice of element types.
struct NodeType {
  const char* domain;
  const char* op_type;
  const Operator* op;
  OperatorKernels kernels;
  const int32_t* output_indices;  // for each result, the node's output for it; -1 for a hidden result
  const int32_t* inputs;          // ONNX's numbers of element types
  const bool* optional;           // of inputs
  int32_t input_count;
  const int32_t* outputs;
  int32_t output_count;
};

struct NodeLibrary {
  const NodeType* types;
  int32_t count;
  uint32_t needs;    // instructions that the kernels were compiled to use: see processor.h
  const char* bits;  // suffix of attributes with the bits of numbers that single precision cannot represent
};
}  // namespace opsmith

extern "C" {
extern const opsmith::NodeLibrary opsmith_nodes;
}
