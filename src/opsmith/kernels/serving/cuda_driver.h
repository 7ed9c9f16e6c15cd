// The CUDA driver, which is loaded at the first call, and torch's current stream on a GPU.
#pragma once
#include <dlfcn.h>

#include <map>

#include "cuda_tables.h"

namespace opsmith {

struct DriverError : std::exception {
  std::string text;
  explicit DriverError(std::string text) : text(std::move(text)) {}
  const char* what() const noexcept override { return text.c_str(); }
};

class Driver {
 public:
  static Driver& get() {
    static Driver* const driver = new Driver;  // launches may be pending when the process ends
    return *driver;
  }

  // Makes torch's context of a GPU current.
  class OnDevice {
   public:
    OnDevice(Driver& driver, int32_t index) : driver_(driver) {
      driver.must("cuCtxPushCurrent_v2", driver.push_(driver.context(index)));
    }
    ~OnDevice() {
      void* before;
      driver_.pop_(&before);
    }

   private:
    Driver& driver_;
  };

  // Compute capability, as 90.
  int32_t capability(int32_t index) {
    int major = 0, minor = 0, device = 0;
    must("cuDeviceGet", device_(&device, index));
    must("cuDeviceGetAttribute", attribute_(&major, capability_major, device));
    must("cuDeviceGetAttribute", attribute_(&minor, capability_minor, device));
    return int32_t(10 * major + minor);
  }

  bool is_capturing(void* stream) {
    int status = 0;
    return capturing_ && !capturing_(stream, &status) && status != 0;
  }

  // Loads an image into the current context. It stays loaded: a launch may be pending in some stream.
  void* load(const unsigned char* image, const char* name) {
    void *module, *function;
    must("cuModuleLoadData", load_(&module, image));
    must("cuModuleGetFunction", function_(&function, module, name));
    return function;
  }

  void allow_shared(void* function, int64_t bytes) {
    must("cuFuncSetAttribute", set_(function, max_dynamic_shared, int(bytes)));
  }

  void launch(void* function, const int64_t* grid, const int64_t* block, int64_t shared, void* stream,
              void** parameters) {
    unsigned sizes[6];
    for (int at = 0; at < 3; at++) sizes[at] = unsigned(grid[at]), sizes[3 + at] = unsigned(block[at]);
    must("cuLaunchKernel", launch_(function, sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5],
                                   unsigned(shared), stream, parameters, nullptr));
  }

 private:
  // Numbers in cuda.h.
  static constexpr int capability_major = 75, capability_minor = 76, max_dynamic_shared = 8;

  Driver() {
    for (const char* name : {"libcuda.so.1", "libcuda.so"})
      if ((library_ = dlopen(name, RTLD_NOW)) != nullptr) break;
    if (!library_) {
      const char* text = dlerror();
      throw DriverError(std::string("there is no CUDA driver\n  expected: libcuda.so.1\n  got: ") + (text ? text : ""));
    }
    int (*init)(unsigned) = nullptr;
    find(init, "cuInit");
    find(device_, "cuDeviceGet");
    find(attribute_, "cuDeviceGetAttribute");
    find(retain_, "cuDevicePrimaryCtxRetain");
    find(push_, "cuCtxPushCurrent_v2");
    find(pop_, "cuCtxPopCurrent_v2");
    find(load_, "cuModuleLoadData");
    find(function_, "cuModuleGetFunction");
    find(set_, "cuFuncSetAttribute");
    find(launch_, "cuLaunchKernel");
    find(name_, "cuGetErrorName");
    capturing_ = reinterpret_cast<decltype(capturing_)>(dlsym(library_, "cuStreamIsCapturing"));
    must("cuInit", init(0));
  }

  template <class F>
  void find(F*& function, const char* name) {
    function = reinterpret_cast<F*>(dlsym(library_, name));
    if (!function) throw DriverError(std::string("the CUDA driver has no function `") + name + "`");
  }

  void must(const char* function, int status) const {
    if (!status) return;
    const char* text = nullptr;
    const bool known = name_(status, &text) == 0 && text;
    throw DriverError(std::string(function) + " returns " + (known ? text : "status " + std::to_string(status)));
  }

  // The primary context of a device, which torch uses. It is retained until the process ends.
  void* context(int32_t index) {
    std::lock_guard lock(mutex_);
    auto found = contexts_.find(index);
    if (found != contexts_.end()) return found->second;
    int device = 0;
    void* context = nullptr;
    must("cuDeviceGet", device_(&device, index));
    must("cuDevicePrimaryCtxRetain", retain_(&context, device));
    return contexts_[index] = context;
  }

  void* library_ = nullptr;
  int (*device_)(int*, int);
  int (*attribute_)(int*, int, int);
  int (*retain_)(void**, int);
  int (*push_)(void*);
  int (*pop_)(void**);
  int (*load_)(void**, const void*);
  int (*function_)(void**, void*, const char*);
  int (*set_)(void*, int, int);
  int (*launch_)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**, void**);
  int (*name_)(int, const char**);
  int (*capturing_)(void*, int*);
  std::mutex mutex_;
  std::map<int32_t, void*> contexts_;
};

// Torch's current stream on a GPU. The function is in the part of torch for CUDA, which a process may lack.
inline void* current_stream(int32_t index) {
  using Get = Status (*)(int32_t, void**);
  static const Get get = [] {
    const char* name = "aoti_torch_get_current_cuda_stream";
    if (void* found = dlsym(RTLD_DEFAULT, name)) return reinterpret_cast<Get>(found);
    void* cuda = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    return reinterpret_cast<Get>(cuda ? dlsym(cuda, name) : nullptr);
  }();
  if (!get) throw DriverError("this torch has no part for CUDA");
  void* stream = nullptr;
  must(get(index, &stream), "aoti_torch_get_current_cuda_stream");
  return stream;
}

// True if a GPU runs an image: `gpu_misfit` of kernels/cuda/packaged.py has the rules.
inline bool runs(const CudaImage& image, int32_t capability) {
  const bool fits = image.suffix == 'a' ? image.target == capability : image.target <= capability;
  return fits && (image.ptx || image.target / 10 == capability / 10);
}

struct LoadedInstance {
  void* function = nullptr;
  int64_t fixed = 0, dynamic = 0;  // bytes of static shared memory, and of dynamic that launches may use
};

// Loads the best image of an instance that a GPU runs, once for each GPU, and lets it use its shared memory.
inline void* loaded(Driver& driver, const CudaInstance& instance, int32_t index, void* stream, int64_t shared) {
  static auto& mutex = *new std::mutex;
  static auto& all = *new std::map<std::pair<const CudaInstance*, int32_t>, LoadedInstance>;
  constexpr int64_t usual_shared = 48 * 1024;
  std::lock_guard lock(mutex);
  LoadedInstance& held = all[{&instance, index}];
  if (!held.function) {
    if (driver.is_capturing(stream))
      throw DriverError(
          "it cannot be loaded while a CUDA graph is captured\n  hint: call the operator once with such arguments "
          "before the capture");
    const int32_t capability = driver.capability(index);
    std::string targets, reason;
    for (int32_t at = 0; at < instance.image_count && !held.function; at++) {
      const CudaImage& image = instance.images[at];
      targets += (at ? ", " : "") + std::string(image.ptx ? "compute_" : "sm_") + std::to_string(image.target);
      if (image.suffix) targets += image.suffix;
      if (!runs(image, capability)) continue;
      try {
        held = {driver.load(opsmith_images + image.at, instance.name), image.shared, 0};
      } catch (const DriverError& error) {  // a driver that is older than what built it
        reason = error.text;
      }
    }
    if (!held.function)
      throw DriverError("the library has no code that this GPU runs\n  expected: one of " + targets + "\n  got: sm_" +
                        std::to_string(capability) + (reason.empty() ? "" : "; " + reason) +
                        "\n  hint: name this GPU in `--cuda` when the library is built");
  }
  if (shared > held.dynamic && held.fixed + shared > usual_shared) {
    driver.allow_shared(held.function, shared);
    held.dynamic = shared;
  }
  return held.function;
}
}  // namespace opsmith
