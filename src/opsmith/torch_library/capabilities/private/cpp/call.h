// Calls of a handle whose signature is in its table: made without a Python frame.
#pragma once

#include "rule.h"

#include <ATen/Context.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/Size.h>

#include <array>
#include <unordered_map>

namespace opsmith {

// Forms of an argument. A letter in upper case means that it may also be None.
enum Form : char {
  TENSOR = 't',
  LIST = 'l',      // of tensors; a kernel gets a new list
  TUPLE = 'u',     // of tensors; a kernel gets a new tuple
  FLOATING = 'f',  // an integer is converted
  NUMBER = 'n',    // an integer or a floating number, as it is
  INTEGERS = 's',  // a tuple or list of plain integers; a kernel gets a new list
  SIZES = 'z',     // the same; a kernel gets a new tuple
  EXACT = 'e',     // of one type
};

// How a route computes.
enum How : char {
  BY_KERNEL = 'k',  // a function of the arguments, whose results are checked here by the contract
  BY_NODE = 'n',    // the `apply` of a node, which takes the items of lists one by one
  WHOLE = 'w',      // a function of a list of all arguments, which returns a tuple of all results
};

struct Route {
  pybind11::object function, validate;
  How how;
  bool trusted;     // it writes only into arguments declared as written, and returns new tensors
  bool has_graph;   // a result may require a gradient
  bool contiguous;  // it takes written arguments only in contiguous memory
};

using Signature = std::vector<uint64_t>;

struct SignatureHash {
  size_t operator()(const Signature& signature) const {
    size_t found = signature.size();
    for (uint64_t each : signature) found = found * 1000003 ^ (each ^ each >> 32);
    return found;
  }
};

inline constexpr size_t MAX_ROUTES = 256;

// Sizes that the tensors of one argument must have, counted from the last one.
struct DeclaredSizes {
  Py_ssize_t argument;
  bool leading;                // any number of sizes may come first
  std::vector<int64_t> sizes;  // the number of a letter, -1 for any size, -2 - n for the size n
};

// The table of the calls of one handle; `calls/accelerator.py` describes its parts.
struct Plan {
  static constexpr const char* name = "opsmith.Plan";
  PyTypeObject* handle;  // borrowed, used while `plans` has the plan
  pybind11::object names, by_keyword, defaults, types, fits, shown, unknown, unchanged;
  Places counts, spread, integers, written;
  std::vector<DeclaredSizes> sizes;
  std::string forms;
  Py_ssize_t positional, results, letters;
  bool by_name, alike;
  std::unordered_map<Signature, Route, SignatureHash> routes = {};

  // Releasing an object may run code that returns here.
  void forget_routes() { const auto forgotten = std::exchange(routes, {}); }
  bool is_used() const;
  void leave();  // its handle, which owns it, may be gone

  template <class F>
  void each(const F& show) {
    for (auto* each : {&names, &by_keyword, &defaults, &types, &fits, &shown, &unknown, &unchanged}) {
      show(*each);
    }
    for (auto& [signature, route] : routes) show(route.function), show(route.validate);
  }
};

inline std::unordered_map<PyTypeObject*, PyObject*> plans;  // borrowed
inline ternaryfunc in_python = nullptr;  // calls a handle by its `__call__`

// One call: the arguments in order, borrowed, and the facts that decide its route.
struct Call {
  Values values, tensors;
  Signature signature;
  Owned owned;
  const PyTypeObject* kind = plain_tensor;  // of the results
};

// The arguments in order; false if one is missing, unknown or given twice.
inline bool bind(const Plan* plan, PyObject* const* args, Py_ssize_t given, PyObject* kwargs, Values& values) {
  const Py_ssize_t count = PyTuple_GET_SIZE(plan->names.ptr());
  if (given > plan->positional) return false;
  values.append(args, args + given);
  values.resize(count, nullptr);
  PyObject *key, *value;
  for (Py_ssize_t at = 0; kwargs && PyDict_Next(kwargs, &at, &key, &value);) {
    if (!plan->by_name) return false;
    Py_ssize_t place = 0;
    while (place < count && PyTuple_GET_ITEM(plan->names.ptr(), place) != key) place++;  // names are interned
    if (place == count || values[place]) return false;
    values[place] = value;
  }
  for (Py_ssize_t at = given; at < count; at++) {
    if (values[at]) continue;
    PyObject* by_default = PyTuple_GET_ITEM(plan->defaults.ptr(), at);  // a tuple of one item, or an empty tuple
    if (!PyTuple_GET_SIZE(by_default)) return false;
    values[at] = PyTuple_GET_ITEM(by_default, 0);
  }
  return true;
}

// True for an int that torch holds.
inline bool is_integer(PyObject* value) {
  int beyond = 0;
  if (PyLong_CheckExact(value)) PyLong_AsLongLongAndOverflow(value, &beyond);
  return PyLong_CheckExact(value) && !beyond;
}

inline bool are_integers(PyObject* value, Py_ssize_t count) {
  if (!PyTuple_CheckExact(value) && !PyList_CheckExact(value) && Py_TYPE(value) != &THPSizeType) return false;
  const Py_ssize_t size = PySequence_Fast_GET_SIZE(value);
  if (count && size != count) return false;
  for (Py_ssize_t at = 0; at < size; at++) {
    if (!is_integer(PySequence_Fast_GET_ITEM(value, at))) return false;
  }
  return true;
}

inline bool is_plain_tensor(PyObject* value) {
  return Py_TYPE(value) == plain_tensor || Py_TYPE(value) == plain_parameter;
}

inline uint64_t dispatch_keys(const at::Tensor& tensor, const c10::impl::LocalDispatchKeySet& local) {
  return ((tensor.key_set() | local.included_) - local.excluded_).raw_repr();
}

// Adds a tensor, and its part of the signature. The keys show transforms, autocast, inference and user modes.
inline void add_tensor(Call& call, PyObject* value, const c10::impl::LocalDispatchKeySet& local) {
  const at::Tensor& tensor = THPVariable_Unpack(value);
  call.tensors.push_back(value);
  const c10::Device device = tensor.device();
  call.signature.push_back(reinterpret_cast<uint64_t>(Py_TYPE(value)));
  call.signature.push_back(dispatch_keys(tensor, local));
  call.signature.push_back(
      static_cast<uint64_t>(tensor.scalar_type()) | static_cast<uint64_t>(static_cast<uint8_t>(device.type())) << 8 |
      static_cast<uint64_t>(static_cast<uint8_t>(device.index())) << 16 | static_cast<uint64_t>(tensor.requires_grad()) << 24 |
      static_cast<uint64_t>(tensor.dim()) << 32);
}

// True if each argument has its form. It notes the signature and the tensors, also tensors in lists. A list becomes
// a tuple, which cannot change while the call runs.
inline bool has_forms(const Plan* plan, Call& call) {
  const auto local = c10::impl::tls_local_dispatch_key_set();
  call.signature.reserve(2 + 4 * call.values.size());
  call.signature.push_back(at::GradMode::is_enabled());
  for (size_t at = 0; at < call.values.size(); at++) {
    PyObject* value = call.values[at];
    char form = plan->forms[at];
    const bool optional = form < 'a';
    if (optional) form += 'a' - 'A';
    if (optional && form == TENSOR) call.signature.push_back(value != Py_None);
    if (optional && value == Py_None) continue;
    PyTypeObject* type = Py_TYPE(value);
    bool fits = false;
    switch (form) {
      case TENSOR:
        fits = is_plain_tensor(value) || type == dtensor;
        if (fits) add_tensor(call, value, local);
        if (type == dtensor) call.kind = dtensor;
        break;
      case LIST:
      case TUPLE:
        fits = type == &PyList_Type || type == &PyTuple_Type;
        if (!fits) break;
        call.owned.emplace_back(PySequence_Tuple(value));
        value = call.values[at] = call.owned.back().get();
        if (!value) return false;
        call.signature.push_back(PyTuple_GET_SIZE(value));
        for (Py_ssize_t item = 0; fits && item < PyTuple_GET_SIZE(value); item++) {
          fits = is_plain_tensor(PyTuple_GET_ITEM(value, item));
          if (fits) add_tensor(call, PyTuple_GET_ITEM(value, item), local);
        }
        break;
      case FLOATING:
      case NUMBER:
        fits = PyFloat_CheckExact(value) || is_integer(value);
        break;
      case INTEGERS:
      case SIZES:
        fits = (plan->spread[at] && is_integer(value)) || are_integers(value, plan->counts[at]);
        break;
      case EXACT:
        fits = reinterpret_cast<PyObject*>(type) == PyTuple_GET_ITEM(plan->types.ptr(), at);
        if (type == &PyLong_Type) fits = fits && is_integer(value);
        break;
    }
    if (!fits) return false;
  }
  return true;
}

// True if nothing that would see the call is active: a mode, a forward-mode level, a profiler, or Dynamo, which
// compiles the Python frame.
inline bool nothing_watches(const Plan* plan) {
  THPObjectPtr callback(PyObject_CallNoArgs(frame_callback));  // null for an error, which the caller raises
  if (callback.get() != Py_None) return false;
  if (at::impl::torch_function_mode_enabled() || c10::impl::TorchDispatchModeTLS::stack_len() > 0) return false;
  if (!plan->alike && at::globalContext().deterministicAlgorithms()) return false;
  for (Py_ssize_t at = 0; at < PyTuple_GET_SIZE(plan->unchanged.ptr()); at++) {
    PyObject* each = PyTuple_GET_ITEM(plan->unchanged.ptr(), at);  // a module's dictionary, a name, a value
    PyObject* value = PyDict_GetItemWithError(PyTuple_GET_ITEM(each, 0), PyTuple_GET_ITEM(each, 1));
    if (value != PyTuple_GET_ITEM(each, 2)) return false;
  }
  return true;
}

// True if a tensor has the declared sizes; it notes the sizes of letters.
inline bool has_sizes(const DeclaredSizes& declared, PyObject* value, c10::SmallVector<int64_t, 8>& letters) {
  const at::IntArrayRef found = THPVariable_Unpack(value).sizes();
  const size_t count = declared.sizes.size();
  if (found.size() < count || (found.size() > count && !declared.leading)) return false;
  for (size_t at = 0; at < count; at++) {
    const int64_t wanted = declared.sizes[at], size = found[found.size() - count + at];
    if (wanted == -1) continue;
    if (wanted < -1 ? size != -2 - wanted : letters[wanted] >= 0 && size != letters[wanted]) return false;
    if (wanted >= 0) letters[wanted] = size;
  }
  return true;
}

// True if the tensors have the declared shapes; false, with an exception set, if Python raises one.
inline bool in_shape(const Plan* plan, const Values& values) {
  if (!plan->fits.is_none()) {
    THPObjectPtr fits(PyObject_Vectorcall(plan->fits.ptr(), values.data(), values.size(), nullptr));
    return fits.get() == Py_True;
  }
  c10::SmallVector<int64_t, 8> letters(plan->letters, -1);
  for (size_t at = 0; at < plan->integers.size(); at++) {
    const Py_ssize_t letter = plan->integers[at];
    if (letter < 0 || values[at] == Py_None) continue;
    letters[letter] = PyLong_AsLongLong(values[at]);
    if (letters[letter] < 0) {  // not a size, or too large for C++
      PyErr_Clear();
      return false;
    }
  }
  for (const DeclaredSizes& declared : plan->sizes) {
    PyObject* value = values[declared.argument];
    if (value == Py_None) continue;
    if (!PyTuple_Check(value)) {
      if (!has_sizes(declared, value, letters)) return false;
      continue;
    }
    for (Py_ssize_t at = 0; at < PyTuple_GET_SIZE(value); at++) {
      if (!has_sizes(declared, PyTuple_GET_ITEM(value, at), letters)) return false;
    }
  }
  return true;
}

// A new list or tuple of one number several times.
inline PyObject* several_of(PyObject* number, Py_ssize_t count, bool as_list) {
  PyObject* made = as_list ? PyList_New(count) : PyTuple_New(count);
  for (Py_ssize_t at = 0; made && at < count; at++) {
    as_list ? PyList_SET_ITEM(made, at, Py_NewRef(number)) : PyTuple_SET_ITEM(made, at, Py_NewRef(number));
  }
  return made;
}

// The arguments for a kernel, or for a node, which takes the items of lists one by one. `owned` keeps new objects.
inline bool convert(const Plan* plan, const Values& values, bool by_node, Values& given, Owned& owned) {
  for (size_t at = 0; at < values.size(); at++) {
    const char form = plan->forms[at] | ('a' - 'A');
    PyObject* value = values[at];
    if (value == Py_None) {
      given.push_back(value);
      continue;
    }
    if (by_node && (form == LIST || form == TUPLE)) {
      PyObject* const* items = &PyTuple_GET_ITEM(value, 0);
      given.append(items, items + PyTuple_GET_SIZE(value));
      continue;
    }
    if (form == FLOATING && PyLong_CheckExact(value)) {
      owned.emplace_back(PyNumber_Float(value));
    } else if ((form == INTEGERS || form == SIZES) && PyLong_CheckExact(value)) {
      owned.emplace_back(several_of(value, std::max<Py_ssize_t>(plan->counts[at], 1), form == INTEGERS));
    } else if (form == LIST || form == INTEGERS) {
      owned.emplace_back(PySequence_List(value));
    } else if (form == TUPLE || form == SIZES) {
      owned.emplace_back(PySequence_Tuple(value));
    } else {
      given.push_back(value);
      continue;
    }
    if (!owned.back()) return false;
    given.push_back(owned.back().get());
  }
  return true;
}

// The results that callers see, from all results: a tuple, or a single result. `-1 - n` is the argument `n`.
inline PyObject* seen(const Plan* plan, PyObject* shown, const Values& values, THPObjectPtr result, bool in_tuple) {
  if (!result) return nullptr;
  const Py_ssize_t count = PyTuple_GET_SIZE(shown);
  const auto item = [&](Py_ssize_t at) {
    const Py_ssize_t place = PyLong_AsSsize_t(PyTuple_GET_ITEM(shown, at));
    if (place < 0) return Py_NewRef(values[-1 - place]);
    return Py_NewRef(in_tuple ? PyTuple_GET_ITEM(result.get(), place) : result.get());
  };
  if (count == 0) Py_RETURN_NONE;
  if (count == 1) return item(0);
  if (count == plan->results && plan->written.empty()) return result.release();
  PyObject* some = PyTuple_New(count);
  for (Py_ssize_t at = 0; some && at < count; at++) PyTuple_SET_ITEM(some, at, item(at));
  return some;
}

// True if the results of a kernel keep its promise.
inline bool holds_contract(const Plan* plan, PyObject* result, const Call& call, bool has_graph) {
  if (!are_new(result, plan->results, call.tensors, call.kind)) return false;
  // A result requires a gradient if a tensor that is not an argument does.
  for (Py_ssize_t at = 0; !has_graph && at < plan->results; at++) {
    PyObject* each = plan->results == 1 ? result : PyTuple_GET_ITEM(result, at);
    if (THPVariable_Unpack(each).requires_grad()) return false;
  }
  return true;
}

// All results of a kernel: one result, or a tuple of several.
inline PyObject* call_kernel(const Plan* plan, const Route& route, Call& call, bool& in_tuple) {
  Values given;
  if (!convert(plan, call.values, false, given, call.owned)) return nullptr;
  const auto is_right = [&](PyObject* result) {
    return route.trusted || holds_contract(plan, result, call, route.has_graph);
  };
  const auto validate = [&](PyObject* result, PyObject* versions) -> PyObject* {
    Values received;  // the kernel may have changed the lists that it got
    if (!convert(plan, call.values, false, received, call.owned)) return nullptr;
    THPObjectPtr listed(as_list(received));
    in_tuple = true;
    return listed ? PyObject_CallFunctionObjArgs(route.validate.ptr(), result, listed.get(), versions, nullptr) : nullptr;
  };
  return run_kernel(route.function, given, plan->by_keyword.ptr(), call.tensors, route.trusted, is_right, validate);
}

// All results of a call by its route.
inline PyObject* follow(const Plan* plan, const Route& route, Call& call, bool& in_tuple) {
  in_tuple = plan->results > 1;
  if (route.how == BY_KERNEL) return call_kernel(plan, route, call, in_tuple);
  Values given;
  if (!convert(plan, call.values, route.how == BY_NODE, given, call.owned)) return nullptr;
  if (route.how == BY_NODE) return PyObject_Vectorcall(route.function.ptr(), given.data(), given.size(), nullptr);
  in_tuple = true;
  THPObjectPtr listed(as_list(given));
  return listed ? PyObject_CallOneArg(route.function.ptr(), listed.get()) : nullptr;
}

inline bool is_written_contiguous(const Plan* plan, const Values& values) {
  for (Py_ssize_t at : plan->written) {
    PyObject* value = values[at];
    const bool is_list = PyTuple_Check(value);
    for (Py_ssize_t item = 0; value != Py_None && item < (is_list ? PyTuple_GET_SIZE(value) : 1); item++) {
      if (!THPVariable_Unpack(is_list ? PyTuple_GET_ITEM(value, item) : value).is_contiguous()) return false;
    }
  }
  return true;
}

// The results that callers see of a call by the table; null, without an exception, if Python makes the call.
inline PyObject* by_table(
    PyObject* table, PyObject* const* args, Py_ssize_t given, PyObject* kwargs, PyObject* shown = nullptr) {
  THPObjectPtr held(Py_NewRef(table));  // a call may replace it
  Plan* plan = &parts_of<Plan>(held.get());
  Call call;
  if (!bind(plan, args, given, kwargs, call.values) || !has_forms(plan, call) || !nothing_watches(plan)) return nullptr;
  const auto known = plan->routes.find(call.signature);
  if (known == plan->routes.end()) return nullptr;
  const Route route = known->second;  // the table may change while it computes
  if ((route.contiguous && !is_written_contiguous(plan, call.values)) || !in_shape(plan, call.values)) return nullptr;
  bool in_tuple;
  THPObjectPtr result(follow(plan, route, call, in_tuple));
  if (!result && PyErr_ExceptionMatches(plan->unknown.ptr())) {
    PyErr_Clear();
    return nullptr;
  }
  return seen(plan, shown ? shown : plan->shown.ptr(), call.values, std::move(result), in_tuple);
}

inline PyObject* call_handle(PyObject* self, PyObject* args, PyObject* kwargs) {
  return for_python([&]() -> PyObject* {
    const auto found = plans.find(Py_TYPE(self));
    if (found == plans.end()) return in_python(self, args, kwargs);
    PyObject* result = by_table(found->second, &PyTuple_GET_ITEM(args, 0), PyTuple_GET_SIZE(args), kwargs);
    return result || PyErr_Occurred() ? result : in_python(self, args, kwargs);
  });
}

inline ternaryfunc autograd_kernel_in_python = nullptr;

// Calls a kernel for the autograd key, which torch gives the dispatch keys first.
inline PyObject* call_autograd_kernel(PyObject* self, PyObject* args, PyObject* kwargs) {
  return for_python([&]() -> PyObject* {
    static PyObject *const table_name = PyUnicode_InternFromString("table"), *const shown_name = PyUnicode_InternFromString("shown");
    THPObjectPtr table(PyObject_GetAttr(self, table_name)), shown(PyObject_GetAttr(self, shown_name));
    if (!table || !shown) return nullptr;
    PyObject* result = nullptr;
    if (table.get() != Py_None) {
      result = by_table(table.get(), &PyTuple_GET_ITEM(args, 1), PyTuple_GET_SIZE(args) - 1, kwargs, shown.get());
    }
    return result || PyErr_Occurred() ? result : autograd_kernel_in_python(self, args, kwargs);
  });
}

// Makes calls of these objects look into their tables.
inline void use_autograd_kernels(pybind11::handle type) {
  auto* kernels = reinterpret_cast<PyTypeObject*>(type.ptr());
  if (kernels->tp_call == call_autograd_kernel) return;
  autograd_kernel_in_python = kernels->tp_call;
  kernels->tp_call = call_autograd_kernel;
}

// Calls with the signature of these values take this route from now on; false if no call can.
inline bool accept(
    pybind11::handle self, const pybind11::list& values, char how, pybind11::object function, pybind11::object validate,
    bool trusted, bool has_graph, bool contiguous) {
  Plan& plan = parts_of<Plan>(self.ptr());
  Call call;
  for (const pybind11::handle each : values) call.values.push_back(each.ptr());
  if (!has_forms(&plan, call)) {
    if (PyErr_Occurred()) throw pybind11::error_already_set();
    return false;
  }
  for (PyObject* each : call.tensors) {
    const at::Tensor& tensor = in_memory(each);
    const bool usual = tensor.layout() == at::kStrided && !tensor.is_nested() && !tensor.is_quantized() &&
        tensor.has_storage() && !tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides();
    if (!usual) return false;
  }
  if (plan.routes.size() >= MAX_ROUTES) plan.forget_routes();
  Route route{std::move(function), std::move(validate), static_cast<How>(how), trusted, has_graph, contiguous};
  std::swap(plan.routes[std::move(call.signature)], route);
  return true;
}

inline bool Plan::is_used() const {
  const auto found = plans.find(handle);
  return found != plans.end() && &parts_of<Plan>(found->second) == this;
}

inline void Plan::leave() {
  if (is_used()) plans.erase(handle);
  forget_routes();
}

// Calls of its handle are made in Python from now on.
inline void detach(pybind11::handle self) {
  Plan& plan = parts_of<Plan>(self.ptr());
  if (plan.is_used() && plan.handle->tp_call == call_handle) plan.handle->tp_call = in_python;
  plan.leave();
}

// Calls of the handle use its table from now on, until it is detached or `__call__` is set. The parts are given
// by name.
inline pybind11::object make_plan(const pybind11::kwargs& given) {
  const auto places = [&](const char* name) { return given[name].cast<Places>(); };
  Plan plan{
      reinterpret_cast<PyTypeObject*>(given["handle"].ptr()),
      given["names"],
      given["by_keyword"],
      given["defaults"],
      given["types"],
      given["fits"],
      given["shown"],
      given["unknown"],
      given["unchanged"],
      places("counts"),
      places("spread"),
      places("integers"),
      places("written"),
      {},
      given["forms"].cast<std::string>(),
      given["positional"].cast<Py_ssize_t>(),
      given["results"].cast<Py_ssize_t>(),
      given["letters"].cast<Py_ssize_t>(),
      given["by_name"].cast<bool>(),
      given["alike"].cast<bool>()};
  for (auto& [argument, leading, sizes] : given["sizes"].cast<std::vector<std::tuple<Py_ssize_t, bool, std::vector<int64_t>>>>()) {
    plan.sizes.push_back({argument, leading, sizes});
  }
  PyTypeObject* const handle = plan.handle;
  pybind11::object made = object_of(std::move(plan));
  if (handle->tp_call != call_handle) in_python = handle->tp_call;
  plans[handle] = made.ptr();
  handle->tp_call = call_handle;
  return made;
}

}  // namespace opsmith
