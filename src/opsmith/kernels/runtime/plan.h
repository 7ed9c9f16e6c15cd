// Plans by which calls run: made once for each call signature, in Python, and cached here.
#pragma once
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <shared_mutex>
#include <unordered_map>

#include "torch_stack.h"

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

struct Plan {
  const Candidate* candidate;  // the instance that computes the results
  std::vector<Copied> copied;
  std::vector<Result> results;

  // Decodes the numbers of `Plan.encode` in plan.py.
  static std::shared_ptr<const Plan> read(const int64_t* at) {
    auto plan = std::make_shared<Plan>();
    auto several = [&at](int64_t count) {
      std::vector<int64_t> numbers(at, at + count);
      at += count;
      return numbers;
    };
    plan->candidate = reinterpret_cast<const Candidate*>(*at++);
    for (int64_t left = *at++; left > 0; left--) {
      Copied copied;
      copied.tensor = *at++;
      copied.argument = *at++;
      copied.back = *at++ != 0;
      int64_t dim = *at++;
      copied.strides = several(dim);
      plan->copied.push_back(std::move(copied));
    }
    for (int64_t left = *at++; left > 0; left--) {
      Result result;
      result.dtype = int32_t(*at++);
      int64_t dim = *at++;
      bool has_written = *at++ != 0;
      result.sizes = several(dim);
      result.strides = several(dim);
      if (has_written) result.written = several(dim);
      plan->results.push_back(std::move(result));
    }
    return plan;
  }
};

// Values by signature. Many threads read it, and one writes rarely.
template <class T>
class CallCache {
 public:
  std::optional<T> find(const Words& words) const {
    std::shared_lock lock(mutex_);
    auto [at, end] = entries_.equal_range(hash(words.data(), words.size()));
    for (; at != end; ++at) {
      const std::vector<uint64_t>& key = at->second.first.words;
      if (key.size() == words.size() && !std::memcmp(key.data(), words.data(), 8 * words.size()))
        return at->second.second;
    }
    return std::nullopt;
  }

  void remember(const Signature& key, T value) {
    std::unique_lock lock(mutex_);
    if (entries_.size() >= limit) entries_.clear();  // sizes that change with each call must not fill the memory
    entries_.emplace(hash(key.words.data(), key.words.size()), std::make_pair(key, std::move(value)));
  }

  void forget() {
    std::unique_lock lock(mutex_);
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

  mutable std::shared_mutex mutex_;
  std::unordered_multimap<uint64_t, std::pair<Signature, T>> entries_;
};
}  // namespace opsmith
