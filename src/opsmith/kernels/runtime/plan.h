// Plans that run calls. A plan is made once for each call signature, and cached here.
#pragma once
#include <atomic>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <shared_mutex>
#include <string>
#include <unordered_map>

#include "values.h"

namespace opsmith {

// Reader of numbers that plan.py, recipe.py and kernels/cuda/linked.py encode: `from(a, b)` reads both, in this order.
// The length of a list comes first. Bytes, also of texts, fill whole words. A structure reads its fields.
class Numbers {
 public:
  explicit Numbers(const int64_t* first) : at_(first) {}

  template <class... T>
  void operator()(T&... into) {
    (read(into), ...);
  }

 private:
  template <class T>
  void read(T& into) {
    if constexpr (std::is_integral_v<T>) into = T(*at_++);
    else if constexpr (std::is_pointer_v<T>) into = reinterpret_cast<T>(*at_++);
    else into.read(*this);
  }
  void read(double& into) { std::memcpy(&into, at_++, sizeof into); }
  void read(std::string& into) { read_bytes(into); }
  void read(std::vector<unsigned char>& into) { read_bytes(into); }
  template <class T, size_t count>
  void read(T (&into)[count]) {
    for (T& each : into) read(each);
  }
  template <class T>
  void read(std::vector<T>& into) {
    into.resize(size_t(*at_++));
    for (T& each : into) read(each);
  }
  template <class T, class U>
  void read(std::pair<T, U>& into) {
    (*this)(into.first, into.second);
  }
  template <class T>
  void read_bytes(T& into) {
    const size_t count = size_t(*at_++);
    const auto* first = reinterpret_cast<const unsigned char*>(at_);
    into.assign(first, first + count);
    at_ += (count + 7) / 8;
  }

  const int64_t* at_;
};

struct Copied {
  int64_t tensor;    // index among all tensors of the call
  int64_t argument;  // index of its argument
  bool back;         // the call writes it, so it is copied back afterwards
  std::vector<int64_t> strides;

  void read(Numbers& from) { from(tensor, argument, back, strides); }
};

struct Result {
  int32_t dtype;
  std::vector<int64_t> sizes, strides;
  std::vector<int64_t> written;  // strides in which the kernel writes it; empty if they are the same

  void read(Numbers& from) { from(dtype, sizes, strides, written); }
};

struct Driver;
using Program = std::vector<int64_t>;  // see recipe.h

// Address of a tensor among the bytes of a launch's parameters.
struct Address {
  uint32_t offset;
  uint32_t tensor;    // index among the tensors of the arguments, the results and the scratch buffers
  uint32_t capacity;  // maximum number of dimensions of the view after it

  void read(Numbers& from) { from(offset, tensor, capacity); }
};

// A floating-point number of a call, among the bytes of a launch's parameters.
struct Given {
  uint32_t offset, argument, bytes;
  int32_t item;  // in a list; -1 for a single number

  void read(Numbers& from) { from(offset, argument, bytes, item); }
};

struct Launch {
  void* function;
  unsigned grid[3], block[3], shared;
  std::vector<unsigned char> parameters;  // in their memory layout, without addresses and floating-point numbers
  std::vector<uint32_t> offsets;          // of each parameter
  std::vector<Address> addresses;
  std::vector<Given> given;
  std::string failed, architecture;  // for the error of a launch that the driver refuses

  void read(Numbers& from) {
    from(function, grid, block, shared, parameters, offsets, addresses, given, failed, architecture);
  }
};

struct Buffer {
  int32_t dtype;
  std::vector<int64_t> sizes, strides;

  void read(Numbers& from) { from(dtype, sizes, strides); }
};

struct Filled {
  size_t made;  // index among the results and the scratch buffers
  bool exact;   // a whole number that a double cannot represent
  double number;
  int64_t whole;

  void read(Numbers& from) { from(made, exact, number, whole); }
};

struct Launches {
  const Driver* driver;
  void* context;
  std::vector<Buffer> scratch;
  std::vector<Filled> filled;
  std::vector<Launch> launches;  // in order; empty if there is nothing to write

  void read(Numbers& from) { from(driver, context, scratch, filled, launches); }
};

// The work of a plan is a function on the CPU, or launches by a driver.
struct Plan {
  const Candidate* candidate = nullptr;  // the instance that computes the results; null if launches compute them
  std::unique_ptr<const Launches> launches;
  Device device;
  std::vector<Copied> copied;
  std::vector<Result> results;

  static std::shared_ptr<const Plan> read(const int64_t* first) {
    auto plan = std::make_shared<Plan>();
    Numbers from(first);
    from(plan->candidate, plan->device.type, plan->device.index, plan->copied, plan->results);
    if (plan->candidate == nullptr) {
      auto work = std::make_unique<Launches>();
      from(*work);
      plan->launches = std::move(work);
    }
    return plan;
  }
};

// A value that replaces another value within a scope.
template <class T>
class Within {
 public:
  Within(T& place, T value) : place_(place), before_(place) { place = value; }
  ~Within() { place_ = before_; }

 private:
  T& place_;
  const T before_;
};

// Values by signature. Many threads read it, and one writes rarely. Forgetting begins a new generation: a value that
// was made for an earlier generation is not stored.
template <class T>
class CallCache {
 public:
  std::optional<T> find(const Words& words) const {
    std::shared_lock lock(mutex_);
    const auto at = entry_of(words.data(), words.size());
    return at == entries_.end() ? std::nullopt : std::optional<T>(at->second.second);
  }

  // Returns the value of a key, and makes it the first time.
  template <class Make>
  T obtain(const Words& words, Make make) {
    if (auto known = find(words)) return *known;
    T made = make();
    remember(Signature(words), made, 0);
    return made;
  }

  uint64_t generation() const { return generation_.load(); }

  void remember(const Signature& key, T value, uint64_t generation) {
    std::unique_lock lock(mutex_);
    if (generation != generation_) return;
    if (entry_of(key.words.data(), key.words.size()) != entries_.end()) return;  // another thread stored it
    if (entries_.size() >= limit) entries_.clear();  // sizes that change with each call must not fill the memory
    entries_.emplace(hash(key.words.data(), key.words.size()), std::make_pair(key, std::move(value)));
  }

  void forget() {
    std::unique_lock lock(mutex_);
    generation_++;
    entries_.clear();
  }

  int64_t count() const {
    std::shared_lock lock(mutex_);
    return int64_t(entries_.size());
  }

  // Makes the cache usable in a forked process, which lacks the thread that may hold the lock. The unfinished data of
  // that thread is never read and never freed.
  void after_fork() {
    if (mutex_.try_lock()) {
      mutex_.unlock();
    } else {
      new (this) CallCache;
    }
  }

 private:
  static constexpr size_t limit = 4096;

  using Entries = std::unordered_multimap<uint64_t, std::pair<Signature, T>>;

  typename Entries::const_iterator entry_of(const uint64_t* words, size_t count) const {
    auto [at, end] = entries_.equal_range(hash(words, count));
    for (; at != end; ++at) {
      const std::vector<uint64_t>& key = at->second.first.words;
      if (key.size() == count && !std::memcmp(key.data(), words, 8 * count)) return at;
    }
    return entries_.end();
  }

  mutable std::shared_mutex mutex_;
  std::atomic<uint64_t> generation_{0};
  Entries entries_;
};
}  // namespace opsmith
