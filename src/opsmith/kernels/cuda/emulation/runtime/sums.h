// Sums of floating-point numbers by atomics, whose order changes the rounding.
#pragma once
#include "segments.h"

namespace emulated {

// Terms that threads have added to an element; further additions of the same thread do not count as new terms.
struct Sum {
  uint32_t block, epoch, adder;  // of the last term
  uint32_t terms;                // all of them
  uint32_t unordered;            // of this block; all terms before the last barrier count as one
};
static std::unordered_map<uint64_t, Sum> sums;

// Adds a term of the running thread; true if it is the third unordered term, so that the sum may round differently.
static bool adds_unordered(uint64_t address) {
  Sum& sum = sums[address];
  const bool same_block = sum.block == block_begin;
  if (!same_block && is_shared(address)) sum = {};
  const bool several_blocks = !same_block && sum.terms;
  if (several_blocks) sum.unordered = UINT32_MAX / 2;  // blocks have no order
  const bool later = same_block && sum.epoch != epoch;
  if (later && sum.unordered < UINT32_MAX / 2) sum.unordered = 1;
  const uint32_t adder = running->tid + 1;
  if (!same_block || later || sum.adder != adder) sum.terms++, sum.unordered++;
  sum.block = block_begin, sum.epoch = epoch, sum.adder = adder;
  return std::min(sum.terms, sum.unordered) >= 3;
}

}  // namespace emulated
