// Kernels of a library that are launched on a GPU: what is constant of them, and the launches of a call.
#pragma once
#include <map>

#include "planning.h"

namespace opsmith {

// As in opsmith_cuda.h: what a kernel takes, and how it lies in memory.
struct DeviceParameter : Parameter {
  int32_t room;  // capacity of a list
  int32_t item;  // bytes of a number
  int32_t size, alignment;

  uint32_t capacity() const { return uint32_t(std::max(dim < 0 ? max_view_dim : dim, 1)); }
  size_t view_size() const { return 24 + 16 * size_t(capacity()); }
  static constexpr int32_t max_view_dim = 8;  // of a view that has any number of dimensions

  static DeviceParameter read(Numbers& from) {
    DeviceParameter made;
    for (int32_t* each : {&made.type, &made.optional, &made.written, &made.dtype, &made.dim, &made.layout, &made.room,
                          &made.item, &made.size, &made.alignment})
      *each = int32_t(from.one());
    return made;
  }
};

// A cubin, or PTX for later GPUs.
struct DeviceImage {
  std::string kind, suffix;  // `sm` or `compute`; `a`: for that GPU alone; `f`: for its family
  int64_t target;            // 90 for sm_90 and compute_90
  const unsigned char* content;
  int64_t shared;            // bytes of static shared memory

  std::string name() const { return kind + "_" + std::to_string(target) + suffix; }
  // True if a GPU runs it: `gpu_misfit` of kernels/cuda/packaged.py has the rules.
  bool runs_on(int64_t capability) const {
    const bool fits = suffix == "a" ? target == capability : target <= capability;
    return fits && (kind == "compute" || target / 10 == capability / 10);
  }
};

struct DeviceInstance {
  std::string name;                 // in the images
  std::vector<DeviceImage> images;  // the best first
  std::vector<DeviceParameter> parameters;
};

// Instances of the launches for one dtype, and for one value of each constant.
struct DeviceVariant {
  std::vector<int64_t> constants;       // of the templates of all launches
  std::vector<int64_t> instances;       // of each launch
  std::vector<DeviceParameter> taken;   // for each argument and result, what takes no more than each launch does
  std::vector<Parameter> parameters;    // the same, for `candidate`
  Candidate candidate;
};

// Number of a kernel's template.
struct Constant {
  std::string name;
  Program program;
};

// Number that fills a result or a scratch buffer.
struct Initial {
  Filled constant;
  Program program;  // empty for a constant
};

struct LaunchedKernel {
  std::vector<Constant> constants;  // of the templates of all launches
  LaunchPrograms programs;
  std::vector<Initial> initial;
  std::vector<Buffer> scratch;         // without sizes
  std::vector<int64_t> dtypes_of;      // for each without a dtype, the value that has it
  std::vector<std::string> failed;     // words for the error of each launch
  std::vector<std::vector<int64_t>> passed;  // to each launch: indices of values
  std::vector<DeviceInstance> instances;
  std::vector<DeviceVariant> variants;  // in the order in which they are tried

  // Reads what kernels/cuda/linked.py encodes.
  static std::unique_ptr<const LaunchedKernel> read(const int64_t* first, const unsigned char* images) {
    auto kernel = std::make_unique<LaunchedKernel>();
    Numbers from(first);
    from.each([&] {
      Constant each{from.bytes<std::string>(), from.program()};
      kernel->constants.push_back(std::move(each));
    });
    kernel->programs = LaunchPrograms::read(from);
    from.each([&] {
      Initial each{Filled::read(from), from.several(from.one())};
      kernel->initial.push_back(std::move(each));
    });
    from.each([&] {
      const int64_t dtype = from.one();
      kernel->dtypes_of.push_back(from.one());
      kernel->scratch.push_back({int32_t(dtype), std::vector<int64_t>(size_t(from.one())), {}});
    });
    from.each([&] {
      kernel->failed.push_back(from.bytes<std::string>());
      kernel->passed.push_back(from.several(from.one()));
    });
    from.each([&] {
      DeviceInstance instance{from.bytes<std::string>(), {}, {}};
      from.each([&] {
        DeviceImage image{from.bytes<std::string>(), from.bytes<std::string>(), from.one(), nullptr, 0};
        image.content = images + from.one();
        image.shared = from.one();
        instance.images.push_back(std::move(image));
      });
      from.each([&] { instance.parameters.push_back(DeviceParameter::read(from)); });
      kernel->instances.push_back(std::move(instance));
    });
    from.each([&] {
      DeviceVariant variant{from.several(from.one()), from.several(from.one()), {}, {}, {}};
      from.each([&] { variant.taken.push_back(DeviceParameter::read(from)); });
      variant.parameters.assign(variant.taken.begin(), variant.taken.end());
      variant.candidate = {variant.parameters.data(), int32_t(variant.parameters.size()), -1, nullptr, nullptr};
      kernel->variants.push_back(std::move(variant));
    });
    return kernel;
  }
};

// What numbers in a library say of a kernel: read with the first call that needs a plan.
inline const LaunchedKernel& launched_kernel(const int64_t* numbers, const unsigned char* images) {
  static auto& mutex = *new std::mutex;
  static auto& all = *new std::map<const int64_t*, std::unique_ptr<const LaunchedKernel>>;
  std::lock_guard lock(mutex);
  auto& found = all[numbers];
  if (!found) found = LaunchedKernel::read(numbers, images);
  return *found;
}

// Parameters of a launch as they lie in memory, but for what a call fills in: addresses, sizes and strides of views.
class Packing {
 public:
  Packing(const CallScope& scope, Launch& launch, SizedLaunch& sized) : scope_(scope), launch_(launch), sized_(sized) {}

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
        launch_.addresses.push_back(
            {uint32_t(first + parameter.view_size() * size_t(item)), uint32_t(tensor + size_t(item))});
        sized_.capacities.push_back(parameter.capacity());
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
  SizedLaunch& sized_;
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
      return scope.refuse("initial", "", std::to_string(found.over) + ", which no " + dtype_name(dtype) + " is");
    filled.whole = found.over;
    filled.number = double((long double)found.over / (long double)found.under);
    filled.exact = found.under == 1 && double(found.over) != (long double)found.over;
  }
  return true;
}

// Makes the launches of a call, without the driver; null, with the reason, where there are none. `load` finds the
// function of an instance for a launch.
template <class Load>
std::unique_ptr<Launches> launches_of(const LaunchedKernel& kernel, const DeviceVariant& variant,
                                      const Signed& signature, const CallValues& arguments, const Plan& plan,
                                      Reason& reason, Load load) {
  CallScope scope(signature, arguments, INT64_MAX, &reason);
  for (const Copied& each : plan.copied) scope.lay_out(size_t(each.tensor), each.strides);
  for (const Result& each : plan.results)
    scope.add(each.dtype, each.sizes, each.written.empty() ? each.strides : each.written);
  auto work = std::make_unique<Launches>();
  work->scratch = kernel.scratch;
  for (size_t at = 0; at < work->scratch.size(); at++) {
    int32_t& dtype = work->scratch[at].dtype;
    if (dtype < 0) dtype = scope.dtype_of_value(size_t(kernel.dtypes_of[at]));
    if (dtype < 0) return scope.refuse("scratch", "", "the dtype of None"), nullptr;
  }
  if (!compute_scratch(kernel.programs, scope, *work) || !compute_initial(kernel, scope, signature.size(), *work))
    return nullptr;
  std::vector<SizedLaunch> sized = kernel.programs.launches;
  for (size_t at = 0; at < sized.size(); at++) {
    const DeviceInstance& instance = kernel.instances[size_t(variant.instances[at])];
    Launch launch{};
    launch.function = const_cast<DeviceInstance*>(&instance);  // until it is loaded
    launch.failed = kernel.failed[at];
    Packing packing(scope, launch, sized[at]);
    for (size_t each = 0; each < instance.parameters.size(); each++)
      packing.add(instance.parameters[each], size_t(kernel.passed[at][each]));
    work->launches.push_back(std::move(launch));
  }
  if (!compute_launches(sized, scope, plan.results, *work)) return nullptr;
  for (Launch& each : work->launches) load(*static_cast<const DeviceInstance*>(each.function), *work, each);
  return work;
}
}  // namespace opsmith
