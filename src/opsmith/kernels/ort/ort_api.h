// The part of ONNX Runtime's C interface that custom operators need: its wheel ships no headers.
//
// Source of the facts: `OrtApi`, `OrtCustomOp` and the enums of onnxruntime_c_api.h, in
// include/onnxruntime/core/session, as of ONNX Runtime 1.16 (ORT_API_VERSION 16). `OrtApi` is a table of
// functions to which releases append, and in which none ever moves; a release hands out the table of each
// version up to its own. Handles are opaque.
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

enum ErrorCode : int { FAIL = 1, INVALID_ARGUMENT = 2 };
enum Characteristic : int { REQUIRED = 0, OPTIONAL = 1 };

struct CustomOp;

// The functions that are used, by their index in the table.
class Api {
 public:
  explicit Api(const void* const* table) : table_(table) {}

  Status* create_status(ErrorCode code, const char* text) const {
    return at<Status* (*)(ErrorCode, const char*)>(0)(code, text);
  }
  Status* create_domain(const char* name, Domain** made) const {
    return at<Status* (*)(const char*, Domain**)>(26)(name, made);
  }
  Status* add_operator(Domain* domain, const CustomOp* op) const {
    return at<Status* (*)(Domain*, const CustomOp*)>(27)(domain, op);
  }
  Status* add_domain(SessionOptions* options, Domain* domain) const {
    return at<Status* (*)(SessionOptions*, Domain*)>(28)(options, domain);
  }
  Status* data(Value* value, void** found) const { return at<Status* (*)(Value*, void**)>(51)(value, found); }
  Status* element_type(const TensorInfo* info, int* found) const {
    return at<Status* (*)(const TensorInfo*, int*)>(60)(info, found);
  }
  Status* dim(const TensorInfo* info, size_t* found) const {
    return at<Status* (*)(const TensorInfo*, size_t*)>(61)(info, found);
  }
  Status* sizes(const TensorInfo* info, int64_t* found, size_t count) const {
    return at<Status* (*)(const TensorInfo*, int64_t*, size_t)>(62)(info, found, count);
  }
  Status* tensor_info(const Value* value, TensorInfo** found) const {
    return at<Status* (*)(const Value*, TensorInfo**)>(65)(value, found);
  }
  Status* attribute(const KernelInfo* info, const char* name, float* found) const {
    return at<Status* (*)(const KernelInfo*, const char*, float*)>(85)(info, name, found);
  }
  Status* attribute(const KernelInfo* info, const char* name, int64_t* found) const {
    return at<Status* (*)(const KernelInfo*, const char*, int64_t*)>(86)(info, name, found);
  }
  Status* attribute(const KernelInfo* info, const char* name, char* found, size_t* size) const {
    return at<Status* (*)(const KernelInfo*, const char*, char*, size_t*)>(87)(info, name, found, size);
  }
  Status* input_count(const Context* context, size_t* found) const {
    return at<Status* (*)(const Context*, size_t*)>(88)(context, found);
  }
  Status* output_count(const Context* context, size_t* found) const {
    return at<Status* (*)(const Context*, size_t*)>(89)(context, found);
  }
  Status* input(const Context* context, size_t place, const Value** found) const {
    return at<Status* (*)(const Context*, size_t, const Value**)>(90)(context, place, found);
  }
  Status* output(Context* context, size_t place, const int64_t* sizes, size_t dim, Value** found) const {
    using Output = Status* (*)(Context*, size_t, const int64_t*, size_t, Value**);
    return at<Output>(91)(context, place, sizes, dim, found);
  }
  void release(Status* status) const { at<void (*)(Status*)>(93)(status); }
  void release(TensorInfo* info) const { at<void (*)(TensorInfo*)>(99)(info); }
  Status* attribute(const KernelInfo* info, const char* name, float* found, size_t* size) const {
    return at<Status* (*)(const KernelInfo*, const char*, float*, size_t*)>(162)(info, name, found, size);
  }
  Status* attribute(const KernelInfo* info, const char* name, int64_t* found, size_t* size) const {
    return at<Status* (*)(const KernelInfo*, const char*, int64_t*, size_t*)>(163)(info, name, found, size);
  }

 private:
  template <class F>
  F at(size_t place) const {
    return reinterpret_cast<F>(const_cast<void*>(table_[place]));
  }
  const void* const* table_;
};

struct ApiBase {
  const void* const* (*get_api)(uint32_t version);
  const char* (*version)();
};

// Description of an operator, and the functions of its kernel: `OrtCustomOp` up to version 16.
struct CustomOp {
  uint32_t version = api_version;
  void* (*create)(const CustomOp*, const void* api, const KernelInfo*) = nullptr;  // see `create_kernel`
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
  Status* (*create_kernel)(const CustomOp*, const void* api, const KernelInfo*, void** kernel) = nullptr;
  Status* (*compute)(void* kernel, Context*) = nullptr;
};
}  // namespace ort
