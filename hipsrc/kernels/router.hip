// router.hip - sigmoid router with correction bias (DeepSeek-V3's "noaux_tc").
//   affinity = sigmoid(logit); choice = affinity + bias; pick the k experts of the largest choice, ties to the lowest id;
//   n_group > 1: a group's score is the sum of its two best choices, only the best topk_group groups (ties to the lowest) compete;
//   weight = affinity of the picked, divided by (their sum + 1e-20) if normalise, times scaling.
// LANES work-items a row, 32 or a block of 256, bring an expert in LANES each to LDS; then 32 of them hold one in 32 each and take the best one
// k times. The order is total (NaN goes last, then lower ids first), so exactly k are taken whatever the logits are; a NaN logit shows as a NaN
// weight if picked.
// Limits: experts <= 256, k <= 16, n_group <= 256, each group at least one expert, at least k experts compete.
#include "portable.h"
#include "scan.h"

namespace routing {

constexpr uint32_t EXPERTS_MAX = 256, EACH = EXPERTS_MAX / 32;
constexpr uint32_t SLOTS_MAX = 16;
constexpr uint32_t NONE = 0u;  // the key of what cannot be taken: below that of -inf

// LDS of pick, of each row at a time.
struct Scratch {
  uint32_t* keys;        // [EXPERTS_MAX]
  float* affinities;     // [EXPERTS_MAX]
  uint32_t* group_keys;  // [EXPERTS_MAX]: n_group > 1 alone
};
constexpr uint32_t SCRATCH_WORDS = 3 * EXPERTS_MAX;
DEVICE Scratch scratch_in(uint32_t* words) { return {words, (float*)words + EXPERTS_MAX, words + 2 * EXPERTS_MAX}; }

// Marks the experts of groups that do not compete.
DEVICE void drop_groups(const router_args& a, const Scratch& lds, uint32_t* key) {
  uint32_t lane = thread_id() % 32, members = a.experts / a.n_group;
  for (uint32_t g = lane; g < a.n_group; g += 32) {
    uint32_t best = 0, second = 0;
    for (uint32_t i = 0; i < members; i++) {
      uint32_t one = lds.keys[g * members + i];
      if (one > best) {
        second = best;
        best = one;
      } else if (one > second) {
        second = one;
      }
    }
    lds.group_keys[g] = order_key(members > 1u ? order_value(best) + order_value(second) : order_value(best));
  }
  wave_sync();
  UNROLL
  for (uint32_t i = 0; i < EACH; i++) {
    uint32_t group = (lane + 32 * i) / members, before = 0;
    for (uint32_t g = 0; g < a.n_group && group < a.n_group; g++) {
      before += (lds.group_keys[g] > lds.group_keys[group] || (lds.group_keys[g] == lds.group_keys[group] && g < group)) ? 1u : 0u;
    }
    if (before >= a.topk_group) key[i] = NONE;
  }
}

// The experts of one row, by LANES work-items; block_sync or, of 32, wave_sync before their LDS is used again.
template <uint32_t LANES> DEVICE void pick(const router_args& a, uint32_t row, const Scratch& lds) {
  UNROLL
  for (uint32_t i = 0; i < EXPERTS_MAX / LANES; i++) {
    uint32_t expert = thread_id() % LANES + LANES * i;
    bool is = expert < a.experts;
    float affinity = is ? sigmoid_f32(((const float*)a.logits)[(uint64_t)row * a.experts + expert]) : 0.0f;
    lds.affinities[expert] = affinity;
    lds.keys[expert] = is ? order_key(affinity + ((const float*)a.bias)[expert]) : NONE;
  }
  if (LANES == 32) wave_sync();
  else block_sync();
  if (thread_id() % LANES >= 32) return;
  uint32_t lane = thread_id() % 32, key[EACH], chosen = 0;
  float sum = 0.0f, weight = 0.0f;
  UNROLL
  for (uint32_t i = 0; i < EACH; i++) key[i] = lds.keys[lane + 32 * i];
  if (a.n_group > 1u) drop_groups(a, lds, key);
  ROLLED
  for (uint32_t place = 0; place < a.k; place++) {
    uint32_t best = NONE, at = lane;  // of several equal ones the lowest expert
    UNROLL
    for (uint32_t i = 0; i < EACH; i++) {
      at = key[i] > best ? lane + 32 * i : at;
      best = key[i] > best ? key[i] : best;
    }
    uint32_t expert = ~(uint32_t)wave32_max((uint64_t)best << 32 | ~at);
    float picked = lds.affinities[expert];
    UNROLL
    for (uint32_t i = 0; i < EACH; i++) key[i] = expert == lane + 32 * i ? NONE : key[i];
    sum += picked;
    if (place == lane) {
      chosen = expert;
      weight = picked;
    }
  }
  if (lane >= a.k) return;
  if (a.normalise) weight = weight / (sum + 1e-20f);
  uint64_t at = (uint64_t)row * a.k + lane;
  ((int32_t*)a.ids)[at] = (int32_t)chosen;
  ((float*)a.weights)[at] = weight * a.scaling;
}

}  // namespace routing

// LAUNCH router block=32 experts_max=256 slots_max=16
KERNEL(router, router_args, 32) {
  SHARED(uint32_t, words, routing::SCRATCH_WORDS);
  routing::pick<32>(a, block_x(), routing::scratch_in(words));
}
