// NVIDIA's GPU driver, for libraries without Python, which open it in the first call that needs it.
#pragma once
#include <stdexcept>

#include "launched_kernel.h"
#include "launches.h"

namespace opsmith {

struct DriverError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class OpenDriver : public Driver {
 public:
  static OpenDriver& get() {
    static OpenDriver* const driver = new OpenDriver;  // launches may be pending when the process ends
    return *driver;
  }

  // Finds the function of an instance for a launch on a GPU. The best image that the GPU can run is loaded once. It
  // stays loaded, since a launch may be pending in a stream.
  void load(const DeviceInstance& instance, int32_t device, Launches& work, Launch& launch) {
    std::lock_guard lock(mutex_);
    Gpu& gpu = gpus_[device];
    if (gpu.context == nullptr) open(device, gpu);
    const InContext current(*this, gpu.context);
    must("cuCtxPushCurrent_v2", current.status);
    Loaded& held = gpu.loaded[&instance];
    if (held.function == nullptr) {
      void* used;
      int status = 0;
      if (stream(device, &used) == 0 && capturing_ && !capturing_(used, &status) && status != 0)
        throw DriverError(
            "it cannot be loaded while a CUDA graph is captured\n  hint: call the operator once with arguments "
            "of this kind before the capture");
      held = loaded(instance, gpu.capability);
    }
    if (launch.shared > held.dynamic && held.fixed + launch.shared > usual_shared) {
      must("cuFuncSetAttribute", set_(held.function, max_dynamic_shared, int(launch.shared)));
      held.dynamic = launch.shared;
    }
    work.driver = this;
    work.context = gpu.context;
    launch.function = held.function;
    launch.architecture = "sm_" + std::to_string(gpu.capability);
  }

 private:
  static constexpr int capability_major = 75, capability_minor = 76, max_dynamic_shared = 8;  // in cuda.h
  static constexpr int64_t usual_shared = 48 * 1024;

  struct Loaded {
    void* function = nullptr;
    int64_t fixed = 0, dynamic = 0;  // bytes of static shared memory, and of dynamic shared memory that launches may use
  };
  struct Gpu {
    void* context = nullptr;  // the primary context, which torch uses; it is retained until the process ends
    int64_t capability = 0;   // 90 for sm_90
    std::map<const DeviceInstance*, Loaded> loaded;
  };

  OpenDriver() : Driver{} {
    stream = reinterpret_cast<decltype(stream)>(stream_of_torch());
    if (stream == nullptr) throw DriverError("this torch has no part for CUDA");
    for (const char* file : {"libcuda.so.1", "libcuda.so"})
      if ((library_ = dlopen(file, RTLD_NOW)) != nullptr) break;
    if (library_ == nullptr) {
      const char* why = dlerror();
      throw DriverError(std::string("there is no CUDA driver\n  expected: libcuda.so.1\n  got: ") + (why ? why : ""));
    }
    int (*init)(unsigned) = nullptr;
    find(init, "cuInit");
    find(device_, "cuDeviceGet");
    find(attribute_, "cuDeviceGetAttribute");
    find(retain_, "cuDevicePrimaryCtxRetain");
    find(push, "cuCtxPushCurrent_v2");
    find(pop, "cuCtxPopCurrent_v2");
    find(load_, "cuModuleLoadData");
    find(function_, "cuModuleGetFunction");
    find(set_, "cuFuncSetAttribute");
    find(Driver::launch, "cuLaunchKernel");
    find(name, "cuGetErrorName");
    find(text, "cuGetErrorString");
    capturing_ = reinterpret_cast<decltype(capturing_)>(dlsym(library_, "cuStreamIsCapturing"));
    must("cuInit", init(0));
  }

  template <class F>
  void find(F*& function, const char* called) {
    function = reinterpret_cast<F*>(dlsym(library_, called));
    if (!function) throw DriverError(std::string("the CUDA driver has no function `") + called + "`");
  }

  void must(const char* function, int status) const {
    if (status) throw DriverError(std::string(function) + " returns " + described(status));
  }

  void open(int32_t index, Gpu& gpu) {
    int device = 0, major = 0, minor = 0;
    must("cuDeviceGet", device_(&device, index));
    must("cuDeviceGetAttribute", attribute_(&major, capability_major, device));
    must("cuDeviceGetAttribute", attribute_(&minor, capability_minor, device));
    must("cuDevicePrimaryCtxRetain", retain_(&gpu.context, device));
    gpu.capability = 10 * major + minor;
  }

  Loaded loaded(const DeviceInstance& instance, int64_t capability) const {
    std::string targets, reason;
    for (const DeviceImage& image : instance.images) {
      targets += (targets.empty() ? "" : ", ") + image.name();
      if (!image.runs_on(capability)) continue;
      void *module, *function;
      const char* called = "cuModuleLoadData";
      int status = load_(&module, instance.content + image.at);
      if (status == 0) called = "cuModuleGetFunction", status = function_(&function, module, instance.name.c_str());
      if (status == 0) return {function, image.shared, 0};
      reason = std::string("; ") + called + " returns " + described(status);  // too old a driver
    }
    throw DriverError("the library has no code that this GPU runs\n  expected: one of " + targets + "\n  got: sm_" +
                      std::to_string(capability) + reason +
                      "\n  hint: name this GPU in `--cuda` when the library is built");
  }

  void* library_ = nullptr;
  int (*device_)(int*, int) = nullptr;
  int (*attribute_)(int*, int, int) = nullptr;
  int (*retain_)(void**, int) = nullptr;
  int (*load_)(void**, const void*) = nullptr;
  int (*function_)(void**, void*, const char*) = nullptr;
  int (*set_)(void*, int, int) = nullptr;
  int (*capturing_)(void*, int*) = nullptr;
  std::mutex mutex_;
  std::map<int32_t, Gpu> gpus_;
};
}  // namespace opsmith
