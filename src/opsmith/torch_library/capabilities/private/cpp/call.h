// Calls of a handle whose signature is in its table: without a frame in Python.
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

// Forms of an argument. In upper case it may be None, too.
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
  BY_KERNEL = 'k',  // a function of the arguments, whose results are held to the contract here
  BY_NODE = 'n',    // the `apply` of a node, which takes the items of lists one by one
  WHOLE = 'w',      // a function of a list of all arguments, which returns a tuple of all results
};

struct Route {
  PyObject *function, *validate;  // owned
  How how;
  bool trusted;     // it writes into no argument that it must not, and returns new tensors
  bool has_graph;   // a result may require a gradient
  bool contiguous;  // it takes what it writes in contiguous memory alone
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

// The table of the calls of one handle; `calls/accelerator.py` says what each part is.
struct Plan {
  PyObject_HEAD
  PyTypeObject* handle;  // borrowed, used while `plans` has the plan
  PyObject *names, *defaults, *types, *fits, *shown, *on_dtensors, *unknown, *unchanged;
  std::unordered_map<Signature, Route, SignatureHash>* routes;
  std::vector<DeclaredSizes>* sizes;
  std::vector<Py_ssize_t>*counts, *spread, *integers, *written;
  std::string* forms;
  Py_ssize_t positional, results, letters;
  bool by_name, alike;
};

inline std::unordered_map<PyTypeObject*, Plan*> plans;
inline ternaryfunc in_python = nullptr;  // calls a handle by its `__call__`

// One call: the arguments in order, borrowed, and what its route follows from.
struct Call {
  Values values, tensors;
  Signature signature;
  Owned owned;
  bool on_dtensors = false;
};

// The arguments in order; false where one is missing, unknown or given twice.
inline bool bind(const Plan* plan, PyObject* args, PyObject* kwargs, Values& values) {
  const Py_ssize_t count = PyTuple_GET_SIZE(plan->names), given = PyTuple_GET_SIZE(args);
  if (given > plan->positional) return false;
  values.append(&PyTuple_GET_ITEM(args, 0), &PyTuple_GET_ITEM(args, 0) + given);
  values.resize(count, nullptr);
  PyObject *key, *value;
  for (Py_ssize_t at = 0; kwargs && PyDict_Next(kwargs, &at, &key, &value);) {
    if (!plan->by_name) return false;
    Py_ssize_t place = 0;
    while (place < count && PyTuple_GET_ITEM(plan->names, place) != key) place++;  // names are interned
    if (place == count || values[place]) return false;
    values[place] = value;
  }
  for (Py_ssize_t at = given; at < count; at++) {
    if (values[at]) continue;
    PyObject* by_default = PyTuple_GET_ITEM(plan->defaults, at);  // a tuple of one, or an empty one
    if (!PyTuple_GET_SIZE(by_default)) return false;
    values[at] = PyTuple_GET_ITEM(by_default, 0);
  }
  return true;
}

inline bool are_integers(PyObject* value, Py_ssize_t count) {
  if (!PyTuple_CheckExact(value) && !PyList_CheckExact(value) && Py_TYPE(value) != &THPSizeType) return false;
  const Py_ssize_t size = PySequence_Fast_GET_SIZE(value);
  if (count && size != count) return false;
  for (Py_ssize_t at = 0; at < size; at++) {
    if (!PyLong_CheckExact(PySequence_Fast_GET_ITEM(value, at))) return false;
  }
  return true;
}

inline PyObject* frame_callback = nullptr;  // see `use_frame_callback`
inline PyTypeObject* dtensor = nullptr;     // see `use_dtensor`

inline bool is_plain_tensor(PyObject* value) {
  return Py_TYPE(value) == plain_tensor || Py_TYPE(value) == plain_parameter;
}

inline uint64_t dispatch_keys(const at::Tensor& tensor, const c10::impl::LocalDispatchKeySet& local) {
  return ((tensor.key_set() | local.included_) - local.excluded_).raw_repr();
}

// Adds a tensor, and its part of the signature. The keys tell of transforms, autocast, inference and modes of users.
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

// True if each argument has its form. It notes the signature and the tensors, also those of lists. A list becomes a
// tuple, which nobody changes while the call runs.
inline bool has_forms(const Plan* plan, Call& call) {
  const auto local = c10::impl::tls_local_dispatch_key_set();
  call.signature.reserve(2 + 4 * call.values.size());
  call.signature.push_back(at::GradMode::is_enabled());
  for (size_t at = 0; at < call.values.size(); at++) {
    PyObject* value = call.values[at];
    char form = (*plan->forms)[at];
    const bool optional = form < 'a';
    if (optional) form += 'a' - 'A';
    if (optional && form == TENSOR) call.signature.push_back(value != Py_None);
    if (optional && value == Py_None) continue;
    PyTypeObject* type = Py_TYPE(value);
    bool fits = false;
    switch (form) {
      case TENSOR:
        fits = is_plain_tensor(value);
        if (fits) add_tensor(call, value, local);
        else if (type == dtensor) fits = call.on_dtensors = true;
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
        fits = PyFloat_CheckExact(value) || PyLong_CheckExact(value);
        break;
      case INTEGERS:
      case SIZES:
        fits = ((*plan->spread)[at] && PyLong_CheckExact(value)) || are_integers(value, (*plan->counts)[at]);
        break;
      case EXACT:
        fits = reinterpret_cast<PyObject*>(type) == PyTuple_GET_ITEM(plan->types, at);
        break;
    }
    if (!fits) return false;
  }
  return true;
}

// True if nothing is active that would see the call: a mode, a forward-mode level, a profiler, or Dynamo, which
// compiles the frame in Python.
inline bool nothing_watches(const Plan* plan) {
  THPObjectPtr callback(PyObject_CallNoArgs(frame_callback));  // null for an error, which the caller raises
  if (callback.get() != Py_None) return false;
  if (at::impl::torch_function_mode_enabled() || c10::impl::TorchDispatchModeTLS::stack_len() > 0) return false;
  if (!plan->alike && at::globalContext().deterministicAlgorithms()) return false;
  for (Py_ssize_t at = 0; at < PyTuple_GET_SIZE(plan->unchanged); at++) {
    PyObject* each = PyTuple_GET_ITEM(plan->unchanged, at);  // a module's dictionary, a name, a value
    PyObject* value = PyDict_GetItemWithError(PyTuple_GET_ITEM(each, 0), PyTuple_GET_ITEM(each, 1));
    if (value != PyTuple_GET_ITEM(each, 2)) return false;
  }
  return true;
}

// True if a tensor has the sizes that are declared; it notes those of letters.
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

// True if the tensors have the declared shapes; false with an exception set where Python raises one.
inline bool in_shape(const Plan* plan, const Values& values) {
  if (plan->fits != Py_None) {
    THPObjectPtr fits(PyObject_Vectorcall(plan->fits, values.data(), values.size(), nullptr));
    return fits.get() == Py_True;
  }
  c10::SmallVector<int64_t, 8> letters(plan->letters, -1);
  for (size_t at = 0; at < plan->integers->size(); at++) {
    const Py_ssize_t letter = (*plan->integers)[at];
    if (letter < 0 || values[at] == Py_None) continue;
    letters[letter] = PyLong_AsLongLong(values[at]);
    if (letters[letter] < 0) {  // no size, or none that C++ can hold
      PyErr_Clear();
      return false;
    }
  }
  for (const DeclaredSizes& declared : *plan->sizes) {
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

// The arguments as a kernel takes them, or as a node does: the items of lists one by one. `owned` holds new objects.
inline bool convert(const Plan* plan, const Values& values, bool by_node, Values& given, Owned& owned) {
  for (size_t at = 0; at < values.size(); at++) {
    const char form = (*plan->forms)[at] | ('a' - 'A');
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
      owned.emplace_back(several_of(value, std::max<Py_ssize_t>((*plan->counts)[at], 1), form == INTEGERS));
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

// What callers see, from all results: a tuple of them, or the one that there is. `-1 - n` is the argument `n`.
inline PyObject* seen(const Plan* plan, const Values& values, THPObjectPtr result, bool in_tuple) {
  if (!result) return nullptr;
  const Py_ssize_t count = PyTuple_GET_SIZE(plan->shown);
  const auto item = [&](Py_ssize_t at) {
    const Py_ssize_t place = PyLong_AsSsize_t(PyTuple_GET_ITEM(plan->shown, at));
    if (place < 0) return Py_NewRef(values[-1 - place]);
    return Py_NewRef(in_tuple ? PyTuple_GET_ITEM(result.get(), place) : result.get());
  };
  if (count == 0) Py_RETURN_NONE;
  if (count == 1) return item(0);
  if (count == plan->results && plan->written->empty()) return result.release();
  PyObject* some = PyTuple_New(count);
  for (Py_ssize_t at = 0; some && at < count; at++) PyTuple_SET_ITEM(some, at, item(at));
  return some;
}

// True if the results of a kernel are as it promises.
inline bool holds_contract(const Plan* plan, PyObject* result, const Values& tensors, bool has_graph) {
  if (!are_new(result, plan->results, tensors)) return false;
  // A result requires a gradient where a tensor that is no argument does.
  for (Py_ssize_t at = 0; !has_graph && at < plan->results; at++) {
    PyObject* each = plan->results == 1 ? result : PyTuple_GET_ITEM(result, at);
    if (THPVariable_Unpack(each).requires_grad()) return false;
  }
  return true;
}

inline PyObject* as_list(const Values& values) {
  PyObject* listed = PyList_New(static_cast<Py_ssize_t>(values.size()));
  for (size_t at = 0; listed && at < values.size(); at++) PyList_SET_ITEM(listed, at, Py_NewRef(values[at]));
  return listed;
}

// Computes a call on DTensors; returns None for one that the dispatcher takes.
inline PyObject* call_on_dtensors(const Plan* plan, Call& call) {
  Values given;
  if (plan->on_dtensors == Py_None) Py_RETURN_NONE;
  if (!in_shape(plan, call.values)) return PyErr_Occurred() ? nullptr : Py_NewRef(Py_None);
  if (!convert(plan, call.values, false, given, call.owned)) return nullptr;
  THPObjectPtr all(PyTuple_New(static_cast<Py_ssize_t>(given.size())));
  if (!all) return nullptr;
  for (size_t at = 0; at < given.size(); at++) PyTuple_SET_ITEM(all.get(), at, Py_NewRef(given[at]));
  return PyObject_CallOneArg(plan->on_dtensors, all.get());
}

// All results of a kernel: one, or a tuple of several.
inline PyObject* call_kernel(const Plan* plan, const Route& route, Call& call, bool& in_tuple) {
  Values given;
  if (!convert(plan, call.values, false, given, call.owned)) return nullptr;
  States before;
  if (!route.trusted) {
    for (PyObject* each : call.tensors) before.emplace_back(THPVariable_Unpack(each));
  }
  // Those that are given by keyword alone stand last.
  PyObject* keywords = nullptr;
  if (static_cast<size_t>(plan->positional) < given.size()) {
    call.owned.emplace_back(PyTuple_GetSlice(plan->names, plan->positional, static_cast<Py_ssize_t>(given.size())));
    keywords = call.owned.back().get();
    if (!keywords) return nullptr;
  }
  THPObjectPtr result(PyObject_Vectorcall(route.function, given.data(), plan->positional, keywords));
  if (!result || route.trusted) return result.release();
  bool unchanged = true;
  for (size_t at = 0; at < before.size(); at++) unchanged &= before[at].is_left(THPVariable_Unpack(call.tensors[at]));
  if (unchanged && holds_contract(plan, result, call.tensors, route.has_graph)) return result.release();
  // The kernel may have changed the lists that it got.
  Values received;
  if (!convert(plan, call.values, false, received, call.owned)) return nullptr;
  THPObjectPtr listed(as_list(received)), versions(as_versions(call.tensors, before));
  if (!listed || !versions) return nullptr;
  in_tuple = true;
  return PyObject_CallFunctionObjArgs(route.validate, result.get(), listed.get(), versions.get(), nullptr);
}

// All results of a call by its route.
inline PyObject* follow(const Plan* plan, const Route& route, Call& call, bool& in_tuple) {
  in_tuple = plan->results > 1;
  if (route.how == BY_KERNEL) return call_kernel(plan, route, call, in_tuple);
  Values given;
  if (!convert(plan, call.values, route.how == BY_NODE, given, call.owned)) return nullptr;
  if (route.how == BY_NODE) return PyObject_Vectorcall(route.function, given.data(), given.size(), nullptr);
  in_tuple = true;
  THPObjectPtr listed(as_list(given));
  return listed ? PyObject_CallOneArg(route.function, listed.get()) : nullptr;
}

inline bool is_written_contiguous(const Plan* plan, const Values& values) {
  for (Py_ssize_t at : *plan->written) {
    PyObject* value = values[at];
    const bool is_list = PyTuple_Check(value);
    for (Py_ssize_t item = 0; value != Py_None && item < (is_list ? PyTuple_GET_SIZE(value) : 1); item++) {
      if (!THPVariable_Unpack(is_list ? PyTuple_GET_ITEM(value, item) : value).is_contiguous()) return false;
    }
  }
  return true;
}

inline PyObject* call_handle(PyObject* self, PyObject* args, PyObject* kwargs) {
  return for_python([&]() -> PyObject* {
    const auto found = plans.find(Py_TYPE(self));
    if (found == plans.end()) return in_python(self, args, kwargs);
    Plan* plan = found->second;
    THPObjectPtr held(Py_NewRef(reinterpret_cast<PyObject*>(plan)));  // a call may replace it
    Call call;
    if (!bind(plan, args, kwargs, call.values) || !has_forms(plan, call) || !nothing_watches(plan)) {
      return PyErr_Occurred() ? nullptr : in_python(self, args, kwargs);
    }
    if (call.on_dtensors) {
      THPObjectPtr result(call_on_dtensors(plan, call));
      if (result.get() == Py_None) return in_python(self, args, kwargs);
      return seen(plan, call.values, std::move(result), plan->results > 1);
    }
    const auto known = plan->routes->find(call.signature);
    if (known == plan->routes->end()) return in_python(self, args, kwargs);
    const Route route = known->second;  // the table may change while it computes
    THPObjectPtr function(Py_NewRef(route.function)), validate(Py_NewRef(route.validate));
    if ((route.contiguous && !is_written_contiguous(plan, call.values)) || !in_shape(plan, call.values)) {
      return PyErr_Occurred() ? nullptr : in_python(self, args, kwargs);
    }
    bool in_tuple;
    THPObjectPtr result(follow(plan, route, call, in_tuple));
    if (!result && PyErr_ExceptionMatches(plan->unknown)) {
      PyErr_Clear();
      return in_python(self, args, kwargs);
    }
    return seen(plan, call.values, std::move(result), in_tuple);
  });
}

inline void forget_routes(Plan* plan) {
  auto routes = std::move(*plan->routes);  // to release an object may run code that comes back here
  plan->routes->clear();
  for (auto& each : routes) {
    Py_DECREF(each.second.function);
    Py_DECREF(each.second.validate);
  }
}

// accept(values, how, function, validate, trusted, has_graph, contiguous): calls with the signature of these values
// take this route; false where no call can.
inline PyObject* accept(PyObject* self, PyObject* args) {
  auto* plan = reinterpret_cast<Plan*>(self);
  PyObject *values, *function, *validate;
  char how;
  int trusted, has_graph, contiguous;
  if (!PyArg_ParseTuple(
          args, "O!cOOppp", &PyList_Type, &values, &how, &function, &validate, &trusted, &has_graph, &contiguous)) {
    return nullptr;
  }
  return for_python([&]() -> PyObject* {
    Call call;
    for (Py_ssize_t at = 0; at < PyList_GET_SIZE(values); at++) call.values.push_back(PyList_GET_ITEM(values, at));
    if (!has_forms(plan, call) || call.on_dtensors) {
      if (PyErr_Occurred()) return nullptr;
      Py_RETURN_FALSE;
    }
    for (PyObject* each : call.tensors) {
      const at::Tensor& tensor = THPVariable_Unpack(each);
      const bool usual = tensor.layout() == at::kStrided && !tensor.is_nested() && !tensor.is_quantized() &&
          tensor.has_storage() && !tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides();
      if (!usual) Py_RETURN_FALSE;
    }
    if (plan->routes->size() >= MAX_ROUTES) forget_routes(plan);
    const Route route{Py_NewRef(function), Py_NewRef(validate), static_cast<How>(how), !!trusted, !!has_graph, !!contiguous};
    const auto added = plan->routes->emplace(std::move(call.signature), route);
    if (!added.second) {
      const Route before = std::exchange(added.first->second, route);
      Py_DECREF(before.function);
      Py_DECREF(before.validate);
    }
    Py_RETURN_TRUE;
  });
}

// detach(): calls of the handle are made in Python from now on.
inline PyObject* detach(PyObject* self, PyObject*) {
  auto* plan = reinterpret_cast<Plan*>(self);
  const auto found = plans.find(plan->handle);
  if (found != plans.end() && found->second == plan) {
    if (plan->handle->tp_call == call_handle) plan->handle->tp_call = in_python;
    plans.erase(found);
  }
  forget_routes(plan);
  Py_RETURN_NONE;
}

inline std::array<PyObject**, 8> objects(Plan* plan) {
  return {&plan->names, &plan->defaults,    &plan->types,   &plan->fits,
          &plan->shown, &plan->on_dtensors, &plan->unknown, &plan->unchanged};
}

inline int traverse_plan(PyObject* self, visitproc visit, void* arg) {
  auto* plan = reinterpret_cast<Plan*>(self);
  for (PyObject** each : objects(plan)) Py_VISIT(*each);
  for (auto& each : *plan->routes) {
    Py_VISIT(each.second.function);
    Py_VISIT(each.second.validate);
  }
  return 0;
}

// Its handle, which holds it, may be gone.
inline int clear_plan(PyObject* self) {
  auto* plan = reinterpret_cast<Plan*>(self);
  const auto found = plans.find(plan->handle);
  if (found != plans.end() && found->second == plan) plans.erase(found);
  forget_routes(plan);
  for (PyObject** each : objects(plan)) Py_CLEAR(*each);
  return 0;
}

inline void delete_plan(PyObject* self) {
  PyObject_GC_UnTrack(self);
  clear_plan(self);
  auto* plan = reinterpret_cast<Plan*>(self);
  delete plan->routes;
  delete plan->sizes;
  for (auto* each : {plan->counts, plan->spread, plan->integers, plan->written}) delete each;
  delete plan->forms;
  PyObject_GC_Del(self);
}

inline PyMethodDef plan_methods[] = {
    {"accept", accept, METH_VARARGS, nullptr}, {"detach", detach, METH_NOARGS, nullptr}, {nullptr}};

inline PyTypeObject PlanType = {PyVarObject_HEAD_INIT(nullptr, 0) "opsmith.Plan", sizeof(Plan)};

// plan(handle class, forms, positional, results, letters, by_name, alike, counts, spread, integers, written,
// sizes, *objects): calls of the handle look into its table from now on, until it is detached or `__call__` is set.
inline PyObject* make_plan(PyObject*, PyObject* args) {
  PyObject* handle;
  const char* forms;
  Py_ssize_t positional, results, letters;
  int by_name, alike;
  std::array<PyObject*, 4> places;
  PyObject* sizes;
  std::array<PyObject*, 8> given;
  if (!PyArg_ParseTuple(
          args, "O!snnnppO!O!O!O!O!OOOOOOOO", &PyType_Type, &handle, &forms, &positional, &results, &letters,
          &by_name, &alike, &PyTuple_Type, &places[0], &PyTuple_Type, &places[1], &PyTuple_Type, &places[2], &PyTuple_Type,
          &places[3], &PyTuple_Type, &sizes, &given[0], &given[1], &given[2], &given[3], &given[4], &given[5], &given[6],
          &given[7])) {
    return nullptr;
  }
  auto* plan = PyObject_GC_New(Plan, &PlanType);
  if (!plan) return nullptr;
  plan->handle = reinterpret_cast<PyTypeObject*>(handle);
  plan->forms = new std::string(forms);
  plan->positional = positional;
  plan->results = results;
  plan->letters = letters;
  plan->by_name = by_name;
  plan->alike = alike;
  plan->routes = new std::unordered_map<Signature, Route, SignatureHash>();
  plan->counts = new Places(places_of(places[0]));
  plan->spread = new Places(places_of(places[1]));
  plan->integers = new Places(places_of(places[2]));
  plan->written = new Places(places_of(places[3]));
  plan->sizes = new std::vector<DeclaredSizes>();
  for (Py_ssize_t at = 0; at < PyTuple_GET_SIZE(sizes); at++) {
    PyObject* each = PyTuple_GET_ITEM(sizes, at);  // argument, whether any sizes may come first, sizes
    const Places wanted = places_of(PyTuple_GET_ITEM(each, 2));
    plan->sizes->push_back(
        {PyLong_AsSsize_t(PyTuple_GET_ITEM(each, 0)), PyTuple_GET_ITEM(each, 1) == Py_True,
         std::vector<int64_t>(wanted.begin(), wanted.end())});
  }
  const auto all = objects(plan);
  for (size_t at = 0; at < all.size(); at++) *all[at] = Py_NewRef(given[at]);
  PyObject_GC_Track(plan);
  if (plan->handle->tp_call != call_handle) in_python = plan->handle->tp_call;
  plans[plan->handle] = plan;
  plan->handle->tp_call = call_handle;
  return reinterpret_cast<PyObject*>(plan);
}

// use_frame_callback(function): it returns what sees the frames of this thread; None for nothing.
inline PyObject* use_frame_callback(PyObject*, PyObject* function) {
  Py_XSETREF(frame_callback, Py_NewRef(function));
  Py_RETURN_NONE;
}

// use_dtensor(type): the class of DTensors, once it is known.
inline PyObject* use_dtensor(PyObject*, PyObject* type) {
  Py_XSETREF(dtensor, reinterpret_cast<PyTypeObject*>(Py_NewRef(type)));
  Py_RETURN_NONE;
}

inline bool ready_plan() {
  PlanType.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC;
  PlanType.tp_dealloc = delete_plan;
  PlanType.tp_traverse = traverse_plan;
  PlanType.tp_clear = clear_plan;
  PlanType.tp_methods = plan_methods;
  return PyType_Ready(&PlanType) == 0;
}

}  // namespace opsmith
