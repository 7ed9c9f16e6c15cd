// Library of custom operators: ONNX Runtime calls `RegisterCustomOps`, and then the operators that it registers.
//
// It is compiled for the baseline processor, so that it can report that the kernels need another one.
#include <map>
#include <mutex>

#include "call.h"
#include "processor.h"

namespace {
using namespace opsmith;

struct Kernel {
  ort::Api api;
  const NodeType* type;
  Attributes attributes;
};

struct Registered : ort::CustomOp {
  const NodeType* type;
};

const NodeType& type_of(const ort::CustomOp* op) { return *static_cast<const Registered*>(op)->type; }

// Runs what may throw: an exception becomes an error of ONNX Runtime's.
template <class F>
ort::Status* guarded(ort::Api api, const char* op, F body) {
  try {
    return body();
  } catch (const Refused& refused) {
    return api.create_status(ort::FAIL, refused.what());
  } catch (const std::exception& thrown) {
    return api.create_status(ort::FAIL, (std::string(op) + ": " + thrown.what()).c_str());
  } catch (...) {
    return api.create_status(ort::FAIL, (std::string(op) + ": it threw something unknown").c_str());
  }
}

ort::Api api_of(const void* table) { return ort::Api(static_cast<const void* const*>(table)); }

ort::Status* create_kernel(const ort::CustomOp* op, const void* table, const ort::KernelInfo* info,
                           void** kernel) {
  const ort::Api api = api_of(table);
  const NodeType& type = type_of(op);
  return guarded(api, type.op->name, [&]() -> ort::Status* {
    *kernel = new Kernel{api, &type, Attributes(api, info, *type.op)};
    return nullptr;
  });
}

ort::Status* compute(void* held, ort::Context* context) {
  const Kernel& kernel = *static_cast<const Kernel*>(held);
  return guarded(kernel.api, kernel.type->op->name, [&]() -> ort::Status* {
    NodeCall(kernel.api, context, *kernel.type, kernel.attributes.values()).compute();
    return nullptr;
  });
}

Registered registered(const NodeType& type) {
  Registered op;
  op.type = &type;
  op.name = [](const ort::CustomOp* self) { return type_of(self).op_type; };
  op.provider = [](const ort::CustomOp*) { return "CPUExecutionProvider"; };
  op.input_type = [](const ort::CustomOp* self, size_t at) { return int(type_of(self).inputs[at]); };
  op.input_count = [](const ort::CustomOp* self) { return size_t(type_of(self).input_count); };
  op.output_type = [](const ort::CustomOp* self, size_t at) { return int(type_of(self).outputs[at]); };
  op.output_count = [](const ort::CustomOp* self) { return size_t(type_of(self).output_count); };
  op.destroy = [](void* kernel) { delete static_cast<Kernel*>(kernel); };
  op.input_characteristic = [](const ort::CustomOp* self, size_t at) {
    return type_of(self).optional[at] ? ort::OPTIONAL : ort::REQUIRED;
  };
  op.output_characteristic = [](const ort::CustomOp*, size_t) { return ort::REQUIRED; };
  op.input_memory = [](const ort::CustomOp*, size_t) { return 0; };
  op.create_kernel = create_kernel;
  op.compute = compute;
  return op;
}

// Sessions hold on to what is registered as long as they live, and any of them may be the last: it stays.
std::deque<Registered>& operators() {
  static auto* const made = [] {
    auto* all = new std::deque<Registered>;
    for (int32_t at = 0; at < opsmith_nodes.count; at++) all->push_back(registered(opsmith_nodes.types[at]));
    return all;
  }();
  return *made;
}

ort::Status* register_all(ort::Api api, const void* table, ort::SessionOptions* options) {
  static auto* const mutex = new std::mutex;
  static auto* const known = new std::map<const void*, std::map<std::string, ort::Domain*>>;
  std::lock_guard lock(*mutex);
  std::map<std::string, ort::Domain*>& domains = (*known)[table];
  if (domains.empty()) {
    std::map<std::string, ort::Domain*> made;
    for (const Registered& op : operators()) {
      ort::Domain*& domain = made[op.type->domain];
      if (domain == nullptr)
        if (ort::Status* status = api.create_domain(op.type->domain, &domain)) return status;
      if (ort::Status* status = api.add_operator(domain, &op)) return status;
    }
    domains = std::move(made);
  }
  for (const auto& [name, domain] : domains)
    if (ort::Status* status = api.add_domain(options, domain)) return status;
  return nullptr;
}
}  // namespace

extern "C" __attribute__((visibility("default"))) ort::Status* RegisterCustomOps(ort::SessionOptions* options,
                                                                                 const ort::ApiBase* base) {
  const void* const* table = base->get_api(ort::api_version);
  if (table == nullptr) {
    std::string text = "opsmith: this library needs ONNX Runtime 1.16 or later, and this is ";
    text += base->version();
    return ort::Api(base->get_api(1)).create_status(ort::FAIL, text.c_str());
  }
  const ort::Api api(table);
  if (const char* missing = missing_instruction(opsmith_nodes.needs)) {
    std::string text = "opsmith: this library was compiled for a processor with ";
    text = text + missing + ", which this one lacks; package it on a machine of this kind";
    return api.create_status(ort::FAIL, text.c_str());
  }
  return guarded(api, "opsmith", [&] { return register_all(api, table, options); });
}
