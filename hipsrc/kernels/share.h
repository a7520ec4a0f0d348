// share.h - which index keys a side of a pair holds (docs/decisions/0006-pair.md): the extents whose number is `side` modulo `sides`, one after the other in
// tables of its own. Its row q of a session is position p; sides 1: q = p.
#pragma once
#include "portable.h"

namespace share {

// Rows that a side holds of the first n positions.
DEVICE uint32_t rows_of(uint32_t n, uint32_t extent_rows, uint32_t side, uint32_t sides) {
  if (sides == 1) return n;
  uint32_t turn = extent_rows * sides, whole = n / turn, rest = n - whole * turn, first = side * extent_rows;
  rest = rest > first ? rest - first : 0u;
  return whole * extent_rows + (rest < extent_rows ? rest : extent_rows);
}

DEVICE uint32_t position_of(uint32_t q, uint32_t extent_rows, uint32_t side, uint32_t sides) {
  return sides == 1 ? q : (q / extent_rows * sides + side) * extent_rows + q % extent_rows;
}

DEVICE bool holds(uint32_t p, uint32_t extent_rows, uint32_t side, uint32_t sides) { return sides == 1 || p / extent_rows % sides == side; }

// The row of a position that the side holds.
DEVICE uint32_t row_of(uint32_t p, uint32_t extent_rows, uint32_t sides) {
  return sides == 1 ? p : p / extent_rows / sides * extent_rows + p % extent_rows;
}

}  // namespace share
