// Reader of the dispatcher's stack: the arguments of one call, and the machine words of its signature.
#pragma once
#include <memory>

#include "stable_torch.h"
#include "values.h"

namespace opsmith {

// Reading does not change the stack, which the fallback needs. After `own()` the objects on it are released.
class Arguments : public CallValues {
 public:
  Inline<TensorHandle, 12> tensors;
  Words words;  // signature: dtypes, devices, sizes and strides of tensors, and all other values except free numbers
  Words kind;   // the same without sizes, strides and floating-point numbers

  ~Arguments() {
    if (!owned_) return;
    for (size_t at = 0; at < tensors.size(); at++) aoti_torch_delete_tensor_object(tensors[at]);
    for (size_t at = 0; at < lists_.size(); at++) torch_delete_list(lists_[at]);
    for (size_t at = 0; at < strings_.size(); at++) torch_delete_string(strings_[at]);
    for (size_t at = 0; at < boxes_.size(); at++) delete boxes_[at];
  }

  void own() { owned_ = true; }

  void read(uint64_t word, const Argument& argument) {
    Value value;
    value.given = true;
    if (argument.optional) {  // a pointer to the word; null for None
      uint64_t* box = reinterpret_cast<uint64_t*>(word);
      both(box != nullptr);
      value.given = box != nullptr;
      if (!value.given) {
        std::memset(&value.tensor, 0, sizeof value.tensor);
        values.push(value);
        return;
      }
      boxes_.push(box);
      word = *box;
    }
    switch (argument.type) {
      case TENSOR: value.tensor = tensor(word, argument.by_address); break;
      case INTEGER: value.integer = int64_t(word); both(word); break;
      case NUMBER:
        value.number = number(word);
        if (!argument.free) words.push(word);
        break;
      case FLAG: value.flag = flag(word); both(value.flag); break;
      case STRING: value.list = string(word); break;
      case TENSORS:
        value.list = list<RawTensor>(word, [this](uint64_t item) { return tensor(item); });
        break;
      case INTEGERS: value.list = list<int64_t>(word, [this](uint64_t item) { return int64_t(both(item)); }); break;
      case NUMBERS:
        value.list = list<double>(word, [&](uint64_t item) {
          if (!argument.free) words.push(item);
          return number(item);
        });
        break;
      case FLAGS: value.list = list<bool>(word, [this](uint64_t item) { return flag(both(item & 1)); }); break;
    }
    values.push(value);
  }

 private:
  static double number(uint64_t bits) {
    double result;
    std::memcpy(&result, &bits, sizeof result);
    return result;
  }
  static bool flag(uint64_t word) { return (word & 1) != 0; }
  uint64_t both(uint64_t word) {
    words.push(word);
    kind.push(word);
    return word;
  }

  RawTensor tensor(uint64_t word, bool by_address = false) {
    TensorHandle handle = reinterpret_cast<TensorHandle>(word);
    tensors.push(handle);
    RawTensor raw;
    int64_t *sizes, *strides;
    int32_t dtype, type, index;
    must(aoti_torch_get_data_ptr(handle, &raw.data), "aoti_torch_get_data_ptr");
    must(aoti_torch_get_dim(handle, &raw.dim), "aoti_torch_get_dim");
    must(aoti_torch_get_sizes(handle, &sizes), "aoti_torch_get_sizes");
    must(aoti_torch_get_strides(handle, &strides), "aoti_torch_get_strides");
    must(aoti_torch_get_dtype(handle, &dtype), "aoti_torch_get_dtype");
    must(aoti_torch_get_device_type(handle, &type), "aoti_torch_get_device_type");
    must(aoti_torch_get_device_index(handle, &index), "aoti_torch_get_device_index");
    raw.sizes = sizes;
    raw.strides = strides;
    dtypes.push(dtype);
    if (tensors.size() == 1) device = {type, index};
    several_devices |= type != device.type || index != device.index;
    const bool odd = by_address && reinterpret_cast<uintptr_t>(raw.data) % 16;
    both(uint64_t(dtype) << 32 | uint64_t(uint8_t(type)) << 24 | uint64_t(uint8_t(index)) << 16 |
         uint64_t(odd) << 15 | uint64_t(raw.dim));
    for (int64_t at = 0; at < raw.dim; at++) words.push(uint64_t(sizes[at]));
    for (int64_t at = 0; at < raw.dim; at++) words.push(uint64_t(strides[at]));
    return raw;
  }

  RawList string(uint64_t word) {
    StringHandle handle = reinterpret_cast<StringHandle>(word);
    strings_.push(handle);
    const char* text;
    size_t length;
    must(torch_string_c_str(handle, &text), "torch_string_c_str");
    must(torch_string_length(handle, &length), "torch_string_length");
    both(length);
    for (size_t at = 0; at < length; at += 8) {
      uint64_t eight = 0;
      std::memcpy(&eight, text + at, length - at < 8 ? length - at : 8);
      both(eight);
    }
    return {text, int64_t(length)};
  }

  template <class T, class Read>
  RawList list(uint64_t word, Read read) {
    ListHandle handle = reinterpret_cast<ListHandle>(word);
    lists_.push(handle);
    size_t size;
    must(torch_list_size(handle, &size), "torch_list_size");
    both(size);
    arrays_.emplace_back(new char[size * sizeof(T) + 1]);
    T* items = reinterpret_cast<T*>(arrays_.back().get());
    for (size_t at = 0; at < size; at++) {
      uint64_t item;
      must(torch_list_get_item(handle, at, &item), "torch_list_get_item");
      items[at] = read(item);
    }
    return {items, int64_t(size)};
  }

  bool owned_ = false;
  Inline<ListHandle, 4> lists_;
  Inline<StringHandle, 4> strings_;
  Inline<uint64_t*, 8> boxes_;
  std::vector<std::unique_ptr<char[]>> arrays_;
};
}  // namespace opsmith
