// Library between torch's dispatcher and all kernels, built once on a machine.
//
// Each kernel has a private operator, which only runs the kernel. The kernel may also serve the operator that it
// computes. Each of these operators has an entry. A call whose signature has a plan runs here completely. Other calls
// go to the fallback, a Python operator with the same arguments. It makes a plan, caches it by `opsmith_remember` and
// calls again. If no instance of the kernel takes the call, it runs the reference.
//
// Calls of other threads may run while a kernel is reloaded. Torch's table of kernels cannot be changed meanwhile, so
// registrations stay. A reload forgets the plans; each plan keeps the code that it runs alive. If a different kernel
// computes the operator from now on, the record of the entry is replaced.
#include <pthread.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <string>
#include <utility>

#include "launches.h"
#include "planning.h"
#include "python_errors.h"

namespace {
using namespace opsmith;

// A kernel. It is complete before a call can find it. It stays as long as the process, since a call may be about to
// use it at any time. Only its caches and counts change.
struct Record {
  const Signed arguments;
  const int64_t results;
  PyObject* const make_error;
  const bool writes =
      std::any_of(arguments.begin(), arguments.end(), [](const Argument& each) { return each.written; });
  CallCache<std::shared_ptr<const Plan>> plans{};
  CallCache<std::shared_ptr<const Recipe>> recipes{};  // of kinds of calls whose reference returns contiguous results
  const std::unique_ptr<std::atomic<int64_t>[]> copies{new std::atomic<int64_t>[arguments.size() + 1]()};
  Record* older = nullptr;  // the record that was made before this one
};

std::atomic<Record*> newest{nullptr};

void after_fork() {
  for (Record* record = newest; record != nullptr; record = record->older) {
    record->plans.after_fork();
    record->recipes.after_fork();
  }
}

[[maybe_unused]] const int registered = pthread_atfork(nullptr, nullptr, after_fork);

// An operator whose calls this library gets.
struct Entry {
  const int64_t results;
  const uint64_t torch_version;
  const std::string fallback;
  std::atomic<Record*> record{nullptr};  // the kernel for calls; null if all calls go to the fallback
};

// Generations of the caches of a record.
struct Generations {
  uint64_t plans = 0, recipes = 0;
};

// The call that is in the fallback in this thread.
struct Pending {
  Record* record = nullptr;
  const Arguments* arguments = nullptr;
  Generations generations;  // at the beginning of the call
};
thread_local Pending pending;

// A call for which the fallback makes a plan.
struct Awaited {
  Signature signature, kind;
  Generations generations;
};

// The kernel whose `sizes` threw in the call that is in the fallback in this thread. If the reference takes the call,
// that exception is an error of the kernel.
thread_local const Record* suspected = nullptr;

void compute(Record& record, const Plan& plan, Arguments& arguments, uint64_t* stack) {
  Made results(plan.device);
  run_plan(record.arguments, plan, arguments, results, [&](size_t at) { record.copies[at]++; },
           [&](const char* text) { throw KernelThrew(record.make_error, text); });
  results.hand_over(stack);
}

// True if a call with a plan may run here. A call with forbidden writes goes to the fallback, which raises an error.
bool may_write(const Record& record, const Arguments& arguments) {
  if (!record.writes) return true;
  return !shares_written(record.arguments, arguments) && raise_versions(record.arguments, arguments);
}

// Compares the sizes that a kernel computes with those of a plan, and records the kind of call if they agree.
void compare(Record& record, const std::shared_ptr<const Plan>& known, const Arguments& arguments, uint64_t generation) {
  const Plan& plan = *known;
  if (!is_sizable(record.arguments, arguments, {})) return;
  if (suspected != &record && record.recipes.find(arguments.kind)) return;
  auto recipe = std::make_shared<Recipe>(Recipe{known, {}, {}, {}});
  for (int32_t at = 0; at < plan.candidate->count; at++)
    if (plan.candidate->parameters[at].layout == CHANNELS_LAST) return;
  char error[1000];
  std::vector<Shape> shapes(plan.results.size());
  const SizesStatus status = sizes_by(plan.candidate, nullptr, arguments, shapes, error, sizeof error);
  if (status == THREW) throw KernelThrew(record.make_error, error);
  if (status != KNOWN) return;
  bool agrees = true;
  for (size_t at = 0; at < plan.results.size(); at++) {
    const Result& result = plan.results[at];
    const int64_t dim = int64_t(result.sizes.size());
    if (shapes[at].dim != dim || std::memcmp(shapes[at].sizes, result.sizes.data(), size_t(dim) * 8)) {
      std::string text = "`sizes` returns " + listed(shapes[at].sizes, shapes[at].dim) + " for result " +
                         std::to_string(at) + ", but the reference returns " + listed(result.sizes.data(), dim);
      throw KernelThrew(record.make_error, text.c_str());
    }
    agrees &= result.strides == strides_in(dim, result.sizes.data(), CONTIGUOUS) &&
              std::all_of(result.sizes.begin(), result.sizes.end(),
                          [](int64_t size) { return size > 1; });  // otherwise strides are arbitrary
  }
  if (agrees) record.recipes.remember(Signature(arguments.kind), std::move(recipe), generation);
}

// The plan of a call; null if it has none.
std::shared_ptr<const Plan> planned(Record& record, const Arguments& arguments, Generations generations, bool& threw) {
  if (auto known = record.plans.find(arguments.words)) {
    const Candidate* candidate = (*known)->candidate;
    if (candidate != nullptr && candidate->sizes != nullptr) compare(record, *known, arguments, generations.recipes);
    return *known;
  }
  const auto recipe = record.recipes.find(arguments.kind);
  return recipe ? plan_by(**recipe, record.arguments, arguments, threw) : nullptr;
}

void enter(Entry& entry, uint64_t* stack) {
  Record* record = entry.record.load();
  Arguments arguments;
  Generations generations;
  bool threw = false;
  if (record != nullptr) {
    generations = {record->plans.generation(), record->recipes.generation()};
    for (size_t at = 0; at < record->arguments.size(); at++) arguments.read(stack[at], record->arguments[at]);
    auto plan = planned(*record, arguments, generations, threw);
    if (plan && may_write(*record, arguments)) {
      arguments.own();
      compute(*record, *plan, arguments, stack);
      return;
    }
  }
  const Within<Pending> in_fallback(pending, {record, &arguments, generations});
  const Within<const Record*> suspicion(suspected, threw ? record : nullptr);
  const Status status = torch_call_dispatcher(entry.fallback.c_str(), "", stack, entry.torch_version);
  if (status == 0 && held_error.error != nullptr)
    for (int64_t at = 0; at < entry.results; at++)
      aoti_torch_delete_tensor_object(reinterpret_cast<TensorHandle>(stack[at]));
  throw_held();  // first, since otherwise a later call would raise this error
  must(status, "torch_call_dispatcher");
}

// Torch's dispatcher takes plain functions without data, so there is one function for each entry.
using Function = void (*)(uint64_t* stack, uint64_t, uint64_t);
constexpr size_t most_entries = 2048;
std::atomic<Entry*> entries[most_entries];

template <size_t number>
void entered(uint64_t* stack, uint64_t, uint64_t) {
  enter(*entries[number].load(std::memory_order_acquire), stack);
}

template <size_t... numbers>
constexpr std::array<Function, most_entries> functions_of(std::index_sequence<numbers...>) {
  return {entered<numbers>...};
}
constexpr std::array<Function, most_entries> functions = functions_of(std::make_index_sequence<most_entries>());
}  // namespace

#define PUBLIC extern "C" __attribute__((visibility("default")))

PUBLIC int32_t opsmith_most_entries() { return int32_t(most_entries); }

// Makes an entry for an operator. `fallback` is the name of an operator.
PUBLIC void* opsmith_entry(int32_t results, uint64_t torch_version, const char* fallback) {
  return new Entry{results, torch_version, fallback};
}

// Makes the record of a kernel. `signature` describes the arguments of its operator. `make_error` turns the text of a
// C++ exception into a Python exception.
PUBLIC void* opsmith_record(const int64_t* signature, int32_t results, PyObject* make_error) {
  Signed arguments;
  Numbers from(signature);
  from(arguments);
  Py_IncRef(make_error);
  Record* record = new Record{std::move(arguments), results, make_error};
  record->older = newest;
  while (!newest.compare_exchange_weak(record->older, record)) {
  }
  return record;
}

// Registers an entry for the operator `name_space::name` on a device, by its number among all entries. An earlier entry
// of this number must not get calls any more. Returns the registration; null if torch does not accept it.
PUBLIC void* opsmith_register(void* entry, int32_t number, const char* name_space, const char* device,
                              const char* name) {
  LibraryHandle registered;
  if (aoti_torch_library_init_impl(name_space, device, __FILE__, __LINE__, &registered)) return nullptr;
  Entry* held = static_cast<Entry*>(entry);
  entries[number].store(held, std::memory_order_release);
  if (torch_library_impl(registered, name, functions[size_t(number)], held->torch_version)) {
    aoti_torch_delete_library_object(registered);
    return nullptr;
  }
  return registered;
}

// Makes a driver from functions in the order of `Driver`. If torch's function is null, it is searched here. Returns
// null if this torch has no CUDA support.
PUBLIC void* opsmith_driver(void* const* functions) {
  auto driver = std::make_unique<Driver>();
  static_assert(sizeof(Driver) == 6 * sizeof(void*), "functions alone");
  std::memcpy(static_cast<void*>(driver.get()), functions, sizeof(Driver));
  if (driver->stream == nullptr) driver->stream = reinterpret_cast<decltype(driver->stream)>(stream_of_torch());
  return driver->stream != nullptr ? driver.release() : nullptr;
}

// Ends a registration. No other thread may call the operator meanwhile.
PUBLIC void opsmith_deregister(void* registered) {
  aoti_torch_delete_library_object(static_cast<LibraryHandle>(registered));
}

// Lets a record run the calls of an entry.
PUBLIC void opsmith_publish(void* entry, void* record) {
  static_cast<Entry*>(entry)->record = static_cast<Record*>(record);
}

// Sends the calls of an entry to the fallback, if this record runs them.
PUBLIC void opsmith_withdraw(void* entry, void* record) {
  Record* expected = static_cast<Record*>(record);
  static_cast<Entry*>(entry)->record.compare_exchange_strong(expected, nullptr);
}

// Returns the record of the call that is in the fallback in this thread; null if there is none.
PUBLIC void* opsmith_pending_record() { return pending.record; }

// Returns the signature of this record's call in the fallback; null if there is none.
PUBLIC void* opsmith_pending(void* held) {
  if (pending.record != held || pending.arguments == nullptr) return nullptr;
  const Arguments& arguments = *pending.arguments;
  auto* awaited = new Awaited{Signature(arguments.words), Signature(arguments.kind), pending.generations};
  pending.arguments = nullptr;
  return awaited;
}

// Caches a plan for a signature, and a recipe for calls of its kind, if they are given and the caches were not cleared
// meanwhile. Releases the signature.
PUBLIC void opsmith_remember(void* held, void* signature, const int64_t* plan, const int64_t* recipe) {
  std::unique_ptr<Awaited> awaited(static_cast<Awaited*>(signature));
  Record& record = *static_cast<Record*>(held);
  if (plan == nullptr) return;
  const auto read = Plan::read(plan);
  record.plans.remember(awaited->signature, read, awaited->generations.plans);
  if (recipe != nullptr) record.recipes.remember(awaited->kind, Recipe::read(recipe, read), awaited->generations.recipes);
}

PUBLIC void opsmith_forget(void* held) {
  static_cast<Record*>(held)->plans.forget();
  static_cast<Record*>(held)->recipes.forget();
}

PUBLIC void opsmith_forget_copies(void* held) {
  Record& record = *static_cast<Record*>(held);
  for (size_t at = 0; at <= record.arguments.size(); at++) record.copies[at] = 0;
}

PUBLIC int64_t opsmith_cached_plans(void* held) { return static_cast<Record*>(held)->plans.count(); }

PUBLIC int64_t opsmith_copies(void* held, int32_t argument) {
  return static_cast<Record*>(held)->copies[size_t(argument)];
}

// Holds a Python exception until C++ may throw it.
PUBLIC void opsmith_hold(PyObject* error, const char* text) {
  Py_IncRef(error);
  held_error.error = error;
  held_error.text = text;
}

// Turns the filling of new memory on or off.
PUBLIC void opsmith_fill(int32_t on) { fills_memory = on; }

PUBLIC int64_t opsmith_version() { return version; }
