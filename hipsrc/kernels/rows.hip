// rows.hip - history rows written, fetched and moved in bulk. All addresses and byte offsets are 64 bits wide.
//   store_rows   x [rows, latent | rope] T -> rows in a row format (row_format.h), at row references
//   place_rows   packed rows to row references: what another device has quantised
//   fetch_rows   rows of the fetch lists, from host extents into hot slots or staging rows, for several planes
//   copy_back    a batch of rows, all planes, from a hot buffer into its host extent
//   gather_plane one plane of a session's host extents into a linear buffer; scatter_plane the other way
//   copy_planes  one stretch of bytes of every plane of two buffers
//   read_rows    planned rows of one layer as values, copy_rows as bytes: for readers that are not our attention
// q8g64, per group of 64 latent values: scale = f16(amax / 127), one f16 step up where a value would round past 127 with it; that happens among
// the f16 subnormals alone (a scale that rounds to 0 included), since a normal f16 is within 2^-11 of amax / 127. q = rint(x / scale), ties to
// even. All zeros: scale 0. A group that is not finite, or whose scale exceeds 65,504, is an error and is stored as zeros.
// Copies keep four 16-byte loads a work-item in flight before the first store: the link's latency is what they wait for.
#include "portable.h"
#include "row_format.h"
#include "fetch.h"

namespace history_rows {

constexpr uint32_t STORE_THREADS = 64;
constexpr uint32_t UNIT = 8;  // latent values a work-item quantises: 8 work-items a group
constexpr uint32_t FLIGHT = 4;  // loads in flight of a work-item
constexpr uint32_t TILE = COPY_THREADS * FLIGHT;  // 16-byte words a block moves at once

static_assert(Q8_GROUP % UNIT == 0 && Q8_GROUP / UNIT <= WAVE, "the work-items of a group share a wave");

// x, `width` values, to a row as they are, by a block of THREADS work-items. The target is aligned and a row is whole words.
template <uint32_t THREADS, class T> DEVICE void store_plain(const T* x, uint32_t width, uint8_t* row) {
  if (((uint64_t)x & 15) == 0) {
    for (uint32_t i = thread_id(); i < width * (uint32_t)sizeof(T) / 16; i += THREADS) ((words16*)row)[i] = ((const words16*)x)[i];
  } else {
    for (uint32_t i = thread_id(); i < width; i += THREADS) ((T*)row)[i] = x[i];
  }
}

// Quantises the work-item's eight values v of a group whose largest magnitude has the bits `top`; false if the group cannot be stored.
DEVICE bool quantise(const float* v, uint32_t top, uint64_t* values, uint16_t* scale_bits) {
  float amax = float_of(top);
  uint16_t bits = top < 0x7f800000u ? f32_to_f16(amax / 127.0f) : (uint16_t)0x7c00u;
  if (top && bits < 0x7c00u && amax >= 127.5f * f16_to_f32(bits)) bits++;
  *values = 0;
  *scale_bits = 0;
  if (bits >= 0x7c00u) return false;
  if (top == 0) return true;
  float scale = f16_to_f32(bits);
  uint64_t packed = 0;
  UNROLL
  for (uint32_t i = 0; i < UNIT; i++) {
    float q = min_f32(max_f32(rint_f32(v[i] / scale), -127.0f), 127.0f);
    packed |= (uint64_t)(uint8_t)(int8_t)(int32_t)q << (8 * i);
  }
  *values = packed;
  *scale_bits = bits;
  return true;
}

// x = [latent | rope] to a q8g64 row, by a block of THREADS work-items; what cannot be stored raises error[0] to `number`.
template <uint32_t THREADS, class T>
DEVICE void store_q8g64(const T* x, uint32_t latent, uint32_t rope, uint8_t* row, uint32_t* error, uint32_t number) {
  uint32_t t = thread_id();
  bool good = true;
  for (uint32_t first = 0; first < latent; first += THREADS * UNIT) {
    uint32_t c = first + t * UNIT, top = 0;
    bool inside = c < latent;
    const T* from = x + (inside ? c : 0u);  // a load that needs no branch
    float v[UNIT];
    UNROLL
    for (uint32_t i = 0; i < UNIT; i++) v[i] = load_f32(from + i);
    UNROLL
    for (uint32_t i = 0; i < UNIT; i++) {
      uint32_t magnitude = bits_of(v[i]) & 0x7fffffffu;  // ordered as the values are, NaN above infinity
      top = magnitude > top ? magnitude : top;
    }
    // A group lies inside or outside as a whole, so nothing outside reaches a group's maximum.
    UNROLL
    for (uint32_t m = Q8_GROUP / UNIT / 2; m; m >>= 1) {
      uint32_t other = shuffle_xor(top, m);
      top = other > top ? other : top;
    }
    if (!inside) continue;
    uint64_t values;
    uint16_t scale_bits;
    if (!quantise(v, top, &values, &scale_bits)) good = false;
    *(uint64_t*)(row + c) = values;
    if (c % Q8_GROUP == 0) ((uint16_t*)(row + latent))[c / Q8_GROUP] = scale_bits;
  }
  bf16* tail = (bf16*)(row + q8_rope_offset(latent));
  for (uint32_t i = t; i < rope; i += THREADS) {
    bf16 v = f32_to_bf16(load_f32(x + latent + i));
    if ((v.bits & 0x7f80u) == 0x7f80u) good = false;
    tail[i] = v;
  }
  if (!good) global_max(error, number);
}

template <class T, bool QUANTISED> DEVICE void store_row(const store_rows_args& a) {
  uint32_t r = block_x();
  uint64_t ref = ((const uint64_t*)a.refs)[r];
  if (ref == 0) return;
  uint8_t* row = row_pointer<uint8_t>(ref, a.offsets, a.row_bytes);
  const T* x = (const T*)a.x + (uint64_t)r * a.x_stride;
  if (QUANTISED) store_q8g64<STORE_THREADS>(x, a.latent, a.rope, row, (uint32_t*)a.error, r + 1u);
  else store_plain<STORE_THREADS>(x, a.latent + a.rope, row);
}

// Copies words [0, count) of one stretch; the blocks take tiles in turn. Loads first, so that they overlap.
DEVICE void copy_stretch(const words16* from, words16* to, uint64_t count, uint32_t blocks) {
  for (uint64_t first = (uint64_t)block_x() * TILE + thread_id(); first < count; first += (uint64_t)blocks * TILE) {
    uint32_t word[FLIGHT][4] = {};
    UNROLL
    for (uint32_t j = 0; j < FLIGHT; j++) {
      if (first + j * COPY_THREADS < count) load_words(from + first + j * COPY_THREADS, word[j]);
    }
    UNROLL
    for (uint32_t j = 0; j < FLIGHT; j++) {
      if (first + j * COPY_THREADS < count) store_words(to + first + j * COPY_THREADS, word[j]);
    }
  }
}

// Rows of a batch. A run: row `entry` of all planes of a group, which lie one after the other in the extent.
struct batch_rows : dealt_runs {
  uint64_t target;  // the group's first row of the batch
  uint64_t source;  // the same, of the group's first plane
  uint64_t source_plane_bytes;
  DEVICE uint64_t host(const batch_rows& b, uint32_t entry) { return b.target + (uint64_t)entry * b.run * 16u; }
  DEVICE uint64_t device(const batch_rows& b, uint32_t entry) { return b.source + (uint64_t)entry * b.words * 16u; }
  DEVICE const words16* from(const batch_rows& b, uint64_t, uint64_t device, uint32_t place) {
    uint32_t plane = place / b.words;
    return pointer_from<const words16>(device + plane * b.source_plane_bytes, b.words * 16u) + (place - plane * b.words);
  }
  DEVICE words16* to(const batch_rows& b, uint64_t host, uint64_t, uint32_t place) { return pointer_from<words16>(host, b.run * 16u) + place; }
};

// Where the first row of the batch of a group of `planes` planes from `first` on lies.
DEVICE uint64_t group_base(const copy_back_args& a, uint32_t first, uint32_t planes) {
  return a.extent + ((uint64_t)a.extent_rows * first + (uint64_t)a.first_row * planes) * a.row_bytes;
}

// Rows of one plane of a session, to the host or from it. A run: a row.
template <bool TO_HOST> struct plane_rows : dealt_runs {
  const uint64_t* table;
  uint64_t offset, linear;
  uint32_t first, extent_rows, stride_bytes;
  DEVICE uint64_t host(const plane_rows& p, uint32_t entry) {
    uint32_t row = p.first + entry;
    return p.table[row / p.extent_rows] + p.offset + (uint64_t)(row % p.extent_rows) * p.stride_bytes;
  }
  DEVICE uint64_t device(const plane_rows& p, uint32_t entry) { return p.linear + ((uint64_t)p.first + entry) * p.run * 16u; }
  DEVICE const words16* from(const plane_rows& p, uint64_t host, uint64_t device, uint32_t place) {
    return pointer_from<const words16>(TO_HOST ? device : host, p.run * 16u) + place;
  }
  DEVICE words16* to(const plane_rows& p, uint64_t host, uint64_t device, uint32_t place) {
    return pointer_from<words16>(TO_HOST ? host : device, p.run * 16u) + place;
  }
};

template <bool TO_HOST> DEVICE void move_plane(const plane_rows_args& a) {
  plane_rows<TO_HOST> p = {deal_runs(a.row_bytes, 1, a.blocks), (const uint64_t*)a.table, a.plane_offset_bytes, (uint64_t)a.linear, a.first,
                           a.extent_rows, a.stride_bytes};
  move_runs(p, a.rows * p.pieces, block_x(), a.blocks);
}

// Where entry i of the query row of this block lies; null for a reference of 0.
DEVICE const uint8_t* planned_row(const read_rows_args& a, uint32_t i) {
  uint64_t row = block_y();
  uint32_t at = a.index ? (uint32_t)((const int32_t*)a.index)[row * a.k + i] : i;
  uint64_t ref = ((const uint64_t*)a.plan)[row * a.plan_k + at];
  return ref ? row_pointer<const uint8_t>(ref, a.offsets, a.row_bytes) : nullptr;
}

// The entries of a query row form one sequence of units of eight values, so that every work-item has work at any width.
template <class Row, class T> DEVICE void read_values(const read_rows_args& a) {
  uint32_t width = a.latent + a.rope, units = (width + ROW_UNIT - 1) / ROW_UNIT;
  uint64_t unit = (uint64_t)block_x() * COPY_THREADS + thread_id();
  if (unit >= (uint64_t)a.k * units) return;
  uint32_t i = (uint32_t)(unit / units), c = (uint32_t)(unit % units) * ROW_UNIT;
  const uint8_t* from = planned_row(a, i);
  float v[ROW_UNIT] = {};
  if (from) Row::load(from, a.latent, a.rope, c, v);
  T* to = (T*)a.out + ((uint64_t)block_y() * a.k + i) * width + c;
  UNROLL
  for (uint32_t j = 0; j < ROW_UNIT; j++) {
    if (c + j < width) store_f32(to + j, v[j]);
  }
}

}  // namespace history_rows

// Grid: rows.
// LAUNCH store_rows_f32_f32 block=64
KERNEL(store_rows_f32_f32, store_rows_args, 64) { history_rows::store_row<float, false>(a); }
// LAUNCH store_rows_bf16_bf16 block=64
KERNEL(store_rows_bf16_bf16, store_rows_args, 64) { history_rows::store_row<bf16, false>(a); }
// LAUNCH store_rows_f32_q8g64 block=64
KERNEL(store_rows_f32_q8g64, store_rows_args, 64) { history_rows::store_row<float, true>(a); }
// LAUNCH store_rows_bf16_q8g64 block=64
KERNEL(store_rows_bf16_q8g64, store_rows_args, 64) { history_rows::store_row<bf16, true>(a); }

// Grid: rows.
// LAUNCH place_rows block=64
KERNEL(place_rows, place_rows_args, 64) {
  uint64_t ref = ((const uint64_t*)a.refs)[block_x()];
  if (ref == 0) return;
  const words16* from = (const words16*)((const uint8_t*)a.rows + (uint64_t)block_x() * a.row_bytes);
  words16* to = row_pointer<words16>(ref, a.offsets, a.row_bytes);
  for (uint32_t i = thread_id(); i < a.row_bytes / 16; i += history_rows::STORE_THREADS) to[i] = from[i];
}

// Grid: (args.blocks, rounds).
// LAUNCH fetch_rows block=256 words=256
EARLY_KERNEL(fetch_rows, fetch_args, 256, 2) {
  SHARED(uint32_t, count, 1);
  next_may_begin();
  if (thread_id() == 0) *count = history_rows::listed(a, block_y());
  block_sync();
  history_rows::fetch_entries<false>(a, block_y(), nullptr, *count, block_x(), a.blocks);
  previous_done();
}

// Grid: (args.blocks, groups).
// LAUNCH copy_back block=256 words=256
KERNEL(copy_back, copy_back_args, 256) {
  using namespace history_rows;
  const uint32_t* group = (const uint32_t*)a.groups + block_y() * 2u;
  batch_rows b = {deal_runs(a.row_bytes, group[1], a.blocks), group_base(a, group[0], group[1]), (uint64_t)a.source + group[0] * a.source_plane_bytes,
                  a.source_plane_bytes};
  move_runs(b, a.rows * b.pieces, block_x(), a.blocks);
}

// Grid: (args.blocks, planes).
// LAUNCH copy_planes block=256 words=1024
KERNEL(copy_planes, copy_planes_args, 256) {
  const words16* from = pointer_from<const words16>((uint64_t)a.source + block_y() * a.source_plane_bytes, a.length_bytes);
  words16* to = pointer_from<words16>((uint64_t)a.target + block_y() * a.target_plane_bytes, a.length_bytes);
  history_rows::copy_stretch(from, to, a.length_bytes / 16, a.blocks);
}

// Grid: args.blocks.
// LAUNCH gather_plane block=256 words=1024
KERNEL(gather_plane, plane_rows_args, 256) { history_rows::move_plane<false>(a); }
// LAUNCH scatter_plane block=256 words=1024
KERNEL(scatter_plane, plane_rows_args, 256) { history_rows::move_plane<true>(a); }

// Grid: (ceil(k * ceil(width / 8) / 256), rows).
// LAUNCH read_rows_f32_f32 block=256
KERNEL(read_rows_f32_f32, read_rows_args, 256) { history_rows::read_values<plain_row<float>, float>(a); }
// LAUNCH read_rows_f32_bf16 block=256
KERNEL(read_rows_f32_bf16, read_rows_args, 256) { history_rows::read_values<plain_row<float>, bf16>(a); }
// LAUNCH read_rows_bf16_f32 block=256
KERNEL(read_rows_bf16_f32, read_rows_args, 256) { history_rows::read_values<plain_row<bf16>, float>(a); }
// LAUNCH read_rows_bf16_bf16 block=256
KERNEL(read_rows_bf16_bf16, read_rows_args, 256) { history_rows::read_values<plain_row<bf16>, bf16>(a); }
// LAUNCH read_rows_q8g64_f32 block=256
KERNEL(read_rows_q8g64_f32, read_rows_args, 256) { history_rows::read_values<q8g64_row, float>(a); }
// LAUNCH read_rows_q8g64_bf16 block=256
KERNEL(read_rows_q8g64_bf16, read_rows_args, 256) { history_rows::read_values<q8g64_row, bf16>(a); }

// Grid: (ceil(k * row_bytes / 16 / 256), rows).
// LAUNCH copy_rows block=256
KERNEL(copy_rows, read_rows_args, 256) {
  using namespace history_rows;
  uint32_t words = a.row_bytes / 16;
  uint64_t word = (uint64_t)block_x() * COPY_THREADS + thread_id();
  if (word >= (uint64_t)a.k * words) return;
  uint32_t i = (uint32_t)(word / words), data[4] = {};
  const uint8_t* from = planned_row(a, i);
  if (from) load_words((const words16*)from + word % words, data);
  store_words((words16*)a.out + (uint64_t)block_y() * a.k * words + word, data);
}
