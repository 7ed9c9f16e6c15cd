// Tensors that torch makes for a call by a plan, and the tensors into which the call may write.
//
// It uses only torch's stable C functions, and no Python. The library between Python and all kernels uses it, and so do
// the libraries that work without Python.
#pragma once
#include <atomic>
#include <cmath>

#include "run.h"
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

// Fills new CPU memory with all bits set, which is nan in every floating dtype; in a bool only one bit is set.
inline void fill_bits(void* data, int32_t dtype, int64_t dim, const int64_t* sizes, const int64_t* strides) {
  if (size_t bytes = extent(dtype, dim, sizes, strides))
    std::memset(data, dtype == dtype_of<bool>::value ? 1 : 0xff, bytes);
}

// Tensors that were made for a call; tensors that are not passed on are released.
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

  // Passes tensors on to the caller, in order.
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

// Memory of a call by a plan: see run.h.
class TorchMemory {
 public:
  TorchMemory(const Arguments& arguments, Made& results)
      : arguments_(arguments), results_(results), copies_(results.device()) {}

  void* copied(const Copied& copied, const RawTensor& raw) {
    const size_t at = size_t(copied.tensor);
    return memory(
        copy(copies_, arguments_.tensors[at], arguments_.dtypes[at], raw.dim, raw.sizes, copied.strides.data()));
  }
  void* result(const Result& result, const int64_t* strides) {
    return memory(results_.empty(result.dtype, int64_t(result.sizes.size()), result.sizes.data(), strides));
  }
  void copy_back(const Copied& copied, size_t at) {
    WithoutGrad guard;
    must(aoti_torch_copy_(arguments_.tensors[size_t(copied.tensor)], copies_[at], 0), "aoti_torch_copy_");
  }
  void lay_out(const Result& result, size_t at) {
    TensorHandle written = results_[at];
    copies_.push(written);
    results_[at] = nullptr;
    Made one(results_.device());
    copy(one, written, result.dtype, int64_t(result.sizes.size()), result.sizes.data(), result.strides.data());
    std::swap(results_[at], one[0]);
  }

 private:
  const Arguments& arguments_;
  Made& results_;
  Made copies_;  // copies of arguments, then results that are copied into another layout
};

// Increments the versions of all tensors that the operator writes into, so that autograd notices the write. Returns
// false if torch refuses, for example for a tensor of inference mode outside of this mode.
inline bool raise_versions(const Signed& signature, const Arguments& arguments) {
  return every(signature, arguments, [&](const RawTensor&, size_t tensor, size_t argument) {
    if (!signature[argument].written) return true;
    WithoutGrad guard;
    // Torch copies nothing from a tensor to itself, and counts it as a write.
    return aoti_torch_copy_(arguments.tensors[tensor], arguments.tensors[tensor], 0) == 0;
  });
}
}  // namespace opsmith
