// Calls of a handle: the conditions of the fast path, without a frame in Python.
#pragma once

#include "rule.h"

#include <ATen/Context.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

#include <array>
#include <cstring>
#include <unordered_map>

namespace opsmith {

// Forms of an argument. In upper case it may be None, too.
enum Form : char {
  TENSOR = 't',
  LIST = 'l',   // of tensors; a kernel gets a new list
  TUPLE = 'u',  // of tensors; a kernel gets a new tuple
  FLOATING = 'f',  // an integer is converted
  NUMBER = 'n',    // an integer or a floating number, as it is
  INTEGERS = 's',  // a tuple or list of plain integers
  EXACT = 'e',     // of one type
};

// How the calls of one operator are made; `fast_path/call_plan.py` says what each part is.
struct Plan {
  PyObject_HEAD
  PyTypeObject* handle;  // borrowed: it holds its `__call__`, which holds the plan
  PyObject *fallback, *finish, *validate, *fits;
  PyObject *names, *defaults, *types, *known, *missing, *shown, *on_dtensors, *unchanged;
  const char* forms;
  Py_ssize_t positional;
  Py_ssize_t results;  // of a kernel; 0 where what the operator returns is not what a kernel does
  bool by_name, alike, node_returns, may_write, may_alias;
};

inline PyTypeObject PlanType = {PyVarObject_HEAD_INIT(nullptr, 0) "opsmith.Plan", sizeof(Plan)};
inline std::unordered_map<PyTypeObject*, Plan*> plans;

inline PyObject* fall_back(const Plan* plan, PyObject* self, PyObject* args, PyObject* kwargs) {
  Values given{self};
  given.append(&PyTuple_GET_ITEM(args, 0), &PyTuple_GET_ITEM(args, 0) + PyTuple_GET_SIZE(args));
  return PyObject_VectorcallDict(plan->fallback, given.data(), given.size(), kwargs);
}

// The arguments in order, borrowed; false where one is missing, unknown or given twice.
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
    values[at] = PyTuple_GET_ITEM(plan->defaults, at);
    if (values[at] == plan->missing) return false;
  }
  return true;
}

inline bool are_integers(PyObject* value) {
  if (PyTuple_CheckExact(value)) {
    for (Py_ssize_t at = 0; at < PyTuple_GET_SIZE(value); at++) {
      if (!PyLong_CheckExact(PyTuple_GET_ITEM(value, at))) return false;
    }
    return true;
  }
  if (!PyList_CheckExact(value)) return false;
  for (Py_ssize_t at = 0; at < PyList_GET_SIZE(value); at++) {
    if (!PyLong_CheckExact(PyList_GET_ITEM(value, at))) return false;
  }
  return true;
}

inline PyObject* frame_callback = nullptr;  // see `use_frame_callback`
inline PyTypeObject* dtensor = nullptr;     // see `use_dtensor`

inline bool is_plain_tensor(PyObject* value) {
  return Py_TYPE(value) == plain_tensor || Py_TYPE(value) == plain_parameter;
}

// True if each argument has its form. It collects the tensors, also those of lists, a number for the set of optional
// ones that are given, the lengths of lists, and whether one is a DTensor. A list becomes a tuple, which nobody changes
// while the call runs.
inline bool has_forms(
    const Plan* plan, Values& values, Values& tensors, size_t& number, c10::SmallVector<Py_ssize_t, 4>& lengths,
    bool& on_dtensors, Owned& owned) {
  for (size_t at = 0; at < values.size(); at++) {
    PyObject* value = values[at];
    char form = plan->forms[at];
    const bool optional = form < 'a';
    if (optional) form += 'a' - 'A';
    if (optional && form == TENSOR) number = 2 * number + (value != Py_None);
    if (optional && value == Py_None) continue;
    PyTypeObject* type = Py_TYPE(value);
    bool fits = false;
    switch (form) {
      case TENSOR:
        fits = is_plain_tensor(value) || type == dtensor;
        on_dtensors |= type == dtensor;
        tensors.push_back(value);
        break;
      case LIST:
      case TUPLE:
        fits = type == &PyList_Type || type == &PyTuple_Type;
        if (!fits) break;
        owned.emplace_back(PySequence_Tuple(value));
        value = values[at] = owned.back().get();
        if (!value) return false;
        lengths.push_back(PyTuple_GET_SIZE(value));
        for (Py_ssize_t item = 0; item < lengths.back(); item++) {
          tensors.push_back(PyTuple_GET_ITEM(value, item));
          fits &= is_plain_tensor(tensors.back());
        }
        break;
      case FLOATING:
      case NUMBER:
        fits = PyFloat_CheckExact(value) || PyLong_CheckExact(value);
        break;
      case INTEGERS:
        fits = are_integers(value);
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

// The known implementation of a call: guard, kernel, apply, requires, in_cpp, any_layout; null for none.
inline PyObject* implementation_of(
    const Plan* plan, size_t number, const Values& tensors, const c10::SmallVector<Py_ssize_t, 4>& lengths) {
  PyObject* known = PyTuple_GET_ITEM(plan->known, number);
  if (PyDict_CheckExact(known)) {  // by the lengths of lists
    THPObjectPtr key(PyTuple_New(static_cast<Py_ssize_t>(lengths.size())));
    if (!key) return nullptr;
    for (size_t at = 0; at < lengths.size(); at++) {
      PyObject* length = PyLong_FromSsize_t(lengths[at]);
      if (!length) return nullptr;
      PyTuple_SET_ITEM(key.get(), at, length);
    }
    known = PyDict_GetItemWithError(known, key);
    if (!known) return nullptr;
  }
  for (Py_ssize_t at = 0; at < PyList_GET_SIZE(known); at++) {
    PyObject* each = PyList_GET_ITEM(known, at);
    PyObject* guard = PyTuple_GET_ITEM(each, 0);
    if (Py_TYPE(guard) == &GuardType && reinterpret_cast<Guard*>(guard)->accepts(tensors.data(), tensors.size())) {
      return Py_NewRef(each);
    }
  }
  return nullptr;
}

// Results of the operator, from those of a kernel or node: hidden ones are left out.
inline PyObject* shown_of(const Plan* plan, THPObjectPtr result) {
  const Py_ssize_t count = PyTuple_GET_SIZE(plan->shown);
  if (!result || plan->results == 1 || count == plan->results) return result.release();
  const auto item = [&](Py_ssize_t at) {
    return Py_NewRef(PyTuple_GET_ITEM(result.get(), PyLong_AsSsize_t(PyTuple_GET_ITEM(plan->shown, at))));
  };
  if (count == 1) return item(0);
  PyObject* some = PyTuple_New(count);
  for (Py_ssize_t at = 0; some && at < count; at++) PyTuple_SET_ITEM(some, at, item(at));
  return some;
}

// True if the results of a kernel are as it promises.
inline bool holds_contract(const Plan* plan, PyObject* result, const Values& tensors, bool in_cpp) {
  if (plan->may_alias ? !are_new(result, plan->results, tensors) : Py_TYPE(result) != plain_tensor) return false;
  if (!plan->may_write || in_cpp) return true;
  // A result requires a gradient where a tensor that is no argument does.
  for (PyObject* each : tensors) {
    if (THPVariable_Unpack(each).requires_grad()) return true;
  }
  for (Py_ssize_t at = 0; at < plan->results; at++) {
    PyObject* each = plan->results == 1 ? result : PyTuple_GET_ITEM(result, at);
    if (THPVariable_Unpack(each).requires_grad()) return false;
  }
  return true;
}

// The arguments as a kernel takes them, or as a node does: the items of lists one by one. `owned` holds new objects.
inline bool convert(
    const Plan* plan, const Values& values, bool by_node, Values& given, Owned& owned) {
  for (size_t at = 0; at < values.size(); at++) {
    const char form = plan->forms[at] | ('a' - 'A');
    if (form == FLOATING && PyLong_CheckExact(values[at])) {
      owned.emplace_back(PyNumber_Float(values[at]));
    } else if ((form == LIST || form == TUPLE) && by_node) {
      PyObject* const* items = &PyTuple_GET_ITEM(values[at], 0);
      given.append(items, items + PyTuple_GET_SIZE(values[at]));
      continue;
    } else if (form == LIST || form == TUPLE) {
      owned.emplace_back(form == LIST ? PySequence_List(values[at]) : PySequence_Tuple(values[at]));
    } else {
      given.push_back(values[at]);
      continue;
    }
    if (!owned.back()) return false;
    given.push_back(owned.back().get());
  }
  return true;
}

// Computes a call on DTensors; returns None for the slow path.
inline PyObject* call_on_dtensors(const Plan* plan, const Values& values, Owned& owned) {
  Values given;
  if (plan->on_dtensors == Py_None || !plan->node_returns) Py_RETURN_NONE;
  if (plan->fits != Py_None) {
    THPObjectPtr fits(PyObject_Vectorcall(plan->fits, values.data(), values.size(), nullptr));
    if (!fits) return nullptr;
    if (fits.get() != Py_True) Py_RETURN_NONE;
  }
  if (!convert(plan, values, false, given, owned)) return nullptr;
  THPObjectPtr all(PyTuple_New(static_cast<Py_ssize_t>(given.size())));
  if (!all) return nullptr;
  for (size_t at = 0; at < given.size(); at++) PyTuple_SET_ITEM(all.get(), at, Py_NewRef(given[at]));
  return PyObject_CallOneArg(plan->on_dtensors, all.get());
}

inline PyObject* call_handle(PyObject* self, PyObject* args, PyObject* kwargs) {
  return for_python([&]() -> PyObject* {
    const auto found = plans.find(Py_TYPE(self));
    if (found == plans.end()) {
      THPObjectPtr call(PyObject_GetAttrString(reinterpret_cast<PyObject*>(Py_TYPE(self)), "__call__"));
      if (!call) return nullptr;
      Values given{self};
      given.append(&PyTuple_GET_ITEM(args, 0), &PyTuple_GET_ITEM(args, 0) + PyTuple_GET_SIZE(args));
      return PyObject_VectorcallDict(call, given.data(), given.size(), kwargs);
    }
    Plan* plan = found->second;
    THPObjectPtr held(Py_NewRef(reinterpret_cast<PyObject*>(plan)));  // a call may replace it
    Values values, tensors;
    size_t number = 0;
    c10::SmallVector<Py_ssize_t, 4> lengths;
    Owned owned;
    bool on_dtensors = false;
    if (!bind(plan, args, kwargs, values) || !has_forms(plan, values, tensors, number, lengths, on_dtensors, owned) ||
        !nothing_watches(plan)) {
      if (PyErr_Occurred()) return nullptr;
      return fall_back(plan, self, args, kwargs);
    }
    if (on_dtensors) {
      THPObjectPtr result(call_on_dtensors(plan, values, owned));
      if (!result) return nullptr;
      return result.get() == Py_None ? fall_back(plan, self, args, kwargs) : shown_of(plan, std::move(result));
    }
    THPObjectPtr implementation(implementation_of(plan, number, tensors, lengths));
    if (!implementation) return PyErr_Occurred() ? nullptr : fall_back(plan, self, args, kwargs);
    PyObject* kernel = PyTuple_GET_ITEM(implementation.get(), 1);
    PyObject* apply = PyTuple_GET_ITEM(implementation.get(), 2);
    const bool requires_grad = PyTuple_GET_ITEM(implementation.get(), 3) == Py_True;
    const bool in_cpp = PyTuple_GET_ITEM(implementation.get(), 4) == Py_True;
    const bool grad_enabled = at::GradMode::is_enabled();
    const bool by_node = apply != Py_None && apply != Py_False && (!requires_grad || grad_enabled);
    if (kernel == Py_None) return fall_back(plan, self, args, kwargs);
    const bool watched = plan->may_write && !in_cpp;  // by versions, which tensors of inference mode have not
    const bool plain = by_node
        ? plan->node_returns
        : plan->results > 0 && !(apply == Py_False && grad_enabled) && !(watched && c10::InferenceMode::is_enabled());
    if (!plain) {
      Values given{self};
      for (Py_ssize_t at = 1; at < PyTuple_GET_SIZE(implementation.get()); at++) {
        given.push_back(PyTuple_GET_ITEM(implementation.get(), at));
      }
      given.append(values.begin(), values.end());
      return PyObject_Vectorcall(plan->finish, given.data(), given.size(), nullptr);
    }
    if (plan->fits != Py_None) {
      THPObjectPtr fits(PyObject_Vectorcall(plan->fits, values.data(), values.size(), nullptr));
      if (!fits) return nullptr;
      if (fits.get() != Py_True) return fall_back(plan, self, args, kwargs);
    }
    Values given;
    if (!convert(plan, values, by_node, given, owned)) return nullptr;
    if (by_node) return shown_of(plan, THPObjectPtr(PyObject_Vectorcall(apply, given.data(), given.size(), nullptr)));
    States before;
    if (watched) {
      for (PyObject* each : tensors) {
        if (THPVariable_Unpack(each).is_inference()) return fall_back(plan, self, args, kwargs);
      }
      for (PyObject* each : tensors) before.emplace_back(THPVariable_Unpack(each));
    }
    // Those that are given by keyword alone stand last.
    PyObject* keywords = nullptr;
    if (static_cast<size_t>(plan->positional) < given.size()) {
      owned.emplace_back(PyTuple_GetSlice(plan->names, plan->positional, static_cast<Py_ssize_t>(given.size())));
      keywords = owned.back().get();
      if (!keywords) return nullptr;
    }
    THPObjectPtr result(PyObject_Vectorcall(kernel, given.data(), plan->positional, keywords));
    if (!result) return nullptr;
    bool unchanged = true;
    for (size_t at = 0; at < before.size(); at++) unchanged &= before[at].is_left(THPVariable_Unpack(tensors[at]));
    if (unchanged && holds_contract(plan, result, tensors, in_cpp)) return shown_of(plan, std::move(result));
    // The kernel may have changed the lists that it got.
    Values received;
    if (!convert(plan, values, false, received, owned)) return nullptr;
    THPObjectPtr listed(PyList_New(static_cast<Py_ssize_t>(received.size())));
    THPObjectPtr versions(watched ? as_versions(tensors, before) : Py_NewRef(Py_None));
    if (!listed || !versions) return nullptr;
    for (size_t at = 0; at < received.size(); at++) PyList_SET_ITEM(listed.get(), at, Py_NewRef(received[at]));
    return PyObject_CallFunctionObjArgs(plan->validate, kernel, result.get(), listed.get(), versions.get(), nullptr);
  });
}

inline constexpr size_t OBJECTS = 12;

inline std::array<PyObject**, OBJECTS> objects(Plan* plan) {
  return {&plan->fallback, &plan->finish, &plan->validate, &plan->fits, &plan->names,
          &plan->defaults, &plan->types, &plan->known, &plan->missing,  &plan->shown,
          &plan->on_dtensors, &plan->unchanged};
}

inline int traverse_plan(PyObject* self, visitproc visit, void* arg) {
  for (PyObject** each : objects(reinterpret_cast<Plan*>(self))) Py_VISIT(*each);
  return 0;
}

inline int clear_plan(PyObject* self) {
  auto* plan = reinterpret_cast<Plan*>(self);
  const auto found = plans.find(plan->handle);
  if (found != plans.end() && found->second == plan) plans.erase(found);
  for (PyObject** each : objects(plan)) Py_CLEAR(*each);
  return 0;
}

inline void delete_plan(PyObject* self) {
  PyObject_GC_UnTrack(self);
  clear_plan(self);
  free(const_cast<char*>(reinterpret_cast<Plan*>(self)->forms));
  PyObject_GC_Del(self);
}

// plan(handle class, forms, positional, results, by_name, alike, node_returns, may_write, may_alias, *objects): calls
// of the handle are made by it from now on, until `__call__` of the class is set or deleted.
inline PyObject* make_plan(PyObject*, PyObject* args) {
  PyObject* handle;
  const char* forms;
  Py_ssize_t positional, results;
  int by_name, alike, node_returns, may_write, may_alias;
  std::array<PyObject*, OBJECTS> given;
  if (!PyArg_ParseTuple(
          args, "O!snnpppppOOOOOOOOOOOO", &PyType_Type, &handle, &forms, &positional, &results, &by_name, &alike,
          &node_returns, &may_write, &may_alias, &given[0], &given[1], &given[2], &given[3], &given[4], &given[5],
          &given[6], &given[7], &given[8], &given[9], &given[10], &given[11])) {
    return nullptr;
  }
  auto* plan = PyObject_GC_New(Plan, &PlanType);
  if (!plan) return nullptr;
  plan->handle = reinterpret_cast<PyTypeObject*>(handle);
  plan->forms = strdup(forms);
  plan->positional = positional;
  plan->by_name = by_name;
  plan->alike = alike;
  plan->node_returns = node_returns;
  plan->results = results;
  plan->may_write = may_write;
  plan->may_alias = may_alias;
  const auto places = objects(plan);
  for (size_t at = 0; at < OBJECTS; at++) *places[at] = Py_NewRef(given[at]);
  PyObject_GC_Track(plan);
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
  return PyType_Ready(&PlanType) == 0;
}

}  // namespace opsmith
