// Between torch's dispatcher and the kernels: one library for all of them, built once on a machine.
//
// It speaks to torch through the C functions that torch keeps stable (torch/csrc/stable/c/shim.h and
// torch/csrc/inductor/aoti_torch/c/shim.h), declared here as they are there, so that no header of torch is
// read and what is built for one torch runs on the next.
#include <memory>
#include <string>
#include <vector>

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
Status aoti_torch_delete_tensor_object(TensorHandle);
Status aoti_torch_library_init_impl(const char*, const char*, const char*, uint32_t, LibraryHandle*);
Status aoti_torch_delete_library_object(LibraryHandle);
Status torch_library_impl(LibraryHandle, const char*, void (*)(uint64_t*, uint64_t, uint64_t), uint64_t);
Status torch_list_size(ListHandle, size_t*);
Status torch_list_get_item(ListHandle, size_t, uint64_t*);
Status torch_delete_list(ListHandle);
Status torch_string_c_str(StringHandle, const char**);
Status torch_string_length(StringHandle, size_t*);
Status torch_delete_string(StringHandle);
void aoti_torch_check(bool, const char*, const char*, uint32_t, const char*);
}

namespace {
using namespace opsmith;

void must(Status status, const char* what) {
  if (status) {
    Error error;
    std::snprintf(error.text, sizeof error.text, "torch failed: %s", what);
    throw error;
  }
}

// How an operator is known to the dispatcher, and which library computes it.
struct Record {
  Exported* library;
  std::vector<int32_t> forms;
  std::vector<bool> optional;
  LibraryHandle registered = nullptr;
};

// The arguments of one call. What the dispatcher hands over is owned here, and let go of at the end.
struct Arguments {
  std::vector<Value> values;
  std::vector<TensorHandle> tensors;
  std::vector<ListHandle> lists;
  std::vector<StringHandle> strings;
  std::vector<std::unique_ptr<char[]>> arrays;

  ~Arguments() {
    for (TensorHandle each : tensors) aoti_torch_delete_tensor_object(each);
    for (ListHandle each : lists) torch_delete_list(each);
    for (StringHandle each : strings) torch_delete_string(each);
  }

  RawTensor tensor(uint64_t word) {
    TensorHandle handle = reinterpret_cast<TensorHandle>(word);
    tensors.push_back(handle);
    RawTensor raw;
    int64_t *sizes, *strides;
    must(aoti_torch_get_data_ptr(handle, &raw.data), "aoti_torch_get_data_ptr");
    must(aoti_torch_get_dim(handle, &raw.dim), "aoti_torch_get_dim");
    must(aoti_torch_get_sizes(handle, &sizes), "aoti_torch_get_sizes");
    must(aoti_torch_get_strides(handle, &strides), "aoti_torch_get_strides");
    raw.sizes = sizes;
    raw.strides = strides;
    return raw;
  }

  template <class T, class Read>
  RawList list(uint64_t word, Read read) {
    ListHandle handle = reinterpret_cast<ListHandle>(word);
    lists.push_back(handle);
    size_t size;
    must(torch_list_size(handle, &size), "torch_list_size");
    arrays.emplace_back(new char[size * sizeof(T) + 1]);
    T* items = reinterpret_cast<T*>(arrays.back().get());
    for (size_t at = 0; at < size; at++) {
      uint64_t item;
      must(torch_list_get_item(handle, at, &item), "torch_list_get_item");
      items[at] = read(item);
    }
    return {items, int64_t(size)};
  }

  void take(uint64_t word, int32_t form, bool optional) {
    Value value;
    value.given = true;
    if (optional) {  // a pointer to the word, which is ours to delete; null for None
      uint64_t* held = reinterpret_cast<uint64_t*>(word);
      value.given = held != nullptr;
      if (!value.given) {
        std::memset(&value.tensor, 0, sizeof value.tensor);
        values.push_back(value);
        return;
      }
      word = *held;
      delete held;
    }
    auto number = [](uint64_t bits) {
      double result;
      std::memcpy(&result, &bits, sizeof result);
      return result;
    };
    switch (form) {
      case TENSOR: value.tensor = tensor(word); break;
      case INTEGER: value.integer = int64_t(word); break;
      case NUMBER: value.number = number(word); break;
      case FLAG: value.flag = (word & 1) != 0; break;
      case STRING: {
        StringHandle handle = reinterpret_cast<StringHandle>(word);
        strings.push_back(handle);
        const char* text;
        size_t length;
        must(torch_string_c_str(handle, &text), "torch_string_c_str");
        must(torch_string_length(handle, &length), "torch_string_length");
        value.list = {text, int64_t(length)};
        break;
      }
      case TENSORS: value.list = list<RawTensor>(word, [&](uint64_t item) { return tensor(item); }); break;
      case INTEGERS: value.list = list<int64_t>(word, [](uint64_t item) { return int64_t(item); }); break;
      case NUMBERS: value.list = list<double>(word, number); break;
      case FLAGS: value.list = list<bool>(word, [](uint64_t item) { return (item & 1) != 0; }); break;
    }
    values.push_back(value);
  }
};

// The stack holds the number of the candidate, and then what the candidate's parameters are.
void run(void* held, uint64_t* stack) {
  Record& record = *static_cast<Record*>(held);
  char error[1000];
  bool failed;
  {
    Arguments arguments;
    arguments.values.reserve(record.forms.size());
    try {
      for (size_t at = 0; at < record.forms.size(); at++)
        arguments.take(stack[at + 1], record.forms[at], record.optional[at]);
      failed = record.library->candidates[stack[0]].run(arguments.values.data(), error, sizeof error);
    } catch (const std::exception& thrown) {
      std::snprintf(error, sizeof error, "%s", thrown.what());
      failed = true;
    }
  }
  if (failed) aoti_torch_check(false, "opsmith", "kernel", 0, error);  // throws what Python sees
}
}  // namespace

#define PUBLIC extern "C" __attribute__((visibility("default")))

// Registers a library's kernel for `name_space::name` at a dispatch key; null where torch refuses.
// `forms` has a number for each argument after the first: its form, and 100 more where it is optional.
PUBLIC void* opsmith_register(Exported* library, const char* name_space, const char* name, const char* key,
                              const int32_t* forms, int32_t count, uint64_t torch_version) {
  auto record = std::make_unique<Record>();
  record->library = library;
  for (int32_t at = 0; at < count; at++) {
    record->forms.push_back(forms[at] % 100);
    record->optional.push_back(forms[at] >= 100);
  }
  if (aoti_torch_library_init_impl(name_space, key, __FILE__, __LINE__, &record->registered)) return nullptr;
  library->run = run;
  library->record = record.get();
  if (torch_library_impl(record->registered, name, library->boxed, torch_version)) {
    aoti_torch_delete_library_object(record->registered);
    return nullptr;
  }
  return record.release();
}

// The record stays: a call in another thread may still read it.
PUBLIC void opsmith_unregister(void* held) {
  aoti_torch_delete_library_object(static_cast<Record*>(held)->registered);
}

PUBLIC int64_t opsmith_version() { return version; }
