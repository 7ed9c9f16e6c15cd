// A call by a plan: copies of its arguments, memory for its results, the kernel, and what it may write into.
//
// Of torch it uses the stable C functions alone, and nothing of Python: the library between Python and all kernels
// and the libraries that serve without Python are made of it.
#pragma once
#include <atomic>
#include <cmath>

#include "plan.h"
#include "torch_stack.h"

namespace opsmith {

class WithoutGrad {
 public:
  WithoutGrad() : before_(aoti_torch_grad_mode_is_enabled()) { aoti_torch_grad_mode_set_enabled(false); }
  ~WithoutGrad() { aoti_torch_grad_mode_set_enabled(before_); }

 private:
  bool before_;
};

// True if new memory is filled with a pattern: see `fill_new_memory`.
inline std::atomic<int32_t> fills_memory{0};

inline void* memory(TensorHandle tensor) {
  void* data;
  must(aoti_torch_get_data_ptr(tensor, &data), "aoti_torch_get_data_ptr");
  return data;
}

inline void fill(TensorHandle tensor, double number) {
  WithoutGrad guard;
  must(aoti_torch_aten_fill__Scalar(tensor, number), "aoti_torch_aten_fill__Scalar");
}

// Fills new memory of the CPU with all bits set, which are nan in every floating dtype; a bool has but one.
inline void fill_bits(void* data, int32_t dtype, int64_t dim, const int64_t* sizes, const int64_t* strides) {
  if (size_t bytes = extent(dtype, dim, sizes, strides))
    std::memset(data, dtype == dtype_of<bool>::value ? 1 : 0xff, bytes);
}

// Tensors that were made for a call; those that are not handed on are let go of.
struct Made : Inline<TensorHandle, 8> {
  explicit Made(Device device = {}) : device_(device) {}
  ~Made() {
    for (size_t at = 0; at < size(); at++)
      if ((*this)[at] != nullptr) aoti_torch_delete_tensor_object((*this)[at]);
  }

  TensorHandle empty(int32_t dtype, int64_t dim, const int64_t* sizes, const int64_t* strides) {
    TensorHandle made;
    const Status status = aoti_torch_empty_strided(dim, sizes, strides, dtype, device_.type, device_.index, &made);
    must(status, "aoti_torch_empty_strided");
    push(made);
    if (fills_memory && device_.type == 0) fill_bits(memory(made), dtype, dim, sizes, strides);
    else if (fills_memory) fill(made, is_floating(dtype) ? NAN : dtype == dtype_of<bool>::value ? 1 : -1);
    return made;
  }

  // Gives tensors away, in order.
  void hand_over(uint64_t* stack) {
    for (size_t at = 0; at < size(); at++) stack[at] = hand_over(at);
  }
  uint64_t hand_over(size_t at) {
    TensorHandle tensor = (*this)[at];
    (*this)[at] = nullptr;
    return reinterpret_cast<uint64_t>(tensor);
  }
  Device device() const { return device_; }

 private:
  Device device_;
};

inline TensorHandle copy(Made& made, TensorHandle from, int32_t dtype, int64_t dim, const int64_t* sizes,
                  const int64_t* strides) {
  TensorHandle result = made.empty(dtype, dim, sizes, strides);
  WithoutGrad guard;
  must(aoti_torch_copy_(result, from, 0), "aoti_torch_copy_");
  return result;
}

// Copies a tensor into another layout, and makes its view one of the copy.
inline void lay_out(const Signed& signature, const Copied& copied, Arguments& arguments, Made& made) {
  Value& value = arguments.values[size_t(copied.argument)];
  RawTensor* raw = &value.tensor;
  if (signature[size_t(copied.argument)].type == TENSORS) {
    int64_t before = 0;  // tensors of the arguments to the left
    for (int64_t at = 0; at < copied.argument; at++) {
      const Value& other = arguments.values[size_t(at)];
      int32_t type = signature[size_t(at)].type;
      before += !other.given ? 0 : type == TENSORS ? other.list.size : type == TENSOR;
    }
    raw = const_cast<RawTensor*>(static_cast<const RawTensor*>(value.list.data)) + (copied.tensor - before);
  }
  TensorHandle from = arguments.tensors[size_t(copied.tensor)];
  int32_t dtype;
  must(aoti_torch_get_dtype(from, &dtype), "aoti_torch_get_dtype");
  raw->data = memory(copy(made, from, dtype, raw->dim, raw->sizes, copied.strides.data()));
  raw->strides = copied.strides.data();
}

// Runs a kernel by a plan, and returns the results, in order.
//
// `counts` is called with the index of each argument that is copied into another layout; the index after the last
// argument stands for the results. `run` computes the results, which are the values behind the arguments.
template <class Counts, class Run>
void run_plan(const Signed& signature, const Plan& plan, Arguments& arguments, Made& results, Counts counts, Run run) {
  Made made(results.device());
  // An argument that is copied twice in one call, as a list may be, counts once.
  int64_t counted = -1;
  for (const Copied& copied : plan.copied) {
    lay_out(signature, copied, arguments, made);
    if (copied.argument != counted) counts(size_t(copied.argument));
    counted = copied.argument;
  }
  for (const Result& result : plan.results) {
    const int64_t dim = int64_t(result.sizes.size());
    const int64_t* strides = (result.written.empty() ? result.strides : result.written).data();
    TensorHandle tensor = results.empty(result.dtype, dim, result.sizes.data(), strides);
    Value value;
    value.given = true;
    value.tensor = {memory(tensor), result.sizes.data(), strides, dim};
    arguments.values.push(value);
  }
  run();
  for (size_t at = 0; at < plan.copied.size(); at++) {
    WithoutGrad guard;
    if (plan.copied[at].back)
      must(aoti_torch_copy_(arguments.tensors[size_t(plan.copied[at].tensor)], made[at], 0), "aoti_torch_copy_");
  }
  for (size_t at = 0; at < plan.results.size(); at++) {
    const Result& result = plan.results[at];
    if (!result.written.empty()) {
      TensorHandle written = results[at];
      made.push(written);
      results[at] = nullptr;
      Made one(results.device());
      copy(one, written, result.dtype, int64_t(result.sizes.size()), result.sizes.data(), result.strides.data());
      std::swap(results[at], one[0]);
      counts(signature.size());
    }
  }
}

// Runs an instance. `threw` is called with the text of the kernel's exception, and throws.
template <class Threw>
void run_candidate(const Candidate& candidate, const Arguments& arguments, Threw threw) {
  char error[1000];
  if (candidate.run(arguments.values.data(), error, sizeof error)) threw(error);
}

// Raises the versions of all tensors that the operator writes into: autograd finds them modified by that. Returns
// false if torch refuses, as for a tensor of inference mode outside of it.
inline bool raise_versions(const Signed& signature, const Arguments& arguments) {
  return every(signature, arguments, [&](const RawTensor&, size_t tensor, size_t argument) {
    if (!signature[argument].written) return true;
    WithoutGrad guard;
    // Torch copies nothing from a tensor to itself, and counts it as a write.
    return aoti_torch_copy_(arguments.tensors[tensor], arguments.tensors[tensor], 0) == 0;
  });
}
}  // namespace opsmith
