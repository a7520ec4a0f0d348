// history_fetch.h - rows of the fetch lists, copied by the fast host build: fetch_rows, and the part FETCH of step_gemv. Every row goes to a place of
// its own, so how they are dealt to blocks decides nothing.
#pragma once

namespace {
namespace host {
namespace fetches {

// What block `block` of `blocks` copies of one round's list, for one plane; false after a failed touch.
inline bool fetch_round(const fetch_args& a, uint32_t plane, uint32_t round, uint32_t block, uint32_t blocks, Blocks& b) {
  int32_t listed = ((const int32_t*)a.counts)[round];
  uint64_t list = (uint64_t)((const int32_t*)a.round_starts)[round] * a.k;
  uint64_t staging = (uint64_t)a.staging + (uint64_t)(plane - a.staging_plane_first) * a.staging_plane_bytes;
  for (int64_t i = block; i < listed; i += blocks) {
    uint64_t source = ((const uint64_t*)a.sources)[list + i] + plane * a.source_plane_bytes, target = ((const uint64_t*)a.targets)[list + i];
    uint64_t row = ref_payload(target) + (ref_space(target) ? staging : plane * a.hot_plane_bytes);
    if (!b.touch(source, a.row_bytes) || !b.touch(row, a.row_bytes)) return false;
    memcpy((void*)row, (const void*)source, a.row_bytes);
  }
  return true;
}

// Grid: (a.blocks, rounds, planes).
inline bool fetch_rows(const fetch_args& a, Blocks& b) {
  for (uint64_t block = b.first; block < b.last; block++) {
    uint32_t round = (uint32_t)(block / b.grid.x % b.grid.y), plane = a.plane_first + (uint32_t)(block / b.grid.x / b.grid.y);
    if (!fetch_round(a, plane, round, (uint32_t)(block % b.grid.x), b.grid.x, b)) return false;
  }
  return true;
}

}  // namespace fetches

FAST_KERNEL(fetch_rows, fetch_args, fetches::fetch_rows);

}  // namespace host
}  // namespace
