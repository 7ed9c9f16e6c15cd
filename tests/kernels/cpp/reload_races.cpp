// Program for ThreadSanitizer: threads call an operator whose kernel another thread reloads. The runtime is the real
// one; torch's C functions, and Python, are as much of them as the runtime uses. Arguments: the number of reloads, and
// the number of kernels that take turns, up to three. Prints figures as JSON.
#include <map>
#include <random>
#include <thread>

#include "runtime.cpp"

// ---- Torch: dense tensors of float in one dimension, and operators by name.

struct AtenTensorOpaque {
  std::vector<float> data;
  int64_t size, stride = 1;
};
using Boxed = void (*)(uint64_t*, uint64_t, uint64_t);
struct TorchLibraryOpaque {
  std::string name_space;
  std::vector<std::string> names;
};

namespace stub {
std::shared_mutex mutex;
std::map<std::string, Boxed> operators;
std::atomic<int64_t> tensors{0};
thread_local bool grad_mode = true;

TensorHandle tensor(int64_t size) {
  tensors++;
  return new AtenTensorOpaque{std::vector<float>(size_t(size)), size};
}

bool call(const std::string& name, uint64_t* stack) {
  Boxed boxed;
  {
    std::shared_lock lock(mutex);
    auto found = operators.find(name);
    if (found == operators.end()) return false;
    boxed = found->second;
  }
  boxed(stack, 1, 1);
  return true;
}
}  // namespace stub

extern "C" {
Status aoti_torch_get_data_ptr(TensorHandle tensor, void** data) { return *data = tensor->data.data(), 0; }
Status aoti_torch_get_dim(TensorHandle, int64_t* dim) { return *dim = 1, 0; }
Status aoti_torch_get_sizes(TensorHandle tensor, int64_t** sizes) { return *sizes = &tensor->size, 0; }
Status aoti_torch_get_strides(TensorHandle tensor, int64_t** strides) { return *strides = &tensor->stride, 0; }
Status aoti_torch_get_dtype(TensorHandle, int32_t* dtype) { return *dtype = dtype_of<float>::value, 0; }
Status aoti_torch_get_device_type(TensorHandle, int32_t* type) { return *type = 0, 0; }
Status aoti_torch_get_device_index(TensorHandle, int32_t* index) { return *index = -1, 0; }
Status aoti_torch_aten_fill__Scalar(TensorHandle, double) { return 1; }
Status aoti_torch_delete_tensor_object(TensorHandle tensor) { return delete tensor, stub::tensors--, 0; }
Status aoti_torch_empty_strided(int64_t, const int64_t* sizes, const int64_t*, int32_t, int32_t, int32_t,
                                TensorHandle* made) {
  return *made = stub::tensor(sizes[0]), 0;
}
Status aoti_torch_copy_(TensorHandle to, TensorHandle from, int32_t) { return to->data = from->data, 0; }
bool aoti_torch_grad_mode_is_enabled() { return stub::grad_mode; }
void aoti_torch_grad_mode_set_enabled(bool on) { stub::grad_mode = on; }
Status aoti_torch_library_init_impl(const char* name_space, const char*, const char*, uint32_t, LibraryHandle* made) {
  return *made = new TorchLibraryOpaque{name_space, {}}, 0;
}
Status torch_library_impl(LibraryHandle library, const char* name, Boxed boxed, uint64_t) {
  std::unique_lock lock(stub::mutex);
  library->names.push_back(library->name_space + "::" + name);
  stub::operators[library->names.back()] = boxed;
  return 0;
}
Status aoti_torch_delete_library_object(LibraryHandle library) {
  std::unique_lock lock(stub::mutex);
  for (const std::string& name : library->names) stub::operators.erase(name);
  delete library;
  return 0;
}
Status torch_call_dispatcher(const char* name, const char*, uint64_t* stack, uint64_t) {
  return stub::call(name, stack) ? 0 : 1;
}
Status torch_list_size(ListHandle, size_t*) { return 1; }
Status torch_list_get_item(ListHandle, size_t, uint64_t*) { return 1; }
Status torch_delete_list(ListHandle) { return 1; }
Status torch_string_c_str(StringHandle, const char**) { return 1; }
Status torch_string_length(StringHandle, size_t*) { return 1; }
Status torch_delete_string(StringHandle) { return 1; }
void Py_IncRef(PyObject*) {}
}

// ---- Instances of kernels: each adds another number.

constexpr int most_kernels = 3;

template <int number>
void added(Contiguous<const float> x, Contiguous<float> y) {
  for (int64_t i = 0; i < x.numel(); i++) y[i] = x[i] + number;
}
template <int number> constexpr opsmith::Candidate instance = opsmith::candidate<&added<number>>();
const opsmith::Candidate* const instances[most_kernels] = {&instance<0>, &instance<1>, &instance<2>};

// ---- Python: what dispatch.py and kernel.py do.

const std::string own = "opsmith_kernels::kernel_0", operator_name = "demo::added",
                  own_fallback = "opsmith_kernels::fallback_0", served_fallback = "opsmith_kernels::fallback_1";
void *record, *own_entry, *served_entry;
std::atomic<int> current{0};  // the instance that is loaded

void without_plan(uint64_t* stack, uint64_t, uint64_t) {
  const int64_t size = reinterpret_cast<TensorHandle>(stack[0])->size;
  const int64_t instance = reinterpret_cast<int64_t>(instances[current]);
  const int64_t plan[] = {instance, 0, 0, 0, 1, dtype_of<float>::value, 1, size, 1, 1, 0};
  void* awaited = opsmith_pending(record);
  if (awaited != nullptr) opsmith_remember(record, awaited, plan, nullptr);
  stub::call(own, stack);
}

void without_kernel(uint64_t* stack, uint64_t, uint64_t) { stub::call(own, stack); }

// What Python does with a kernel: it gets a record, by which its own operator runs, and the one that it computes.
void make() {
  const int64_t tensor[] = {1, opsmith::TENSOR, 0, 0, 0, 0};
  record = opsmith_record(tensor, 1, nullptr);
  own_entry = opsmith_entry(1, 0, own_fallback.c_str());
  served_entry = opsmith_entry(1, 0, served_fallback.c_str());
  opsmith_publish(own_entry, record);
  opsmith_publish(served_entry, record);
  opsmith_register(own_entry, 0, "opsmith_kernels", "CPU", "kernel_0");
  opsmith_register(served_entry, 1, "demo", "CPU", "added");
}

// What it does in a reload. Plans that are made meanwhile may be of what was there before.
void reload(int kernel) {
  opsmith_withdraw(served_entry, record);
  opsmith_forget(record);
  current = kernel;
  opsmith_forget(record);
  opsmith_publish(served_entry, record);
}

int main(int, char** arguments) {
  constexpr int callers = 4;
  const int reloads = std::stoi(arguments[1]), kernels = std::stoi(arguments[2]);
  std::atomic<int> begun{0}, ended{0}, failed{0}, replaced{0};
  std::atomic<int64_t> calls{0};
  std::atomic<bool> stopped{false};
  stub::operators[own_fallback] = without_plan;
  stub::operators[served_fallback] = without_kernel;
  make();

  std::vector<std::thread> threads;
  for (int caller = 0; caller < callers; caller++)
    threads.emplace_back([&, caller] {
      std::mt19937 draw{unsigned(caller)};
      while (!stopped) {
        const int oldest = ended;
        uint64_t stack[1] = {reinterpret_cast<uint64_t>(stub::tensor(1 + draw() % 5))};
        const bool through_own = caller == 0;  // as the fast path calls a kernel
        try {
          if (!stub::call(through_own ? own : operator_name, stack)) failed++;
        } catch (const std::exception& error) {
          failed++;
          std::printf("%s\n", error.what());
        }
        TensorHandle result = reinterpret_cast<TensorHandle>(stack[0]);
        bool allowed = false;
        for (int reload = oldest; reload <= begun; reload++) allowed |= result->data[0] == float(reload % kernels);
        replaced += !allowed;
        aoti_torch_delete_tensor_object(result);
        calls++;
      }
    });
  for (int reload = 1; reload <= reloads; reload++) {
    begun = reload;
    ::reload(reload % kernels);
    ended = reload;
    for (const int64_t before = calls; calls < before + callers;) std::this_thread::yield();
  }
  stopped = true;
  for (std::thread& thread : threads) thread.join();
  std::printf("{\"calls\": %ld, \"reloads\": %d, \"failed\": %d, \"replaced\": %d, \"tensors\": %ld}\n",
              long(calls), int(ended), int(failed), int(replaced), long(stub::tensors));
}
