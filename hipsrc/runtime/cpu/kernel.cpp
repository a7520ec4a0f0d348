// kernel.cpp - see kernel.h.
#include "kernel.h"

#include <algorithm>
#include <cstdio>
#include <cstring>

namespace glm53_cpu {
namespace {

constexpr uint64_t ranges_most = 1 << 16;        // seeded mode: a larger grid runs in this many shuffled ranges
constexpr uint64_t waiting_part_bytes = 1 << 20;
constexpr uint64_t fingerprint_bytes = 4096;     // looked at from each pointer argument

int hook_give_way(void*) { return Strands::give_way(); }
int hook_may_touch(void* context, uint64_t address, uint64_t bytes) {
  return static_cast<KernelOp*>(context)->may_touch(address, bytes) ? 1 : 0;
}

std::string hex(uint64_t value) {
  char out[32];
  snprintf(out, sizeof out, "0x%llx", static_cast<unsigned long long>(value));
  return out;
}

}  // namespace

uint64_t Launch::waiting_blocks() const {
  if (kernel->flags & GLM53_KERNEL_SPINS) return blocks();
  if (!(kernel->flags & GLM53_KERNEL_SPINS_FIRST)) return 0;
  uint32_t count = 0;
  memcpy(&count, reinterpret_cast<const uint8_t*>(args.data()) + (kernel->flags >> 16), sizeof count);
  return std::min<uint64_t>(count, blocks());
}

uint64_t Launch::pointer(uint32_t index) const {
  uint64_t value = 0;
  memcpy(&value, reinterpret_cast<const uint8_t*>(args.data()) + kernel->pointer_offsets[index], sizeof value);
  return value;
}

bool KernelOp::may_touch(uint64_t address, uint64_t bytes) {
  if (memory_.may_touch(device->index, address, bytes)) return true;
  if (!forbidden_.exchange(true)) {
    std::lock_guard<std::mutex> lock(message_mutex_);
    message_ = "kernel " + std::string(label()) + " read the address " + hex(address) + " from memory (" + std::to_string(bytes) +
               " bytes), which device " + std::to_string(device->index) +
               " may not touch: " + memory_.explain(device->index, address, bytes);
  }
  return false;
}

int KernelOp::run_blocks(uint64_t first, uint64_t last, bool fast, std::string* message) {
  glm53_host_hooks hooks{this, hook_give_way, hook_may_touch};
  char text[512] = {};
  const glm53_host_kernel* kernel = launch_->kernel;
  glm53_host_run run = fast ? kernel->fast : launch_->module->table->run_blocks;
  int result = run(kernel, launch_->args.data(), launch_->grid, first, last, &hooks, text, sizeof text);
  if (result != 0) *message = text;
  return result;
}

void KernelOp::report(Step& step, const std::string& message) {
  if (forbidden_) {
    std::lock_guard<std::mutex> lock(message_mutex_);
    step.fail(hipErrorIllegalAddress, message_);
  } else {
    step.fail(hipErrorLaunchFailure, "kernel " + std::string(label()) + ": " + (message.empty() ? "failed without a message" : message));
  }
}

// Checks the pointers of the argument struct and lays out the work. False: the launch failed.
bool KernelOp::begin(Step& step) {
  begun_ = true;
  const glm53_host_kernel& kernel = *launch_->kernel;
  for (uint32_t i = 0; i < kernel.pointer_count; i++) {
    uint64_t address = launch_->pointer(i);
    if (address == 0 || memory_.may_touch(device->index, address, 1)) continue;
    step.fail(hipErrorIllegalAddress,
              "kernel " + std::string(kernel.name) + ", argument offset " + std::to_string(kernel.pointer_offsets[i]) + ": device " +
                  std::to_string(device->index) + " may not touch " + hex(address) + ": " + memory_.explain(device->index, address, 1));
    return false;
  }
  waiting_ = launch_->waiting_blocks();
  uint64_t plain = launch_->blocks() - waiting_;
  if (!plain) wait_for_others();
  else if (step.random) {
    uint64_t count = std::min(plain, ranges_most);
    for (uint64_t i = 0; i < count; i++) {
      // Products stay below 2^64 in 128 bits only: blocks may be near 2^60.
      auto cut = [&](uint64_t at) { return waiting_ + static_cast<uint64_t>(static_cast<unsigned __int128>(plain) * at / count); };
      ranges_.emplace_back(cut(i), cut(i + 1));
    }
    for (uint64_t i = count; i > 1; i--) std::swap(ranges_[i - 1], ranges_[step.random->below(i)]);
  }
  return true;
}

// From here on the blocks run that may wait.
void KernelOp::wait_for_others() {
  const glm53_host_kernel& kernel = *launch_->kernel;
  bool all = kernel.flags & GLM53_KERNEL_SPINS;
  view_ = std::make_unique<View>();
  for (uint32_t i = 0; i < kernel.pointer_count; i++) {
    Place place = memory_.find(launch_->pointer(i));
    // Where the first blocks alone wait, large memory is that of the others: weights.
    if (place.known() && !place.block->coherent && (all || place.block->bytes <= waiting_part_bytes)) view_->add(place.block->alias, place.block->bytes);
  }
  strands_ =
      std::make_unique<Strands>(waiting_, [this](uint64_t block, std::string* message) { return run_blocks(block, block + 1, false, message); });
}

bool KernelOp::advance(Step& step) {
  if (!begun_ && !begin(step)) return true;
  if (strands_) return advance_spinning(step);
  if (!advance_plain(step)) return false;
  if (!waiting_ || step.error != hipSuccess) return true;
  wait_for_others();
  return false;
}

bool KernelOp::advance_plain(Step& step) {
  std::string message;
  if (!step.random) {
    bool fast = launch_->kernel->fast && !step.fibers;
    bool good = pool_.run(launch_->blocks() - waiting_, [&](uint64_t first, uint64_t last) {
      std::string text;
      if (run_blocks(waiting_ + first, waiting_ + last, fast, &text) == 0) return true;
      std::lock_guard<std::mutex> lock(message_mutex_);
      if (message.empty()) message = text;
      return false;
    });
    if (!good || forbidden_) {
      report(step, message);
      return true;
    }
    return fast || end(step);  // fast forms are compared with fibers, which are checked; the device's next synchronisation still looks
  }
  // Half of the kernels run in one step, the others in up to three parts with other queues in between.
  uint64_t parts = step.random->below(2) ? 1 : 1 + step.random->below(3);
  uint64_t count = (ranges_.size() + parts - 1) / parts;
  while (count-- && !ranges_.empty()) {
    std::pair<uint64_t, uint64_t> range = ranges_.back();
    ranges_.pop_back();
    if (run_blocks(range.first, range.second, false, &message) != 0 || forbidden_) {
      report(step, message);
      return true;
    }
  }
  return ranges_.empty() ? end(step) : false;
}

bool KernelOp::advance_spinning(Step& step) {
  bool gave_way = false, failed = false;
  std::string message;
  view_->enter();
  size_t turn = fair_turn_++;
  bool finished = strands_->resume(step.random ? step.random->next() : turn, &gave_way, &failed, &message);
  view_->leave();
  spinning_ = gave_way && !finished;
  bool stopped = failed || forbidden_;
  if (!stopped && !finished) return false;
  // The stream keeps its last operation: its threads and copies end here.
  strands_.reset();
  if (stopped) report(step, message);
  else view_->publish();
  view_.reset();
  return stopped || end(step);
}

// A kernel that wrote outside its buffers is named while it is known.
bool KernelOp::end(Step& step) {
  for (uint32_t i = 0; i < launch_->kernel->pointer_count; i++) {
    Place place = memory_.find(launch_->pointer(i));
    if (!place.known()) continue;
    std::string problem = memory_.check_block(*place.block);
    if (!problem.empty()) step.fail(hipErrorIllegalAddress, "kernel " + std::string(label()) + ": " + problem);
  }
  return true;
}

uint64_t KernelOp::fingerprint() const {
  // FNV-1a over what the pointer arguments show first: mailboxes, flags and results are small.
  uint64_t hash = 0xcbf29ce484222325ull;
  for (uint32_t i = 0; i < launch_->kernel->pointer_count; i++) {
    Place place = memory_.find(launch_->pointer(i));
    if (!place.known()) continue;
    auto bytes = reinterpret_cast<const volatile uint8_t*>(launch_->pointer(i));
    for (uint64_t k = 0; k < std::min(place.room, fingerprint_bytes); k++) hash = (hash ^ bytes[k]) * 0x100000001b3ull;
  }
  return hash;
}

}  // namespace glm53_cpu
