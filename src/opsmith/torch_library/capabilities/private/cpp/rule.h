// Rules: the calls of one signature with a node, whose gradients are formulas. `autograd/prepared_rule.py` describes
// each part, and runs the backward if something is unusual.
#pragma once

#include "node.h"

#include <c10/core/InferenceMode.h>

#include <tuple>

namespace opsmith {

using Places = std::vector<Py_ssize_t>;

struct FormulaCall {
  pybind11::object function;  // takes its arguments by position
  Places sources;             // of its arguments among the saved tensors, the gradients, and kept values
  Places answers;             // flat arguments whose gradients it returns
  bool joint;                 // `spread` takes them from its return value
};

// Roles of a result.
enum Role : char {
  CONSTANT = 1,  // it has no gradient
  USED = 2,      // a formula uses its gradient
  FOLLOWED = 4,  // its gradient goes through the reference
};

// The `apply` of the node of a rule.
struct Rule {
  static constexpr const char* name = "opsmith.Rule";
  pybind11::object generated, kernel, names, validate, fit, spread, refuse_writes, note, needed;
  bool trusted;              // the kernel writes into no argument, and returns new tensors
  std::vector<int> results;  // for each result a set of `Role`
  Places saved;              // among flat arguments and results
  Places values;             // flat arguments that are kept
  Places filled;             // results whose metadata are kept
  bool keeps, keeps_shapes, on_mesh;
  bool alone;  // the formulas compute all gradients
  std::vector<FormulaCall> formulas;

  static PyObject* call(PyObject* self, PyObject* const* arguments, size_t flags, PyObject*);

  template <class F>
  void each(const F& show) {
    for (auto* each : {&generated, &kernel, &names, &validate, &fit, &spread, &refuse_writes, &note, &needed}) show(*each);
    for (FormulaCall& formula : formulas) show(formula.function);
  }
};

inline bool autocasts() {
  return !(c10::autocast_dispatch_keyset - c10::impl::tls_local_dispatch_key_set().excluded_).empty();
}

struct RuleNode : public OperatorNode {
  std::vector<std::optional<Wanted>> wanted;

  const Rule& rule() const { return parts_of<Rule>(parts); }

  variable_list apply(variable_list&& grads) override {
    pybind11::gil_scoped_acquire gil;
    bool usual = rule().alone && !at::GradMode::is_enabled() && !c10::InferenceMode::is_enabled() && !autocasts();
    bool some = false;
    for (size_t at = 0; at < grads.size(); at++) {
      usual &= !(rule().results[at] & (grads[at].defined() ? FOLLOWED : USED));
      some |= grads[at].defined();
    }
    return usual && some ? by_formulas(grads) : OperatorNode::apply(std::move(grads));
  }

  variable_list by_formulas(const variable_list& grads) {
    const Uncompiled uncompiled;
    at::OptionalDeviceGuard device;
    Owned every;  // the saved tensors, the gradients, and kept values
    THPObjectPtr tensors(rule().saved.empty() ? made(PyTuple_New(0)) : unpack());  // without any it may go back twice
    for (Py_ssize_t at = 0; at < PyTuple_GET_SIZE(tensors.get()); at++) {
      every.emplace_back(Py_NewRef(PyTuple_GET_ITEM(tensors.get(), at)));
    }
    for (const at::Tensor& each : grads) {
      if (each.defined() && !device.current_device()) device.reset_device(each.device());
      every.emplace_back(each.defined() ? made(THPVariable_Wrap(each)) : Py_NewRef(Py_None));
    }
    const size_t count = every.size();
    const auto versions = [&]() {
      c10::SmallVector<int64_t, 12> all;
      for (size_t at = 0; at < count; at++) {
        all.push_back(every[at].get() == Py_None ? 0 : version_of(THPVariable_Unpack(every[at].get())));
      }
      return all;
    };
    for (Py_ssize_t part = 0; context->kept && part < 2; part++) {  // values and shapes
      PyObject* items = PyTuple_GET_ITEM(context->kept, part);
      for (Py_ssize_t at = 0; at < PyTuple_GET_SIZE(items); at++) {
        every.emplace_back(Py_NewRef(PyTuple_GET_ITEM(items, at)));
      }
    }
    for (Py_ssize_t at = 0; at < PyTuple_GET_SIZE(rule().needed.ptr()); at++) {
      every.emplace_back(Py_NewRef(PyTuple_GET_ITEM(rule().needed.ptr(), at)));
    }
    const auto before = versions();
    std::vector<THPObjectPtr> answers(given.size());
    for (size_t number = 0; number < rule().formulas.size(); number++) {
      const FormulaCall& formula = rule().formulas[number];
      Values arguments;
      for (Py_ssize_t at : formula.sources) arguments.push_back(every[at].get());
      THPObjectPtr answer(PyObject_Vectorcall(formula.function.ptr(), arguments.data(), arguments.size(), nullptr));
      if (!answer) raise_noted(number);
      if (!formula.joint) {
        answers[formula.answers[0]] = std::move(answer);
        continue;
      }
      THPObjectPtr place(made(PyLong_FromSize_t(number)));
      answer = made(PyObject_CallFunctionObjArgs(rule().spread.ptr(), place.get(), answer.get(), nullptr));
      for (size_t at = 0; at < formula.answers.size(); at++) {
        answers[formula.answers[at]] = Py_NewRef(PyTuple_GET_ITEM(answer.get(), at));
      }
    }
    const auto after = versions();
    if (before != after) raise_written(before, after);
    variable_list gradients;
    gradients.reserve(given.size());
    for (size_t at = 0; at < given.size(); at++) {
      if (!given[at]) continue;
      if (!wanted[at]) {
        gradients.emplace_back();
        continue;
      }
      if (!wanted[at]->describes(answers[at])) {
        THPObjectPtr place(made(PyLong_FromSize_t(at)));
        PyObject* kept = context->kept ? context->kept : Py_None;
        answers[at] = made(PyObject_CallFunctionObjArgs(
            rule().fit.ptr(), place.get(), answers[at].get(), tensors.get(), kept, nullptr));
      }
      gradients.push_back(THPVariable_Unpack(answers[at].get()));
    }
    return gradients;
  }

  // Raises the error of a formula, with a note that names the formula.
  [[noreturn]] void raise_noted(size_t number) {
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyErr_NormalizeException(&type, &value, &trace);
    if (trace) PyException_SetTraceback(value, trace);
    THPObjectPtr place(PyLong_FromSize_t(number));
    THPObjectPtr noted(place ? PyObject_CallFunctionObjArgs(rule().note.ptr(), place.get(), value, nullptr) : nullptr);
    PyErr_Clear();
    PyErr_Restore(type, value, trace);
    raise_python_error();
  }

  template <class Versions>
  [[noreturn]] void raise_written(const Versions& before, const Versions& after) {
    size_t at = 0;
    while (before[at] == after[at]) at++;
    THPObjectPtr place(made(PyLong_FromSize_t(at)));
    THPObjectPtr nothing(PyObject_CallOneArg(rule().refuse_writes.ptr(), place.get()));
    TORCH_CHECK(!nothing, "a formula wrote into one of its arguments");
    raise_python_error();
  }
};

// The values other than saved tensors that a call keeps for its backward: values, shapes, meshes, metadata of results.
inline PyObject* kept_of(const Rule& rule, PyObject* const* arguments, size_t count, PyObject* const* results) {
  const auto attribute = [](PyObject* tensor, const char* name) {
    return made(PyObject_GetAttrString(tensor, name));
  };
  THPObjectPtr values(made(PyTuple_New(static_cast<Py_ssize_t>(rule.values.size()))));
  for (size_t at = 0; at < rule.values.size(); at++) {
    PyTuple_SET_ITEM(values.get(), at, Py_NewRef(arguments[rule.values[at]]));
  }
  THPObjectPtr shapes(made(PyTuple_New(rule.keeps_shapes ? static_cast<Py_ssize_t>(count) : 0)));
  for (size_t at = 0; rule.keeps_shapes && at < count; at++) {
    PyObject* shape = THPVariable_Check(arguments[at]) ? attribute(arguments[at], "shape") : Py_NewRef(Py_None);
    PyTuple_SET_ITEM(shapes.get(), at, shape);
  }
  THPObjectPtr metadata(made(PyTuple_New(static_cast<Py_ssize_t>(rule.filled.size()))));
  for (size_t at = 0; at < rule.filled.size(); at++) {
    PyObject* each = results[rule.filled[at]];
    THPObjectPtr shape(attribute(each, "shape")), dtype(attribute(each, "dtype")), device(attribute(each, "device"));
    PyTuple_SET_ITEM(metadata.get(), at, made(PyTuple_Pack(3, shape.get(), dtype.get(), device.get())));
  }
  THPObjectPtr meshes(made(PyTuple_New(rule.on_mesh ? static_cast<Py_ssize_t>(count) : 0)));
  for (size_t at = 0; rule.on_mesh && at < count; at++) {
    const bool is_placed = Py_TYPE(arguments[at]) == dtensor;
    PyTuple_SET_ITEM(meshes.get(), at, is_placed ? attribute(arguments[at], "device_mesh") : Py_NewRef(Py_None));
  }
  return made(PyTuple_Pack(4, values.get(), shapes.get(), meshes.get(), metadata.get()));
}

inline bool is_as_promised(const Rule& rule, PyObject* result, const Values& tensors, const PyTypeObject* kind) {
  const Py_ssize_t count = static_cast<Py_ssize_t>(rule.results.size());
  if (!rule.trusted && !are_new(result, count, tensors, kind)) return false;
  for (Py_ssize_t at = 0; at < count; at++) {
    PyObject* each = count == 1 ? result : PyTuple_GET_ITEM(result, at);
    if (!THPVariable_Check(each)) return false;
    if ((rule.results[at] & USED) && !torch::autograd::isDifferentiableType(THPVariable_Unpack(each).scalar_type())) {
      return false;
    }
  }
  return true;
}

inline PyObject* Rule::call(PyObject* self, PyObject* const* arguments, size_t flags, PyObject*) {
  return for_python([&]() -> PyObject* {
    const Rule& rule = parts_of<Rule>(self);
    THPObjectPtr held(Py_NewRef(self));  // a kernel may replace it
    const size_t count = PyVectorcall_NARGS(flags);
    Values tensors;
    Owned lists;  // the kernel's own lists, which it may change: a formula gets the given lists
    for (size_t at = 0; at < count; at++) {
      if (THPVariable_Check(arguments[at])) tensors.push_back(arguments[at]);
    }
    const PyTypeObject* kind = rule.on_mesh ? dtensor : plain_tensor;
    Values given(arguments, arguments + count);
    for (size_t at = 0; at < count; at++) {
      if (PyList_CheckExact(given[at])) given[at] = lists.emplace_back(made(PySequence_List(given[at]))).get();
    }
    THPObjectPtr result;
    {
      at::AutoGradMode no_grad(false);
      at::AutoFwGradMode no_forward_mode(false);
      result = run_kernel(
          rule.kernel, given, rule.names.ptr(), tensors, rule.trusted,
          [&](PyObject* returned) { return is_as_promised(rule, returned, tensors, kind); },
          [&](PyObject* returned, PyObject* versions) {
            THPObjectPtr listed(made(as_list(Values(arguments, arguments + count))));
            return PyObject_CallFunctionObjArgs(rule.validate.ptr(), returned, listed.get(), versions, nullptr);
          });
    }
    if (!result) return nullptr;
    const auto node = new_node<RuleNode>();
    auto* context = new_context();
    THPObjectPtr owned(reinterpret_cast<PyObject*>(context));
    begin(*node, rule.generated.ptr(), context, arguments, count);
    node->parts = Py_NewRef(self);
    node->wanted.resize(count);
    for (const FormulaCall& formula : rule.formulas) {
      for (Py_ssize_t at : formula.answers) node->wanted[at].emplace(THPVariable_Unpack(arguments[at]));
    }
    PyObject* single = result.get();
    const bool several = rule.results.size() > 1;
    PyObject* const* results = several ? &PyTuple_GET_ITEM(result.get(), 0) : &single;
    for (size_t at = 0; at < rule.results.size(); at++) add_result(node, results[at], rule.results[at] & CONSTANT);
    node->saved->reserve(rule.saved.size());
    for (Py_ssize_t at : rule.saved) {
      const bool is_result = at >= static_cast<Py_ssize_t>(count);
      save(*node, is_result ? results[at - count] : arguments[at], is_result);
    }
    if (rule.keeps) context->kept = kept_of(rule, arguments, count, results);
    return result.release();
  });
}

// The `apply` of a rule, whose parts are given by name: `autograd/prepared_rule.py` describes them.
inline pybind11::object make_rule(const pybind11::kwargs& given) {
  Rule rule{
      given["node"],
      given["kernel"],
      given["names"],
      given["validate"],
      given["fit"],
      given["spread"],
      given["refuse_writes"],
      given["note"],
      given["needed"],
      given["trusted"].cast<bool>(),
      given["results"].cast<std::vector<int>>(),
      given["saved"].cast<Places>(),
      given["values"].cast<Places>(),
      given["filled"].cast<Places>(),
      given["keeps"].cast<bool>(),
      given["keeps_shapes"].cast<bool>(),
      given["on_mesh"].cast<bool>(),
      given["alone"].cast<bool>(),
      {}};
  using Formulas = std::vector<std::tuple<pybind11::object, Places, Places, bool>>;
  for (auto& [function, sources, answers, joint] : given["formulas"].cast<Formulas>()) {
    rule.formulas.push_back({function, sources, answers, joint});
  }
  return object_of(std::move(rule));
}

}  // namespace opsmith
