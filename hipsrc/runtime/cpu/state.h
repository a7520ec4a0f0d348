// state.h - the runtime's one state: devices, streams, events, modules, graphs, and the operations that wait in hardware queues.
//
// Invariants
// * `State::mutex` guards everything here except Memory, which has its own lock, and the contents of an operation that is being executed.
// * One operation step runs at a time (`executing`); the thread that runs it does not hold the mutex meanwhile.
// * An operation waits only for operations that were submitted before it, so queues cannot lock each other up; only spinning kernels can.
// * A handle is a number that is never used twice: a stale one is found out by looking it up.
#pragma once
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "../hip_abi.h"
#include "memory.h"
#include "module.h"
#include "pool.h"

namespace glm53_cpu {

constexpr int queues_per_device = 4;

struct Device;
struct Stream;
struct Capture;
struct State;

// splitmix64 (Steele, Lea, Flood 2014).
class Random {
 public:
  explicit Random(uint64_t seed = 0) : state_(seed) {}
  uint64_t next() {
    uint64_t z = state_ += 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
  }
  uint64_t below(uint64_t bound) { return bound ? next() % bound : 0; }

 private:
  uint64_t state_;
};

// What an operation step needs, and how it reports a failure (which makes the device lost).
struct Step {
  Random* random = nullptr;  // null: unseeded, fair order
  bool fibers = false;       // kernels run as fibers even where they have a fast form
  hipError_t error = hipSuccess;
  std::string message;
  void fail(hipError_t code, std::string text) {
    if (error != hipSuccess) return;
    error = code;
    message = std::move(text);
  }
};

// One entry of a hardware queue, or one node of a graph.
struct Op {
  virtual ~Op() = default;
  // Does a part of the work; true when all of it is done. Called without the mutex, by one thread at a time.
  virtual bool advance(Step& step) = 0;
  virtual bool spinning() const { return false; }  // it gave way while waiting: nothing may have changed
  virtual uint64_t fingerprint() const { return 0; }  // of the memory a spinning kernel may exchange through
  virtual const char* label() const = 0;

  Device* device = nullptr;
  std::vector<std::shared_ptr<Op>> after;  // beyond the order of the queue
  uint64_t id = 0;
  bool done = false;
  hipError_t error = hipSuccess;  // set if it was dropped because its device was lost
  uint64_t finished_ns = 0;
};

// Does nothing; event records, waits and barriers are this with dependencies.
struct MarkerOp : Op {
  explicit MarkerOp(const char* name) : name_(name) {}
  bool advance(Step&) override { return true; }
  const char* label() const override { return name_; }

 private:
  const char* name_;
};

struct Queue {
  Device* device = nullptr;
  int index = 0;
  std::deque<std::shared_ptr<Op>> ops;
};

struct Device {
  int index = 0;
  hipError_t lost = hipSuccess;  // sticky
  Queue queues[queues_per_device];
  std::shared_ptr<Stream> null_stream;
  std::vector<std::shared_ptr<Stream>> streams;  // live ones, and destroyed ones with work left; the null stream first
  uint64_t streams_made = 0;
};

struct Stream {
  Device* device = nullptr;
  Queue* queue = nullptr;
  uint64_t handle = 0;  // 0: the null stream
  uint32_t flags = 0;
  bool destroyed = false;
  std::shared_ptr<Op> last;
  std::shared_ptr<Capture> capture;  // set while capturing
  std::vector<int> capture_tail;     // nodes the next one depends on
  bool blocking() const { return !(flags & hipStreamNonBlocking); }
};

struct Event {
  Device* device = nullptr;
  uint32_t flags = 0;
  std::shared_ptr<Op> record;
  std::shared_ptr<Capture> capture;  // last recorded while capturing
  std::vector<int> capture_nodes;
};

struct Node {
  std::shared_ptr<Op> work;  // template, never executed; null: an empty node
  std::vector<int> after;
  uint64_t handle = 0;
};

struct Graph {
  Device* device = nullptr;
  std::vector<Node> nodes;
};

struct GraphExec {
  Device* device = nullptr;
  std::vector<Node> nodes;
  std::weak_ptr<Op> last_launch;  // launches of one executable graph run one after another
};

struct Capture {
  std::shared_ptr<Graph> graph;
  hipStreamCaptureMode mode = hipStreamCaptureModeGlobal;
  std::thread::id thread;
  std::shared_ptr<Stream> origin;
  std::vector<std::shared_ptr<Stream>> streams;  // origin and forked ones
  bool invalidated = false;
};

struct Failure {
  uint64_t nth = 0;  // counts down
  hipError_t error = hipSuccess;
};

struct State {
  std::mutex mutex;
  std::condition_variable changed;       // a step ended, or operations were dropped
  std::condition_variable work_arrived;  // for the worker

  // Settings
  pid_t process = getpid();
  bool started = false;
  uint32_t device_count = 2;
  uint64_t bytes_per_device = 4ull << 30;
  bool seeded = false;
  bool fibers = false;  // asked for; seeded schedules and injected failures imply it
  Random random;

  Memory memory;
  Pool pool;
  std::vector<std::unique_ptr<Device>> devices;
  std::unordered_map<uint64_t, std::shared_ptr<Stream>> streams;
  std::unordered_map<uint64_t, std::shared_ptr<Event>> events;
  std::unordered_map<uint64_t, std::shared_ptr<Module>> modules;
  std::unordered_map<uint64_t, std::shared_ptr<Function>> functions;
  std::unordered_map<uint64_t, std::shared_ptr<Graph>> graphs;
  std::unordered_map<uint64_t, std::shared_ptr<GraphExec>> graph_execs;
  std::vector<std::shared_ptr<Capture>> captures;  // going on
  uint64_t handles_made = 0;
  uint64_t ops_made = 0;

  // Scheduling
  bool executing = false;
  bool stopping = false;
  bool worker_idle = false;
  int waiting_hosts = 0;
  size_t last_queue = 0;
  // Seeded mode. Uniform draws would rarely let one queue run far ahead of another or the host far ahead of all, so both have phases.
  size_t favoured_queue = 0;
  std::set<size_t> busy_queues;  // that ever had work since the seed was set
  size_t starved_queue = 0;   // number of queues: none
  uint64_t starve_left = 0;   // choices until another queue is starved
  int pace = 0;               // progress an API call allows: 0 and 1 none, 2 little, 3 much
  uint64_t pace_left = 0;     // calls until the pace is drawn anew
  uint64_t spin_steps = 0;         // in a row, of any kernel
  uint64_t spin_unchanged = 0;     // of those, since the exchanged memory last changed
  uint64_t spin_fingerprint = 0;
  uint64_t spin_changed_ns = 0;
  std::thread worker;
  std::string trace;               // seeded mode: one line a step

  // Control
  std::unordered_map<std::string, uint64_t> calls;
  std::unordered_map<std::string, Failure> failures;
  std::string message;

  uint64_t new_handle() { return 0x530000000000ull + 64 * ++handles_made; }
  void start();
  void stop();

  // Puts an operation at the end of the stream's hardware queue, behind what HIP's stream rules order before it.
  void enqueue(const std::shared_ptr<Stream>& stream, const std::shared_ptr<Op>& op);
  // Runs one step of some ready queue on the calling thread. False: nothing is ready, or a step is running already.
  bool run_step(std::unique_lock<std::mutex>& lock);
  // Seeded mode: the progress that one API call of the host allows.
  void pump(std::unique_lock<std::mutex>& lock);
  // Returns when the operation is done or dropped.
  void wait(std::unique_lock<std::mutex>& lock, const std::shared_ptr<Op>& op);
  void wait_device(std::unique_lock<std::mutex>& lock, Device& device);
  void lose(Device& device, hipError_t error, const std::string& text, std::vector<std::shared_ptr<Op>>* dropped);
  // The same from an API call: the dropped operations end outside the lock.
  void lose_now(std::unique_lock<std::mutex>& lock, Device& device, hipError_t error, const std::string& text);

 private:
  bool ready(const Queue& queue) const;
  Queue* choose();
  bool stuck();
  // Leaves the processors to others when only spinning kernels have run for a while.
  void rest(std::unique_lock<std::mutex>& lock);
  void wake_worker();
  void work();
};

State& state();
void replace_state();  // glm53_cpu_reset

uint64_t now_ns();

}  // namespace glm53_cpu
