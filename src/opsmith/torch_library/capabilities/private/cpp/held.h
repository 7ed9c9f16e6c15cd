// Functions whose results are checked by an operator's promise: `held_results.py` compares each combination of the
// metadata of arguments and results once, with some floating numbers.
#pragma once

#include "results.h"

#include <unordered_map>
#include <unordered_set>

namespace opsmith {

inline constexpr size_t MAX_NUMBERS = 8;  // see `held_results.py`

// A hash of the metadata, of tensors and values, on which the results' metadata may depend; floats are hashed apart.
struct Metadata {
  uint64_t hash = 14695981039346656037u, numbers = 0;
  bool is_plain = true;  // false if a tensor has sizes that are not numbers

  void add(uint64_t value) { hash = (hash ^ (value + 0x9e3779b97f4a7c15u + (hash << 6) + (hash >> 2))) * 1099511628211u; }

  void add(PyObject* value) {
    add(reinterpret_cast<uint64_t>(Py_TYPE(value)));
    if (THPVariable_Check(value)) {
      const at::Tensor& tensor = THPVariable_Unpack(value);
      const bool plain = tensor.layout() == at::kStrided && !tensor.is_nested() &&
          !tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides();
      is_plain &= plain;
      if (!plain) return;
      add(static_cast<uint64_t>(tensor.scalar_type()));
      add(static_cast<uint64_t>(tensor.device().type()) << 8 | static_cast<uint8_t>(tensor.device().index()));
      add(static_cast<uint64_t>(tensor.dim()));
      for (int64_t size : tensor.sizes()) add(static_cast<uint64_t>(size));
      for (int64_t stride : tensor.strides()) add(static_cast<uint64_t>(stride));
    } else if (PyTuple_CheckExact(value) || PyList_CheckExact(value)) {
      const Py_ssize_t count = PySequence_Fast_GET_SIZE(value);
      add(static_cast<uint64_t>(count));
      for (Py_ssize_t at = 0; at < count; at++) add(PySequence_Fast_GET_ITEM(value, at));
    } else if (PyFloat_CheckExact(value)) {
      numbers = numbers * 1099511628211u ^ static_cast<uint64_t>(PyObject_Hash(value));
    } else {
      const Py_hash_t known = PyObject_Hash(value);
      if (known == -1) PyErr_Clear();  // its type represents it
      add(static_cast<uint64_t>(known));
    }
  }
};

struct Held {
  static constexpr const char* name = "opsmith.Held";
  pybind11::object function, compare;  // `compare(returned, *args, **kwargs)` returns the results, or raises
  // Hashes of the floating numbers of combinations that are right, by the hash of the other metadata.
  std::unordered_map<uint64_t, std::unordered_set<uint64_t>> known = {};

  static PyObject* call(PyObject* self, PyObject* const* arguments, size_t flags, PyObject* names) {
    return for_python([&]() -> PyObject* {
      THPObjectPtr owned(Py_NewRef(self));  // a call may replace it
      Held& held = parts_of<Held>(self);
      const size_t positional = PyVectorcall_NARGS(flags), count = positional + (names ? PyTuple_GET_SIZE(names) : 0);
      const auto metadata = [&]() {
        Metadata of;
        for (size_t at = 0; at < count; at++) of.add(arguments[at]);
        return of;
      };
      Metadata given = metadata();
      THPObjectPtr returned(PyObject_Vectorcall(held.function.ptr(), arguments, positional, names));
      if (!returned) return nullptr;
      Metadata all = given;
      all.add(returned.get());
      const auto known = held.known.find(all.hash);
      const bool is_known = all.is_plain && known != held.known.end() &&
          (known->second.size() >= MAX_NUMBERS || known->second.count(all.numbers));
      if (is_known) return returned.release();
      if (metadata().hash != given.hash) return returned.release();  // the contract refuses changed arguments
      Values compared{returned.get()};
      compared.append(arguments, arguments + count);
      THPObjectPtr results(PyObject_Vectorcall(held.compare.ptr(), compared.data(), 1 + positional, names));
      if (!results) return nullptr;
      if (all.is_plain && results.get() == returned.get()) {
        if (held.known.size() >= 4096) held.known.clear();
        held.known[all.hash].insert(all.numbers);
      }
      return results.release();
    });
  }

  static PyObject* wrapped(PyObject* self, void*) { return Py_NewRef(parts_of<Held>(self).function.ptr()); }
  inline static PyGetSetDef properties[] = {{"__wrapped__", wrapped, nullptr, nullptr, nullptr}, {nullptr}};

  template <class F>
  void each(const F& show) {
    show(function), show(compare);
  }
};

}  // namespace opsmith
