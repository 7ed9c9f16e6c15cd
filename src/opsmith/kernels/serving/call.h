// One call without Python: the kernel that takes it, the sizes of its results, and what is refused.
//
// Results are contiguous. A call whose results the reference would lay out in another way is refused: compiled code
// has the strides that the reference gives, and would read other numbers.
#pragma once
#include <string>

#include "run.h"
#include "tables.h"

namespace opsmith {

// Exception with a message in the form of opsmith's errors in Python.
struct Refused : std::exception {
  std::string text;
  explicit Refused(std::string text) : text(std::move(text)) {}
  const char* what() const noexcept override { return text.c_str(); }
};

inline std::string dtype_name(int32_t dtype) {
  static const char* const names[] = {"uint8",   "int8",    "int16",     "int32",      "int64",
                                      "float16", "float32", "float64",   "complex32",  "complex64",
                                      "complex128", "bool", "qint8",     "quint8",     "qint32",
                                      "bfloat16"};
  const bool known = dtype >= 0 && dtype < int32_t(sizeof names / sizeof *names);
  return known ? names[dtype] : "dtype " + std::to_string(dtype);
}

inline std::string listed(const int64_t* numbers, int64_t count) {
  std::string text = "[";
  for (int64_t at = 0; at < count; at++) text += (at ? ", " : "") + std::to_string(numbers[at]);
  return text + "]";
}

// True if the dimensions of a tensor lie in one another, the last innermost, with or without gaps.
inline bool is_nested(const RawTensor& raw) {
  int64_t inner = 1;
  for (int64_t at = raw.dim - 1; at >= 0; at--) {
    if (raw.sizes[at] == 0) return true;
    if (raw.sizes[at] == 1) continue;
    if (raw.strides[at] < inner) return false;
    inner = raw.strides[at] * raw.sizes[at];
  }
  return true;
}

inline std::vector<int64_t> strides_of(const RawTensor& raw, bool channels_last) {
  std::vector<int64_t> strides(size_t(raw.dim));
  int64_t step = 1;
  auto put = [&](int64_t at) {
    strides[size_t(at)] = step;
    step *= std::max<int64_t>(raw.sizes[at], 1);
  };
  if (channels_last) put(1);
  for (int64_t at = raw.dim - 1; at >= (channels_last ? 2 : 0); at--) put(at);
  if (channels_last) put(0);
  return strides;
}

inline bool has_layout(const RawTensor& raw, int32_t layout) {
  if (layout == ANY) return true;
  if (layout == CONTIGUOUS) return is_contiguous(raw.dim, raw.sizes, raw.strides);
  const std::vector<int64_t> wanted = strides_of(raw, true);
  for (int64_t at = 0; at < raw.dim; at++)
    if (raw.sizes[at] != 1 && raw.strides[at] != wanted[size_t(at)]) return false;
  return true;
}

// Instance that may take a call.
struct Offer {
  const Candidate* candidate;
  bool copies_back;  // what it writes in place may be copied, and back
  int32_t index;     // among all instances of the operator on the device
};
using Offers = Inline<Offer, 8>;

class ServedCall {
 public:
  // Takes the arguments from the stack.
  ServedCall(const ServedOperator& op, const Signed& signature, const uint64_t* stack)
      : op_(op), signature_(signature) {
    for (size_t at = 0; at < signature.size(); at++) arguments_.read(stack[at], signature[at]);
    arguments_.own();
  }

  void compute(uint64_t* stack) {
    Offers offers;
    for (int32_t kernel = 0, index = 0; kernel < op_.kernel_count; kernel++)
      for (int32_t at = 0; at < op_.kernels[kernel]->count; at++)
        offers.push({&op_.kernels[kernel]->candidates[at], op_.copies_back[kernel], index++});
    const Candidate& candidate = *chosen(offers).candidate;
    const Plan plan = planned(candidate);
    Made results;
    run_plan(signature_, plan, arguments_, results, [](size_t) {}, [&] {
      run_candidate(candidate, arguments_,
                    [&](const char* text) { throw refused(std::string("the kernel threw: ") + text); });
    });
    hand_over(results, stack);
  }

 protected:
  struct Line {
    const char* label;
    std::string text;
  };

  Refused refused(const std::string& problem, std::initializer_list<Line> lines = {}) const {
    std::string text = std::string(op_.name_space) + "::" + op_.name + ": " + problem;
    for (const Line& line : lines) text += std::string("\n  ") + line.label + ": " + line.text;
    return Refused(text);
  }

  std::string name(size_t argument) const { return op_.arguments[argument].name; }

  void hand_over(Made& results, uint64_t* stack) const {
    for (int32_t at = 0; at < op_.shown_count; at++) stack[at] = results.hand_over(size_t(op_.shown[at]));
  }

  // Returns the first instance that takes the dtypes, numbers of dimensions and layouts.
  const Offer& chosen(const Offers& offers) const {
    size_t furthest = 0;
    std::string found, taken;
    for (size_t at = 0; at < offers.size(); at++) {
      size_t index = 0;
      std::string value, takes;
      if (takes_all(*offers[at].candidate, offers[at].copies_back, index, value, takes)) {
        refuse_layouts();
        refuse_writes();
        return offers[at];
      }
      if (found.empty() || index > furthest) {
        furthest = index, found = value, taken = takes;
      } else if (value == found && taken.find(takes) == std::string::npos) {
        taken += " or " + takes;
      }
    }
    throw refused("no kernel of the library takes the call",
                  {{"argument", name(furthest)},
                   {"expected", taken},
                   {"got", found},
                   {"hint", "convert it; where Python is, the reference computes such a call"}});
  }

  // True if an instance takes all tensors; else the first that it does not, its value, and the one that it takes.
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
        value = std::to_string(raw.dim) + " dimensions", takes = std::to_string(parameter.dim) + " dimensions";
      } else if (parameter.written && !copies_back && !has_layout(raw, parameter.layout)) {
        value = "strides " + listed(raw.strides, raw.dim);
        takes = parameter.layout == CONTIGUOUS ? "contiguous memory" : "channels-last memory";
      } else {
        return true;
      }
      return false;
    });
  }

  void refuse_layouts() const {
    every(signature_, arguments_, [&](const RawTensor& raw, size_t, size_t argument) {
      const int32_t accepted = op_.arguments[argument].accepted;
      if (accepted == ANY_LAYOUT || is_contiguous(raw.dim, raw.sizes, raw.strides)) return true;
      if (accepted == NESTED_LAYOUT && is_nested(raw)) return true;
      const std::string wanted = accepted == NESTED_LAYOUT ? "strides that fall, as of rows of a larger tensor"
                                                           : "a contiguous tensor";
      throw refused("the layout of its results follows from this argument's, which is known in Python alone",
                    {{"argument", name(argument)},
                     {"expected", wanted},
                     {"got", "sizes " + listed(raw.sizes, raw.dim) + ", strides " + listed(raw.strides, raw.dim)},
                     {"hint", "call it with `" + name(argument) + ".contiguous()`"}});
    });
  }

  void refuse_writes() const {
    bool writes = false;
    every(signature_, arguments_, [&](const RawTensor& raw, size_t, size_t argument) {
      if (!signature_[argument].written) return true;
      writes = true;
      for (int64_t at = 0; at < raw.dim; at++)
        if (raw.sizes[at] > 1 && raw.strides[at] == 0)
          throw refused("several elements of `" + name(argument) + "` are one in memory",
                        {{"argument", name(argument)},
                         {"expected", "a tensor that is not expanded"},
                         {"got", "strides " + listed(raw.strides, raw.dim)},
                         {"hint", "call it on a clone"}});
      return true;
    });
    if (!writes) return;
    if (shares_written(signature_, arguments_))
      throw refused("a tensor that it writes shares elements with another argument",
                    {{"expected", "tensors that share no element"}, {"hint", "call it with a clone of one"}});
    if (!raise_versions(signature_, arguments_))
      throw refused("torch does not let it write into a tensor",
                    {{"expected", "a tensor that may be written here"},
                     {"hint", "call it in inference mode, or on a clone, if the tensor was made in that mode"}});
  }

  Plan planned(const Candidate& candidate) const {
    Plan plan;
    plan.candidate = &candidate;
    every(signature_, arguments_, [&](const RawTensor& raw, size_t tensor, size_t argument) {
      const Parameter& parameter = candidate.parameters[argument];
      if (!has_layout(raw, parameter.layout))
        plan.copied.push_back({int64_t(tensor), int64_t(argument), parameter.written != 0,
                               strides_of(raw, parameter.layout == CHANNELS_LAST)});
      return true;
    });
    const std::vector<Shape> shapes = sizes(candidate);
    for (int32_t at = 0; at < op_.result_count; at++) {
      const Parameter& written = candidate.parameters[op_.argument_count + at];
      const Shape& shape = shapes[size_t(at)];
      if (written.dim >= 0 && written.dim != shape.dim) throw misfit();
      if (std::any_of(shape.sizes, shape.sizes + shape.dim, [](int64_t size) { return size < 0; })) throw misfit();
      const RawTensor raw{nullptr, shape.sizes, nullptr, shape.dim};
      Result result{written.dtype, {shape.sizes, shape.sizes + shape.dim}, strides_of(raw, false), {}};
      if (written.layout == CHANNELS_LAST) result.written = strides_of(raw, true);
      plan.results.push_back(std::move(result));
    }
    return plan;
  }

  // The sizes of the results; without results it refuses tensors that do not fit one another, before any is written.
  std::vector<Shape> sizes(const Candidate& candidate) const {
    std::vector<Shape> shapes(size_t(op_.result_count));
    const Value* values = arguments_.values.data();
    char error[1000];
    SizesStatus status = KNOWN;
    if (candidate.sizes != nullptr) status = candidate.sizes(values, shapes.data(), error, sizeof error);
    else if (op_.sizing != nullptr) status = declared_sizes(op_.sizing, values, shapes.data());
    if (status == THREW) throw refused(std::string("the kernel threw: ") + error);
    if (status != KNOWN) throw misfit();
    return shapes;
  }

  Refused misfit() const {
    std::string found;
    every(signature_, arguments_, [&](const RawTensor& raw, size_t, size_t argument) {
      found += (found.empty() ? "" : ", ") + name(argument) + ": " + listed(raw.sizes, raw.dim);
      return true;
    });
    return refused("its tensors do not fit one another",
                   {{"expected", *op_.shapes ? op_.shapes : "sizes for which its kernel knows those of the results"},
                    {"got", found},
                    {"hint", "look at the sizes of its tensors"}});
  }

  const ServedOperator& op_;
  const Signed& signature_;
  Arguments arguments_;
};
}  // namespace opsmith
