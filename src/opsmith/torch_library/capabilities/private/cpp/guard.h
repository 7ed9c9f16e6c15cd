// Guards: what tensors must be like for a call whose signature is known.
#pragma once

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/object_ptr.h>

#include <c10/core/impl/LocalDispatchKeySet.h>

#include <vector>

namespace opsmith {

// Runs a function for Python. What torch warns of meanwhile comes when it ends, unless an exception tells that an error
// is set: Python would take a warning over it for a `SystemError`.
template <typename Function>
PyObject* for_python(const Function& function) {
  HANDLE_TH_ERRORS
  PyObject* result = function();
  if (!result) throw python_error();
  return result;
  END_HANDLE_TH_ERRORS
}

// The metadata of one example.
struct Example {
  PyTypeObject* type;  // owned
  uint64_t keys;       // of the tensor and of the thread: transforms, autocast, modes of users
  at::ScalarType dtype;
  c10::Device device;
  bool requires_grad;
  int64_t rank;
  std::vector<int64_t> sizes;  // empty where any will do
};

inline uint64_t dispatch_keys(const at::Tensor& tensor, const c10::impl::LocalDispatchKeySet& local) {
  return ((tensor.key_set() | local.included_) - local.excluded_).raw_repr();
}

// Accepts tensors with the metadata of the examples, none of them given twice.
struct Guard {
  PyObject_HEAD
  vectorcallfunc call;
  std::vector<Example>* examples;
  bool sized;
  bool never;  // an example has sizes that are symbols

  bool accepts(PyObject* const* tensors, size_t count) const {
    if (never || count != examples->size()) return false;
    const auto local = c10::impl::tls_local_dispatch_key_set();
    for (size_t at = 0; at < count; at++) {
      const Example& example = (*examples)[at];
      if (Py_TYPE(tensors[at]) != example.type) return false;
      for (size_t before = 0; before < at; before++) {
        if (tensors[before] == tensors[at]) return false;
      }
      const at::Tensor& tensor = THPVariable_Unpack(tensors[at]);
      if (dispatch_keys(tensor, local) != example.keys || tensor.scalar_type() != example.dtype ||
          tensor.device() != example.device || tensor.requires_grad() != example.requires_grad) {
        return false;
      }
      // The keys have told nested tensors apart, which have no sizes.
      if (tensor.dim() != example.rank || (sized && tensor.sizes() != c10::IntArrayRef(example.sizes))) return false;
    }
    return true;
  }
};

inline PyTypeObject GuardType = {PyVarObject_HEAD_INIT(nullptr, 0) "opsmith.Guard", sizeof(Guard)};

inline PyObject* call_guard(PyObject* self, PyObject* const* tensors, size_t flags, PyObject*) {
  return for_python([&]() -> PyObject* {
    return PyBool_FromLong(reinterpret_cast<Guard*>(self)->accepts(tensors, PyVectorcall_NARGS(flags)));
  });
}

inline void delete_guard(PyObject* self) {
  auto* guard = reinterpret_cast<Guard*>(self);
  for (const Example& example : *guard->examples) Py_DECREF(example.type);
  delete guard->examples;
  PyObject_Free(self);
}

// guard(tensors: tuple, sized: bool)
inline PyObject* make_guard(PyObject*, PyObject* args) {
  return for_python([&]() -> PyObject* {
    PyObject* tensors;
    int sized;
    if (!PyArg_ParseTuple(args, "O!p", &PyTuple_Type, &tensors, &sized)) return nullptr;
    auto* guard = PyObject_New(Guard, &GuardType);
    if (!guard) return nullptr;
    THPObjectPtr owned(reinterpret_cast<PyObject*>(guard));
    guard->call = call_guard;
    guard->examples = new std::vector<Example>();
    guard->sized = sized;
    guard->never = false;
    const auto local = c10::impl::tls_local_dispatch_key_set();
    for (Py_ssize_t at = 0; at < PyTuple_GET_SIZE(tensors); at++) {
      PyObject* each = PyTuple_GET_ITEM(tensors, at);
      TORCH_CHECK_TYPE(THPVariable_Check(each), "a guard is made of tensors");
      const at::Tensor& tensor = THPVariable_Unpack(each);
      guard->never |= tensor.is_nested() || tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides();
      Py_INCREF(Py_TYPE(each));
      guard->examples->push_back(
          {Py_TYPE(each), dispatch_keys(tensor, local), tensor.scalar_type(), tensor.device(),
           tensor.requires_grad(), guard->never ? 0 : tensor.dim(),
           sized && !guard->never ? tensor.sizes().vec() : std::vector<int64_t>()});
    }
    return owned.release();
  });
}

inline bool ready_guard() {
  GuardType.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL;
  GuardType.tp_vectorcall_offset = offsetof(Guard, call);
  GuardType.tp_call = PyVectorcall_Call;
  GuardType.tp_dealloc = delete_guard;
  return PyType_Ready(&GuardType) == 0;
}

}  // namespace opsmith
