// The module `opsmith_calls`, built for one Python and one version of torch.
#include "call.h"
#include "held.h"

namespace {

PyMethodDef functions[] = {
    {"recorder", opsmith::make_recorder, METH_VARARGS, nullptr},
    {"held", opsmith::make_held, METH_VARARGS, nullptr},
    {"rule", opsmith::make_rule, METH_VARARGS, nullptr},
    {"freshness", opsmith::make_freshness, METH_O, nullptr},
    {"plan", opsmith::make_plan, METH_VARARGS, nullptr},
    {"use_frame_callback", opsmith::use_frame_callback, METH_O, nullptr},
    {"use_dtensor", opsmith::use_dtensor, METH_O, nullptr},
    {"use_types", opsmith::use_types, METH_VARARGS, nullptr},
    {"use_maker", opsmith::use_maker, METH_VARARGS, nullptr},
    {nullptr}};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "opsmith_calls", nullptr, -1, functions};

}  // namespace

PyMODINIT_FUNC PyInit_opsmith_calls() {
  using namespace opsmith;
  if (!ready_results() || !ready_node() || !ready_rule() || !ready_plan() || !ready_held()) return nullptr;
  PyObject* module = PyModule_Create(&definition);
  if (module && PyModule_AddObjectRef(module, "Node", reinterpret_cast<PyObject*>(&opsmith::NodeType)) < 0) {
    Py_CLEAR(module);
  }
  return module;
}
