// Tables of a library for torch's dispatcher: its operators, and the data for their registration.
#pragma once
#include "operators.h"

namespace opsmith {

using Entered = void (*)(uint64_t* stack, uint64_t, uint64_t);  // called by the dispatcher

// The kernels of an operator on one type of device.
struct ServedDevice {
  const char* key;  // of the dispatcher
  Entered entry;
  OperatorKernels kernels;
};

struct ServedOperator {
  Operator op;
  const char* schema;  // in torch's language, with the name
  const char* digest;  // of the author's sources
  Entered description_entry;  // of the second operator: see torch_library.cpp
  const ServedDevice* devices;
  int32_t device_count;
  const int32_t* shown;  // indices of the results that callers get
  int32_t shown_count;
  const char* returning;  // schema of the operator that returns its first argument, which this operator writes; or null
  Entered returning_entry;
};

struct ServedLibrary {
  const ServedOperator* operators;
  int32_t count;
  uint32_t needs;  // instructions that kernels for the CPU were compiled to use: see processor.h
};

// Computes a call of an operator of the library on one of its devices.
void serve(int32_t index, int32_t device, uint64_t* stack);
// Computes a call of the second operator, which describes the first.
void describe(int32_t index, uint64_t* stack);
// Computes a call of the operator that returns the argument that operator `index` writes.
void serve_returning(int32_t index, uint64_t* stack);
}  // namespace opsmith

extern "C" {
extern const opsmith::ServedLibrary opsmith_served;
extern const unsigned char opsmith_images[];  // of all kernels for GPUs, if there are any
}
