// Registration of a library's operators with torch's dispatcher when the library is loaded.
//
// Each operator `a::b` has a second operator, `opsmith_libraries::a__b`. With it, libraries and the Python package find
// out who else computes the operator. If several parts compute it, they must be built from the same sources:
// - of two libraries, the second one leaves the operator to the first; if their sources differ, both are refused;
// - a library that finds an operator of Python asks Python at the first call. It does not ask during loading, since
//   the system's loader is locked then, and Python may be waiting for it;
// - if Python finds an operator of a library, Python takes it over.
//
// This file is compiled for the baseline processor, so that it can report that the kernels need a different processor.
#include <dlfcn.h>
#include <pthread.h>

#include <mutex>

#include "driver.h"
#include "torch_library.h"
#include "processor.h"

extern "C" {
Status aoti_torch_library_init_fragment(const char*, const char*, uint32_t, LibraryHandle*);
Status aoti_torch_library_def(LibraryHandle, const char*);
Status aoti_torch_new_tensor_handle(TensorHandle, TensorHandle*);
Status torch_new_string_handle(const char*, size_t, StringHandle*);
// From torch 2.13 on; null in earlier versions.
__attribute__((weak)) const char* torch_exception_get_what_without_backtrace();
}

namespace {
using namespace opsmith;

// Torch's calling convention, as the oldest version whose functions the library uses: a byte each for major and minor.
constexpr uint64_t abi_version = uint64_t(2) << 56 | uint64_t(11) << 48;
constexpr const char* registry = "opsmith_libraries";

enum Mode : int32_t {
  OWN,        // the library computes the operator
  ASKS,       // another part defines the operator; the first call asks it
  SHARED,     // the Python package computes it, with the same sources
  CONTESTED,  // two parts compute it with different sources
};

struct Served {
  const ServedOperator* made;
  Signed signature;
  std::string full_name;
  std::string name_space, name;
  std::string registry_name;  // of the second operator
  std::string defined_before;  // torch's text about an earlier definition of the operator; may be empty
  std::atomic<int32_t> mode{OWN};
  std::once_flag once;
  std::string contested;  // the message
  CallCache<std::shared_ptr<const Plan>> plans;
};

// The last exception of the library in this thread. Up to torch 2.12, an exception that passes through torch's C
// functions is printed and lost.
thread_local std::string thrown;

// Torch's text for its last exception in this thread; empty if torch does not keep it.
std::string torch_words() {
  const char* text = torch_exception_get_what_without_backtrace ? torch_exception_get_what_without_backtrace() : nullptr;
  return text ? text : "";
}

std::string why() {
  const std::string words = torch_words();
  return words.empty() ? thrown : words;
}

// Raises the exception of a call by the dispatcher.
[[noreturn]] void rethrow(const std::string& name) {
  const std::string text = why();
  throw Refused(text.empty() ? name + ": the call failed, and torch has printed why" : text);
}

std::string file() {
  Dl_info info;
  return dladdr(reinterpret_cast<const void*>(&opsmith_served), &info) && info.dli_fname ? info.dli_fname : "?";
}

// The operators stay as long as the process: a call may be about to use one at any time.
Served* served() {
  static Served* const all = [] {
    auto* made = new Served[size_t(opsmith_served.count)];
    for (int32_t at = 0; at < opsmith_served.count; at++) {
      Served& each = made[at];
      each.made = &opsmith_served.operators[at];
      each.signature = each.made->op.signature();
      each.full_name = each.made->op.name;
      const size_t end = each.full_name.find("::");
      each.name_space = each.full_name.substr(0, end), each.name = each.full_name.substr(end + 2);
      each.registry_name = each.name_space + "__" + each.name;
    }
    return made;
  }();
  return all;
}

StringHandle torch_string(const std::string& text) {
  StringHandle made;
  must(torch_new_string_handle(text.data(), text.size(), &made), "torch_new_string_handle");
  return made;
}

std::string taken(uint64_t word) {
  const StringHandle handle = reinterpret_cast<StringHandle>(word);
  const char* text;
  size_t length;
  must(torch_string_c_str(handle, &text), "torch_string_c_str");
  must(torch_string_length(handle, &length), "torch_string_length");
  std::string found(text, length);
  torch_delete_string(handle);
  return found;
}

// Calls an operator that takes two or three strings and returns a string. Returns false if there is no such operator.
bool call_registry(const std::string& name, std::initializer_list<std::string> given, std::string& answer) {
  uint64_t stack[3];
  size_t count = 0;
  for (const std::string& each : given) stack[count++] = reinterpret_cast<uint64_t>(torch_string(each));
  if (torch_call_dispatcher((std::string(registry) + "::" + name).c_str(), "", stack, abi_version)) return false;
  answer = taken(stack[0]);
  return true;
}

std::string conflict(const Served& one, const std::string& other) {
  return one.full_name + ": two parts of the process compute it, but they are made of different sources\n  expected: " +
         "libraries and a Python package of the same kernels\n  got: " + file() + " and " + other +
         "\n  hint: build the library again from the current package, or load only one of the two";
}

void contest(Served& each, const std::string& message) {
  std::call_once(each.once, [&] { each.contested = message; });
  each.mode = CONTESTED;
}

// Calls the operator again, after the Python package has replaced the library's kernel.
void dispatch_again(Served& each, uint64_t* stack) {
  thread_local const Served* dispatching = nullptr;
  if (dispatching == &each) throw Refused(each.full_name + ": the Python package has withdrawn it");
  const Within<const Served*> scope(dispatching, &each);
  thrown.clear();
  if (torch_call_dispatcher(each.full_name.c_str(), "", stack, abi_version)) rethrow(each.full_name);
}

// Asks the Python package, which takes the operator over if it has the same sources. If not, the arguments of the call
// stay on the stack, since they may not match the arguments of this library.
void ask(Served& each) {
  std::string answer;
  const bool python = call_registry("share", {each.full_name, each.made->digest, file()}, answer);
  if (!python) answer = each.defined_before.empty() ? "another library or program" : each.defined_before;
  if (!answer.empty()) {
    contest(each, conflict(each, answer));
    throw Refused(each.contested);
  }
  each.mode = SHARED;
}

// Plans a call; on a GPU, its kernels are loaded, too.
std::shared_ptr<const Plan> planned(const OperatorCall& call, const ServedDevice& on, int32_t gpu) {
  return call.plan(on.kernels, [&](const DeviceInstance& instance, Launches& work, Launch& launch) {
    try {
      OpenDriver::get().load(instance, gpu, work, launch);
    } catch (const DriverError& error) {
      throw call.refused(launch.failed + ": " + error.what());
    }
  });
}

void compute(Served& each, const ServedDevice& on, uint64_t* stack) {
  if (each.mode == CONTESTED) throw Refused(each.contested);
  if (each.mode == ASKS) ask(each);
  if (each.mode == SHARED) return dispatch_again(each, stack);
  Arguments arguments;
  for (size_t at = 0; at < each.signature.size(); at++) arguments.read(stack[at], each.signature[at]);
  arguments.own();
  const OperatorCall call(each.made->op, each.signature, arguments);
  if (on.kernels.first->launched == nullptr) {
    static const char* const missing = missing_instruction(opsmith_served.needs);  // CPUID is slow, above all in a VM
    if (missing != nullptr)
      throw Refused(each.full_name + ": its kernel was compiled for a processor with " + missing +
                    ", which this processor lacks\n  got: " + file() +
                    "\n  hint: build the library for this processor");
  } else if (arguments.several_devices) {
    throw call.refused("its tensors are on several devices",
                       {{"expected", "all tensors on one GPU"}, {"hint", "move them to the same device"}});
  }
  arguments.device.index = std::max(arguments.device.index, 0);
  const auto plan = each.plans.obtain(arguments.words, [&] { return planned(call, on, arguments.device.index); });
  call.refuse_writes([&] { return raise_versions(each.signature, arguments); });
  Made results(plan->device);
  run_plan(each.signature, *plan, arguments, results, [](size_t) {}, [&](const char* text) {
    throw plan->launches ? call.refused(text) : call.threw(text);
  });
  const ServedOperator& made = *each.made;
  for (int32_t at = 0; at < made.shown_count; at++) stack[at] = results.hand_over(size_t(made.shown[at]));
}

// The second operator: returns digest and file. If a caller claims the operator with a different digest, it returns an
// error message.
void describe(Served& each, uint64_t* stack) {
  const std::string other = taken(stack[0]), digest = taken(stack[1]);
  std::string answer;
  if (other.empty()) {
    answer = std::string(each.made->digest) + "\n" + file();
  } else if (digest != each.made->digest) {
    contest(each, conflict(each, other));
    answer = each.contested;
  }
  stack[0] = reinterpret_cast<uint64_t>(torch_string(answer));
}

// Torch copies the names, and keeps a registration until its handle is deleted; no handle is deleted.
LibraryHandle fragment(const char* name_space) {
  LibraryHandle made = nullptr;
  aoti_torch_library_init_fragment(name_space, __FILE__, __LINE__, &made);
  return made;
}

bool implement(const char* name_space, const char* key, const char* name, void (*entry)(uint64_t*, uint64_t, uint64_t)) {
  LibraryHandle made;
  if (aoti_torch_library_init_impl(name_space, key, __FILE__, __LINE__, &made)) return false;
  return torch_library_impl(made, name, entry, abi_version) == 0;
}

void register_operator(Served& each) {
  const ServedOperator& op = *each.made;
  const char *name_space = each.name_space.c_str(), *name = each.name.c_str();
  const bool defined = aoti_torch_library_def(fragment(name_space), op.schema) == 0;
  const std::string before = defined ? "" : why();
  const std::string described = each.registry_name + "(str file, str digest) -> str";
  if (aoti_torch_library_def(fragment(registry), described.c_str())) {
    std::string answer;
    if (call_registry(each.registry_name, {file(), op.digest}, answer) && !answer.empty())
      std::fprintf(stderr, "opsmith: %s\n", answer.c_str());
    return;
  }
  implement(registry, "CompositeExplicitAutograd", each.registry_name.c_str(), op.description_entry);
  if (!defined) {
    each.defined_before = before;
    each.mode = ASKS;
  }
  for (const ServedDevice* on = op.devices; on != op.devices + op.device_count; on++)
    implement(name_space, on->key, name, on->entry);
  if (defined && op.returning != nullptr && aoti_torch_library_def(fragment(name_space), op.returning) == 0) {
    const std::string returning(op.returning, std::strcspn(op.returning, "("));
    implement(name_space, "CompositeImplicitAutograd", returning.c_str(), op.returning_entry);
  }
}

void after_fork() {
  for (int32_t at = 0; at < opsmith_served.count; at++) served()[at].plans.after_fork();
}

[[maybe_unused]] const bool registered = [] {
  pthread_atfork(nullptr, nullptr, after_fork);
  for (int32_t at = 0; at < opsmith_served.count; at++) register_operator(served()[at]);
  return true;
}();
}  // namespace

namespace opsmith {
void serve(int32_t index, int32_t device, uint64_t* stack) {
  Served& each = served()[index];
  try {
    compute(each, each.made->devices[device], stack);
  } catch (const Refused& error) {
    thrown = error.what();
    throw;
  } catch (const std::exception& error) {  // for example from `must`
    thrown = each.full_name + ": " + error.what() + (torch_words().empty() ? "" : "\n  got: " + torch_words());
    throw Refused(thrown);
  }
}

void describe(int32_t index, uint64_t* stack) { ::describe(served()[index], stack); }

void serve_returning(int32_t index, uint64_t* stack) {
  Served& each = served()[index];
  TensorHandle returned;
  must(aoti_torch_new_tensor_handle(reinterpret_cast<TensorHandle>(stack[0]), &returned), "aoti_torch_new_tensor_handle");
  thrown.clear();
  if (torch_call_dispatcher(each.full_name.c_str(), "", stack, abi_version)) {
    aoti_torch_delete_tensor_object(returned);
    rethrow(each.full_name);
  }
  stack[0] = reinterpret_cast<uint64_t>(returned);
}
}  // namespace opsmith
