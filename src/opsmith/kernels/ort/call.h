// One call of a node: views of its tensors, the kernel that takes them, memory for the results.
#pragma once
#include <deque>

#include "attributes.h"
#include "layouts.h"

namespace opsmith {

class NodeCall {
 public:
  NodeCall(ort::Api api, ort::Context* context, const NodeType& type, const std::vector<Value>& attributes)
      : api_(api), context_(context), type_(type), op_(*type.op), values_(attributes) {
    read();
  }

  void compute() {
    const Candidate& candidate = chosen();
    std::vector<Shape> shapes(static_cast<size_t>(op_.result_count));
    compute_sizes(candidate, shapes.data());
    lay_out(candidate);
    std::vector<Written> results;
    for (int32_t at = 0; at < op_.result_count; at++)
      results.push_back(allocate(candidate, at, shapes[size_t(at)]));
    char error[1000] = "";
    if (candidate.run(values_.data(), error, sizeof error)) throw refused(error);
    for (const Written& each : results)
      if (each.strides != nullptr)
        copy(each.scratch, each.strides->data(), each.data, each.tensor.strides, each.tensor.sizes,
             each.tensor.dim, each.size);
  }

 private:
  struct Written {
    RawTensor tensor;  // as ONNX Runtime has it
    char* data;
    const char* scratch;
    const std::vector<int64_t>* strides;  // of the scratch; null where the kernel writes the result itself
    int64_t size;                         // of an element
  };

  static const RawTensor* listed(const Value& value) {
    return static_cast<const RawTensor*>(value.list.data);
  }

  Refused refused(const std::string& text) const { return Refused(std::string(op_.name) + ": " + text); }

  void must(ort::Status* status, const char* what) const {
    if (status == nullptr) return;
    api_.release(status);
    throw refused(std::string("ONNX Runtime does not give ") + what);
  }

  void read() {
    size_t count = 0, index = 0;
    must(api_.input_count(context_, &count), "its inputs");
    for (size_t at = 0; at < values_.size(); at++) {
      const NodeArgument& argument = op_.arguments[at];
      Value& value = values_[at];
      if (argument.type == TENSOR) {
        value.given = index < count && tensor(index, value.tensor);
        index++;
        if (!value.given && !argument.optional)
          throw refused(std::string("its input `") + argument.name + "` is missing");
      } else if (argument.type == TENSORS) {
        lists_.emplace_back();
        for (int64_t left = value.list.size; left > 0; left--, index++) {
          lists_.back().emplace_back();
          if (index >= count || !tensor(index, lists_.back().back()))
            throw refused(std::string("a tensor of its list `") + argument.name + "` is missing");
        }
        value.list.data = lists_.back().data();
      }
    }
    while (values_.size() < size_t(op_.argument_count + op_.result_count)) {
      values_.emplace_back();
      values_.back().given = true;
    }
  }

  bool tensor(size_t index, RawTensor& raw) {
    const ort::Value* value = nullptr;
    must(api_.input(context_, index, &value), "an input");
    if (value == nullptr) return false;
    ort::TensorInfo* info = nullptr;
    must(api_.tensor_info(value, &info), "the type of an input");
    size_t dim = 0;
    int type = 0;
    ort::Status* status = api_.dim(info, &dim);
    std::vector<int64_t>& sizes = numbers_.emplace_back(dim);
    if (status == nullptr) status = api_.sizes(info, sizes.data(), dim);
    if (status == nullptr) status = api_.element_type(info, &type);
    api_.release(info);
    must(status, "the sizes of an input");
    must(api_.data(const_cast<ort::Value*>(value), &raw.data), "the data of an input");
    raw.sizes = sizes.data();
    raw.dim = int64_t(dim);
    raw.strides = numbers_.emplace_back(contiguous_strides(raw.sizes, raw.dim)).data();
    types_.push_back(type);
    return true;
  }

  // Returns the first instance of a kernel that takes these element types and numbers of dimensions.
  const Candidate& chosen() const {
    for (int32_t kernel = 0; kernel < op_.kernel_count; kernel++)
      for (int32_t at = 0; at < op_.kernels[kernel]->count; at++)
        if (takes(op_.kernels[kernel]->candidates[at])) return op_.kernels[kernel]->candidates[at];
    throw refused("no kernel of the library takes these tensors, by their types and numbers of dimensions");
  }

  bool takes(const Candidate& candidate) const {
    size_t tensor = 0;
    auto fits = [&](const Parameter& parameter, const RawTensor& raw) {
      const bool of_type = element_type(parameter.dtype) == types_[tensor++];
      return of_type && (parameter.dim < 0 || parameter.dim == raw.dim);
    };
    for (int32_t at = 0; at < op_.argument_count; at++) {
      const Parameter& parameter = candidate.parameters[at];
      const Value& value = values_[size_t(at)];
      if (parameter.type == TENSOR && value.given && !fits(parameter, value.tensor)) return false;
      if (parameter.type == TENSORS)
        for (int64_t item = 0; item < value.list.size; item++)
          if (!fits(parameter, listed(value)[item])) return false;
    }
    return true;
  }

  void compute_sizes(const Candidate& candidate, Shape* shapes) const {
    char error[1000] = "";
    SizesStatus status = UNKNOWN;
    if (candidate.sizes != nullptr) status = candidate.sizes(values_.data(), shapes, error, sizeof error);
    else if (op_.sizing != nullptr) status = declared_sizes(op_.sizing, values_.data(), shapes);
    if (status == THREW) throw refused(error);
    if (status == UNKNOWN && type_.sizes != nullptr) status = type_.sizes(values_.data(), shapes);
    for (int32_t at = 0; status == KNOWN && at < op_.result_count; at++)
      for (int64_t index = 0; index < shapes[at].dim; index++)
        if (shapes[at].sizes[index] < 0) status = UNKNOWN;
    if (status == KNOWN) return;
    if (*op_.shapes) throw refused(std::string("the tensors do not have the shapes `") + op_.shapes + "`");
    throw refused("the sizes of its results are not known for these tensors; export it with dynamic axes");
  }

  // Copies tensors that the kernel takes as channels-last: all inputs are contiguous.
  void lay_out(const Candidate& candidate) {
    for (int32_t at = 0; at < op_.argument_count; at++) {
      const Parameter& parameter = candidate.parameters[at];
      Value& value = values_[size_t(at)];
      if (parameter.layout != CHANNELS_LAST || !value.given) continue;
      if (parameter.type == TENSOR) to_channels_last(value.tensor, parameter.dtype);
      if (parameter.type == TENSORS)
        for (int64_t item = 0; item < value.list.size; item++)
          to_channels_last(const_cast<RawTensor*>(listed(value))[item], parameter.dtype);
    }
  }

  void to_channels_last(RawTensor& raw, int32_t dtype) {
    const int64_t* strides = numbers_.emplace_back(channels_last_strides(raw.sizes, raw.dim)).data();
    const int64_t size = element_size(dtype);
    char* into = scratch(raw.sizes, raw.dim, size);
    copy(static_cast<const char*>(raw.data), raw.strides, into, strides, raw.sizes, raw.dim, size);
    raw.data = into;
    raw.strides = strides;
  }

  Written allocate(const Candidate& candidate, int32_t result, const Shape& shape) {
    const Parameter& parameter = candidate.parameters[op_.argument_count + result];
    const int64_t dim = shape.dim, size = element_size(parameter.dtype);
    if (parameter.dim >= 0 && parameter.dim != dim) throw refused("a result has more or fewer dimensions");
    const std::vector<int64_t>& sizes = numbers_.emplace_back(shape.sizes, shape.sizes + dim);
    const std::vector<int64_t>& strides = numbers_.emplace_back(contiguous_strides(sizes.data(), dim));
    size_t count = 0;
    ort::Value* made = nullptr;
    void* data = nullptr;
    must(api_.output_count(context_, &count), "its outputs");
    const int32_t index = op_.output_indices[result];
    if (index >= 0 && size_t(index) < count)
      must(api_.output(context_, size_t(index), sizes.data(), size_t(dim), &made), "memory for a result");
    if (made != nullptr) must(api_.data(made, &data), "memory for a result");
    if (made == nullptr) data = scratch(sizes.data(), dim, size);  // an output that the model does not use
    const RawTensor whole{data, sizes.data(), strides.data(), dim};
    Written written{whole, static_cast<char*>(data), nullptr, nullptr, size};
    RawTensor& seen = values_[size_t(op_.argument_count + result)].tensor;
    seen = written.tensor;
    if (parameter.layout == CHANNELS_LAST) {
      written.strides = &numbers_.emplace_back(channels_last_strides(sizes.data(), dim));
      written.scratch = scratch(sizes.data(), dim, size);
      seen.data = const_cast<char*>(written.scratch);
      seen.strides = written.strides->data();
    }
    return written;
  }

  char* scratch(const int64_t* sizes, int64_t dim, int64_t size) {
    for (int64_t at = 0; at < dim; at++) size *= sizes[at];
    constexpr int64_t aligned = 64;
    memory_.emplace_back(new char[size_t(size + aligned)]);
    char* start = memory_.back().get();
    return start + (aligned - int64_t(reinterpret_cast<uintptr_t>(start) % aligned));
  }

  ort::Api api_;
  ort::Context* context_;
  const NodeType& type_;
  const NodeOperator& op_;
  std::vector<Value> values_;
  std::vector<int> types_;  // of the tensors, in order
  std::deque<std::vector<int64_t>> numbers_;
  std::deque<std::vector<RawTensor>> lists_;
  std::vector<std::unique_ptr<char[]>> memory_;
};
}  // namespace opsmith
