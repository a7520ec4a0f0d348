// pool.h - host threads that run the blocks of one kernel launch in parallel. One launch at a time: the scheduler's baton sees to it.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace glm53_cpu {

class Pool {
 public:
  // Runs [first, last) ranges that together cover [0, total); a false result stops the rest. True if all were true.
  using Body = std::function<bool(uint64_t first, uint64_t last)>;

  ~Pool() { stop(); }
  void set_threads(unsigned threads);  // caller included; takes effect with the next run
  bool run(uint64_t total, const Body& body);
  void stop();

 private:
  void serve(uint64_t seen);
  void share(const Body& body, uint64_t total);

  std::mutex mutex_;
  std::condition_variable wake_, idle_;
  std::vector<std::thread> helpers_;
  std::atomic<unsigned> threads_{0};  // 0: one per processor
  const Body* body_ = nullptr;
  uint64_t total_ = 0;
  uint64_t chunk_ = 1;
  uint64_t round_ = 0;
  unsigned busy_ = 0;
  bool stopping_ = false;
  std::atomic<uint64_t> next_{0};
  std::atomic<bool> failed_{false};
};

}  // namespace glm53_cpu
