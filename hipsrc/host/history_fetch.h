// history_fetch.h - rows between host extents and device memory, copied by the fast host build: fetch_rows and the part FETCH of step_gemv, copy_back,
// gather_plane and scatter_plane. Every row goes to a place of its own, so how they are dealt to blocks decides nothing.
#pragma once

namespace {
namespace host {
namespace fetches {

// What block `block` of `blocks` copies of one round's list; false after a failed touch.
inline bool fetch_round(const fetch_args& a, uint32_t round, uint32_t block, uint32_t blocks, Blocks& b) {
  int32_t listed = ((const int32_t*)a.counts)[round];
  uint64_t list = (uint64_t)((const int32_t*)a.round_starts)[round] * a.k;
  uint64_t staging = (uint64_t)a.staging - (uint64_t)a.staging_plane_first * a.staging_plane_bytes;
  for (int64_t i = block; i < listed; i += blocks) {
    uint64_t source = ((const uint64_t*)a.sources)[list + i], target = ((const uint64_t*)a.targets)[list + i];
    for (uint32_t plane = a.plane_first; plane < a.plane_first + a.planes; plane++) {
      uint64_t from = source + (uint64_t)plane * a.row_bytes;
      uint64_t row = ref_payload(target) + (ref_space(target) ? staging + plane * a.staging_plane_bytes : plane * a.hot_plane_bytes);
      if (!b.touch(from, a.row_bytes) || !b.touch(row, a.row_bytes)) return false;
      memcpy((void*)row, (const void*)from, a.row_bytes);
    }
  }
  return true;
}

// Grid: (a.blocks, rounds).
inline bool fetch_rows(const fetch_args& a, Blocks& b) {
  for (uint64_t block = b.first; block < b.last; block++) {
    if (!fetch_round(a, (uint32_t)(block / b.grid.x), (uint32_t)(block % b.grid.x), b.grid.x, b)) return false;
  }
  return true;
}

// Grid: (a.blocks, groups).
inline bool copy_back(const copy_back_args& a, Blocks& b) {
  for (uint64_t block = b.first; block < b.last; block++) {
    const uint32_t* group = (const uint32_t*)a.groups + block / b.grid.x * 2;
    uint64_t target = history_rows::group_base(a, group[0], group[1]);
    for (uint32_t row = (uint32_t)(block % b.grid.x); row < a.rows; row += a.blocks) {
      for (uint32_t plane = 0; plane < group[1]; plane++) {
        uint64_t from = (uint64_t)a.source + (group[0] + plane) * a.source_plane_bytes + (uint64_t)row * a.row_bytes;
        uint64_t to = target + ((uint64_t)row * group[1] + plane) * a.row_bytes;
        if (!b.touch(from, a.row_bytes) || !b.touch(to, a.row_bytes)) return false;
        memcpy((void*)to, (const void*)from, a.row_bytes);
      }
    }
  }
  return true;
}

// Grid: a.blocks.
template <bool TO_HOST> bool move_plane(const plane_rows_args& a, Blocks& b) {
  for (uint64_t block = b.first; block < b.last; block++) {
    for (uint64_t row = a.first + block; row < (uint64_t)a.first + a.rows; row += a.blocks) {
      uint64_t host = ((const uint64_t*)a.table)[row / a.extent_rows] + a.plane_offset_bytes + row % a.extent_rows * a.stride_bytes;
      uint64_t device = (uint64_t)a.linear + row * a.row_bytes, from = TO_HOST ? device : host, to = TO_HOST ? host : device;
      if (!b.touch(from, a.row_bytes) || !b.touch(to, a.row_bytes)) return false;
      memcpy((void*)to, (const void*)from, a.row_bytes);
    }
  }
  return true;
}

}  // namespace fetches

FAST_KERNEL(fetch_rows, fetch_args, fetches::fetch_rows);
FAST_KERNEL(copy_back, copy_back_args, fetches::copy_back);
FAST_KERNEL(gather_plane, plane_rows_args, fetches::move_plane<false>);
FAST_KERNEL(scatter_plane, plane_rows_args, fetches::move_plane<true>);

}  // namespace host
}  // namespace
