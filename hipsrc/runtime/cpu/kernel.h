// kernel.h - kernel launches: the checks before one, its blocks on the pool, and spinning kernels that give way.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "module.h"
#include "spin.h"
#include "state.h"

namespace glm53_cpu {

// What a launch fixes: copied at the API call and shared by replays of a graph.
struct Launch {
  std::shared_ptr<Module> module;
  const glm53_host_kernel* kernel = nullptr;
  glm53_dim3 grid = {0, 0, 0};
  std::vector<std::max_align_t> args;
  uint64_t blocks() const { return static_cast<uint64_t>(grid.x) * grid.y * grid.z; }
  uint64_t waiting_blocks() const;  // the first so many may wait for others
  uint64_t pointer(uint32_t index) const;
};

class KernelOp : public Op {
 public:
  KernelOp(Memory& memory, Pool& pool, std::shared_ptr<const Launch> launch) : memory_(memory), pool_(pool), launch_(std::move(launch)) {}
  bool advance(Step& step) override;
  bool spinning() const override { return spinning_; }
  uint64_t fingerprint() const override;
  const char* label() const override { return launch_->kernel->name; }
  std::shared_ptr<KernelOp> copy() const { return std::make_shared<KernelOp>(memory_, pool_, launch_); }

  // Services for the blocks (host_abi.h); they run on pool threads or on strands.
  bool may_touch(uint64_t address, uint64_t bytes);
  int run_blocks(uint64_t first, uint64_t last, bool fast, std::string* message);

 private:
  bool begin(Step& step);
  void wait_for_others();
  bool advance_plain(Step& step);  // all blocks but those
  bool advance_spinning(Step& step);
  bool end(Step& step);
  void report(Step& step, const std::string& message);

  Memory& memory_;
  Pool& pool_;
  std::shared_ptr<const Launch> launch_;
  bool begun_ = false;
  uint64_t waiting_ = 0;
  bool spinning_ = false;
  size_t fair_turn_ = 0;  // unseeded: strands in turn
  std::atomic<bool> forbidden_{false};
  std::vector<std::pair<uint64_t, uint64_t>> ranges_;  // seeded: block ranges still to run, last first
  std::unique_ptr<Strands> strands_;
  std::unique_ptr<View> view_;
  std::mutex message_mutex_;
  std::string message_;
};

}  // namespace glm53_cpu
