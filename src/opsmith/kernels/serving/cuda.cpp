// Calls of CUDA kernels without Python: the instance that takes a call, its buffers, parameters and launches.
#include <array>

#include "cuda_driver.h"

extern "C" {
Status aoti_torch_get_device_type(TensorHandle, int32_t*);
Status aoti_torch_get_device_index(TensorHandle, int32_t*);
Status aoti_torch_aten_fill__Scalar(TensorHandle, double);
}

namespace {
using namespace opsmith;

// ---- Parameters as they lie in memory: the structures of opsmith_cuda.h.

using Bytes = std::vector<unsigned char>;

template <class T>
void put(Bytes& bytes, size_t at, T value) {
  std::memcpy(bytes.data() + at, &value, sizeof value);
}

size_t view_size(const CudaParameter& parameter) {
  const int64_t dim = parameter.dim < 0 ? max_view_dim : parameter.dim;
  return size_t(24 + 16 * std::max<int64_t>(dim, 1));
}

void put_view(Bytes& bytes, size_t at, const CudaParameter& parameter, const RawTensor& raw) {
  const size_t capacity = (view_size(parameter) - 24) / 16;
  put(bytes, at, raw.data), put(bytes, at + 8, elements(raw)), put(bytes, at + 16, raw.dim);
  for (int64_t each = 0; each < raw.dim; each++) {
    put(bytes, at + 24 + 8 * size_t(each), raw.sizes[each]);
    put(bytes, at + 24 + 8 * (capacity + size_t(each)), raw.strides[each]);
  }
}

void put_whole(Bytes& bytes, size_t at, const CudaParameter& parameter, int64_t value) {
  parameter.item == 4 ? put(bytes, at, int32_t(value)) : put(bytes, at, value);
}

void put_real(Bytes& bytes, size_t at, const CudaParameter& parameter, double value) {
  parameter.item == 4 ? put(bytes, at, float(value)) : put(bytes, at, value);
}

template <class T, class Put>
void put_list(Bytes& bytes, const RawList& list, size_t item, Put put_item) {
  put(bytes, 0, list.size);
  for (int64_t at = 0; at < list.size; at++) put_item(8 + item * size_t(at), static_cast<const T*>(list.data)[at]);
}

Bytes packed(const CudaParameter& parameter, const Value& value) {
  Bytes bytes(size_t(parameter.size));
  if (!value.given) return bytes;
  const size_t width = parameter.type == TENSOR ? view_size(parameter) : size_t(parameter.item);
  // `Optional` has a flag before its value.
  const size_t at = parameter.optional ? bytes.size() - width : 0;
  if (parameter.optional) bytes[0] = 1;
  switch (parameter.type) {
    case TENSOR: put_view(bytes, at, parameter, value.tensor); break;
    case INTEGER: put_whole(bytes, at, parameter, value.integer); break;
    case NUMBER: put_real(bytes, at, parameter, value.number); break;
    case FLAG: put(bytes, at, value.flag); break;
    case TENSORS:
      put_list<RawTensor>(bytes, value.list, view_size(parameter),
                          [&](size_t to, const RawTensor& raw) { put_view(bytes, to, parameter, raw); });
      break;
    case INTEGERS:
      put_list<int64_t>(bytes, value.list, width, [&](size_t to, int64_t each) { put_whole(bytes, to, parameter, each); });
      break;
    case NUMBERS:
      put_list<double>(bytes, value.list, width, [&](size_t to, double each) { put_real(bytes, to, parameter, each); });
      break;
    case FLAGS: put_list<bool>(bytes, value.list, width, [&](size_t to, bool each) { put(bytes, to, each); }); break;
  }
  return bytes;
}

// ---- A call.

struct Geometry {
  int64_t grid[3], block[3], shared;
  bool left_out;
};

std::string text_of(const int64_t* numbers, size_t count) {
  std::string text;
  for (size_t at = 0; at < count; at++) text += (at ? " x " : "") + std::to_string(numbers[at]);
  return text;
}

class CudaCall : OperatorCall {
 public:
  CudaCall(const ServedOperator& served, const Signed& signature, Arguments& arguments)
      : OperatorCall(served.op, signature, arguments), served_(served), arguments_(arguments), device_(device()) {}

  void compute(uint64_t* stack) {
    const std::pair<const CudaKernel&, const CudaVariant&> found = taken();
    const CudaVariant& variant = found.second;
    refuse_capacities(variant);
    refuse_writes([&] { return raise_versions(signature_, arguments_); });
    const auto made = planned(variant.candidate);
    const Plan& plan = *made;
    Made results(device_);
    run_plan(signature_, plan, arguments_, results, [](size_t) {}, [&] { run(found.first, variant, plan, results); });
    hand_over(served_, results, stack);
  }

 private:
  // The device of all tensors.
  Device device() const {
    Device first;
    for (size_t at = 0; at < arguments_.tensors.size(); at++) {
      Device found;
      must(aoti_torch_get_device_type(arguments_.tensors[at], &found.type), "aoti_torch_get_device_type");
      must(aoti_torch_get_device_index(arguments_.tensors[at], &found.index), "aoti_torch_get_device_index");
      if (at && (found.type != first.type || found.index != first.index))
        throw refused("its tensors are on several devices",
                      {{"expected", "all on one GPU"}, {"hint", "move them to the same device"}});
      first = found;
    }
    if (first.index < 0) first.index = 0;
    return first;
  }

  Scope scope(const Value* values, const int32_t* dtypes, size_t count) const {
    return {signature_, values, dtypes, count};
  }

  // dtypes of the arguments that are tensors, or lists of some.
  std::vector<int32_t> dtypes_of_arguments() const {
    std::vector<int32_t> dtypes(signature_.size(), -1);
    every(signature_, arguments_, [&](const RawTensor&, size_t tensor, size_t argument) {
      if (dtypes[argument] < 0) dtypes[argument] = arguments_.dtypes[tensor];
      return true;
    });
    return dtypes;
  }

  // The first variant that takes the call, among those of its constants.
  std::pair<const CudaKernel&, const CudaVariant&> taken() const {
    const std::vector<int32_t> dtypes = dtypes_of_arguments();
    const Scope given = scope(arguments_.values.data(), dtypes.data(), signature_.size());
    Offers offers;
    std::vector<std::pair<const CudaKernel*, const CudaVariant*>> all;
    std::string missing;
    for (int32_t at = 0; at < served_.cuda->count; at++) {
      const CudaKernel& kernel = served_.cuda->kernels[at];
      const std::vector<int64_t> constants = numbers("constants", kernel.constants, given);
      const size_t before = all.size();
      for (int32_t each = 0; each < kernel.variant_count; each++) {
        const CudaVariant& variant = kernel.variants[each];
        if (!std::equal(constants.begin(), constants.end(), variant.constants)) continue;
        offers.push({&variant.candidate, kernel.copies_back, int32_t(all.size())});
        all.push_back({&kernel, &variant});
      }
      if (all.size() == before) missing = std::string(kernel.constant_names) + " = " + text_of(constants.data(), constants.size());
    }
    if (all.empty())
      throw refused("the library has no instance of its CUDA kernel for these sizes",
                    {{"got", missing}, {"hint", "give the operator a sample of such sizes, and build the library anew"}});
    const auto& found = all[size_t(chosen(offers).index)];
    return {*found.first, *found.second};
  }

  std::vector<int64_t> numbers(const char* name, Rule rule, const Scope& scope) const {
    try {
      return whole_numbers(rule, scope);
    } catch (const NoValue& error) {
      throw uncomputable(name, error);
    }
  }

  Refused uncomputable(const char* name, const NoValue& error) const {
    return refused(std::string("`") + name + "` of its CUDA kernel cannot be computed",
                   {{"got", error.text}, {"hint", "correct the expression"}});
  }

  // Refuses values beyond the capacity of a parameter.
  void refuse_capacities(const CudaVariant& variant) const {
    for (size_t at = 0; at < signature_.size(); at++) {
      const CudaParameter& parameter = variant.taken[at];
      const Value& value = arguments_.values[at];
      const int32_t type = signature_[at].type;
      if (!parameter.size || !value.given) continue;  // no launch gets it
      if (type >= TENSORS && value.list.size > parameter.room)
        throw over(at, "a list of at most " + std::to_string(parameter.room), std::to_string(value.list.size) + " items");
      const int64_t* items = type == INTEGER ? &value.integer : static_cast<const int64_t*>(value.list.data);
      if (parameter.item == 4 && (type == INTEGER || type == INTEGERS))
        for (int64_t each = 0; each < (type == INTEGER ? 1 : value.list.size); each++)
          if (items[each] != int32_t(items[each])) throw over(at, "an int of 32 bits", std::to_string(items[each]));
    }
    every(signature_, arguments_, [&](const RawTensor& raw, size_t, size_t argument) {
      const CudaParameter& parameter = variant.taken[argument];
      if (parameter.size && parameter.dim < 0 && raw.dim > max_view_dim)
        throw over(argument, "at most " + std::to_string(max_view_dim) + " dimensions", std::to_string(raw.dim));
      return true;
    });
  }

  Refused over(size_t argument, const std::string& expected, const std::string& got) const {
    return refused("its CUDA kernel has no room for an argument",
                   {{"argument", name(argument)}, {"expected", expected}, {"got", got}});
  }

  // Fills the buffers, and launches the kernels on torch's current stream.
  void run(const CudaKernel& kernel, const CudaVariant& variant, const Plan& plan, const Made& results) {
    std::vector<int32_t> dtypes = dtypes_of_arguments();
    for (const Result& each : plan.results) dtypes.push_back(each.dtype);
    const size_t made = arguments_.values.size();  // arguments and results
    Made scratch(device_);
    std::vector<std::vector<int64_t>> sizes, strides;
    sizes.reserve(size_t(kernel.buffer_count)), strides.reserve(size_t(kernel.buffer_count));
    for (int32_t at = int32_t(plan.results.size()); at < kernel.buffer_count; at++) {
      const CudaBuffer& buffer = kernel.buffers[at];
      const int32_t dtype = buffer.dtype < 0 ? dtypes[size_t(buffer.dtype_at)] : buffer.dtype;
      sizes.push_back(numbers("scratch", buffer.sizes, scope(arguments_.values.data(), dtypes.data(), made)));
      for (int64_t size : sizes.back())
        if (size < 0 || dtype < 0) throw uncomputable("scratch", NoValue("a negative size, or the dtype of None"));
      RawTensor raw{nullptr, sizes.back().data(), nullptr, int64_t(sizes.back().size())};
      strides.push_back(strides_in(raw.dim, raw.sizes, CONTIGUOUS));
      raw.strides = strides.back().data();
      raw.data = memory(scratch.empty(dtype, raw.dim, raw.sizes, raw.strides));
      Value value;
      value.given = true, value.tensor = raw;
      arguments_.values.push(value);
      dtypes.push_back(dtype);
    }
    const Scope all = scope(arguments_.values.data(), dtypes.data(), arguments_.values.size());
    fill_buffers(kernel, all, results, scratch);
    const std::vector<Geometry> geometries = launches(kernel, all);
    launch(kernel, variant, geometries);
  }

  void fill_buffers(const CudaKernel& kernel, const Scope& all, const Made& results, const Made& scratch) const {
    for (int32_t at = 0; at < kernel.buffer_count; at++) {
      if (!kernel.buffers[at].initial) continue;
      double number;
      try {
        const std::vector<Term> found = values_of(kernel.buffers[at].initial, all);
        if (found.size() != 1) throw NoValue("it is not one number");
        number = approximate(found[0]);
        // Torch takes a number of floating point.
        if (all.dtypes[signature_.size() + size_t(at)] == dtype_of<int64_t>::value && std::fabs(number) > 9007199254740992.0)
          throw NoValue("a whole number in it exceeds 53 bits");
      } catch (const NoValue& error) {
        throw uncomputable("initial", error);
      }
      const size_t index = size_t(at);
      WithoutGrad guard;
      must(aoti_torch_aten_fill__Scalar(index < results.size() ? results[index] : scratch[index - results.size()], number),
           "aoti_torch_aten_fill__Scalar");
    }
  }

  // The launches of a call; none if there is nothing to write. One without blocks is left out if another has some, or if
  // all that must be written has an initial value.
  std::vector<Geometry> launches(const CudaKernel& kernel, const Scope& all) const {
    bool filled = true, some = false;
    for (int32_t at = 0; at < op_.result_count; at++) {
      if (!elements(all.values[signature_.size() + size_t(at)].tensor)) continue;
      some = true;
      if (!kernel.buffers[at].initial) filled = false;
    }
    every(signature_, arguments_, [&](const RawTensor& raw, size_t, size_t argument) {
      if (signature_[argument].written && elements(raw)) some = true;
      return true;
    });
    std::vector<Geometry> found;
    if (!some) return found;
    bool any = false;
    std::vector<std::vector<int64_t>> grids;
    for (int32_t at = 0; at < kernel.launch_count; at++) {
      grids.push_back(numbers("grid", kernel.launches[at].grid, all));
      any = any || std::find(grids.back().begin(), grids.back().end(), 0) == grids.back().end();
    }
    for (int32_t at = 0; at < kernel.launch_count; at++) {
      const CudaLaunch& rules = kernel.launches[at];
      const std::vector<int64_t>& grid = grids[size_t(at)];
      const bool empty = std::find(grid.begin(), grid.end(), 0) != grid.end();
      Geometry geometry{};
      geometry.left_out = empty && (any || filled);
      if (!geometry.left_out) {
        within("grid", grid, geometry.grid, {INT32_MAX, 65535, 65535}, 1);
        within("block", numbers("block", rules.block, all), geometry.block, {1024, 1024, 64}, 1);
        if (geometry.block[0] * geometry.block[1] * geometry.block[2] > 1024)
          throw outside("block", "at most 1024 threads together", text_of(geometry.block, 3));
        int64_t shared[3];
        within("shared", numbers("shared", rules.shared, all), shared, {INT32_MAX, 1, 1}, 0);
        geometry.shared = shared[0];
      }
      found.push_back(geometry);
    }
    return found;
  }

  void within(const char* name, const std::vector<int64_t>& found, int64_t* three, std::array<int64_t, 3> most,
              int64_t least) const {
    bool fits = !found.empty() && found.size() <= 3;
    for (size_t at = 0; at < 3; at++) {
      three[at] = at < found.size() ? found[at] : 1;
      fits = fits && three[at] >= least && three[at] <= most[at];
    }
    if (!fits) throw outside(name, std::to_string(least) + " to " + text_of(most.data(), 3), text_of(found.data(), found.size()));
  }

  Refused outside(const char* name, const std::string& expected, const std::string& got) const {
    return refused(std::string("`") + name + "` of its CUDA kernel is outside the limits of a GPU",
                   {{"expected", expected}, {"got", got}});
  }

  void launch(const CudaKernel& kernel, const CudaVariant& variant, const std::vector<Geometry>& geometries) const {
    size_t at = 0;
    try {
      if (geometries.empty()) return;
      void* const stream = current_stream(device_.index);
      Driver& driver = Driver::get();
      Driver::OnDevice guard(driver, device_.index);
      std::vector<void*> functions;
      for (; at < geometries.size(); at++)
        functions.push_back(geometries[at].left_out ? nullptr
                                                    : loaded(driver, *variant.instances[at], device_.index, stream,
                                                             geometries[at].shared));
      for (at = 0; at < geometries.size(); at++) {
        if (geometries[at].left_out) continue;
        const CudaInstance& instance = *variant.instances[at];
        std::vector<Bytes> parameters;
        std::vector<void*> addresses;
        for (int32_t each = 0; each < instance.parameter_count; each++)
          parameters.push_back(packed(instance.parameters[each], arguments_.values[size_t(kernel.launches[at].passed[each])]));
        for (Bytes& each : parameters) addresses.push_back(each.data());
        driver.launch(functions[at], geometries[at].grid, geometries[at].block, geometries[at].shared, stream,
                      addresses.data());
      }
    } catch (const DriverError& error) {
      std::string got;
      if (at < geometries.size() && !geometries[at].left_out) {
        const Geometry& geometry = geometries[at];
        got = "`" + std::string(kernel.launches[at].call) + "`, grid " + text_of(geometry.grid, 3) + ", block " +
              text_of(geometry.block, 3) + ", " + std::to_string(geometry.shared) + " bytes of shared memory";
      }
      throw refused("its CUDA kernel is not launched: " + error.text, {{"launch", got}});
    }
  }

  const ServedOperator& served_;
  Arguments& arguments_;
  const Device device_;
};
}  // namespace

namespace opsmith {
void compute_cuda(const ServedOperator& op, const Signed& signature, Arguments& arguments, uint64_t* stack) {
  CudaCall(op, signature, arguments).compute(stack);
}
}  // namespace opsmith
