// history_stores.h - history rows and index keys written by the fast host build: store_rows_*, place_rows, append_*.
#pragma once

namespace {
namespace host {
namespace stores {

// x = [latent | rope] to a q8g64 row; false if something of it cannot be stored. As history_rows::store_q8g64.
template <class T> DEVICE bool quantise_row(const T* x, uint32_t latent, uint32_t rope, uint8_t* row) {
  constexpr uint32_t UNIT = history_rows::UNIT;
  bool good = true;
  for (uint32_t first = 0; first < latent; first += Q8_GROUP) {
    float v[Q8_GROUP];
    uint32_t top = 0;
    for (uint32_t i = 0; i < Q8_GROUP; i++) {
      v[i] = load_f32(x + first + i);
      uint32_t magnitude = bits_of(v[i]) & 0x7fffffffu;
      top = magnitude > top ? magnitude : top;
    }
    uint16_t scale_bits = 0;
    for (uint32_t i = 0; i < Q8_GROUP; i += UNIT) {
      uint64_t values;
      if (!history_rows::quantise(v + i, top, &values, &scale_bits)) good = false;
      __builtin_memcpy(row + first + i, &values, sizeof values);
    }
    ((uint16_t*)(row + latent))[first / Q8_GROUP] = scale_bits;
  }
  bf16* tail = (bf16*)(row + q8_rope_offset(latent));
  for (uint32_t i = 0; i < rope; i++) {
    bf16 v = f32_to_bf16(load_f32(x + latent + i));
    if ((v.bits & 0x7f80u) == 0x7f80u) good = false;
    tail[i] = v;
  }
  return good;
}

// Grid: rows.
template <class T, bool QUANTISED> bool store_rows(const store_rows_args& a, Blocks& b) {
  for (uint64_t r = b.first; r < b.last; r++) {
    uint64_t ref = ((const uint64_t*)a.refs)[r];
    if (ref == 0) continue;
    uint8_t* row = (uint8_t*)b.row(ref, a.offsets, a.row_bytes);
    if (!row) return false;
    const T* x = (const T*)a.x + r * a.x_stride;
    if (!QUANTISED) memcpy(row, x, (a.latent + a.rope) * sizeof(T));
    else if (!quantise_row(x, a.latent, a.rope, row)) global_max((uint32_t*)a.error, (uint32_t)r + 1u);
  }
  return true;
}

// Grid: rows.
DEVICE bool place_rows(const place_rows_args& a, Blocks& b) {
  for (uint64_t r = b.first; r < b.last; r++) {
    uint64_t ref = ((const uint64_t*)a.refs)[r];
    if (ref == 0) continue;
    uint8_t* row = (uint8_t*)b.row(ref, a.offsets, a.row_bytes);
    if (!row) return false;
    memcpy(row, (const uint8_t*)a.rows + r * a.row_bytes, a.row_bytes);
  }
  return true;
}

// The row of an index key; null after a failed touch.
DEVICE uint8_t* key_row(Blocks& b, const uint64_t* table, uint32_t plane, uint32_t extent_rows, uint32_t row_bytes, uint32_t position,
                        uint64_t bytes) {
  uint64_t address = table[position / extent_rows] + ((uint64_t)plane * extent_rows + position % extent_rows) * row_bytes;
  return b.touch(address, bytes) ? (uint8_t*)address : nullptr;
}

// Grid: rows.
template <class T> bool append(const append_args& a, Blocks& b) {
  for (uint64_t r = b.first; r < b.last; r++) {
    int32_t position = ((const int32_t*)a.positions)[r];
    if (position < 0 || !share::holds((uint32_t)position, a.extent_rows, a.side, a.sides)) continue;
    uint32_t at = share::row_of((uint32_t)position, a.extent_rows, a.sides);
    const uint64_t* table = (const uint64_t*)a.tables + (uint64_t)((const int32_t*)a.sessions)[r] * a.table_stride;
    uint8_t* row = key_row(b, table, a.plane, a.extent_rows, a.row_bytes, at, a.width * sizeof(T));
    if (!row) return false;
    memcpy(row, (const T*)a.x + r * a.x_stride, a.width * sizeof(T));
  }
  return true;
}

}  // namespace stores

FAST_KERNEL(store_rows_f32_f32, store_rows_args, stores::store_rows<float, false>);
FAST_KERNEL(store_rows_bf16_bf16, store_rows_args, stores::store_rows<bf16, false>);
FAST_KERNEL(store_rows_f32_q8g64, store_rows_args, stores::store_rows<float, true>);
FAST_KERNEL(store_rows_bf16_q8g64, store_rows_args, stores::store_rows<bf16, true>);
FAST_KERNEL(place_rows, place_rows_args, stores::place_rows);
FAST_KERNEL(append_f32, append_args, stores::append<float>);
FAST_KERNEL(append_bf16, append_args, stores::append<bf16>);

}  // namespace host
}  // namespace
