// Python exceptions, thrown through the C++ frames between an operator and its caller.
//
// Torch's binding passes C++ exceptions to pybind11, which calls `set_error` of its class `builtin_exception`.
// That class is declared here as in pybind11, and is recognised by its name. A caller outside of Python
// gets a `std::runtime_error` with the same text.
#pragma once
#include <cstddef>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>

extern "C" {
typedef struct _object PyObject;
__attribute__((weak)) PyObject* PyObject_CallFunction(PyObject*, const char*, ...);
__attribute__((weak)) PyObject* PyUnicode_DecodeUTF8(const char*, ptrdiff_t, const char*);
__attribute__((weak)) PyObject* PyObject_Type(PyObject*);
__attribute__((weak)) void PyErr_SetObject(PyObject*, PyObject*);
__attribute__((weak)) void Py_IncRef(PyObject*);
__attribute__((weak)) void Py_DecRef(PyObject*);
__attribute__((weak)) int PyGILState_Ensure();
__attribute__((weak)) void PyGILState_Release(int);
}

namespace pybind11 {
class __attribute__((visibility("default"))) builtin_exception : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
  virtual void set_error() const = 0;
};
}  // namespace pybind11

namespace opsmith {
inline void set_python_error(PyObject* error) {
  PyObject* type = PyObject_Type(error);
  PyErr_SetObject(type, error);
  Py_DecRef(type);
}

// Exception of a kernel. `make` turns its text into a Python exception.
struct KernelThrew : pybind11::builtin_exception {
  PyObject* make;
  KernelThrew(PyObject* make, const char* text) : builtin_exception(text), make(make) {}
  void set_error() const override {
    // The text may contain any bytes, and a multi-byte character at its end may be cut.
    PyObject* text = PyUnicode_DecodeUTF8(what(), ptrdiff_t(std::strlen(what())), "replace");
    if (text == nullptr) return;
    PyObject* error = PyObject_CallFunction(make, "O", text);
    Py_DecRef(text);
    if (error == nullptr) return;  // the exception of `make` is set instead
    set_python_error(error);
    Py_DecRef(error);
  }
};

// Exception of Python code further down the stack. It may be dropped without the interpreter's lock.
struct PythonRaised : pybind11::builtin_exception {
  std::shared_ptr<PyObject> error;
  PythonRaised(PyObject* raised, const char* text)
      : builtin_exception(text), error(raised, [](PyObject* dropped) {
          int state = PyGILState_Ensure();
          Py_DecRef(dropped);
          PyGILState_Release(state);
        }) {}
  void set_error() const override { set_python_error(error.get()); }
};

// Exception that Python code caught because the C frames above it cannot carry one.
struct HeldError {
  PyObject* error = nullptr;
  std::string text;
};
inline thread_local HeldError held_error;

inline void throw_held() {
  PyObject* error = held_error.error;
  if (error == nullptr) return;
  held_error.error = nullptr;
  throw PythonRaised(error, held_error.text.c_str());
}
}  // namespace opsmith
