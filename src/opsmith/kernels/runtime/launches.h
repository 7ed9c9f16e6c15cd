// Launches of a plan by a CUDA driver: scratch buffers, parameters with the addresses of tensors, torch's stream.
//
// This needs no header or library of CUDA. Python opens the driver; in a library without Python, driver.h opens it in
// the first call that needs it.
#pragma once
#include <dlfcn.h>

#include "torch_memory.h"

namespace opsmith {

// Functions of the driver, and torch's function for its current stream.
struct Driver {
  int (*push)(void* context);
  int (*pop)(void** context);
  int (*launch)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**, void**);
  int (*name)(int status, const char** text);
  int (*text)(int status, const char** text);
  Status (*stream)(int32_t device, void** stream);

  std::string described(int status) const {
    std::string found;
    for (auto* get : {name, text}) {
      const char* words = nullptr;
      if (get(status, &words) == 0 && words != nullptr) found += (found.empty() ? "" : ": ") + std::string(words);
    }
    return found.empty() ? "status " + std::to_string(status) : found;
  }
};

// Torch's function for its current stream, which is in torch's CUDA library; null if that is not loaded.
inline void* stream_of_torch() {
  const char* name = "aoti_torch_get_current_cuda_stream";
  if (void* found = dlsym(RTLD_DEFAULT, name)) return found;
  void* cuda = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
  return cuda ? dlsym(cuda, name) : nullptr;
}

// Makes torch's context of a GPU current.
struct InContext {
  const Driver& driver;
  const int status;

  InContext(const Driver& driver, void* context) : driver(driver), status(driver.push(context)) {}
  ~InContext() {
    void* before;
    if (status == 0) driver.pop(&before);
  }
};

inline void fill_whole(TensorHandle tensor, int64_t number) {
  Made made;
  TensorHandle whole = made.empty(dtype_of<int64_t>::value, 0, nullptr, nullptr);
  std::memcpy(memory(whole), &number, sizeof number);
  WithoutGrad guard;
  must(aoti_torch_copy_(tensor, whole, 0), "aoti_torch_copy_");
}

// Returns the status of the driver.
inline int launch(const Driver& driver, const Launch& planned, const Arguments& arguments, void* const* tensors,
                  void* stream) {
  alignas(16) unsigned char room[4096];  // the driver copies them
  std::unique_ptr<unsigned char[]> more;
  const size_t count = planned.parameters.size();
  unsigned char* bytes = room;
  if (count > sizeof room) {
    more.reset(new unsigned char[count]);
    bytes = more.get();
  }
  std::memcpy(bytes, planned.parameters.data(), count);
  for (const Address& each : planned.addresses) std::memcpy(bytes + each.offset, &tensors[each.tensor], sizeof(void*));
  for (const Given& each : planned.given) {
    const Value& value = arguments.values[each.argument];
    const double number = each.item < 0 ? value.number : static_cast<const double*>(value.list.data)[each.item];
    const float single = float(number);
    std::memcpy(bytes + each.offset, each.bytes == 4 ? static_cast<const void*>(&single) : &number, each.bytes);
  }
  Inline<void*, 32> parameters;
  for (uint32_t offset : planned.offsets) parameters.push(bytes + offset);
  const unsigned *grid = planned.grid, *block = planned.block;
  return driver.launch(planned.function, grid[0], grid[1], grid[2], block[0], block[1], block[2], planned.shared, stream,
                       parameters.data(), nullptr);
}

// Text for the requested launch, for errors.
inline std::string described(const Launch& launch) {
  std::string text;
  for (auto [name, sizes] : {std::pair{"grid (", launch.grid}, {"block (", launch.block}})
    text += name + std::to_string(sizes[0]) + ", " + std::to_string(sizes[1]) + ", " + std::to_string(sizes[2]) + "), ";
  return text + std::to_string(launch.shared) + " bytes of shared memory, on " + launch.architecture;
}

// Runs the launches of a call, whose results are the values after its arguments. If the driver refuses, `threw` is
// called with the text, and throws.
template <class Threw>
void launch_all(const Signed& signature, const Launches& work, Arguments& arguments, const Made& results, Threw threw) {
  Made scratch(results.device());
  for (const Buffer& each : work.scratch)
    scratch.empty(each.dtype, int64_t(each.sizes.size()), each.sizes.data(), each.strides.data());
  for (const Filled& each : work.filled) {
    TensorHandle tensor = each.made < results.size() ? results[each.made] : scratch[each.made - results.size()];
    if (each.exact) fill_whole(tensor, each.whole);
    else fill(tensor, each.number);
  }
  if (work.launches.empty()) return;
  Inline<void*, 64> tensors;
  every(signature, arguments, [&](const RawTensor& raw, size_t, size_t) {
    tensors.push(raw.data);
    return true;
  });
  for (size_t at = 0; at < results.size(); at++) tensors.push(arguments.values[signature.size() + at].tensor.data);
  for (size_t at = 0; at < scratch.size(); at++) tensors.push(memory(scratch[at]));
  const Driver& driver = *work.driver;
  void* stream = nullptr;
  must(driver.stream(results.device().index, &stream), "aoti_torch_get_current_cuda_stream");
  const Launch* planned = work.launches.data();
  const char* function = "cuCtxPushCurrent_v2";
  int status;
  {
    InContext context(driver, work.context);
    status = context.status;
    for (const Launch& each : work.launches) {
      if (status) break;
      planned = &each;
      function = "cuLaunchKernel";
      status = launch(driver, each, arguments, tensors.data(), stream);
    }
  }
  if (status)
    threw((planned->failed + ": " + function + " returns " + driver.described(status) + "\n  got: " + described(*planned))
              .c_str());
}

// Computes a call by a plan, in torch's memory; `results` gets the results of the call. For `counts` see run.h. `threw`
// is called with the text of an exception or a refusal, and throws.
template <class Counts, class Threw>
void run_plan(const Signed& signature, const Plan& plan, Arguments& arguments, Made& results, Counts counts,
              Threw threw) {
  TorchMemory made(arguments, results);
  run_plan_in(made, signature, plan, arguments, counts, [&] {
    if (plan.launches) launch_all(signature, *plan.launches, arguments, results, threw);
    else run_candidate(*plan.candidate, arguments, threw);
  });
}
}  // namespace opsmith
