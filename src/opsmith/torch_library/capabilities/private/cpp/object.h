// The Python side of C++: objects with C++ values, which the garbage collector follows, and functions.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>

#include <new>
#include <utility>

namespace opsmith {

// Runs a function for Python. torch's warnings are issued at its end, unless an exception shows that an error is set:
// for a warning on top of an error, Python would raise a `SystemError`.
template <typename Function>
PyObject* for_python(const Function& function) {
  HANDLE_TH_ERRORS
  PyObject* result = function();
  if (!result) throw python_error();
  return result;
  END_HANDLE_TH_ERRORS
}

// The object of some parts: they have a `name`, show the objects that they own by `each`, and may have a `call`,
// `properties`, and a `leave` that runs before their objects are released.
template <class Parts>
struct Object {
  PyObject_HEAD
  vectorcallfunc call;
  Parts parts;
};

template <class Parts>
inline PyTypeObject type_of = {PyVarObject_HEAD_INIT(nullptr, 0) Parts::name, sizeof(Object<Parts>)};

template <class Parts>
Parts& parts_of(PyObject* self) {
  return reinterpret_cast<Object<Parts>*>(self)->parts;
}

template <class Parts>
pybind11::object object_of(Parts parts) {
  auto* made = PyObject_GC_New(Object<Parts>, &type_of<Parts>);
  if (!made) throw pybind11::error_already_set();
  if constexpr (requires { Parts::call; }) made->call = Parts::call;
  new (&made->parts) Parts(std::move(parts));
  PyObject_GC_Track(made);
  return pybind11::reinterpret_steal<pybind11::object>(reinterpret_cast<PyObject*>(made));
}

template <class Parts>
int clear(PyObject* self) {
  if constexpr (requires(Parts parts) { parts.leave(); }) parts_of<Parts>(self).leave();
  parts_of<Parts>(self).each([](pybind11::object& each) { pybind11::object(std::move(each)); });
  return 0;
}

// Makes the type ready; throws Python's exception.
template <class Parts>
void make_ready() {
  PyTypeObject& type = type_of<Parts>;
  type.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC;
  if constexpr (requires { Parts::call; }) {
    type.tp_flags |= Py_TPFLAGS_HAVE_VECTORCALL;
    type.tp_vectorcall_offset = offsetof(Object<Parts>, call);
    type.tp_call = PyVectorcall_Call;
  }
  if constexpr (requires { Parts::properties; }) type.tp_getset = Parts::properties;
  type.tp_traverse = [](PyObject* self, visitproc visit, void* arg) {
    int status = 0;
    parts_of<Parts>(self).each([&](pybind11::object& each) {
      if (!status && each) status = visit(each.ptr(), arg);
    });
    return status;
  };
  type.tp_clear = clear<Parts>;
  type.tp_dealloc = [](PyObject* self) {
    PyObject_GC_UnTrack(self);
    clear<Parts>(self);
    parts_of<Parts>(self).~Parts();
    PyObject_GC_Del(self);
  };
  if (PyType_Ready(&type) < 0) throw pybind11::error_already_set();
}

}  // namespace opsmith
