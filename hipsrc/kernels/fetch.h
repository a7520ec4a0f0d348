// fetch.h - rows of fetch lists from host extents into hot slots or staging rows: fetch_rows, and the FETCH part of a decode step.
// 32 lanes read a piece of a row together. A row is cut where its address is a multiple of 128 bytes, so that no line of 128 bytes is asked for
// twice: over the link, requests are what is dear. Pieces are dealt to the blocks first, so that a short list spreads over all of them.
// FETCH_FLIGHT loads of 16 bytes a work-item are under way before the first store.
#pragma once
#include "row_format.h"

namespace history_rows {

constexpr uint32_t COPY_THREADS = 256;
constexpr uint32_t FETCH_LANES = 32;
constexpr uint32_t FETCH_FLIGHT = 4;
constexpr uint32_t LINE_WORDS = 8;  // 16-byte words of a line

static_assert(FETCH_FLIGHT == 4, "fetch_round counts four pieces");

// 16 bytes into four registers and back, as one access each: nvcc makes four of one that goes element by element. An array of words16 would be copied
// as memory, and clang would put it into LDS.
DEVICE void load_words(const words16* from, uint32_t* to) {
  words16 word = *from;
  UNROLL
  for (uint32_t i = 0; i < 4; i++) to[i] = word.w[i];
}
DEVICE void store_words(words16* to, const uint32_t* from) { *to = {{from[0], from[1], from[2], from[3]}}; }

// One fetch list, for one plane.
struct fetch_list {
  const uint64_t* sources;
  const uint64_t* targets;
  uint64_t source_offset, hot_offset, staging;
  uint32_t words;   // 16-byte words a row
  uint32_t pieces;  // a row
  uint32_t stride;  // pieces between two of the same 32 lanes
};

// N pieces from `first` on. No branch: clang sinks loads into one, behind the wait for the data of the row before. Lanes outside the row move its
// first or last word once more, to the same place.
template <uint32_t N> DEVICE void fetch_pieces(const fetch_list& f, uint32_t first) {
  int32_t lane = (int32_t)(thread_id() % FETCH_LANES), last = (int32_t)f.words - 1, place[N];
  uint32_t word[N][4];
  uint64_t source[N], target[N];
  UNROLL
  for (uint32_t j = 0; j < N; j++) {
    uint32_t piece = first + j * f.stride, entry = piece / f.pieces;
    place[j] = (int32_t)((piece - entry * f.pieces) * FETCH_LANES) + lane;
    source[j] = f.sources[entry];
    target[j] = f.targets[entry];
  }
  UNROLL
  for (uint32_t j = 0; j < N; j++) {
    source[j] += f.source_offset;
    place[j] -= (int32_t)((uint32_t)source[j] / 16u % LINE_WORDS);
    place[j] = place[j] < 0 ? 0 : place[j] > last ? last : place[j];
    load_words(pointer_from<const words16>(source[j], f.words * 16) + place[j], word[j]);
  }
  UNROLL
  for (uint32_t j = 0; j < N; j++) {
    uint64_t row = ref_payload(target[j]) + (ref_space(target[j]) ? f.staging : f.hot_offset);
    store_words(pointer_from<words16>(row, f.words * 16) + place[j], word[j]);
  }
}

// The list of one round, dealt to `blocks` blocks of 256 work-items; this one is number `block`. Returns the pieces of the list. The caller keeps
// a list below 2^31 words.
DEVICE uint32_t fetch_round(const fetch_args& a, uint32_t plane, uint32_t round, uint32_t block, uint32_t blocks) {
  int32_t listed = ((const int32_t*)a.counts)[round];
  uint64_t list = (uint64_t)((const int32_t*)a.round_starts)[round] * a.k;
  fetch_list f;
  f.words = a.row_bytes / 16;
  f.pieces = (f.words + LINE_WORDS - 1u + FETCH_LANES - 1u) / FETCH_LANES;
  f.stride = blocks * (COPY_THREADS / FETCH_LANES);
  uint32_t total = listed > 0 ? (uint32_t)listed * f.pieces : 0u;
  f.sources = (const uint64_t*)a.sources + list;
  f.targets = (const uint64_t*)a.targets + list;
  f.source_offset = plane * a.source_plane_bytes;
  f.hot_offset = plane * a.hot_plane_bytes;
  f.staging = (uint64_t)a.staging + (uint64_t)(plane - a.staging_plane_first) * a.staging_plane_bytes;
  for (uint32_t first = thread_id() / FETCH_LANES * blocks + block; first < total; first += FETCH_FLIGHT * f.stride) {
    uint32_t rest = (total - 1u - first) / f.stride;  // further pieces of these lanes
    if (rest >= 3) fetch_pieces<4>(f, first);
    else if (rest == 2) fetch_pieces<3>(f, first);
    else if (rest == 1) fetch_pieces<2>(f, first);
    else fetch_pieces<1>(f, first);
  }
  return total;
}

// What fetch_rows does for plane a.plane_first, all rounds in turn. Each round's list starts at the block behind the last one of the round before.
DEVICE void fetch_part(const fetch_args& a, uint32_t block, uint32_t blocks, uint32_t rounds) {
  uint32_t dealt = 0;
  for (uint32_t round = 0; round < rounds; round++) {
    uint32_t turned = block + blocks - dealt;
    dealt = (dealt + fetch_round(a, a.plane_first, round, turned < blocks ? turned : turned - blocks, blocks)) % blocks;
  }
}

}  // namespace history_rows
