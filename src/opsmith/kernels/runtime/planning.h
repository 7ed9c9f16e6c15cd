// Plans by programs: results, scratch buffers and launches of a call. No other C++ code computes a size or a grid.
#pragma once
#include <array>

#include "plan.h"
#include "recipe.h"

namespace opsmith {

// The parts of a launch that depend on the call.
struct SizedLaunch {
  std::vector<std::pair<int64_t, Program>> constants;  // numbers of the kernel's template, which select the instance
  Program grid[3], block[3], shared;
  int64_t most_threads, most_shared;  // of a block

  void read(Numbers& from) { from(constants, grid, block, shared, most_threads, most_shared); }
};

// All programs that a kernel for a GPU needs for a call.
struct LaunchPrograms {
  std::vector<std::vector<Program>> scratch;  // sizes of each scratch buffer
  std::vector<SizedLaunch> launches;          // of each launch of the plan

  void read(Numbers& from) { from(scratch, launches); }
};

// Plans calls of one kind: with the same dtypes, devices, numbers of dimensions, whole numbers, flags and None.
struct Recipe {
  std::shared_ptr<const Plan> known;  // of a call of this kind, which has no copies
  std::vector<uint64_t> ones;  // for each tensor of the arguments, then each result, a bit for each dimension of size 1
  std::vector<int64_t> sizing;        // see `declared_sizes`; empty if the kernel computes the sizes
  LaunchPrograms programs;

  static std::shared_ptr<const Recipe> read(const int64_t* first, std::shared_ptr<const Plan> known) {
    auto recipe = std::make_shared<Recipe>();
    recipe->known = std::move(known);
    Numbers from(first);
    from(recipe->ones, recipe->sizing, recipe->programs);
    return recipe;
  }
};

// Part of a launch without a plan, and the reason: it is outside of the expected limits, or has no value.
struct Reason {
  std::string part, expected, got;
};

// Minimum size of a dimension that a recipe plans. If a size is 0, or 1 by chance, the reference may return different
// strides.
inline int64_t least_size(const std::vector<uint64_t>& ones, size_t tensor, int64_t dim) {
  return tensor < ones.size() && (ones[tensor] >> dim & 1) ? 1 : 2;
}

// True if a recipe may plan a call: all tensors are contiguous and have the minimum sizes. Python plans calls whose
// tensors have more elements than an int can count, since a kernel may not be able to count them.
inline bool is_sizable(const Signed& signature, const CallValues& arguments, const std::vector<uint64_t>& ones) {
  return every(signature, arguments, [&](const RawTensor& raw, size_t tensor, size_t) {
    int64_t step = 1;
    for (int64_t at = raw.dim - 1; at >= 0; at--) {
      if (raw.strides[at] != step || raw.sizes[at] < least_size(ones, tensor, at)) return false;
      step *= raw.sizes[at];
      if (step > INT32_MAX) return false;
    }
    return true;
  });
}

// Computes the sizes of results, by a function of the kernel or by `shapes=`. If the kernel throws, its text is in
// `error`. Without both, the sizes are known only if there are no results.
inline SizesStatus sizes_by(const Candidate* candidate, const int64_t* sizing, const CallValues& arguments,
                            std::vector<Shape>& shapes, char* error, size_t room) {
  const Value* values = arguments.values.data();
  if (candidate != nullptr && candidate->sizes != nullptr) return candidate->sizes(values, shapes.data(), error, room);
  if (sizing != nullptr) return declared_sizes(sizing, values, shapes.data());
  return shapes.empty() ? KNOWN : UNKNOWN;
}

// Values that programs of a call read: first the arguments, then the results and scratch buffers.
class CallScope {
 public:
  // `reason`, if given, gets the reason why there is no plan; `most` is the maximum of elements of a scratch buffer.
  CallScope(const Signed& signature, const CallValues& arguments, int64_t most, Reason* reason = nullptr)
      : most_(most), reason_(reason) {
    for (size_t at = 0; at < signature.size(); at++) push(arguments.values[at], -1);
    every(signature, arguments, [&](const RawTensor& raw, size_t tensor, size_t argument) {
      if (dtypes_[argument] < 0) first_[argument] = tensor;
      dtypes_[argument] = arguments.dtypes[tensor];
      item_sizes_[argument] = int64_t(item_size(dtypes_[argument]));
      writes_ |= signature[argument].written && !std::count(raw.sizes, raw.sizes + raw.dim, 0);
      tensors_.push_back(raw);
      return true;
    });
  }
  // Programs read these sizes and strides, so they must live as long as the programs run.
  void add(int32_t dtype, const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides) {
    tensors_.push_back({nullptr, sizes.data(), strides.data(), int64_t(sizes.size())});
    Value value;
    value.given = true, value.tensor = tensors_.back();
    push(value, dtype);
  }
  // Adds the results of a plan; copies of arguments replace the arguments.
  void add(const Plan& plan) {
    for (const Copied& each : plan.copied) tensors_[size_t(each.tensor)].strides = each.strides.data();
    for (const Result& each : plan.results)
      add(each.dtype, each.sizes, each.written.empty() ? each.strides : each.written);
  }

  Fraction value(const Program& program) const {
    return evaluated(program.data(), {nullptr, values_.data(), item_sizes_.data()});
  }
  // False if the value is not a whole number.
  bool whole(const char* part, const Program& program, int64_t& found) const {
    const Fraction computed = value(program);
    found = computed.over;
    if (computed.under == 1) return true;
    return refuse(part, "", computed.defined()
                                ? std::to_string(computed.over) + "/" + std::to_string(computed.under) +
                                      ", which is not a whole number"
                                : "it divides by zero, exceeds 64 bits, or reads a value that the call does not have");
  }
  // Stores the reason why there is no plan. Always returns false.
  template <class Text>
  bool refuse(const char* part, Text expected, const std::string& got) const {
    if (reason_) *reason_ = {part, expected, got};
    return false;
  }

  const Value& value_of(size_t at) const { return values_[at]; }
  int32_t dtype_of_value(size_t at) const { return dtypes_[at]; }  // -1 if it has no tensor
  size_t first_tensor(size_t at) const { return first_[at]; }      // of a value, among all
  const RawTensor& tensor(size_t at) const { return tensors_[at]; }
  bool writes() const { return writes_; }  // into an argument that has elements
  int64_t most() const { return most_; }

 private:
  void push(const Value& value, int32_t dtype) {
    values_.push(value);
    dtypes_.push(dtype);
    item_sizes_.push(dtype < 0 ? 0 : int64_t(item_size(dtype)));
    first_.push(tensors_.empty() ? 0 : tensors_.size() - 1);
  }

  Inline<Value, 24> values_;
  Inline<int32_t, 24> dtypes_;
  Inline<int64_t, 24> item_sizes_;
  Inline<size_t, 24> first_;
  std::vector<RawTensor> tensors_;
  const int64_t most_;
  Reason* const reason_;
  bool writes_ = false;
};

// Lays a tensor out contiguously. False if a size is negative, or it has too many elements.
inline bool lay_out(const std::vector<int64_t>& sizes, std::vector<int64_t>& strides, int64_t most) {
  Fraction count{1, 1};
  for (int64_t size : sizes) {
    count = product(count, {std::max<int64_t>(size, 1), 1});
    if (size < 0 || !count.defined() || count.over > most) return false;
  }
  strides = strides_in(int64_t(sizes.size()), sizes.data(), CONTIGUOUS);
  return true;
}

// Computes the sizes of scratch buffers, and adds them to the values of the call.
inline bool compute_scratch(const LaunchPrograms& programs, CallScope& scope, Launches& work) {
  for (size_t at = 0; at < work.scratch.size(); at++) {
    Buffer& buffer = work.scratch[at];
    buffer.sizes.resize(programs.scratch[at].size());
    for (size_t dim = 0; dim < buffer.sizes.size(); dim++) {
      if (!scope.whole("scratch", programs.scratch[at][dim], buffer.sizes[dim])) return false;
      if (buffer.sizes[dim] < 0)
        return scope.refuse("scratch", "", "a negative size: " + std::to_string(buffer.sizes[dim]));
    }
    if (!lay_out(buffer.sizes, buffer.strides, scope.most())) return scope.refuse("scratch", "", "too many elements");
  }
  for (const Buffer& each : work.scratch) scope.add(each.dtype, each.sizes, each.strides);
  return true;
}

inline std::string crossed(const int64_t* numbers, size_t count) {
  std::string text;
  for (size_t at = 0; at < count; at++) text += (at ? " x " : "") + std::to_string(numbers[at]);
  return text;
}

// Puts three numbers into a launch. False if they exceed a GPU's limits.
inline bool put(const CallScope& scope, const char* part, const int64_t* found, const int64_t* most, unsigned* into) {
  for (int at = 0; at < 3; at++) {
    if (found[at] < 1 || found[at] > most[at]) return scope.refuse(part, "1 to " + crossed(most, 3), crossed(found, 3));
    into[at] = unsigned(found[at]);
  }
  return true;
}

// Computes a launch, whose parameters lack the sizes and strides of views. False if it exceeds a GPU's limits, or needs
// a different instance of the kernel.
inline bool compute_launch(const SizedLaunch& sized, const CallScope& scope, const int64_t* grid, Launch& launch) {
  constexpr int64_t most_grid[3] = {INT32_MAX, 65535, 65535}, most_block[3] = {1024, 1024, 64};
  int64_t found, block[3];
  for (const auto& [number, program] : sized.constants)
    if (!scope.whole("constants", program, found) || found != number) return false;
  for (int at = 0; at < 3; at++)
    if (!scope.whole("block", sized.block[at], block[at])) return false;
  if (!put(scope, "grid", grid, most_grid, launch.grid) || !put(scope, "block", block, most_block, launch.block))
    return false;
  if (block[0] * block[1] * block[2] > sized.most_threads)
    return scope.refuse("block", "at most " + std::to_string(sized.most_threads) + " threads together",
                        crossed(block, 3));
  if (!scope.whole("shared", sized.shared, found)) return false;
  if (found < 0 || found > sized.most_shared)
    return scope.refuse("shared", "0 to " + std::to_string(sized.most_shared), std::to_string(found));
  launch.shared = unsigned(found);
  for (const Address& address : launch.addresses) {
    const RawTensor& tensor = scope.tensor(address.tensor);
    unsigned char* view = launch.parameters.data() + address.offset;
    int64_t elements = 1;
    for (int64_t dim = 0; dim < tensor.dim; dim++) elements *= tensor.sizes[dim];
    std::memcpy(view + 8, &elements, 8);  // behind the address; then the number of dimensions, sizes, strides
    std::memcpy(view + 16, &tensor.dim, 8);
    std::memcpy(view + 24, tensor.sizes, size_t(tensor.dim) * 8);
    std::memcpy(view + 24 + 8 * address.capacity, tensor.strides, size_t(tensor.dim) * 8);
  }
  return true;
}

// Computes the launches of a call. All launches are left out if there is nothing to write. A launch without blocks is
// left out if another launch has blocks, or all results with elements have initial values.
inline bool compute_launches(const std::vector<SizedLaunch>& sized, const CallScope& scope,
                             const std::vector<Result>& results, Launches& work) {
  bool some = scope.writes(), filled = true, any = false;
  for (size_t at = 0; at < results.size(); at++) {
    if (std::count(results[at].sizes.begin(), results[at].sizes.end(), 0)) continue;
    some = true;
    filled &= std::any_of(work.filled.begin(), work.filled.end(), [&](const Filled& each) { return each.made == at; });
  }
  std::vector<std::array<int64_t, 3>> grids(some ? sized.size() : 0);
  const auto empty = [](const std::array<int64_t, 3>& grid) { return std::count(grid.begin(), grid.end(), 0) != 0; };
  for (size_t at = 0; at < grids.size(); at++) {
    for (size_t dim = 0; dim < 3; dim++)
      if (!scope.whole("grid", sized[at].grid[dim], grids[at][dim])) return false;
    any |= !empty(grids[at]);
  }
  std::vector<Launch> launches;
  for (size_t at = 0; at < grids.size(); at++) {
    if (empty(grids[at]) && (any || filled)) continue;
    launches.push_back(std::move(work.launches[at]));
    if (!compute_launch(sized[at], scope, grids[at].data(), launches.back())) return false;
  }
  work.launches = std::move(launches);
  return true;
}

// Computes the scratch buffers and the launches of a call. `work` has the parts that do not depend on sizes; `prepare`
// may add more after the scratch buffers are known. False if this is impossible.
template <class Prepare>
bool compute_work(const LaunchPrograms& programs, CallScope& scope, const Plan& plan, Launches& work, Prepare prepare) {
  return compute_scratch(programs, scope, work) && prepare() &&
         compute_launches(programs.launches, scope, plan.results, work);
}

// Plans a call of a recipe's kind; null if it cannot. If the kernel's `sizes` throws, the call goes to the fallback. If
// the reference refuses the arguments, too, the reference's exception is raised.
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
    const Result& known = recipe.known->results[at];
    if (shapes[at].dim != int64_t(known.sizes.size())) return nullptr;  // the instance may not take such a result
    for (int64_t dim = 0; dim < shapes[at].dim; dim++)
      if (shapes[at].sizes[dim] < least_size(recipe.ones, arguments.dtypes.size() + at, dim)) return nullptr;
    Result result{known.dtype, {shapes[at].sizes, shapes[at].sizes + shapes[at].dim}, {}, {}};
    if (!lay_out(result.sizes, result.strides, INT32_MAX)) return nullptr;
    plan->results.push_back(std::move(result));
  }
  if (recipe.known->launches) {
    CallScope scope(signature, arguments, INT32_MAX);
    scope.add(*plan);
    auto work = std::make_unique<Launches>(*recipe.known->launches);
    if (!compute_work(recipe.programs, scope, *plan, *work, [] { return true; })) return nullptr;
    plan->launches = std::move(work);
  }
  return plan;
}
}  // namespace opsmith
