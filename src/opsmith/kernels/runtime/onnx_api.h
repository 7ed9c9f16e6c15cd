// The part of ONNX Runtime's C interface that custom operators need, since its wheel ships no headers.
//
// Source of the facts: `OrtApi`, `OrtCustomOp` and the enums of onnxruntime_c_api.h, in
// include/onnxruntime/core/session, in ONNX Runtime 1.16 (ORT_API_VERSION 16). `OrtApi` is a table of functions.
// Releases append functions, and never move one. A release provides the table of each version up to its own.
// Handles are opaque.
#pragma once
#include <cstddef>
#include <cstdint>

namespace ort {
constexpr uint32_t api_version = 16;

struct Status;
struct Value;
struct TensorInfo;
struct KernelInfo;
struct Context;
struct Domain;
struct SessionOptions;

enum ErrorCode : int { FAIL = 1 };
enum Characteristic : int { REQUIRED = 0, OPTIONAL = 1 };

struct CustomOp;

// The functions that we use, at their places in the table.
struct Api {
  Status* (*create_status)(ErrorCode code, const char* text);
  void* from_1[25];
  Status* (*create_domain)(const char* name, Domain** made);
  Status* (*add_operator)(Domain*, const CustomOp*);
  Status* (*add_domain)(SessionOptions*, Domain*);
  void* from_29[22];
  Status* (*data)(Value*, void** found);
  void* from_52[8];
  Status* (*element_type)(const TensorInfo*, int* found);
  Status* (*dim)(const TensorInfo*, size_t* found);
  Status* (*sizes)(const TensorInfo*, int64_t* found, size_t dim);
  void* from_63[2];
  Status* (*tensor_info)(const Value*, TensorInfo** found);
  void* from_66[19];
  Status* (*number)(const KernelInfo*, const char* name, float* found);
  Status* (*integer)(const KernelInfo*, const char* name, int64_t* found);
  Status* (*text)(const KernelInfo*, const char* name, char* found, size_t* size);
  Status* (*input_count)(const Context*, size_t* found);
  Status* (*output_count)(const Context*, size_t* found);
  Status* (*input)(const Context*, size_t place, const Value** found);
  Status* (*output)(Context*, size_t place, const int64_t* sizes, size_t dim, Value** found);
  void* from_92;
  void (*release_status)(Status*);
  void* from_94[5];
  void (*release_info)(TensorInfo*);
  void* from_100[62];
  Status* (*numbers)(const KernelInfo*, const char* name, float* found, size_t* size);
  Status* (*integers)(const KernelInfo*, const char* name, int64_t* found, size_t* size);
};
static_assert(offsetof(Api, integers) == 163 * sizeof(void*), "the places are those of the table");

struct ApiBase {
  const Api* (*get_api)(uint32_t version);
  const char* (*version)();
};

// Description of an operator, and the functions of its kernel: the part of `OrtCustomOp` up to version 16.
struct CustomOp {
  uint32_t version = api_version;
  void* (*create)(const CustomOp*, const Api*, const KernelInfo*) = nullptr;  // see `create_kernel`
  const char* (*name)(const CustomOp*) = nullptr;
  const char* (*provider)(const CustomOp*) = nullptr;
  int (*input_type)(const CustomOp*, size_t) = nullptr;
  size_t (*input_count)(const CustomOp*) = nullptr;
  int (*output_type)(const CustomOp*, size_t) = nullptr;
  size_t (*output_count)(const CustomOp*) = nullptr;
  void (*compute_unchecked)(void* kernel, Context*) = nullptr;  // see `compute`
  void (*destroy)(void* kernel) = nullptr;
  Characteristic (*input_characteristic)(const CustomOp*, size_t) = nullptr;
  Characteristic (*output_characteristic)(const CustomOp*, size_t) = nullptr;
  int (*input_memory)(const CustomOp*, size_t) = nullptr;
  int (*variadic_input_least)(const CustomOp*) = nullptr;
  int (*variadic_input_alike)(const CustomOp*) = nullptr;
  int (*variadic_output_least)(const CustomOp*) = nullptr;
  int (*variadic_output_alike)(const CustomOp*) = nullptr;
  Status* (*create_kernel)(const CustomOp*, const Api*, const KernelInfo*, void** kernel) = nullptr;
  Status* (*compute)(void* kernel, Context*) = nullptr;
};
}  // namespace ort
