// merge.h - the local lists that the two sides of a pair select by (docs/decisions/0006-pair.md), and the exact selection from both.
// A list: entries of the best positions that a side holds, ascending by position; entry = order key of the score << 32 | ~position, so that the larger
// is the better: the higher score, then the lower position. No two entries are equal and none is 0.
#pragma once
#include "portable.h"

namespace merge {

DEVICE uint64_t entry_of(uint32_t key, uint32_t position) { return (uint64_t)key << 32 | (uint32_t)~position; }
DEVICE uint32_t position_of(uint64_t entry) { return ~(uint32_t)entry; }

}  // namespace merge
