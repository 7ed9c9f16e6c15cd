// The module `opsmith_calls`, built for one Python and one version of torch.
#include "call.h"
#include "held.h"

PYBIND11_MODULE(opsmith_calls, module) {
  using namespace opsmith;
  using pybind11::handle, pybind11::object;
  make_node_ready();
  torch::autograd::registerCppFunction(typeid(RuleNode), &NodeType);
  make_ready<Freshness>();
  make_ready<Keeper>();
  make_ready<Recorder>();
  make_ready<Rule>();
  make_ready<Plan>();
  make_ready<Held>();
  module.attr("Node") = handle(reinterpret_cast<PyObject*>(&NodeType));
  module.def("freshness", [](Py_ssize_t results) { return object_of(Freshness{results}); });
  module.def("held", [](object function, object compare) { return object_of(Held{function, compare}); });
  module.def("keeper", [](std::optional<bool> always, std::vector<size_t> strays, object plain, object mode) {
    return object_of(Keeper{always, strays, plain, mode});
  });
  module.def("recorder", [](object generated, object of_class) {
    return object_of(Recorder{generated, generated.attr("forward"), of_class});
  });
  module.def("rule", make_rule);
  module.def("plan", make_plan);
  module.def("accept", accept);
  module.def("detach", detach);
  module.def("use_autograd_kernels", use_autograd_kernels);
  // Functions that get and set the callback for the frames of this thread; None for no callback.
  module.def("use_frame_callback", [](object get, object set) {
    frame_callback = get.release().ptr();
    set_frame_callback = set.release().ptr();
  });
  // The class of DTensors, once it is known.
  module.def("use_dtensor", [](object type) {
    if (!dtensor) dtensor = reinterpret_cast<PyTypeObject*>(type.release().ptr());
  });
  // The classes of tensors and parameters.
  module.def("use_types", [](object tensor, object parameter) {
    plain_tensor = reinterpret_cast<PyTypeObject*>(tensor.release().ptr());
    plain_parameter = reinterpret_cast<PyTypeObject*>(parameter.release().ptr());
  });
  // `wrap(function)`, made at its first call, takes `(generated, context, results, arguments)`. It makes the same call
  // with `torch.autograd.Function`, and returns one of its results.
  module.def("use_maker", [](object function, object wrap) {
    make_of_torch = function.release().ptr();
    wrap_maker = wrap.release().ptr();
  });
}
