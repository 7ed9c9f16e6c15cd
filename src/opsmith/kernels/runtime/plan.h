// Plans by which calls run: made once for each call signature, and cached here.
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

struct Copied {
  int64_t tensor;    // index among all tensors of the call
  int64_t argument;  // index of its argument
  bool back;         // it is written, and copied back after the call
  std::vector<int64_t> strides;
};

struct Result {
  int32_t dtype;
  std::vector<int64_t> sizes, strides;
  std::vector<int64_t> written;  // strides in which the kernel writes it; empty where they are the same
};

struct Driver;
using Program = std::vector<int64_t>;  // see recipe.h

// Address of a tensor among the bytes of a launch's parameters.
struct Address {
  uint32_t offset;
  uint32_t tensor;  // index among the tensors of the arguments, the results and the scratch buffers
};

// A number of floating point that a call gives, among the bytes of a launch's parameters.
struct Given {
  uint32_t offset, argument, bytes;
  int32_t item;  // in a list; -1 for a number alone
};

struct Launch {
  void* function;
  unsigned grid[3], block[3], shared;
  std::vector<unsigned char> parameters;  // as they lie in memory, without addresses and such numbers
  std::vector<uint32_t> offsets;          // of each parameter
  std::vector<Address> addresses;
  std::vector<Given> given;
  std::string failed, architecture;  // for the error of a launch that the driver refuses
};

struct Buffer {
  int32_t dtype;
  std::vector<int64_t> sizes, strides;
};

// Numbers that plan.py and recipe.py encode, from the first to the last.
class Numbers {
 public:
  explicit Numbers(const int64_t* first) : at_(first) {}
  int64_t one() { return *at_++; }
  template <class T>
  T* address() { return reinterpret_cast<T*>(one()); }
  std::vector<int64_t> several(int64_t count) {
    std::vector<int64_t> numbers(at_, at_ + count);
    at_ += count;
    return numbers;
  }
  Program program() { return several(one()); }
  double real() {
    double number;
    std::memcpy(&number, at_++, sizeof number);
    return number;
  }
  // Bytes, in whole words.
  template <class T>
  T bytes() {
    const size_t count = size_t(one());
    const auto* first = reinterpret_cast<const unsigned char*>(at_);
    at_ += (count + 7) / 8;
    return T(first, first + count);
  }
  template <class Read>
  void each(Read read) {
    for (int64_t left = one(); left > 0; left--) read();
  }

 private:
  const int64_t* at_;
};

struct Filled {
  size_t made;  // index among the results and the scratch buffers
  bool exact;   // a whole number that has no double
  double number;
  int64_t whole;

  static Filled read(Numbers& from) {
    Filled filled;
    filled.made = size_t(from.one());
    filled.exact = from.one() != 0;
    filled.number = from.real();
    filled.whole = from.one();
    return filled;
  }
};

struct Launches {
  const Driver* driver;
  void* context;
  std::vector<Buffer> scratch;
  std::vector<Filled> filled;
  std::vector<Launch> launches;  // in order; none if there is nothing to write
};

// The work of a plan is a function of the host, or launches by a driver.
struct Plan {
  const Candidate* candidate = nullptr;  // the instance that computes the results; null where launches do
  std::unique_ptr<const Launches> launches;
  Device device;
  std::vector<Copied> copied;
  std::vector<Result> results;

  static std::shared_ptr<const Plan> read(const int64_t* first) {
    auto plan = std::make_shared<Plan>();
    Numbers from(first);
    plan->candidate = from.address<const Candidate>();
    plan->device.type = int32_t(from.one());
    plan->device.index = int32_t(from.one());
    from.each([&] {
      Copied copied;
      copied.tensor = from.one();
      copied.argument = from.one();
      copied.back = from.one() != 0;
      copied.strides = from.several(from.one());
      plan->copied.push_back(std::move(copied));
    });
    from.each([&] {
      Result result;
      result.dtype = int32_t(from.one());
      const int64_t dim = from.one();
      const bool has_written = from.one() != 0;
      result.sizes = from.several(dim);
      result.strides = from.several(dim);
      if (has_written) result.written = from.several(dim);
      plan->results.push_back(std::move(result));
    });
    if (plan->candidate == nullptr) plan->launches = read_launches(from);
    return plan;
  }

 private:
  static std::unique_ptr<const Launches> read_launches(Numbers& from) {
    auto work = std::make_unique<Launches>();
    work->driver = from.address<const Driver>();
    work->context = from.address<void>();
    from.each([&] {
      Buffer buffer;
      buffer.dtype = int32_t(from.one());
      const int64_t dim = from.one();
      buffer.sizes = from.several(dim);
      buffer.strides = from.several(dim);
      work->scratch.push_back(std::move(buffer));
    });
    from.each([&] { work->filled.push_back(Filled::read(from)); });
    from.each([&] {
      Launch launch;
      launch.function = from.address<void>();
      for (unsigned* sizes : {launch.grid, launch.block})
        for (int at = 0; at < 3; at++) sizes[at] = unsigned(from.one());
      launch.shared = unsigned(from.one());
      launch.parameters = from.bytes<std::vector<unsigned char>>();
      from.each([&] { launch.offsets.push_back(uint32_t(from.one())); });
      from.each([&] {
        const uint32_t offset = uint32_t(from.one());
        launch.addresses.push_back({offset, uint32_t(from.one())});
      });
      from.each([&] {
        Given given;
        given.offset = uint32_t(from.one());
        given.argument = uint32_t(from.one());
        given.bytes = uint32_t(from.one());
        given.item = int32_t(from.one());
        launch.given.push_back(given);
      });
      launch.failed = from.bytes<std::string>();
      launch.architecture = from.bytes<std::string>();
      work->launches.push_back(std::move(launch));
    });
    return work;
  }
};

// Values by signature. Many threads read it, and one writes rarely. What is forgotten begins a new generation: a value
// that was made for an earlier one is not remembered.
template <class T>
class CallCache {
 public:
  std::optional<T> find(const Words& words) const {
    std::shared_lock lock(mutex_);
    const auto at = entry_of(words.data(), words.size());
    return at == entries_.end() ? std::nullopt : std::optional<T>(at->second.second);
  }

  uint64_t generation() const { return generation_.load(); }

  void remember(const Signature& key, T value, uint64_t generation) {
    std::unique_lock lock(mutex_);
    if (generation != generation_) return;
    if (entry_of(key.words.data(), key.words.size()) != entries_.end()) return;  // of another thread
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

  // Makes the cache usable in a forked process, which lacks the thread that may hold the lock. What that thread
  // has left half done is never read and never freed.
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
