// Plans for new sizes of a known kind of call, by its recipe: nothing else here computes a size.
#pragma once
#include "recipe.h"
#include "run.h"

namespace opsmith {

// How calls of one kind are planned: of the same dtypes, devices, numbers of dimensions, whole numbers, flags and None.
struct Recipe {
  const Candidate* candidate;  // the instance that takes them
  Device device;
  std::vector<int32_t> dtypes;  // of the results
  std::vector<uint64_t> ones;   // for each tensor a bit for each dimension that is always 1
  std::vector<int64_t> sizing;  // see `declared_sizes`; empty where the kernel computes the sizes

  static std::shared_ptr<const Recipe> read(const int64_t* first) {
    auto recipe = std::make_shared<Recipe>();
    Numbers from(first);
    recipe->candidate = from.address<const Candidate>();
    recipe->device.type = int32_t(from.one());
    recipe->device.index = int32_t(from.one());
    from.each([&] { recipe->dtypes.push_back(int32_t(from.one())); });
    from.each([&] { recipe->ones.push_back(uint64_t(from.one())); });
    recipe->sizing = from.several(from.one());
    return recipe;
  }
};

// True if a recipe may plan a call: all tensors are contiguous, and no size is 0, or 1 by chance, for which the
// reference may return other strides. What has more elements than an int counts, Python plans: a kernel may not count
// them.
inline bool is_sizable(const Signed& signature, const Arguments& arguments, const std::vector<uint64_t>& ones) {
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

// Computes the sizes of results by a recipe. Where the kernel throws, its text is in `error`.
inline SizesStatus sizes_by(const Recipe& recipe, const Arguments& arguments, std::vector<Shape>& shapes, char* error,
                            size_t room) {
  shapes.resize(recipe.dtypes.size());
  const Value* values = arguments.values.data();
  if (recipe.sizing.empty()) return recipe.candidate->sizes(values, shapes.data(), error, room);
  return declared_sizes(recipe.sizing.data(), values, shapes.data());
}

// Plans a call of the kind of a recipe; null where it cannot. If the kernel's `sizes` throws, the call goes to the
// fallback: if the reference refuses the arguments too, its exception is raised.
inline std::shared_ptr<const Plan> plan_by(const Recipe& recipe, const Signed& signature, const Arguments& arguments,
                                           bool& threw) {
  char error[1000];
  std::vector<Shape> shapes;
  if (!is_sizable(signature, arguments, recipe.ones)) return nullptr;
  const SizesStatus status = sizes_by(recipe, arguments, shapes, error, sizeof error);
  threw = status == THREW;
  if (status != KNOWN) return nullptr;
  auto plan = std::make_shared<Plan>();
  plan->candidate = recipe.candidate;
  plan->device = recipe.device;
  for (size_t at = 0; at < shapes.size(); at++) {
    Result result;
    result.dtype = recipe.dtypes[at];
    result.sizes.assign(shapes[at].sizes, shapes[at].sizes + shapes[at].dim);
    result.strides.resize(result.sizes.size());
    int64_t step = 1;
    for (size_t d = result.sizes.size(); d-- > 0;) {
      if (result.sizes[d] < 0 || result.sizes[d] > INT32_MAX) return nullptr;
      result.strides[d] = step;
      step *= std::max<int64_t>(result.sizes[d], 1);
      if (step > INT32_MAX) return nullptr;
    }
    plan->results.push_back(std::move(result));
  }
  return plan;
}
}  // namespace opsmith
