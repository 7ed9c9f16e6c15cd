// What a packaged library holds: kernels, the operators that they compute, the nodes that call them.
#pragma once
#include "opsmith.h"

namespace opsmith {

struct NodeArgument {
  const char* name;
  int32_t form;      // one of Form
  bool optional;
  const char* bits;  // of numbers: the attribute that has them where single precision would change them
};

struct NodeOperator {
  const char* name;                 // `namespace::name`
  const Exported* const* kernels;   // in the order in which they are tried
  int32_t kernel_count;
  const NodeArgument* arguments;
  int32_t argument_count;
  const int32_t* places;  // for each result which output it is; -1 for one that no node shows
  int32_t result_count;
  const char* shapes;  // as `shapes=` has them, for messages; empty where it says none
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
  Told (*sizes)(const Value* values, Shape* shapes);  // asked where a kernel does not tell them; or null
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
