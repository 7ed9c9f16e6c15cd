// The attributes of a node, read once when a session is made.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "nodes.h"
#include "ort_api.h"

namespace opsmith {

// Exception that becomes an error of ONNX Runtime.
struct Refused : std::exception {
  std::string text;
  explicit Refused(std::string text) : text(std::move(text)) {}
  const char* what() const noexcept override { return text.c_str(); }
};

class Attributes {
 public:
  Attributes(ort::Api api, const ort::KernelInfo* info, const NodeOperator& op) : api_(api), info_(info) {
    values_.resize(size_t(op.argument_count));
    held_.resize(values_.size());
    for (size_t at = 0; at < values_.size(); at++) {
      const NodeArgument& argument = op.arguments[at];
      values_[at].given = read(argument, values_[at], held_[at]);
      if (!values_[at].given && !argument.optional && argument.type != TENSOR)
        throw Refused(std::string(op.name) + ": a node has no attribute `" + argument.name + "`");
    }
  }

  // Value of each argument; for lists of tensors only their length.
  const std::vector<Value>& values() const { return values_; }

 private:
  struct Held {
    std::vector<int64_t> integers;
    std::vector<double> numbers;
    std::unique_ptr<bool[]> flags;
    std::string text;
  };

  bool read(const NodeArgument& argument, Value& value, Held& held) {
    switch (argument.type) {
      case TENSOR: return false;
      case INTEGER: return one(argument.name, value.integer);
      case FLAG: {
        int64_t found;
        if (!one(argument.name, found)) return false;
        value.flag = found != 0;
        return true;
      }
      case NUMBER:
        if (int64_t bits; one(argument.bits, bits)) {
          std::memcpy(&value.number, &bits, sizeof bits);
          return true;
        }
        if (float single; one(argument.name, single)) {
          value.number = single;
          return true;
        }
        return false;
      case STRING: return text(argument.name, value, held.text);
      case TENSORS: return one((std::string(argument.name) + "_count").c_str(), value.list.size);
      case INTEGERS: return list(argument.name, value, held.integers);
      case NUMBERS: return numbers(argument, value, held);
      case FLAGS: {
        if (!several(argument.name, held.integers)) return false;
        held.flags.reset(new bool[held.integers.size() + 1]);
        for (size_t at = 0; at < held.integers.size(); at++) held.flags[at] = held.integers[at] != 0;
        value.list = {held.flags.get(), int64_t(held.integers.size())};
        return true;
      }
    }
    return false;
  }

  bool numbers(const NodeArgument& argument, Value& value, Held& held) {
    if (several(argument.bits, held.integers)) {
      held.numbers.resize(held.integers.size());
      std::memcpy(held.numbers.data(), held.integers.data(), 8 * held.numbers.size());
    } else {
      std::vector<float> single;
      if (!several(argument.name, single)) return false;
      held.numbers.assign(single.begin(), single.end());
    }
    value.list = {held.numbers.data(), int64_t(held.numbers.size())};
    return true;
  }

  bool list(const char* name, Value& value, std::vector<int64_t>& held) {
    if (!several(name, held)) return false;
    value.list = {held.data(), int64_t(held.size())};
    return true;
  }

  bool text(const char* name, Value& value, std::string& held) {
    size_t size = 0;
    if (!is(api_.attribute(info_, name, static_cast<char*>(nullptr), &size))) return false;
    std::vector<char> found(size + 1);
    if (!is(api_.attribute(info_, name, found.data(), &size))) return false;
    held.assign(found.data(), size ? size - 1 : 0);  // without the zero at its end
    value.list = {held.data(), int64_t(held.size())};
    return true;
  }

  template <class T>
  bool one(const char* name, T& found) {
    return is(api_.attribute(info_, name, &found));
  }

  template <class T>
  bool several(const char* name, std::vector<T>& found) {
    size_t count = 0;
    if (!is(api_.attribute(info_, name, static_cast<T*>(nullptr), &count))) return false;
    found.resize(count);
    return count == 0 || is(api_.attribute(info_, name, found.data(), &count));
  }

  bool is(ort::Status* status) {
    if (status != nullptr) api_.release(status);
    return status == nullptr;
  }

  ort::Api api_;
  const ort::KernelInfo* info_;
  std::vector<Value> values_;
  std::vector<Held> held_;
};
}  // namespace opsmith
