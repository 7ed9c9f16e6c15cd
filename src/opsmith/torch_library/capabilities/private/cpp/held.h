// Functions whose results are held to what an operator promises: `held_results.py` compares each combination of the
// metadata of arguments and results once, with some floating numbers.
#pragma once

#include "entry.h"
#include "results.h"

#include <structmember.h>

#include <unordered_map>
#include <unordered_set>

namespace opsmith {

struct Held {
  PyObject_HEAD
  vectorcallfunc call;
  PyObject *function, *compare;
  // Hashes of the floating numbers of combinations that are right, by the hash of the other metadata.
  std::unordered_map<uint64_t, std::unordered_set<uint64_t>>* known;
};

inline constexpr size_t MAX_NUMBERS = 8;  // see `held_results.py`

inline PyTypeObject HeldType = {PyVarObject_HEAD_INIT(nullptr, 0) "opsmith.Held", sizeof(Held)};

// A hash of the metadata on which that of results may depend: of tensors, and of values; that of floating numbers apart.
struct Metadata {
  uint64_t hash = 14695981039346656037u, numbers = 0;
  bool is_plain = true;  // false where a tensor has no sizes that are numbers

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
      if (known == -1) PyErr_Clear();  // its type stands for it
      add(static_cast<uint64_t>(known));
    }
  }
};

inline PyObject* call_held(PyObject* self, PyObject* const* arguments, size_t flags, PyObject* names) {
  return for_python([&]() -> PyObject* {
    THPObjectPtr owned(Py_NewRef(self));  // a call may replace it
    auto* held = reinterpret_cast<Held*>(self);
    const size_t positional = PyVectorcall_NARGS(flags), count = positional + (names ? PyTuple_GET_SIZE(names) : 0);
    const auto metadata = [&]() {
      Metadata of;
      for (size_t at = 0; at < count; at++) of.add(arguments[at]);
      return of;
    };
    Metadata given = metadata();
    THPObjectPtr returned(PyObject_Vectorcall(held->function, arguments, positional, names));
    if (!returned) return nullptr;
    Metadata all = given;
    all.add(returned.get());
    const auto known = held->known->find(all.hash);
    const bool is_known = all.is_plain && known != held->known->end() &&
        (known->second.size() >= MAX_NUMBERS || known->second.count(all.numbers));
    if (is_known) return returned.release();
    if (metadata().hash != given.hash) return returned.release();  // the contract refuses what it did to arguments
    Values compared{returned.get()};
    compared.append(arguments, arguments + count);
    THPObjectPtr results(PyObject_Vectorcall(held->compare, compared.data(), 1 + positional, names));
    if (!results) return nullptr;
    if (all.is_plain && results.get() == returned.get()) {
      if (held->known->size() >= 4096) held->known->clear();
      (*held->known)[all.hash].insert(all.numbers);
    }
    return results.release();
  });
}

inline int traverse_held(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(reinterpret_cast<Held*>(self)->function);
  Py_VISIT(reinterpret_cast<Held*>(self)->compare);
  return 0;
}

inline int clear_held(PyObject* self) {
  Py_CLEAR(reinterpret_cast<Held*>(self)->function);
  Py_CLEAR(reinterpret_cast<Held*>(self)->compare);
  return 0;
}

inline void delete_held(PyObject* self) {
  PyObject_GC_UnTrack(self);
  clear_held(self);
  delete reinterpret_cast<Held*>(self)->known;
  PyObject_GC_Del(self);
}

// held(function, compare): `compare(returned, *args, **kwargs)` gives the results, or raises.
inline PyObject* make_held(PyObject*, PyObject* args) {
  PyObject *function, *compare;
  if (!PyArg_ParseTuple(args, "OO", &function, &compare)) return nullptr;
  auto* held = PyObject_GC_New(Held, &HeldType);
  if (!held) return nullptr;
  held->call = call_held;
  held->function = Py_NewRef(function);
  held->compare = Py_NewRef(compare);
  held->known = new std::unordered_map<uint64_t, std::unordered_set<uint64_t>>();
  PyObject_GC_Track(held);
  return reinterpret_cast<PyObject*>(held);
}

inline PyMemberDef held_members[] = {
    {"__wrapped__", T_OBJECT_EX, offsetof(Held, function), READONLY, nullptr}, {nullptr}};

inline bool ready_held() {
  HeldType.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_HAVE_GC;
  HeldType.tp_vectorcall_offset = offsetof(Held, call);
  HeldType.tp_call = PyVectorcall_Call;
  HeldType.tp_dealloc = delete_held;
  HeldType.tp_traverse = traverse_held;
  HeldType.tp_clear = clear_held;
  HeldType.tp_members = held_members;
  return PyType_Ready(&HeldType) == 0;
}

}  // namespace opsmith
