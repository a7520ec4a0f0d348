// router.hip - sigmoid router with correction bias (DeepSeek-V3's "noaux_tc").
//   affinity = sigmoid(logit); choice = affinity + bias; pick the k experts of the largest choice, ties to the lowest id;
//   n_group > 1: a group's score is the sum of its two best choices, only the best topk_group groups (ties to the lowest) compete;
//   weight = affinity of the picked, divided by (their sum + 1e-20) if normalise, times scaling.
// 32 work-items a row, which hold an expert in 32 each and take the best one k times. The order is total (NaN goes last, then lower ids first), so exactly k
// are taken whatever the logits are; a NaN logit shows as a NaN weight if picked.
// Limits: experts <= 256, k <= 16, n_group <= 256, each group at least one expert.
#include "portable.h"
#include "scan.h"

namespace routing {

constexpr uint32_t EXPERTS_MAX = 256, EACH = EXPERTS_MAX / 32;
constexpr uint32_t SLOTS_MAX = 16;
constexpr uint32_t OUT_OF_GROUP = 0u;  // below the key of -inf

// LDS of pick, of each 32 work-items.
struct Scratch {
  uint32_t* keys;        // [EXPERTS_MAX] and
  uint32_t* group_keys;  // [EXPERTS_MAX]: n_group > 1 alone
};
constexpr uint32_t SCRATCH_WORDS = 2 * EXPERTS_MAX;

// Marks the experts of groups that do not compete.
DEVICE void drop_groups(const router_args& a, const Scratch& lds, uint32_t* key) {
  uint32_t lane = thread_id() % 32, members = a.experts / a.n_group;
  UNROLL
  for (uint32_t i = 0; i < EACH; i++) lds.keys[lane + 32 * i] = key[i];
  wave_sync();
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
    if (before >= a.topk_group) key[i] = OUT_OF_GROUP;
  }
  wave_sync();
}

// The experts of one row, by 32 work-items.
DEVICE void pick(const router_args& a, uint32_t row, const Scratch& lds) {
  uint32_t lane = thread_id() % 32, key[EACH], left = 0, chosen = 0;  // left: bit i: the lane's expert i may be taken
  float affinity[EACH], sum = 0.0f, weight = 0.0f;
  UNROLL
  for (uint32_t i = 0; i < EACH; i++) {
    uint32_t expert = lane + 32 * i;
    bool is = expert < a.experts;
    affinity[i] = is ? sigmoid_f32(((const float*)a.logits)[(uint64_t)row * a.experts + expert]) : 0.0f;
    key[i] = is ? order_key(affinity[i] + ((const float*)a.bias)[expert]) : OUT_OF_GROUP;
    left |= is ? 1u << i : 0u;
  }
  if (a.n_group > 1u) drop_groups(a, lds, key);
  for (uint32_t place = 0; place < a.k; place++) {
    uint64_t best = 0;  // key, then the lowest expert
    float of_best = 0.0f;
    UNROLL
    for (uint32_t i = 0; i < EACH; i++) {
      uint64_t one = left >> i & 1u ? (uint64_t)key[i] << 32 | ~(lane + 32 * i) : 0u;
      of_best = one > best ? affinity[i] : of_best;
      best = one > best ? one : best;
    }
    uint32_t expert = ~(uint32_t)wave32_max(best);
    float picked = shuffle_from(of_best, thread_id() / 32 * 32 % WAVE + expert % 32);
    left &= expert % 32 == lane ? ~(1u << expert / 32) : ~0u;
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
  routing::pick(a, block_x(), {words, words + routing::EXPERTS_MAX});
}
