// step_router_rows.h - the router's logits of bf16 x for the fast host build, in the order of step.hip's multiply_router: 256 work-items, chunk c of
// 4 values is work-item c % 256's. Eight work-items are the lanes of a register.
#pragma once

namespace {
namespace host {
namespace step_router {

constexpr uint32_t ITEMS = 256, CHUNK = 4, TURN = ITEMS * CHUNK, STEP = LANES * CHUNK;  // values of a turn of the block, and of a register's lanes

// Floats of a row of x: whole steps, zeros past k. Of a step, first value 0 of each lane, then value 1 ..
DEVICE size_t row_floats(uint32_t k) { return ((size_t)k + STEP - 1) / STEP * STEP; }
inline void pack(const float* x, uint32_t k, float* to) {
  for (uint32_t i = 0; i < row_floats(k); i++) to[i / STEP * STEP + i % CHUNK * LANES + i % STEP / CHUNK] = i < k ? x[i] : 0.0f;
}

// x times w over k values, in the block's order; x packed, w [k]. A register has the chains of eight work-items; four go side by side.
inline float dot(const float* x, const float* w, uint32_t k) {
  constexpr uint32_t SIDE = 4;
  float total = 0.0f;
  for (uint32_t wave = 0; wave < ITEMS; wave += WAVE) {
    lanes8 sum[SIDE] = {};
    static_assert(SIDE * LANES == WAVE, "the registers of a wave");
    for (uint32_t turn = wave * CHUNK; turn < k; turn += TURN) {
      UNROLL
      for (uint32_t i = 0; i < SIDE; i++) {
        uint32_t at = turn + i * STEP;
        if (at >= k) continue;
        words8 word[CHUNK];
        if (at + STEP <= k) {
          products::load_words((const uint8_t*)(w + at), (const uint8_t*)(w + at + STEP / 2), word);
        } else {
          float rest[STEP] = {};
          memcpy(rest, w + at, (k - at) * sizeof(float));
          products::load_words((const uint8_t*)rest, (const uint8_t*)(rest + STEP / 2), word);
        }
        UNROLL
        for (uint32_t j = 0; j < CHUNK; j++) sum[i] = fma8(load8(x + at + j * LANES), (lanes8)word[j], sum[i]);
      }
    }
    lanes8 s = (sum[0] + sum[2]) + (sum[1] + sum[3]);
    total += ((s[0] + s[4]) + (s[2] + s[6])) + ((s[1] + s[5]) + (s[3] + s[7]));
  }
  return total;
}

// A row of x, times norm if there is one, packed; returns 1 / sqrt(mean(x^2) + eps), or 1 without a norm. room: [k] f32.
inline float prepare(const bf16* x, const bf16* norm, uint32_t k, float eps, float* room, float* packed) {
  for (uint32_t c = 0; c < k; c++) room[c] = load_f32(x + c);
  pack(room, k, packed);
  if (!norm) return 1.0f;
  float squares = dot(packed, room, k);
  for (uint32_t c = 0; c < k; c++) room[c] *= load_f32(norm + c);
  pack(room, k, packed);
  return rsqrt_exact(squares / (float)k + eps);
}

}  // namespace step_router
}  // namespace host
}  // namespace
