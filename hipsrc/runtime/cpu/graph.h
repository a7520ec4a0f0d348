// graph.h - stream capture and the replay of graphs.
#pragma once
#include <memory>
#include <vector>

#include "state.h"

namespace glm53_cpu {

// Replays the nodes of an executable graph as one operation of its stream, in some topological order (seeded: a random one, with the pieces
// of independent nodes interleaved).
class GraphOp : public Op {
 public:
  explicit GraphOp(std::shared_ptr<const GraphExec> exec) : exec_(std::move(exec)) {}
  bool advance(Step& step) override;
  bool spinning() const override { return spinning_; }
  uint64_t fingerprint() const override;
  const char* label() const override { return "graph"; }

 private:
  void begin();
  bool advance_node(Step& step);
  void finish(int node);
  std::shared_ptr<const GraphExec> exec_;
  std::vector<std::shared_ptr<Op>> running_;  // by node, made when it is first advanced
  std::vector<int> waiting_for_;              // by node: unfinished predecessors
  std::vector<std::vector<int>> followers_;
  std::vector<int> open_;                     // nodes that may run
  size_t turn_ = 0;
  bool begun_ = false;
  bool spinning_ = false;
};

// A fresh operation that does the work of a node's template; null for an empty node.
std::shared_ptr<Op> work_of(const Node& node);

// Submits an operation to a stream: into its hardware queue, or as a node while it is capturing.
hipError_t submit(State& s, const std::shared_ptr<Stream>& stream, const std::shared_ptr<Op>& op);

hipError_t begin_capture(State& s, const std::shared_ptr<Stream>& stream, hipStreamCaptureMode mode);
hipError_t end_capture(State& s, const std::shared_ptr<Stream>& stream, std::shared_ptr<Graph>* graph);
// Record and wait while capturing; both invalidate the capture where HIP says so.
void capture_record(const std::shared_ptr<Stream>& stream, Event& event);
hipError_t capture_wait(State& s, const std::shared_ptr<Stream>& stream, Event& event);
// An API call that no capture may see (allocation, synchronisation): hipErrorStreamCaptureUnsupported, and the captures in the way end.
hipError_t forbid_while_capturing(State& s);
// Use of the null stream while a blocking stream of the device captures.
hipError_t forbid_null_stream(State& s, const Device& device);

}  // namespace glm53_cpu
