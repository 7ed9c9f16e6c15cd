// Library of custom operators: ONNX Runtime calls `RegisterCustomOps`, and then the operators that it registers.
//
// It is compiled for the baseline processor, so that it can report that the kernels need a different processor.
#include <deque>
#include <map>

#include "onnx.h"
#include "onnx_api.h"
#include "processor.h"
#include "run.h"

namespace {
using namespace opsmith;

// ONNX's number of an element type, by torch's number; 0 if kernels have no such type.
constexpr int element_types[] = {2, 3, 5, 6, 7, 10, 1, 11, 0, 0, 0, 9, 0, 0, 0, 16};

// Copies elements between two tensors of the same sizes with different strides.
void copy(const char* from, const int64_t* from_strides, char* into, const int64_t* into_strides, const int64_t* sizes,
          int64_t dim, size_t item) {
  if (dim == 0) {
    std::memcpy(into, from, item);
    return;
  }
  for (int64_t at = 0; at < *sizes; at++)
    copy(from + at * *from_strides * int64_t(item), from_strides + 1, into + at * *into_strides * int64_t(item),
         into_strides + 1, sizes + 1, dim - 1, item);
}

// The attributes of a node, read once when a session is made. They contain the length of each list of tensors.
class Attributes {
 public:
  Inline<Value, 12> values;

  Attributes(const ort::Api& api, const ort::KernelInfo* info, const Operator& op)
      : api_(api), info_(info), held_(size_t(op.argument_count)) {
    for (int32_t at = 0; at < op.argument_count; at++) {
      const OperatorArgument& argument = op.arguments[at];
      Value value{};
      value.given = argument.type != TENSOR && read(argument, value, held_[size_t(at)]);
      if (!value.given && !argument.optional && argument.type != TENSOR)
        throw Refused(std::string(op.name) + ": a node has no attribute `" + argument.name +
                      (argument.type == TENSORS ? "_count`" : "`"));
      values.push(value);
    }
  }

 private:
  struct Held {
    std::vector<int64_t> integers;
    std::vector<double> numbers;
    std::vector<char> bytes;  // of a text, or of flags
  };

  bool read(const OperatorArgument& argument, Value& value, Held& held) {
    const std::string name = argument.name, bits = name + opsmith_nodes.bits;
    int64_t whole = 0;
    float single = 0;
    std::vector<float> singles;
    switch (argument.type) {
      case INTEGER: return one(api_.integer, name, value.integer);
      case TENSORS: return one(api_.integer, name + "_count", value.list.size);
      case FLAG:
        if (!one(api_.integer, name, whole)) return false;
        value.flag = whole != 0;
        return true;
      case NUMBER:
        if (one(api_.integer, bits, whole)) {
          std::memcpy(&value.number, &whole, sizeof whole);
          return true;
        }
        if (!one(api_.number, name, single)) return false;
        value.number = single;
        return true;
      case STRING:
        if (!several(api_.text, name, held.bytes)) return false;
        if (!held.bytes.empty()) held.bytes.pop_back();  // the zero at its end
        return put(held.bytes, value);
      case INTEGERS: return several(api_.integers, name, held.integers) && put(held.integers, value);
      case NUMBERS:
        if (several(api_.integers, bits, held.integers)) {
          held.numbers.resize(held.integers.size());
          std::memcpy(held.numbers.data(), held.integers.data(), 8 * held.numbers.size());
        } else {
          if (!several(api_.numbers, name, singles)) return false;
          held.numbers.assign(singles.begin(), singles.end());
        }
        return put(held.numbers, value);
      case FLAGS:
        if (!several(api_.integers, name, held.integers)) return false;
        for (int64_t each : held.integers) held.bytes.push_back(each != 0);
        return put(held.bytes, value);
    }
    return false;
  }

  template <class T>
  static bool put(const std::vector<T>& held, Value& value) {
    value.list = {held.data(), int64_t(held.size())};
    return true;
  }

  template <class Get, class T>
  bool one(Get get, const std::string& name, T& found) {
    return is(get(info_, name.c_str(), &found));
  }

  template <class Get, class T>
  bool several(Get get, const std::string& name, std::vector<T>& found) {
    size_t count = 0;
    if (!is(get(info_, name.c_str(), nullptr, &count))) return false;
    found.resize(count);
    return count == 0 || is(get(info_, name.c_str(), found.data(), &count));
  }

  bool is(ort::Status* status) {
    if (status != nullptr) api_.release_status(status);
    return status == nullptr;
  }

  const ort::Api& api_;
  const ort::KernelInfo* info_;
  std::vector<Held> held_;
};

// A node of a session.
struct Kernel {
  const ort::Api& api;
  const NodeType& type;
  Attributes attributes;
  Signed signature;
  CallCache<std::shared_ptr<const Plan>> plans;  // by the inputs, since attributes do not change

  Kernel(const ort::Api& api, const NodeType& type, const ort::KernelInfo* info)
      : api(api), type(type), attributes(api, info, *type.op), signature(type.op->signature()) {}
};

// One call of a node: its values, and its memory in the form that run.h expects.
class NodeCall : public CallValues {
 public:
  NodeCall(Kernel& kernel, ort::Context* context)
      : kernel_(kernel), api_(kernel.api), context_(context), op_(*kernel.type.op) {
    must(api_.input_count(context_, &input_count_), "its inputs");
    for (int32_t at = 0; at < op_.argument_count; at++) {
      const OperatorArgument& argument = op_.arguments[at];
      Value value = kernel.attributes.values[size_t(at)];
      if (argument.type == TENSOR) {
        value.given = read(value.tensor);
        if (!value.given && !argument.optional)
          throw refused(std::string("its input `") + argument.name + "` is missing");
      } else if (argument.type == TENSORS) {
        std::vector<RawTensor>& items = lists_.emplace_back(size_t(value.list.size));
        for (RawTensor& each : items)
          if (!read(each)) throw refused(std::string("a tensor of its list `") + argument.name + "` is missing");
        value.list.data = items.data();
      }
      values.push(value);
    }
  }

  void compute() {
    const OperatorCall call(op_, kernel_.signature, *this);
    const auto plan = kernel_.plans.obtain(words_, [&] { return call.plan(kernel_.type.kernels); });
    run_plan_in(*this, kernel_.signature, *plan, *this, [](size_t) {}, [&] {
      run_candidate(*plan->candidate, *this, [&](const char* text) { throw call.threw(text); });
    });
  }

  void* copied(const Copied& copied, const RawTensor& raw) {
    const int32_t dtype = dtypes[size_t(copied.tensor)];
    char* into = scratch(dtype, raw.dim, raw.sizes, copied.strides.data());
    copy(static_cast<const char*>(raw.data), raw.strides, into, copied.strides.data(), raw.sizes, raw.dim,
         item_size(dtype));
    return into;
  }

  void* result(const Result& result, const int64_t* strides) {
    made_.push_back(result.written.empty() ? output(result, made_.size())
                                           : scratch(result.dtype, int64_t(result.sizes.size()), result.sizes.data(),
                                                     strides));
    return made_.back();
  }

  void copy_back(const Copied&, size_t) { throw refused("a node writes no input"); }

  void lay_out(const Result& result, size_t at) {
    copy(made_[at], result.written.data(), output(result, at), result.strides.data(), result.sizes.data(),
         int64_t(result.sizes.size()), item_size(result.dtype));
  }

 private:
  Refused refused(const std::string& text) const { return Refused(std::string(op_.name) + ": " + text); }

  void must(ort::Status* status, const char* what) const {
    if (status == nullptr) return;
    api_.release_status(status);
    throw refused(std::string("ONNX Runtime does not give ") + what);
  }

  // Reads the next input; returns false if it is missing.
  bool read(RawTensor& raw) {
    const ort::Value* value = nullptr;
    const size_t index = next_++;
    if (index < input_count_) must(api_.input(context_, index, &value), "an input");
    words_.push(value != nullptr);
    if (value == nullptr) return false;
    ort::TensorInfo* info = nullptr;
    must(api_.tensor_info(value, &info), "the type of an input");
    size_t dim = 0;
    int type = 0;
    ort::Status* status = api_.dim(info, &dim);
    std::vector<int64_t>& sizes = numbers_.emplace_back(dim);
    if (status == nullptr) status = api_.sizes(info, sizes.data(), dim);
    if (status == nullptr) status = api_.element_type(info, &type);
    api_.release_info(info);
    must(status, "the sizes of an input");
    must(api_.data(const_cast<ort::Value*>(value), &raw.data), "the data of an input");
    raw.sizes = sizes.data();
    raw.dim = int64_t(dim);
    raw.strides = numbers_.emplace_back(strides_in(raw.dim, raw.sizes, CONTIGUOUS)).data();
    dtypes.push(int32_t(std::find(std::begin(element_types), std::end(element_types), type) - element_types));
    words_.push(uint64_t(type) << 32 | dim);
    for (int64_t size : sizes) words_.push(uint64_t(size));
    return true;
  }

  // Memory for a result in ONNX Runtime; scratch if the node has no such output, or the model does not use it.
  char* output(const Result& result, size_t at) {
    size_t count = 0;
    ort::Value* made = nullptr;
    void* data = nullptr;
    const size_t dim = result.sizes.size();
    must(api_.output_count(context_, &count), "its outputs");
    const int32_t index = kernel_.type.output_indices[at];
    if (index >= 0 && size_t(index) < count)
      must(api_.output(context_, size_t(index), result.sizes.data(), dim, &made), "memory for a result");
    if (made == nullptr) return scratch(result.dtype, int64_t(dim), result.sizes.data(), result.strides.data());
    must(api_.data(made, &data), "memory for a result");
    return static_cast<char*>(data);
  }

  char* scratch(int32_t dtype, int64_t dim, const int64_t* sizes, const int64_t* strides) {
    constexpr size_t aligned = 64;
    memory_.emplace_back(new char[extent(dtype, dim, sizes, strides) + aligned]);
    char* start = memory_.back().get();
    return start + (aligned - reinterpret_cast<uintptr_t>(start) % aligned);
  }

  Kernel& kernel_;
  const ort::Api& api_;
  ort::Context* context_;
  const Operator& op_;
  Words words_;  // missing inputs, element types and sizes
  size_t input_count_ = 0, next_ = 0;
  std::vector<char*> made_;  // memory into which the kernel writes the results
  std::deque<std::vector<int64_t>> numbers_;
  std::deque<std::vector<RawTensor>> lists_;
  std::vector<std::unique_ptr<char[]>> memory_;
};

struct Registered : ort::CustomOp {
  const NodeType* type;
};

const NodeType& type_of(const ort::CustomOp* op) { return *static_cast<const Registered*>(op)->type; }

// Runs code that may throw, and converts an exception to an error of ONNX Runtime.
template <class F>
ort::Status* guarded(const ort::Api& api, const char* op, F body) {
  try {
    return body();
  } catch (const Refused& refused) {
    return api.create_status(ort::FAIL, refused.what());
  } catch (const std::exception& thrown) {
    return api.create_status(ort::FAIL, (std::string(op) + ": " + thrown.what()).c_str());
  }
}

ort::Status* create_kernel(const ort::CustomOp* op, const ort::Api* api, const ort::KernelInfo* info, void** kernel) {
  const NodeType& type = type_of(op);
  return guarded(*api, type.op->name, [&]() -> ort::Status* {
    *kernel = new Kernel(*api, type, info);
    return nullptr;
  });
}

ort::Status* compute(void* held, ort::Context* context) {
  Kernel& kernel = *static_cast<Kernel*>(held);
  return guarded(kernel.api, kernel.type.op->name, [&]() -> ort::Status* {
    NodeCall(kernel, context).compute();
    return nullptr;
  });
}

Registered registered(const NodeType& type) {
  Registered op;
  op.type = &type;
  op.name = [](const ort::CustomOp* self) { return type_of(self).op_type; };
  op.provider = [](const ort::CustomOp*) { return "CPUExecutionProvider"; };
  op.input_type = [](const ort::CustomOp* self, size_t at) { return int(type_of(self).inputs[at]); };
  op.input_count = [](const ort::CustomOp* self) { return size_t(type_of(self).input_count); };
  op.output_type = [](const ort::CustomOp* self, size_t at) { return int(type_of(self).outputs[at]); };
  op.output_count = [](const ort::CustomOp* self) { return size_t(type_of(self).output_count); };
  op.destroy = [](void* kernel) { delete static_cast<Kernel*>(kernel); };
  op.input_characteristic = [](const ort::CustomOp* self, size_t at) {
    return type_of(self).optional[at] ? ort::OPTIONAL : ort::REQUIRED;
  };
  op.output_characteristic = [](const ort::CustomOp*, size_t) { return ort::REQUIRED; };
  op.input_memory = [](const ort::CustomOp*, size_t) { return 0; };
  op.create_kernel = create_kernel;
  op.compute = compute;
  return op;
}

// Makes the operators, once for each table of functions. They are never freed, since any session may still use them.
ort::Status* register_all(const ort::Api& api, ort::SessionOptions* options) {
  static auto* const mutex = new std::mutex;
  static auto* const known = new std::map<const ort::Api*, std::map<std::string, ort::Domain*>>;
  std::lock_guard lock(*mutex);
  std::map<std::string, ort::Domain*>& domains = (*known)[&api];
  if (domains.empty()) {
    std::map<std::string, ort::Domain*> made;
    for (int32_t at = 0; at < opsmith_nodes.count; at++) {
      const NodeType& type = opsmith_nodes.types[at];
      ort::Domain*& domain = made[type.domain];
      if (domain == nullptr)
        if (ort::Status* status = api.create_domain(type.domain, &domain)) return status;
      if (ort::Status* status = api.add_operator(domain, new Registered(registered(type)))) return status;
    }
    domains = std::move(made);
  }
  for (const auto& [name, domain] : domains)
    if (ort::Status* status = api.add_domain(options, domain)) return status;
  return nullptr;
}
}  // namespace

extern "C" __attribute__((visibility("default"))) ort::Status* RegisterCustomOps(ort::SessionOptions* options,
                                                                                 const ort::ApiBase* base) {
  const ort::Api* api = base->get_api(ort::api_version);
  if (api == nullptr) {
    const std::string text = "opsmith: this library needs ONNX Runtime 1.16 or later, but this is ";
    return base->get_api(1)->create_status(ort::FAIL, (text + base->version()).c_str());
  }
  if (const char* missing = missing_instruction(opsmith_nodes.needs)) {
    const std::string text = std::string("opsmith: this library was compiled for a processor with ") + missing +
                             ", which this processor lacks; package the library on a machine of this kind";
    return api->create_status(ort::FAIL, text.c_str());
  }
  return guarded(*api, "opsmith", [&] { return register_all(*api, options); });
}
