// Operators of a library without Python: the kernel that takes a call, its plan, or the message if no kernel takes it.
//
// This code does not depend on torch or ONNX Runtime: `CallValues` describes a call. Results are contiguous. A call is
// refused if the reference would lay out its results in a different way, because compiled code reads the results with
// the reference's strides and would read wrong numbers.
#pragma once
#include <stdexcept>

#include "launched_kernel.h"

namespace opsmith {

// Layouts in which the reference returns contiguous results, like these kernels. Each layout includes the next one.
enum Accepted : int32_t { ANY_LAYOUT, NESTED_LAYOUT, CONTIGUOUS_LAYOUT };

struct OperatorArgument {
  const char* name;
  int32_t type;  // one of ParameterType
  bool optional;
  bool written;
  int32_t accepted;  // one of Accepted
};

// Kernel of an operator.
struct OperatorKernel {
  const Exported* instances;  // in the order in which they are tried; null for a launched kernel
  bool copies_back;           // written arguments may be copied into a layout and back
  const int64_t* launched = nullptr;  // see `LaunchedKernel`
  const unsigned char* images = nullptr;  // of `launched`
};

// Kernels of an operator on one type of device, in the order in which they are tried.
struct OperatorKernels {
  const OperatorKernel* first;
  int32_t count;
};

struct Operator {
  const char* name;  // `namespace::name`
  const OperatorArgument* arguments;
  int32_t argument_count;
  int32_t result_count;
  const char* shapes;     // text of `shapes=`, for messages; may be empty
  const int64_t* sizing;  // the sizes of the results by `shapes`: see recipe.h; null if it does not determine them
  const int64_t* const* calls = nullptr;  // the sizes by calls of an exported model, if there is no other source
  int32_t call_count = 0;

  Signed signature() const {
    Signed all;
    for (int32_t at = 0; at < argument_count; at++)
      all.push_back({arguments[at].type, arguments[at].optional, arguments[at].written});
    return all;
  }
};

// Exception with a message in the form of opsmith's errors in Python.
struct Refused : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// True if a text is among others.
inline bool is_listed(const std::string& all, const std::string& between, const std::string& text) {
  return (between + all + between).find(between + text + between) != std::string::npos;
}

// Instance that may take a call.
struct Offer {
  const Candidate* candidate;
  bool copies_back;
  const LaunchedKernel* launched;
  const DeviceVariant* variant;
};
using Offers = Inline<Offer, 8>;

class OperatorCall {
 public:
  OperatorCall(const Operator& op, const Signed& signature, const CallValues& arguments)
      : op_(op), signature_(signature), arguments_(arguments) {}

  // Plans the call. `load` finds the function of an instance on a GPU: see `launches_of`.
  template <class Load>
  std::shared_ptr<const Plan> plan(const OperatorKernels& kernels, Load load) const {
    const Offer offer = chosen(offers(kernels));
    auto plan = planned(*offer.candidate);
    if (offer.launched == nullptr) return plan;
    refuse_capacities(*offer.variant, plan->results);
    Reason reason;
    plan->candidate = nullptr;
    plan->device = arguments_.device;
    plan->launches = launches_of(*offer.launched, *offer.variant, signature_, arguments_, *plan, reason, load);
    if (!plan->launches) throw refused(reason);
    return plan;
  }
  std::shared_ptr<const Plan> plan(const OperatorKernels& kernels) const {
    return plan(kernels, [](const DeviceInstance&, Launches&, Launch&) {});
  }

  // Refuses writes that `may_write` does not allow, since a plan also serves calls with other memory.
  template <class MayWrite>
  void refuse_writes(MayWrite may_write) const {
    if (std::none_of(signature_.begin(), signature_.end(), [](const Argument& each) { return each.written; })) return;
    if (shares_written(signature_, arguments_))
      throw refused("a tensor that it writes shares elements with another argument",
                    {{"expected", "tensors that share no element"}, {"hint", "call it with a clone of one tensor"}});
    if (!may_write())
      throw refused("torch does not let it write into a tensor",
                    {{"expected", "a tensor that may be written here"},
                     {"hint", "if the tensor was made in inference mode, call it in that mode, or on a clone"}});
  }

  struct Line {
    const char* label;
    std::string text;
  };

  Refused refused(const std::string& problem, std::initializer_list<Line> lines = {}) const {
    std::string text = std::string(op_.name) + ": " + problem;
    for (const Line& line : lines) text += std::string("\n  ") + line.label + ": " + line.text;
    return Refused(text);
  }

  Refused threw(const char* text) const { return refused(std::string("the kernel threw: ") + text); }

 private:
  std::string name(size_t argument) const { return op_.arguments[argument].name; }
  static std::string layout(const RawTensor& raw) {
    return "sizes " + listed(raw.sizes, raw.dim) + ", strides " + listed(raw.strides, raw.dim);
  }
  static std::string dimensions(int64_t count) {
    return std::to_string(count) + (count == 1 ? " dimension" : " dimensions");
  }

  Refused refused(const Reason& reason) const {
    const std::string part = "`" + reason.part + "` of its CUDA kernel ";
    if (reason.expected.empty())
      return refused(part + "cannot be computed", {{"got", reason.got}, {"hint", "correct the expression"}});
    return refused(part + "is outside the limits of a GPU", {{"expected", reason.expected}, {"got", reason.got}});
  }

  // The instances that may take the call; an instance with constants must fit the call's sizes.
  Offers offers(const OperatorKernels& kernels) const {
    Offers found;
    std::string missing;
    for (const OperatorKernel* kernel = kernels.first; kernel != kernels.first + kernels.count; kernel++) {
      if (kernel->launched == nullptr) {
        for (int32_t at = 0; at < kernel->instances->count; at++)
          found.push({&kernel->instances->candidates[at], kernel->copies_back, nullptr, nullptr});
        continue;
      }
      const LaunchedKernel& launched = launched_kernel(kernel->launched, kernel->images);
      Reason reason;
      const CallScope scope(signature_, arguments_, INT64_MAX, &reason);
      std::vector<int64_t> constants(launched.constants.size());
      missing.clear();
      for (size_t at = 0; at < constants.size(); at++) {
        const auto& [called, program] = launched.constants[at];
        if (!scope.whole("constants", program, constants[at])) throw refused(reason);
        const std::string text = called + " = " + std::to_string(constants[at]);
        if (!is_listed(missing, ", ", text)) missing += (at ? ", " : "") + text;
      }
      for (const DeviceVariant& each : launched.variants)
        if (each.constants == constants) found.push({&each.candidate, kernel->copies_back, &launched, &each});
    }
    if (found.size() == 0)
      throw refused("the library has no instance of its CUDA kernel for these sizes",
                    {{"got", missing},
                     {"hint", "give the operator a sample of these sizes, and build the library again"}});
    return found;
  }

  // Refuses values beyond the capacity of a parameter.
  void refuse_capacities(const DeviceVariant& variant, const std::vector<Result>& results) const {
    for (size_t at = 0; at < signature_.size(); at++) {
      const DeviceParameter& parameter = variant.taken[at];
      const Value& value = arguments_.values[at];
      const int32_t type = signature_[at].type;
      if (!parameter.size || !value.given) continue;  // no launch gets it
      const int64_t count = type >= TENSORS ? value.list.size : 1;
      if (type >= TENSORS && count > parameter.room)
        throw over(at, "a list of at most " + std::to_string(parameter.room), std::to_string(count) + " items");
      if (parameter.item != 4 || (type != INTEGER && type != INTEGERS)) continue;
      const int64_t* items = type == INTEGER ? &value.integer : static_cast<const int64_t*>(value.list.data);
      for (int64_t each = 0; each < count; each++)
        if (items[each] != int32_t(items[each])) throw over(at, "an int of 32 bits", std::to_string(items[each]));
    }
    every(signature_, arguments_, [&](const RawTensor& raw, size_t, size_t argument) {
      const DeviceParameter& parameter = variant.taken[argument];
      const uint32_t most = parameter.capacity();
      if (parameter.size && raw.dim > most)
        throw over(argument, "at most " + dimensions(most), dimensions(raw.dim));
      return true;
    });
    for (size_t at = 0; at < results.size(); at++) {
      const int64_t dim = int64_t(results[at].sizes.size()), most = variant.taken[signature_.size() + at].capacity();
      if (dim > most)
        throw refused("its CUDA kernel has no room for a result",
                      {{"expected", "at most " + dimensions(most)}, {"got", dimensions(dim)}});
    }
  }

  Refused over(size_t argument, const std::string& expected, const std::string& got) const {
    return refused("its CUDA kernel has no room for an argument",
                   {{"argument", name(argument)}, {"expected", expected}, {"got", got}});
  }

  // Returns the first instance that takes the dtypes, numbers of dimensions and layouts.
  Offer chosen(const Offers& offers) const {
    size_t furthest = 0;
    std::string found, taken;
    for (size_t at = 0; at < offers.size(); at++) {
      size_t index = 0;
      std::string value, takes;
      if (takes_all(*offers[at].candidate, offers[at].copies_back, index, value, takes)) {
        refuse_layouts();
        return offers[at];
      }
      if (found.empty() || index > furthest) {
        furthest = index, found = value, taken = takes;
      } else if (value == found && !is_listed(taken, " or ", takes)) {
        taken += " or " + takes;
      }
    }
    throw refused("no kernel of the library takes the call",
                  {{"argument", name(furthest)},
                   {"expected", taken},
                   {"got", found},
                   {"hint", "convert the argument; PyTorch with opsmith computes such a call by the reference"}});
  }

  // True if an instance takes all tensors; else the first tensor that it refuses, with its value and the accepted value.
  bool takes_all(const Candidate& candidate, bool copies_back, size_t& index, std::string& value,
                 std::string& takes) const {
    return every(signature_, arguments_, [&](const RawTensor& raw, size_t tensor, size_t argument) {
      const Parameter& parameter = candidate.parameters[argument];
      const int32_t dtype = arguments_.dtypes[tensor];
      index = argument;
      if (parameter.dtype < 0) return true;  // no launch gets it
      if (dtype != parameter.dtype) {
        value = dtype_name(dtype), takes = dtype_name(parameter.dtype);
      } else if (parameter.dim >= 0 && parameter.dim != raw.dim) {
        value = dimensions(raw.dim), takes = dimensions(parameter.dim);
      } else if (parameter.written && !copies_back && !has_layout(raw, parameter.layout)) {
        value = layout(raw);
        takes = parameter.layout == CONTIGUOUS ? "contiguous memory" : "channels-last memory";
      } else {
        return true;
      }
      return false;
    });
  }

  void refuse_layouts() const {
    every(signature_, arguments_, [&](const RawTensor& raw, size_t, size_t argument) {
      refuse_layout(raw, argument);
      if (signature_[argument].written && meets_itself(raw))
        throw refused("several elements of `" + name(argument) + "` share the same memory",
                      {{"argument", name(argument)},
                       {"expected", "a tensor that is not expanded"},
                       {"got", layout(raw)},
                       {"hint", "call it on a clone"}});
      return true;
    });
  }

  void refuse_layout(const RawTensor& raw, size_t argument) const {
    const int32_t accepted = op_.arguments[argument].accepted;
    if (accepted == ANY_LAYOUT || has_layout(raw, CONTIGUOUS)) return;
    if (accepted == NESTED_LAYOUT && is_nested(raw)) return;
    const std::string wanted =
        accepted == NESTED_LAYOUT ? "strides that decrease, as in rows of a larger tensor" : "a contiguous tensor";
    throw refused("only Python knows the layout of its results, which follows from the layout of this argument",
                  {{"argument", name(argument)},
                   {"expected", wanted},
                   {"got", layout(raw)},
                   {"hint", "call it with `" + name(argument) + ".contiguous()`"}});
  }

  std::shared_ptr<Plan> planned(const Candidate& candidate) const {
    auto plan = std::make_shared<Plan>();
    plan->candidate = &candidate;
    every(signature_, arguments_, [&](const RawTensor& raw, size_t tensor, size_t argument) {
      const Parameter& parameter = candidate.parameters[argument];
      if (!has_layout(raw, parameter.layout))
        plan->copied.push_back({int64_t(tensor), int64_t(argument), parameter.written != 0,
                                strides_in(raw.dim, raw.sizes, parameter.layout)});
      return true;
    });
    const std::vector<Shape> shapes = sizes(candidate);
    for (int32_t at = 0; at < op_.result_count; at++) {
      const Parameter& written = candidate.parameters[op_.argument_count + at];
      const Shape& shape = shapes[size_t(at)];
      Result result{written.dtype, {shape.sizes, shape.sizes + shape.dim}, {}, {}};
      const bool fits = written.dim < 0 || written.dim == shape.dim;
      if (!fits || !lay_out(result.sizes, result.strides, INT64_MAX / 16))  // its bytes, too, have 64 bits
        throw refused("its kernel cannot write a result of the computed sizes",
                      {{"expected", fits ? "sizes that fit into memory" : dimensions(written.dim)},
                       {"got", listed(shape.sizes, shape.dim)},
                       {"hint", "check the sizes of its tensors, and `sizes` of its kernel"}});
      if (written.layout == CHANNELS_LAST) result.written = strides_in(shape.dim, shape.sizes, CHANNELS_LAST);
      plan->results.push_back(std::move(result));
    }
    return plan;
  }

  // The sizes of the results. Without results, it refuses tensors that do not fit one another, before any write.
  std::vector<Shape> sizes(const Candidate& candidate) const {
    std::vector<Shape> shapes(size_t(op_.result_count));
    char error[1000];
    SizesStatus status = sizes_by(&candidate, op_.sizing, arguments_, shapes, error, sizeof error);
    for (int32_t at = 0; status == UNKNOWN && at < op_.call_count; at++) {
      shapes.assign(shapes.size(), Shape());
      status = declared_sizes(op_.calls[at], arguments_.values.data(), shapes.data());
    }
    if (status == THREW) throw threw(error);
    if (status != KNOWN) throw misfit();
    return shapes;
  }

  Refused misfit() const {
    std::string found;
    every(signature_, arguments_, [&](const RawTensor& raw, size_t, size_t argument) {
      found += (found.empty() ? "" : ", ") + name(argument) + ": " + listed(raw.sizes, raw.dim);
      return true;
    });
    if (!*op_.shapes && op_.call_count)
      return refused("the sizes of its results are not known for these tensors",
                     {{"expected", "the sizes and other arguments of a call in the exported model"},
                      {"got", found},
                      {"hint", "export the model with dynamic axes"}});
    return refused("its tensors do not fit one another",
                   {{"expected",
                     *op_.shapes ? op_.shapes : "sizes from which its kernel computes the sizes of the results"},
                    {"got", found},
                    {"hint", "check the sizes of its tensors"}});
  }

  const Operator& op_;
  const Signed& signature_;
  const CallValues& arguments_;
};
}  // namespace opsmith
