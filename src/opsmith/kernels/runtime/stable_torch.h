// Torch's stable C functions, declared as in torch/csrc/stable/c/shim.h and
// torch/csrc/inductor/aoti_torch/c/shim.h, and in generated/c_shim_aten.h next to it. No header of torch is read, and
// a library that is built for one torch also runs with later versions.
#pragma once
#include <cstddef>
#include <cstdint>

#include "opsmith.h"

extern "C" {
typedef struct AtenTensorOpaque* TensorHandle;
typedef struct TorchLibraryOpaque* LibraryHandle;
typedef struct StableListOpaque* ListHandle;
typedef struct StringOpaque* StringHandle;
typedef int32_t Status;  // 0: success
Status aoti_torch_get_data_ptr(TensorHandle, void**);
Status aoti_torch_get_dim(TensorHandle, int64_t*);
Status aoti_torch_get_sizes(TensorHandle, int64_t**);
Status aoti_torch_get_strides(TensorHandle, int64_t**);
Status aoti_torch_get_dtype(TensorHandle, int32_t*);
Status aoti_torch_get_device_type(TensorHandle, int32_t*);
Status aoti_torch_get_device_index(TensorHandle, int32_t*);
Status aoti_torch_delete_tensor_object(TensorHandle);
Status aoti_torch_empty_strided(int64_t, const int64_t*, const int64_t*, int32_t, int32_t, int32_t, TensorHandle*);
Status aoti_torch_copy_(TensorHandle, TensorHandle, int32_t);
Status aoti_torch_aten_fill__Scalar(TensorHandle, double);
bool aoti_torch_grad_mode_is_enabled();
void aoti_torch_grad_mode_set_enabled(bool);
Status aoti_torch_library_init_impl(const char*, const char*, const char*, uint32_t, LibraryHandle*);
Status aoti_torch_delete_library_object(LibraryHandle);
Status torch_library_impl(LibraryHandle, const char*, void (*)(uint64_t*, uint64_t, uint64_t), uint64_t);
Status torch_call_dispatcher(const char*, const char*, uint64_t*, uint64_t);
Status torch_list_size(ListHandle, size_t*);
Status torch_list_get_item(ListHandle, size_t, uint64_t*);
Status torch_delete_list(ListHandle);
Status torch_string_c_str(StringHandle, const char**);
Status torch_string_length(StringHandle, size_t*);
Status torch_delete_string(StringHandle);
}

namespace opsmith {
inline void must(Status status, const char* what) {
  if (status) {
    Error error;
    std::snprintf(error.text, sizeof error.text, "torch failed: %s", what);
    throw error;
  }
}
}  // namespace opsmith
