// Results of a kernel: a test that they are new tensors.
#pragma once

#include "object.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/object_ptr.h>

#include <c10/util/DimVector.h>
#include <c10/util/SmallVector.h>

namespace opsmith {

inline PyTypeObject *plain_tensor = nullptr, *plain_parameter = nullptr, *dtensor = nullptr;

using Values = c10::SmallVector<PyObject*, 16>;

// New objects of a call, kept until its end.
using Owned = c10::SmallVector<THPObjectPtr, 4>;

// True if two storages are the same, or share memory: torch allocates no memory twice, but a storage that NumPy or
// DLPack has made, which cannot be resized, may share the memory of another storage.
inline bool are_one(const c10::StorageImpl* one, const c10::StorageImpl* other) {
  if (one == other) return true;
  if (one->resizable() && other->resizable()) return false;
  const auto begin = reinterpret_cast<uintptr_t>(one->data()), other_begin = reinterpret_cast<uintptr_t>(other->data());
  return begin && other_begin && begin < other_begin + other->nbytes() && other_begin < begin + one->nbytes();
}

[[noreturn]] inline void raise_python_error() {
  python_error error;
  error.persist();
  throw error;
}

// A new object; Python's exception if it cannot be made, as without memory.
inline PyObject* made(PyObject* object) {
  if (!object) raise_python_error();
  return object;
}

// The tensor with a tensor's memory: the shard of a DTensor; any other tensor itself. It is borrowed.
inline const at::Tensor& in_memory(PyObject* tensor) {
  if (Py_TYPE(tensor) != dtensor) return THPVariable_Unpack(tensor);
  static PyObject* const name = PyUnicode_InternFromString("_local_tensor");
  THPObjectPtr shard(made(PyObject_GetAttr(tensor, name)));
  return THPVariable_Unpack(shard.get());
}

// True if the results are dense tensors of the class `kind`, and share memory with no argument and no other result.
inline bool are_new(PyObject* result, Py_ssize_t count, const Values& arguments, const PyTypeObject* kind) {
  PyObject* const* all = &result;
  if (count > 1) {
    if (!PyTuple_CheckExact(result) || PyTuple_GET_SIZE(result) != count) return false;
    all = &PyTuple_GET_ITEM(result, 0);
  }
  c10::SmallVector<const c10::StorageImpl*, 16> taken;
  for (PyObject* each : arguments) {
    if (each != Py_None) taken.push_back(in_memory(each).storage().unsafeGetStorageImpl());
  }
  for (Py_ssize_t at = 0; at < count; at++) {
    if (Py_TYPE(all[at]) != kind) return false;
    const at::Tensor& tensor = in_memory(all[at]);
    const bool plain = tensor.layout() == at::kStrided && !tensor.is_nested() && !tensor.is_quantized();
    if (!plain || !tensor.has_storage()) return false;
    const c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
    for (const c10::StorageImpl* other : taken) {
      if (are_one(storage, other)) return false;
    }
    taken.push_back(storage);
  }
  return true;
}

// The version of a tensor; inference tensors have none.
inline int64_t version_of(const at::Tensor& tensor) { return tensor.is_inference() ? 0 : tensor._version(); }

// The number of writes that torch has counted in a tensor; in a DTensor and its shard together.
inline int64_t writes_of(PyObject* tensor) {
  const int64_t own = version_of(THPVariable_Unpack(tensor));
  return Py_TYPE(tensor) == dtensor ? own + version_of(in_memory(tensor)) : own;
}

// The state of an argument tensor before a call, which only reads it.
struct State {
  int64_t version;
  const c10::StorageImpl* storage;
  size_t bytes;  // of the storage
  int64_t offset;
  c10::DimVector sizes, strides;

  explicit State(PyObject* of) : State(in_memory(of), writes_of(of)) {}

  State(const at::Tensor& tensor, int64_t writes)
      : version(writes),
        storage(tensor.storage().unsafeGetStorageImpl()),
        bytes(storage->nbytes()),
        offset(tensor.storage_offset()),
        sizes(tensor.sizes()),
        strides(tensor.strides()) {}

  bool is_left(PyObject* of) const {
    const at::Tensor& tensor = in_memory(of);
    return writes_of(of) == version && tensor.storage().unsafeGetStorageImpl() == storage &&
        storage->nbytes() == bytes && tensor.storage_offset() == offset && tensor.sizes() == at::IntArrayRef(sizes) &&
        tensor.strides() == at::IntArrayRef(strides);
  }
};

using States = c10::SmallVector<State, 8>;

// The versions before a call, as `validate` takes them: -1 for a tensor that has changed.
inline PyObject* as_versions(const Values& tensors, const States& before) {
  PyObject* all = PyTuple_New(static_cast<Py_ssize_t>(before.size()));
  for (size_t at = 0; all && at < before.size(); at++) {
    const bool left = before[at].is_left(tensors[at]);
    PyTuple_SET_ITEM(all, at, PyLong_FromLongLong(left ? before[at].version : -1));
  }
  return all;
}

inline PyObject* as_list(const Values& values) {
  PyObject* listed = PyList_New(static_cast<Py_ssize_t>(values.size()));
  for (size_t at = 0; listed && at < values.size(); at++) PyList_SET_ITEM(listed, at, Py_NewRef(values[at]));
  return listed;
}

// Runs a kernel, whose last arguments have `names` unless that is None. If it is not trusted to leave its tensors
// unchanged, or its result is not right, `validate` checks the result and the versions before.
template <class IsRight, class Validate>
PyObject* run_kernel(
    const pybind11::object& kernel, const Values& given, PyObject* names, const Values& tensors, bool trusted,
    const IsRight& is_right, const Validate& validate) {
  States before;
  for (size_t at = 0; !trusted && at < tensors.size(); at++) before.emplace_back(tensors[at]);
  const bool by_name = names != Py_None;
  const size_t positional = given.size() - (by_name ? PyTuple_GET_SIZE(names) : 0);
  THPObjectPtr result(PyObject_Vectorcall(kernel.ptr(), given.data(), positional, by_name ? names : nullptr));
  if (!result) return nullptr;
  bool unchanged = true;
  for (size_t at = 0; at < before.size(); at++) unchanged &= before[at].is_left(tensors[at]);
  if (unchanged && is_right(result.get())) return result.release();
  THPObjectPtr versions(trusted ? Py_NewRef(Py_None) : as_versions(tensors, before));
  return versions ? validate(result.get(), versions.get()) : nullptr;
}

// A test that results are new: called with the result and the tensor arguments, some of them None.
struct Freshness {
  static constexpr const char* name = "opsmith.Freshness";
  Py_ssize_t count;  // of results

  static PyObject* call(PyObject* self, PyObject* const* args, size_t flags, PyObject*) {
    return for_python([&]() -> PyObject* {
      const size_t count = PyVectorcall_NARGS(flags);
      return PyBool_FromLong(are_new(args[0], parts_of<Freshness>(self).count, Values(args + 1, args + count), plain_tensor));
    });
  }

  template <class F>
  void each(const F&) {}
};

}  // namespace opsmith
