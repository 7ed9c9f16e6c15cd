// Autograd nodes: what `torch.autograd.Function` does for a class that opsmith generated, and no more.
#pragma once

#include "results.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>
#include <torch/version.h>

#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/SmallVector.h>

#include <structmember.h>

#include <algorithm>
#include <optional>
#include <utility>

namespace opsmith {

using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 13
using NodePtr = c10::intrusive_ptr<torch::autograd::Node>;
#else
using NodePtr = std::shared_ptr<torch::autograd::Node>;
#endif

inline PyObject *make_of_torch = nullptr, *wrap_maker = nullptr;  // see `use_maker`

inline PyObject *frame_callback = nullptr, *set_frame_callback = nullptr;  // see `use_frame_callback`

// While it lives Dynamo compiles no function, which it does after a graph break with each that runs.
struct Uncompiled {
  THPObjectPtr before;

  Uncompiled() {
    THPObjectPtr callback(made(PyObject_CallNoArgs(frame_callback)));
    if (callback.get() != Py_None) before = made(PyObject_CallOneArg(set_frame_callback, Py_None));
  }
  ~Uncompiled() {
    if (before && !THPObjectPtr(PyObject_CallOneArg(set_frame_callback, before))) PyErr_WriteUnraisable(nullptr);
  }
};

struct OperatorNode;

// `ctx` of a generated class: what its forward leaves for its backward.
struct Context {
  PyObject_HEAD
  PyObject *to_save, *non_differentiable, *dirty_tensors, *kept, *materialize_grads;
  OperatorNode* node;  // null once it is gone
};

inline PyTypeObject ContextType = {PyVarObject_HEAD_INIT(nullptr, 0) "opsmith.Context", sizeof(Context)};

// Metadata that a gradient must have.
struct Wanted {
  at::ScalarType dtype;
  c10::Device device;
  c10::DimVector sizes;

  explicit Wanted(const at::Tensor& tensor)
      : dtype(tensor.scalar_type()), device(tensor.device()), sizes(tensor.sizes()) {}

  bool describes(PyObject* gradient) const {
    if (Py_TYPE(gradient) != plain_tensor) return false;
    const at::Tensor& tensor = THPVariable_Unpack(gradient);
    return tensor.layout() == at::kStrided && !tensor.is_nested() && tensor.scalar_type() == dtype &&
        tensor.device() == device && tensor.sizes() == at::IntArrayRef(sizes);
  }
};

struct OperatorNode : public torch::autograd::Node {
  PyObject* generated = nullptr;  // the class, owned
  Context* context = nullptr;     // owned
  PyObject* parts = nullptr;      // of another kind of node, owned
  std::shared_ptr<std::vector<SavedVariable>> saved = std::make_shared<std::vector<SavedVariable>>();
  std::vector<char> given;  // for each argument: 0 no tensor, 1 a tensor, 2 one that requires a gradient
  std::vector<bool> constant;  // of each result
  bool freed = false;
  mutable NodePtr of_torch;  // stands in for this one in compiled autograd, which knows torch's nodes alone

  ~OperatorNode() override {
    if (!Py_IsInitialized()) return;
    pybind11::gil_scoped_acquire gil;
    if (context) context->node = nullptr;
    Py_XDECREF(context);
    Py_XDECREF(generated);
    Py_XDECREF(parts);
  }

  std::string name() const override {
    return std::string(reinterpret_cast<PyTypeObject*>(generated)->tp_name) + "Backward";
  }

  void release_variables() override {
    pybind11::gil_scoped_acquire gil;
    freed = true;  // what is kept beside tensors stays, as by torch: a node that saves none can go back twice
    saved = std::make_shared<std::vector<SavedVariable>>();
    of_torch.reset();
  }

  // The saved tensors, as a new tuple.
  PyObject* unpack() {
    TORCH_CHECK(!freed, torch::autograd::ERR_BACKWARD_TWICE);
    const auto held = saved;  // a hook may let another thread go back, which releases them
    THPObjectPtr tensors(made(PyTuple_New(static_cast<Py_ssize_t>(held->size()))));
    for (size_t at = 0; at < held->size(); at++) {
      PyTuple_SET_ITEM(tensors.get(), at, made(THPVariable_Wrap((*held)[at].unpack(getptr()))));
    }
    return tensors.release();
  }

  variable_list apply(variable_list&& grads) override {
    pybind11::gil_scoped_acquire gil;
    const Uncompiled uncompiled;
    at::OptionalDeviceGuard device;
    THPObjectPtr arguments(made(PyTuple_New(static_cast<Py_ssize_t>(1 + grads.size()))));
    PyTuple_SET_ITEM(arguments.get(), 0, Py_NewRef(reinterpret_cast<PyObject*>(context)));
    for (size_t at = 0; at < grads.size(); at++) {
      const bool defined = grads[at].defined();
      if (defined && !device.current_device()) device.reset_device(grads[at].device());
      PyTuple_SET_ITEM(arguments.get(), 1 + at, defined ? made(THPVariable_Wrap(grads[at])) : Py_NewRef(Py_None));
    }
    grads.clear();
    static PyObject* const backward_name = PyUnicode_InternFromString("backward");
    THPObjectPtr backward(made(PyObject_GetAttr(generated, backward_name)));
    THPObjectPtr gradients(made(PyObject_CallObject(backward, arguments)));
    TORCH_CHECK(
        PyTuple_Check(gradients.get()) && static_cast<size_t>(PyTuple_GET_SIZE(gradients.get())) == given.size(),
        name(), " returned other gradients than it has arguments");
    variable_list answers;
    answers.reserve(given.size());
    for (size_t at = 0; at < given.size(); at++) {
      PyObject* each = PyTuple_GET_ITEM(gradients.get(), at);
      if (given[at]) answers.push_back(each == Py_None ? at::Tensor() : THPVariable_Unpack(each));
    }
    return answers;
  }

  // The same call, as a node of `torch.autograd.Function`, made once.
  Node& torch_node() const {
    pybind11::gil_scoped_acquire gil;  // it guards the node that is made once
    if (of_torch) return *of_torch;
    THPObjectPtr results(made(PyTuple_New(static_cast<Py_ssize_t>(num_inputs()))));
    THPObjectPtr arguments(made(PyTuple_New(static_cast<Py_ssize_t>(given.size()))));
    for (uint32_t at = 0; at < num_inputs(); at++) {
      PyObject* like = constant[at] ? Py_NewRef(Py_None) : made(THPVariable_Wrap(input_metadata(at).zeros_like()));
      PyTuple_SET_ITEM(results.get(), at, like);
    }
    for (size_t at = 0; at < given.size(); at++) {
      PyTuple_SET_ITEM(arguments.get(), at, made(PyLong_FromLong(given[at])));
    }
    if (wrap_maker) {
      Py_SETREF(make_of_torch, made(PyObject_CallOneArg(wrap_maker, make_of_torch)));
      Py_CLEAR(wrap_maker);
    }
    THPObjectPtr result(made(PyObject_CallFunctionObjArgs(
        make_of_torch, generated, reinterpret_cast<PyObject*>(context), results.get(), arguments.get(), nullptr)));
    of_torch = THPVariable_Unpack(result.get()).grad_fn();
    return *of_torch;
  }

  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override {
    torch_node().compiled_args(args);
  }

  variable_list apply_with_saved(
      const variable_list& grads, torch::dynamo::autograd::SwapSavedVariables& swapped) override {
    return torch_node().apply_with_saved(grads, swapped);
  }
};

// Parts of the nodes of an adopted class, functions but for the facts; `origins/class_nodes.py` says what each does.
struct ClassParts {
  PyObject *facts, *backward, *restored, *answers, *fit, *refuse_writes;  // owned by a tuple
};

// Keys of a `torch.func` transform, in force or of a tensor.
inline bool has_transforms(c10::DispatchKeySet keys) {
  return keys.has_any(c10::DispatchKeySet(
      {c10::DispatchKey::FuncTorchDynamicLayerFrontMode, c10::DispatchKey::FuncTorchDynamicLayerBackMode,
       c10::DispatchKey::FuncTorchGradWrapper, c10::DispatchKey::FuncTorchBatched}));
}

struct ClassNode : public OperatorNode {
  std::vector<std::optional<Wanted>> wanted;

  ClassParts of_class() const {
    PyObject* const* all = &PyTuple_GET_ITEM(parts, 0);
    return {all[0], all[1], all[2], all[3], all[4], all[5]};
  }

  variable_list apply(variable_list&& grads) override {
    pybind11::gil_scoped_acquire gil;
    bool usual = context->kept && PyTuple_CheckExact(context->kept) && !at::GradMode::is_enabled() &&
        !has_transforms(c10::impl::tls_local_dispatch_key_set().included_);
    for (const at::Tensor& each : grads) {
      usual = usual && each.defined() && !each.is_inference() && !has_transforms(each.key_set());
    }
    if (usual) {
      static PyObject* const written = PyUnicode_InternFromString("grads_written");
      THPObjectPtr known(made(PyObject_GetAttr(of_class().facts, written)));
      usual = known.get() == Py_False;
    }
    return usual ? by_class(grads) : OperatorNode::apply(std::move(grads));
  }

  variable_list by_class(const variable_list& grads) {
    const Uncompiled uncompiled;
    const ClassParts own = of_class();
    at::OptionalDeviceGuard device(grads[0].device());
    THPObjectPtr held(Py_NewRef(context->kept));
    const Py_ssize_t count = PyTuple_GET_SIZE(held.get());
    const bool saves = PyLong_AsLong(PyTuple_GET_ITEM(held.get(), 2)) > 0 || count > 4 ||
        (count > 3 && PyList_GET_SIZE(PyTuple_GET_ITEM(held.get(), 3)) > 0);
    THPObjectPtr tensors(saves ? unpack() : made(PyTuple_New(0)));  // without any it may go back twice
    THPObjectPtr restored(made(PyObject_CallFunctionObjArgs(own.restored, held.get(), tensors.get(), nullptr)));
    Owned owned;
    Values arguments{restored.get()};
    c10::SmallVector<int64_t, 4> before, after;
    for (const at::Tensor& each : grads) {
      arguments.push_back(owned.emplace_back(made(THPVariable_Wrap(each))).get());
      before.push_back(version_of(each));
    }
    THPObjectPtr answer(made(PyObject_Vectorcall(own.backward, arguments.data(), arguments.size(), nullptr)));
    for (const at::Tensor& each : grads) after.push_back(version_of(each));
    if (before != after) {
      THPObjectPtr nothing(PyObject_CallNoArgs(own.refuse_writes));
      TORCH_CHECK(!nothing, "a backward wrote into a gradient that it is given");
      raise_python_error();
    }
    bool fits = PyTuple_CheckExact(answer.get()) && PyTuple_GET_SIZE(answer.get()) == static_cast<Py_ssize_t>(given.size());
    for (size_t at = 0; fits && at < given.size(); at++) fits = given[at] || PyTuple_GET_ITEM(answer.get(), at) == Py_None;
    if (!fits) answer = made(PyObject_CallOneArg(own.answers, answer.get()));
    variable_list gradients;
    gradients.reserve(given.size());
    for (size_t at = 0; at < given.size(); at++) {
      if (!given[at]) continue;
      PyObject* each = PyTuple_GET_ITEM(answer.get(), at);
      if (!wanted[at] || each == Py_None) {
        gradients.emplace_back();
        continue;
      }
      THPObjectPtr fitted(Py_NewRef(each));
      if (!wanted[at]->describes(each)) {
        THPObjectPtr place(made(PyLong_FromSize_t(at)));
        fitted = made(PyObject_CallFunctionObjArgs(own.fit, place.get(), each, held.get(), nullptr));
      }
      gradients.push_back(THPVariable_Unpack(fitted.get()));
    }
    return gradients;
  }
};

inline PyObject* context_saved_tensors(PyObject* self, void*) {
  return for_python([&]() -> PyObject* {
    auto* node = reinterpret_cast<Context*>(self)->node;
    TORCH_CHECK(node, torch::autograd::ERR_BACKWARD_TWICE);
    return node->unpack();
  });
}

// The metadata of each result, as the `grad_fn` of torch's own contexts has them.
inline PyObject* context_input_metadata(PyObject* self, void*) {
  return for_python([&]() -> PyObject* {
    auto* node = reinterpret_cast<Context*>(self)->node;
    TORCH_CHECK(node, torch::autograd::ERR_BACKWARD_TWICE);
    THPObjectPtr all(PyList_New(0));
    for (uint32_t at = 0; all && at < node->num_inputs(); at++) {
      pybind11::object each = pybind11::cast(&node->input_metadata(at), pybind11::return_value_policy::reference);
      if (PyList_Append(all.get(), each.ptr()) < 0) return nullptr;
    }
    return all.release();
  });
}

inline void delete_context(PyObject* self) {
  auto* context = reinterpret_cast<Context*>(self);
  Py_CLEAR(context->to_save);
  Py_CLEAR(context->non_differentiable);
  Py_CLEAR(context->dirty_tensors);
  Py_CLEAR(context->kept);
  Py_CLEAR(context->materialize_grads);
  PyObject_Free(self);
}

// `grad_fn` of a result: torch's own attributes, the saved tensors, and the class as `_forward_cls`.
// torch prints the `name()` of a node whose type has this name.
inline PyTypeObject NodeType = {
    PyVarObject_HEAD_INIT(nullptr, 0) "opsmith.CppFunction", sizeof(torch::autograd::THPCppFunction)};

inline OperatorNode& node_of(PyObject* self) {
  return static_cast<OperatorNode&>(*reinterpret_cast<torch::autograd::THPCppFunction*>(self)->cdata);
}

inline PyObject* node_saved_tensors(PyObject* self, void*) {
  return for_python([&]() -> PyObject* {
    return node_of(self).unpack();
  });
}

inline PyObject* node_raw_saved_tensors(PyObject* self, void*) {
  return for_python([&]() -> PyObject* {
    auto& node = node_of(self);
    TORCH_CHECK(!node.freed, torch::autograd::ERR_BACKWARD_TWICE);
    THPObjectPtr all(PyTuple_New(static_cast<Py_ssize_t>(node.saved->size())));
    if (!all) return nullptr;
    for (size_t at = 0; at < node.saved->size(); at++) {
      // It lives as long as the node, which the caller holds.
      pybind11::object each = pybind11::cast(&(*node.saved)[at], pybind11::return_value_policy::reference);
      PyTuple_SET_ITEM(all.get(), at, each.release().ptr());
    }
    return all.release();
  });
}

inline PyObject* node_needs_input_grad(PyObject* self, void*) {
  const auto& given = node_of(self).given;
  PyObject* needs = PyTuple_New(static_cast<Py_ssize_t>(given.size()));
  for (size_t at = 0; needs && at < given.size(); at++) PyTuple_SET_ITEM(needs, at, PyBool_FromLong(given[at] == 2));
  return needs;
}

inline PyObject* node_class(PyObject* self, void*) { return Py_NewRef(node_of(self).generated); }

inline bool holds(PyObject* tuple, PyObject* item) {
  for (Py_ssize_t at = 0; tuple && at < PyTuple_GET_SIZE(tuple); at++) {
    if (PyTuple_GET_ITEM(tuple, at) == item) return true;
  }
  return false;
}

// True for a tuple of tensors and None.
inline bool are_tensors(PyObject* value) {
  if (!PyTuple_Check(value)) return false;
  for (Py_ssize_t at = 0; at < PyTuple_GET_SIZE(value); at++) {
    PyObject* each = PyTuple_GET_ITEM(value, at);
    if (each != Py_None && !THPVariable_Check(each)) return false;
  }
  return true;
}

template <class N>
auto new_node() {
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 13
  return c10::make_intrusive<N>();
#else
  return std::shared_ptr<N>(new N(), torch::autograd::deleteNode);
#endif
}

inline Context* new_context() {
  auto* context = PyObject_New(Context, &ContextType);
  if (!context) raise_python_error();
  context->to_save = context->non_differentiable = context->dirty_tensors = nullptr;
  context->kept = context->materialize_grads = nullptr;
  context->node = nullptr;
  return context;
}

// Gives a node its class, its context and its edges.
inline void begin(
    OperatorNode& node, PyObject* generated, Context* context, PyObject* const* arguments, size_t count) {
  node.generated = Py_NewRef(generated);
  node.context = reinterpret_cast<Context*>(Py_NewRef(reinterpret_cast<PyObject*>(context)));
  context->node = &node;
  torch::autograd::edge_list edges;
  edges.reserve(count);
  node.given.reserve(count);
  for (size_t at = 0; at < count; at++) {
    const bool tensor = THPVariable_Check(arguments[at]);
    node.given.push_back(tensor + (tensor && THPVariable_Unpack(arguments[at]).requires_grad()));
    if (tensor) edges.push_back(torch::autograd::impl::gradient_edge(THPVariable_Unpack(arguments[at])));
  }
  node.set_next_edges(std::move(edges));
}

// Makes a result that of a node; `constant` for one without a gradient, `written` for an argument, which is no view.
template <class Pointer>
void add_result(const Pointer& node, PyObject* result, bool constant, bool written = false) {
  const at::Tensor& tensor = THPVariable_Unpack(result);
  constant |= !torch::autograd::isDifferentiableType(tensor.scalar_type());
  node->constant.push_back(constant);
  if (constant) {
    node->add_input_metadata(torch::autograd::Node::undefined_input());
  } else {
    const auto number = node->add_input_metadata(tensor);
    if (written) torch::autograd::impl::rebase_history(tensor, {node, number});
    else torch::autograd::impl::set_gradient_edge(tensor, {node, number});
  }
}

inline void save(OperatorNode& node, PyObject* value, bool is_result) {
  if (value == Py_None) {
    node.saved->emplace_back();
  } else {
    node.saved->emplace_back(THPVariable_Unpack(value), is_result);
  }
}

// Makes the results those of a node.
template <class Pointer>
void record(
    const Pointer& node, PyObject* generated, Context* context, PyObject* to_save, PyObject* non_differentiable,
    PyObject* dirty_tensors, PyObject* result, PyObject* const* arguments, size_t count) {
  begin(*node, generated, context, arguments, count);
  const bool several = PyTuple_Check(result);
  const Py_ssize_t results = several ? PyTuple_GET_SIZE(result) : 1;
  for (Py_ssize_t at = 0; at < results; at++) {
    PyObject* each = several ? PyTuple_GET_ITEM(result, at) : result;
    add_result(node, each, holds(non_differentiable, each), holds(dirty_tensors, each));
  }
  const Py_ssize_t count_saved = to_save ? PyTuple_GET_SIZE(to_save) : 0;
  node->saved->reserve(count_saved);
  for (Py_ssize_t at = 0; at < count_saved; at++) {
    PyObject* each = PyTuple_GET_ITEM(to_save, at);
    save(*node, each, several ? holds(result, each) : each == result);
  }
}

// The `apply` of a generated class.
struct Recorder {
  static constexpr const char* name = "opsmith.Recorder";
  pybind11::object generated, forward;
  pybind11::object of_class;  // a tuple of the parts of a class; None for another rule

  static PyObject* call(PyObject* self, PyObject* const* arguments, size_t flags, PyObject*) {
    return for_python([&]() -> PyObject* {
      Recorder& recorder = parts_of<Recorder>(self);
      const size_t count = PyVectorcall_NARGS(flags);
      auto* context = new_context();
      THPObjectPtr owned(reinterpret_cast<PyObject*>(context));
      c10::SmallVector<PyObject*, 16> given{owned.get()};
      given.append(arguments, arguments + count);
      THPObjectPtr result;
      {
        at::AutoGradMode no_grad(false);
        at::AutoFwGradMode no_forward_mode(false);
        result = PyObject_Vectorcall(recorder.forward.ptr(), given.data(), given.size(), nullptr);
      }
      // A result in the context of its own node would keep both for ever, if what follows raises.
      THPObjectPtr to_save(std::exchange(context->to_save, nullptr));
      THPObjectPtr non_differentiable(std::exchange(context->non_differentiable, nullptr));
      THPObjectPtr dirty_tensors(std::exchange(context->dirty_tensors, nullptr));
      if (!result) return nullptr;
      for (PyObject* each : {to_save.get(), non_differentiable.get(), dirty_tensors.get()}) {
        TORCH_CHECK_TYPE(!each || are_tensors(each), "a context keeps and marks tuples of tensors, and no other values");
      }
      for (Py_ssize_t at = 0; dirty_tensors && at < PyTuple_GET_SIZE(dirty_tensors.get()); at++) {
        torch::autograd::impl::bump_version(THPVariable_Unpack(PyTuple_GET_ITEM(dirty_tensors.get(), at)));
      }
      bool requires_grad = false;
      for (size_t at = 0; at < count; at++) {
        requires_grad |= THPVariable_Check(arguments[at]) && THPVariable_Unpack(arguments[at]).requires_grad();
      }
      if (requires_grad && at::GradMode::is_enabled()) {
        const auto recorded = [&](const auto& node) {
          record(
              node, recorder.generated.ptr(), context, to_save, non_differentiable, dirty_tensors, result, arguments, count);
        };
        if (!recorder.of_class.is_none()) {
          const auto node = new_node<ClassNode>();
          node->parts = Py_NewRef(recorder.of_class.ptr());
          node->wanted.resize(count);
          for (size_t at = 0; at < count; at++) {
            if (THPVariable_Check(arguments[at]) && THPVariable_Unpack(arguments[at]).requires_grad()) {
              node->wanted[at].emplace(THPVariable_Unpack(arguments[at]));
            }
          }
          recorded(node);
        } else {
          recorded(new_node<OperatorNode>());
        }
      }
      return result.release();
    });
  }

  template <class F>
  void each(const F& show) {
    show(generated), show(forward), show(of_class);
  }
};

// What a known call of an adopted class keeps for its backward: called with the attributes of its context, the tensors
// that it saves, the tensors that it is given, its results and its arguments, it returns what `ClassNodes._kept` does, and
// takes the tensors out of the attributes; None where that must look at the values.
struct Keeper {
  static constexpr const char* name = "opsmith.Keeper";
  std::optional<bool> always;    // as `keeps_inputs` returns it
  std::vector<size_t> strays;    // places of the arguments that are no tensors
  pybind11::object plain, mode;  // types of other values that an attribute may have; returns the autocast in force

  static PyObject* call(PyObject* self, PyObject* const* args, size_t, PyObject*) {
    return for_python([&]() -> PyObject* {
      Keeper& keeper = parts_of<Keeper>(self);
      THPObjectPtr given(made(PySequence_Tuple(args[2])));
      if (!PyTuple_CheckExact(args[1])) return Py_NewRef(Py_None);
      const size_t own = PyTuple_GET_SIZE(args[1]);
      Values saved(&PyTuple_GET_ITEM(args[1], 0), &PyTuple_GET_ITEM(args[1], 0) + own);
      const auto place = [&](PyObject* tensor) {
        const size_t at = std::find(saved.begin(), saved.end(), tensor) - saved.begin();
        if (at == saved.size()) saved.push_back(tensor);
        return at;
      };
      pybind11::list held, inputs, others;
      Py_ssize_t next = 0;
      for (PyObject *key, *value; PyDict_Next(args[0], &next, &key, &value);) {
        if (Py_TYPE(value) == plain_tensor) {
          held.append(pybind11::make_tuple(pybind11::handle(key), place(value)));
        } else if (!keeper.plain.contains(pybind11::handle(reinterpret_cast<PyObject*>(Py_TYPE(value))))) {
          return Py_NewRef(Py_None);
        }
      }
      bool keeps = keeper.always.value_or(false);
      for (PyObject* each : saved) {
        if (each == Py_None || holds(given, each) || holds(args[3], each)) continue;
        if (Py_TYPE(each) != plain_tensor) return Py_NewRef(Py_None);
        keeps |= !keeper.always && torch::autograd::isDifferentiableType(THPVariable_Unpack(each).scalar_type());
      }
      if (keeps) {
        for (Py_ssize_t at = 0; at < PyTuple_GET_SIZE(given.get()); at++) inputs.append(place(PyTuple_GET_ITEM(given.get(), at)));
        for (const size_t at : keeper.strays) others.append(pybind11::handle(PyTuple_GET_ITEM(args[4], at)));
      }
      pybind11::tuple tensors(saved.size());
      for (size_t at = 0; at < saved.size(); at++) tensors[at] = pybind11::handle(saved[at]);
      for (const auto each : held) {
        if (PyDict_DelItem(args[0], PyTuple_GET_ITEM(each.ptr(), 0)) < 0) return nullptr;
      }
      if (!keeps) return pybind11::make_tuple(tensors, own, held).release().ptr();
      return pybind11::make_tuple(tensors, own, held, inputs, others, keeper.mode()).release().ptr();
    });
  }

  template <class F>
  void each(const F& show) {
    show(plain), show(mode);
  }
};

inline PyMemberDef context_members[] = {
    {"to_save", T_OBJECT_EX, offsetof(Context, to_save), 0, nullptr},
    {"non_differentiable", T_OBJECT_EX, offsetof(Context, non_differentiable), 0, nullptr},
    {"dirty_tensors", T_OBJECT_EX, offsetof(Context, dirty_tensors), 0, nullptr},
    {"kept", T_OBJECT_EX, offsetof(Context, kept), 0, nullptr},
    {"materialize_grads", T_OBJECT_EX, offsetof(Context, materialize_grads), 0, nullptr},
    {nullptr}};
inline PyGetSetDef context_properties[] = {
    {"saved_tensors", context_saved_tensors, nullptr, nullptr, nullptr},
    {"_input_metadata", context_input_metadata, nullptr, nullptr, nullptr},
    {nullptr}};
inline PyGetSetDef node_properties[] = {
    {"next_functions", torch::autograd::THPCppFunction_next_functions, nullptr, nullptr, nullptr},
    {"requires_grad", torch::autograd::THPCppFunction_requires_grad, nullptr, nullptr, nullptr},
    {"metadata", torch::autograd::THPCppFunction_metadata, nullptr, nullptr, nullptr},
    {"_input_metadata", torch::autograd::THPCppFunction_input_metadata, nullptr, nullptr, nullptr},
    {"saved_tensors", node_saved_tensors, nullptr, nullptr, nullptr},
    {"_raw_saved_tensors", node_raw_saved_tensors, nullptr, nullptr, nullptr},
    {"needs_input_grad", node_needs_input_grad, nullptr, nullptr, nullptr},
    {"_forward_cls", node_class, nullptr, nullptr, nullptr},
    {nullptr}};

inline void make_node_ready() {
  ContextType.tp_flags = Py_TPFLAGS_DEFAULT;
  ContextType.tp_dealloc = delete_context;
  ContextType.tp_members = context_members;
  ContextType.tp_getset = context_properties;
  if (PyType_Ready(&ContextType) < 0) throw pybind11::error_already_set();
  // It makes the type ready, with the methods of torch's own nodes.
  torch::autograd::_initFunctionPyTypeObject(NodeType, NodeType.tp_name, node_properties, nullptr);
  torch::autograd::registerCppFunction(typeid(OperatorNode), &NodeType);
  torch::autograd::registerCppFunction(typeid(ClassNode), &NodeType);
}

}  // namespace opsmith
