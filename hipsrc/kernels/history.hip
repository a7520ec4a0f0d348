// history.hip - index keys into the extents of a session.
//   row p of plane l lies at  table[session][p / extent_rows] + (l * extent_rows + p % extent_rows) * row_bytes
// A side of a pair has tables of its own for the positions that it holds, as their rows (share.h); a row of the other side is skipped.
// History rows are written by rows.hip, through references. Kernels find memory through tables alone, so a batch may mix sessions. A row with
// a negative position is padding and is skipped.
#include "portable.h"
#include "share.h"

// One row of `source` to row `row` of the tables, by a block of THREADS work-items; table: the session's. Of `a`, plane, extent_rows, row_bytes and
// width are used.
template <uint32_t THREADS, class T> DEVICE void append_values(const append_args& a, const T* source, const uint64_t* table, uint32_t row) {
  uint64_t offset = ((uint64_t)a.plane * a.extent_rows + row % a.extent_rows) * a.row_bytes;
  T* target = pointer_from<T>(table[row / a.extent_rows] + offset, (uint64_t)a.width * sizeof(T));
  uint32_t bytes = a.width * (uint32_t)sizeof(T);
  if ((((uint64_t)source | (uint64_t)target | bytes) & 15) == 0) {
    for (uint32_t i = thread_id(); i < bytes / 16; i += THREADS) ((words16*)target)[i] = ((const words16*)source)[i];
  } else {
    for (uint32_t i = thread_id(); i < a.width; i += THREADS) target[i] = source[i];
  }
}

template <class T> DEVICE void append_row(const append_args& a) {
  uint32_t r = block_x();
  int32_t position = ((const int32_t*)a.positions)[r];
  if (position < 0 || !share::holds((uint32_t)position, a.extent_rows, a.side, a.sides)) return;
  uint32_t session = (uint32_t)((const int32_t*)a.sessions)[r];
  const uint64_t* table = (const uint64_t*)a.tables + (uint64_t)session * a.table_stride;
  append_values<64>(a, (const T*)a.x + (uint64_t)r * a.x_stride, table, share::row_of((uint32_t)position, a.extent_rows, a.sides));
}

// Grid: rows.
// LAUNCH append_f32 block=64
KERNEL(append_f32, append_args, 64) { append_row<float>(a); }
// LAUNCH append_bf16 block=64
KERNEL(append_bf16, append_args, 64) { append_row<bf16>(a); }
