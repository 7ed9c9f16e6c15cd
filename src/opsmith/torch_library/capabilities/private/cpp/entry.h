// Entry of the functions that Python calls.
#pragma once

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/object_ptr.h>

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

}  // namespace opsmith
