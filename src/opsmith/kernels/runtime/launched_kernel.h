// Kernels of a library that are launched on a GPU: their constant data, and the launches of a call.
#pragma once
#include <map>

#include "planning.h"

namespace opsmith {

// As in opsmith_cuda.h: a parameter of a kernel, and its memory layout.
struct DeviceParameter : Parameter {
  int32_t room;  // capacity of a list
  int32_t item;  // bytes of a number
  int32_t size, alignment;

  uint32_t capacity() const { return uint32_t(std::max(dim < 0 ? max_view_dim : dim, 1)); }
  size_t view_size() const { return 24 + 16 * size_t(capacity()); }
  static constexpr int32_t max_view_dim = 8;  // of a view without a fixed number of dimensions

  void read(Numbers& from) {
    from(type, optional, written, dtype, dim, layout, room, item, size, alignment);
  }
};

// A cubin, or PTX for later GPUs.
struct DeviceImage {
  std::string kind, suffix;  // `sm` or `compute`; `a`: only for that GPU; `f`: for its family
  int64_t target;            // 90 for sm_90 and compute_90
  size_t at;                 // first byte among all images of the kernel
  int64_t shared;            // bytes of static shared memory

  void read(Numbers& from) { from(kind, suffix, target, at, shared); }
  std::string name() const { return kind + "_" + std::to_string(target) + suffix; }
  // True if a GPU can run it. The rules are in `gpu_misfit` of kernels/cuda/packaged.py.
  bool runs_on(int64_t capability) const {
    const bool fits = suffix == "a" ? target == capability : target <= capability;
    return fits && (kind == "compute" || target / 10 == capability / 10);
  }
};

struct DeviceInstance {
  std::string name;                 // in the images
  std::vector<DeviceImage> images;  // the best first
  std::vector<DeviceParameter> parameters;
  const unsigned char* content;  // of all images of the kernel

  void read(Numbers& from) { from(name, images, parameters); }
};

// Instances of the launches for one dtype, and for one value of each constant.
struct DeviceVariant {
  std::vector<int64_t> constants;      // of the templates of all launches
  std::vector<int64_t> instances;      // of each launch
  std::vector<DeviceParameter> taken;  // for each argument and result: takes only tensors that every launch takes
  std::vector<Parameter> parameters;   // the same, for `candidate`
  Candidate candidate;

  void read(Numbers& from) {
    from(constants, instances, taken);
    parameters.assign(taken.begin(), taken.end());
    candidate = {parameters.data(), int32_t(parameters.size()), -1, nullptr, nullptr};
  }
};

// Number that fills a result or a scratch buffer.
struct Initial {
  Filled constant;
  Program program;  // empty for a constant

  void read(Numbers& from) { from(constant, program); }
};

struct LaunchedKernel {
  std::vector<std::pair<std::string, Program>> constants;  // of the templates of all launches, by name
  LaunchPrograms programs;
  std::vector<Initial> initial;
  std::vector<std::pair<int32_t, size_t>> scratch;  // dtype of each buffer; if it is -1, the value with the same dtype
  std::vector<std::string> failed;                  // words for the error of each launch
  std::vector<std::vector<size_t>> passed;          // to each launch: indices of values
  std::vector<DeviceInstance> instances;
  std::vector<DeviceVariant> variants;  // in the order in which they are tried

  // Reads what kernels/cuda/linked.py encodes.
  LaunchedKernel(const int64_t* first, const unsigned char* images) {
    Numbers from(first);
    from(constants, programs, initial, scratch, failed, passed, instances, variants);
    for (DeviceInstance& each : instances) each.content = images;
  }
};

// Data of a kernel, decoded from numbers in the library by the first call that needs a plan.
inline const LaunchedKernel& launched_kernel(const int64_t* numbers, const unsigned char* images) {
  static auto& mutex = *new std::mutex;
  static auto& all = *new std::map<const int64_t*, std::unique_ptr<const LaunchedKernel>>;
  std::lock_guard lock(mutex);
  auto& found = all[numbers];
  if (!found) found = std::make_unique<const LaunchedKernel>(numbers, images);
  return *found;
}

// Parameters of a launch in their memory layout. A call fills in addresses, sizes and strides of views.
class Packing {
 public:
  Packing(const CallScope& scope, Launch& launch) : scope_(scope), launch_(launch) {}

  void add(const DeviceParameter& parameter, size_t at) {
    const Value& value = scope_.value_of(at);
    std::vector<unsigned char>& bytes = launch_.parameters;
    const size_t alignment = size_t(parameter.alignment);
    size_t first = (bytes.size() + alignment - 1) / alignment * alignment;
    launch_.offsets.push_back(uint32_t(first));
    bytes.resize(first + size_t(parameter.size));
    if (!value.given) return;
    const bool is_list = parameter.type >= TENSORS;
    if (parameter.optional) {  // a flag before the value
      bytes[first] = 1;
      first = bytes.size() - (parameter.type == TENSOR ? parameter.view_size() : size_t(parameter.item));
    }
    if (is_list) put(first, value.list.size), first += 8;
    for (int64_t item = 0; item < (is_list ? value.list.size : 1); item++)
      add_item(parameter, value, is_list, item, first, scope_.first_tensor(at));
  }

 private:
  void add_item(const DeviceParameter& parameter, const Value& value, bool is_list, int64_t item, size_t first,
                size_t tensor) {
    const size_t width = size_t(parameter.item), to = first + width * size_t(item);
    switch (parameter.type) {
      case TENSOR: case TENSORS:
        launch_.addresses.push_back({uint32_t(first + parameter.view_size() * size_t(item)),
                                     uint32_t(tensor + size_t(item)), parameter.capacity()});
        break;
      case INTEGER: case INTEGERS: {
        const int64_t whole = is_list ? static_cast<const int64_t*>(value.list.data)[item] : value.integer;
        if (width == 4) put(to, int32_t(whole));
        else put(to, whole);
        break;
      }
      case NUMBER: case NUMBERS: {
        const double number = is_list ? static_cast<const double*>(value.list.data)[item] : value.number;
        if (width == 4) put(to, float(number));
        else put(to, number);
        break;
      }
      case FLAG: case FLAGS: put(to, is_list ? static_cast<const bool*>(value.list.data)[item] : value.flag);
    }
  }

  template <class T>
  void put(size_t at, T value) {
    std::memcpy(launch_.parameters.data() + at, &value, sizeof value);
  }

  const CallScope& scope_;
  Launch& launch_;
};

// Computes the numbers that fill buffers; `first` is the first result among the values of the call.
inline bool compute_initial(const LaunchedKernel& kernel, const CallScope& scope, size_t first, Launches& work) {
  for (const Initial& each : kernel.initial) {
    work.filled.push_back(each.constant);
    Filled& filled = work.filled.back();
    if (each.program.empty()) continue;
    const Fraction found = scope.value(each.program);
    const int32_t dtype = scope.dtype_of_value(first + filled.made);
    if (!found.defined() || (found.under != 1 && !is_floating(dtype)))
      return scope.whole("initial", each.program, filled.whole);
    if (!is_floating(dtype) && (found.over < least_of(dtype) || found.over > most_of(dtype)))
      return scope.refuse("initial", "",
                          std::to_string(found.over) + ", which " + dtype_name(dtype) + " cannot represent");
    filled.whole = found.over;
    filled.number = double((long double)found.over / (long double)found.under);
    filled.exact = found.under == 1 && double(found.over) != (long double)found.over;
  }
  return true;
}

// Makes the launches of a call, without the driver; null, with the reason, if they are impossible. `load` finds the
// function of an instance for a launch.
template <class Load>
std::unique_ptr<Launches> launches_of(const LaunchedKernel& kernel, const DeviceVariant& variant,
                                      const Signed& signature, const CallValues& arguments, const Plan& plan,
                                      Reason& reason, Load load) {
  CallScope scope(signature, arguments, INT64_MAX, &reason);
  scope.add(plan);
  auto work = std::make_unique<Launches>();
  for (const auto& [dtype, of] : kernel.scratch) {
    work->scratch.push_back({dtype < 0 ? scope.dtype_of_value(of) : dtype, {}, {}});
    if (work->scratch.back().dtype < 0) return scope.refuse("scratch", "", "the dtype of None"), nullptr;
  }
  const auto prepare = [&] {
    for (size_t at = 0; at < variant.instances.size(); at++) {
      const DeviceInstance& instance = kernel.instances[size_t(variant.instances[at])];
      Launch launch{};
      launch.function = const_cast<DeviceInstance*>(&instance);  // until it is loaded
      launch.failed = kernel.failed[at];
      Packing packing(scope, launch);
      for (size_t each = 0; each < instance.parameters.size(); each++)
        packing.add(instance.parameters[each], kernel.passed[at][each]);
      work->launches.push_back(std::move(launch));
    }
    return compute_initial(kernel, scope, signature.size(), *work);
  };
  if (!compute_work(kernel.programs, scope, plan, *work, prepare)) return nullptr;
  for (Launch& each : work->launches) load(*static_cast<const DeviceInstance*>(each.function), *work, each);
  return work;
}
}  // namespace opsmith
