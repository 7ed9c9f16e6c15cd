// Plans for new sizes of a known kind of call, by its recipe: nothing else here computes a size or a grid.
#pragma once
#include "plan.h"
#include "recipe.h"

namespace opsmith {

using Program = std::vector<int64_t>;

// What of a launch depends on sizes.
struct SizedLaunch {
  std::vector<std::pair<int64_t, Program>> constants;  // numbers of the kernel's template: others need another instance
  Program grid[3], block[3], shared;
  std::vector<uint32_t> capacities;  // of the view behind each address: dimensions that it has room for
  int64_t most_threads, most_shared;  // of a block
};

// How calls of one kind are planned: of the same dtypes, devices, numbers of dimensions, whole numbers, flags and None.
struct Recipe {
  std::shared_ptr<const Plan> known;  // of a call of this kind, which has no copies
  std::vector<uint64_t> ones;         // for each tensor a bit for each dimension that is always 1
  std::vector<int64_t> sizing;        // see `declared_sizes`; empty where the kernel computes the sizes
  std::vector<std::vector<Program>> scratch;  // sizes of each scratch buffer
  std::vector<SizedLaunch> launches;          // of each launch of the plan

  static std::shared_ptr<const Recipe> read(const int64_t* first, std::shared_ptr<const Plan> known) {
    auto recipe = std::make_shared<Recipe>();
    Numbers from(first);
    const auto program = [&] { return from.several(from.one()); };
    recipe->known = std::move(known);
    from.each([&] { recipe->ones.push_back(uint64_t(from.one())); });
    recipe->sizing = from.several(from.one());
    from.each([&] {
      std::vector<Program> sizes;
      from.each([&] { sizes.push_back(program()); });
      recipe->scratch.push_back(std::move(sizes));
    });
    from.each([&] {
      SizedLaunch launch;
      from.each([&] {
        const int64_t number = from.one();
        launch.constants.emplace_back(number, program());
      });
      for (Program* programs : {launch.grid, launch.block})
        for (int at = 0; at < 3; at++) programs[at] = program();
      launch.shared = program();
      from.each([&] { launch.capacities.push_back(uint32_t(from.one())); });
      launch.most_threads = from.one();
      launch.most_shared = from.one();
      recipe->launches.push_back(std::move(launch));
    });
    return recipe;
  }
};

// True if a recipe may plan a call: all tensors are contiguous, and no size is 0, or 1 by chance, for which the
// reference may return other strides. What has more elements than an int counts, Python plans: a kernel may not count
// them.
inline bool is_sizable(const Signed& signature, const CallValues& arguments, const std::vector<uint64_t>& ones) {
  return every(signature, arguments, [&](const RawTensor& raw, size_t tensor, size_t) {
    const uint64_t one = tensor < ones.size() ? ones[tensor] : 0;
    int64_t step = 1;
    for (int64_t at = raw.dim - 1; at >= 0; at--) {
      if (raw.strides[at] != step || raw.sizes[at] < (one >> at & 1 ? 1 : 2)) return false;
      step *= raw.sizes[at];
      if (step > INT32_MAX) return false;
    }
    return true;
  });
}

// Computes the sizes of results, by a function of the kernel or by `shapes=`. Where the kernel throws, its text is in
// `error`. Without either they are known if there are none.
inline SizesStatus sizes_by(const Candidate* candidate, const int64_t* sizing, const CallValues& arguments,
                            std::vector<Shape>& shapes, char* error, size_t room) {
  const Value* values = arguments.values.data();
  if (candidate != nullptr && candidate->sizes != nullptr) return candidate->sizes(values, shapes.data(), error, room);
  if (sizing != nullptr) return declared_sizes(sizing, values, shapes.data());
  return shapes.empty() ? KNOWN : UNKNOWN;
}

// Lays a tensor out contiguously. False if its sizes are none, or it has more elements than an int counts.
inline bool lay_out(const std::vector<int64_t>& sizes, std::vector<int64_t>& strides) {
  int64_t step = 1;
  strides.resize(sizes.size());
  for (size_t d = sizes.size(); d-- > 0;) {
    if (sizes[d] < 0 || sizes[d] > INT32_MAX) return false;
    strides[d] = step;
    step *= std::max<int64_t>(sizes[d], 1);
    if (step > INT32_MAX) return false;
  }
  return true;
}

// Values that programs of a call read: those of its arguments, then of its results and scratch buffers.
class CallScope {
 public:
  CallScope(const Signed& signature, const CallValues& arguments) {
    for (size_t at = 0; at < signature.size(); at++) values_.push(arguments.values[at]), item_sizes_.push(0);
    every(signature, arguments, [&](const RawTensor& raw, size_t tensor, size_t argument) {
      item_sizes_[argument] = int64_t(item_size(arguments.dtypes[tensor]));
      tensors_.push_back(raw);
      return true;
    });
  }
  // The sizes and strides are read as long as programs are.
  void add(int32_t dtype, const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides) {
    tensors_.push_back({nullptr, sizes.data(), strides.data(), int64_t(sizes.size())});
    Value value;
    value.given = true, value.tensor = tensors_.back();
    values_.push(value), item_sizes_.push(int64_t(item_size(dtype)));
  }
  bool whole(const Program& program, int64_t least, int64_t most, int64_t& found) const {
    const Fraction value = evaluated(program.data(), {nullptr, values_.data(), item_sizes_.data()});
    found = value.over;
    return value.under == 1 && found >= least && found <= most;
  }
  const RawTensor& tensor(size_t at) const { return tensors_[at]; }

 private:
  Inline<Value, 24> values_;
  Inline<int64_t, 24> item_sizes_;
  std::vector<RawTensor> tensors_;
};

// Computes a launch that has the parameters of a known one, but for sizes and strides of views. False where a GPU would
// not do it, or another instance of the kernel is for it.
inline bool compute_launch(const SizedLaunch& sized, const CallScope& computed, Launch& launch) {
  constexpr int64_t most_grid[3] = {INT32_MAX, 65535, 65535}, most_block[3] = {1024, 1024, 64};
  int64_t found, threads = 1;
  for (const auto& [number, program] : sized.constants)
    if (!computed.whole(program, number, number, found)) return false;
  for (int at = 0; at < 3; at++) {
    if (!computed.whole(sized.grid[at], 1, most_grid[at], found)) return false;
    launch.grid[at] = unsigned(found);
    if (!computed.whole(sized.block[at], 1, most_block[at], found)) return false;
    launch.block[at] = unsigned(found);
    threads *= found;
  }
  if (threads > sized.most_threads || !computed.whole(sized.shared, 0, sized.most_shared, found)) return false;
  launch.shared = unsigned(found);
  for (size_t at = 0; at < launch.addresses.size(); at++) {
    const RawTensor& tensor = computed.tensor(launch.addresses[at].tensor);
    unsigned char* view = launch.parameters.data() + launch.addresses[at].offset;
    int64_t elements = 1;
    for (int64_t dim = 0; dim < tensor.dim; dim++) elements *= tensor.sizes[dim];
    std::memcpy(view + 8, &elements, 8);  // behind the address; then the number of dimensions, sizes, strides
    std::memcpy(view + 24, tensor.sizes, size_t(tensor.dim) * 8);
    std::memcpy(view + 24 + 8 * sized.capacities[at], tensor.strides, size_t(tensor.dim) * 8);
  }
  return true;
}

// Computes the launches of a call by a recipe; null where it cannot.
inline std::unique_ptr<const Launches> launches_by(const Recipe& recipe, const Signed& signature,
                                                   const CallValues& arguments, const std::vector<Result>& results) {
  CallScope computed(signature, arguments);
  for (const Result& each : results) {
    computed.add(each.dtype, each.sizes, each.strides);
    if (std::count(each.sizes.begin(), each.sizes.end(), 0)) return nullptr;  // launches may be left out
  }
  auto work = std::make_unique<Launches>(*recipe.known->launches);
  for (size_t at = 0; at < work->scratch.size(); at++) {
    Buffer& buffer = work->scratch[at];
    for (size_t dim = 0; dim < buffer.sizes.size(); dim++)
      if (!computed.whole(recipe.scratch[at][dim], 0, INT32_MAX, buffer.sizes[dim])) return nullptr;
    if (!lay_out(buffer.sizes, buffer.strides)) return nullptr;
  }
  for (const Buffer& each : work->scratch) computed.add(each.dtype, each.sizes, each.strides);
  for (size_t at = 0; at < work->launches.size(); at++)
    if (!compute_launch(recipe.launches[at], computed, work->launches[at])) return nullptr;
  return work;
}

// Plans a call of the kind of a recipe; null where it cannot. If the kernel's `sizes` throws, the call goes to the
// fallback: if the reference refuses the arguments too, its exception is raised.
inline std::shared_ptr<const Plan> plan_by(const Recipe& recipe, const Signed& signature, const CallValues& arguments,
                                           bool& threw) {
  char error[1000];
  std::vector<Shape> shapes(recipe.known->results.size());
  if (!is_sizable(signature, arguments, recipe.ones)) return nullptr;
  const int64_t* sizing = recipe.sizing.empty() ? nullptr : recipe.sizing.data();
  const SizesStatus status = sizes_by(recipe.known->candidate, sizing, arguments, shapes, error, sizeof error);
  threw = status == THREW;
  if (status != KNOWN) return nullptr;
  auto plan = std::make_shared<Plan>();
  plan->candidate = recipe.known->candidate;
  plan->device = recipe.known->device;
  for (size_t at = 0; at < shapes.size(); at++) {
    Result result{recipe.known->results[at].dtype, {shapes[at].sizes, shapes[at].sizes + shapes[at].dim}, {}, {}};
    if (!lay_out(result.sizes, result.strides)) return nullptr;
    plan->results.push_back(std::move(result));
  }
  if (recipe.known->launches) {
    plan->launches = launches_by(recipe, signature, arguments, plan->results);
    if (!plan->launches) return nullptr;
  }
  return plan;
}
}  // namespace opsmith
