// api_graph.cpp - capture and graphs.
#include "api.h"

using namespace glm53_cpu;

namespace glm53_cpu {

static hipError_t instantiate(State& s, hipGraphExec_t* handle, hipGraph_t graph_handle) {
  if (!handle) return hipErrorInvalidValue;
  *handle = nullptr;
  std::shared_ptr<Graph> graph = find(s.graphs, graph_handle);
  if (!graph) return hipErrorInvalidValue;
  auto exec = std::make_shared<GraphExec>();
  exec->device = graph->device;
  exec->nodes = graph->nodes;
  uint64_t number = s.new_handle();
  s.graph_execs[number] = exec;
  *handle = reinterpret_cast<hipGraphExec_t>(number);
  return hipSuccess;
}

}  // namespace glm53_cpu

GLM53_EXPORT hipError_t hipStreamBeginCapture(hipStream_t handle, hipStreamCaptureMode mode) {
  return call("hipStreamBeginCapture", plain, [&](State& s, Lock&) {
    std::shared_ptr<Stream> stream = find_stream(s, handle);
    if (!stream) return hipErrorInvalidHandle;
    if (stream->device->lost != hipSuccess) return stream->device->lost;
    return begin_capture(s, stream, mode);
  });
}

GLM53_EXPORT hipError_t hipStreamEndCapture(hipStream_t handle, hipGraph_t* graph_handle) {
  return call("hipStreamEndCapture", plain, [&](State& s, Lock&) {
    if (!graph_handle) return hipErrorInvalidValue;
    *graph_handle = nullptr;
    std::shared_ptr<Stream> stream = find_stream(s, handle);
    if (!stream) return hipErrorInvalidHandle;
    std::shared_ptr<Graph> graph;
    hipError_t error = end_capture(s, stream, &graph);
    if (error != hipSuccess) return error;
    uint64_t number = s.new_handle();
    s.graphs[number] = graph;
    *graph_handle = reinterpret_cast<hipGraph_t>(number);
    return hipSuccess;
  });
}

GLM53_EXPORT hipError_t hipGraphInstantiate(hipGraphExec_t* handle, hipGraph_t graph, hipGraphNode_t* error_node, char* log,
                                            size_t log_bytes) {
  return call("hipGraphInstantiate", uses_device, [&](State& s, Lock&) {
    if (error_node) *error_node = nullptr;
    if (log && log_bytes) log[0] = 0;
    return instantiate(s, handle, graph);
  });
}

GLM53_EXPORT hipError_t hipGraphInstantiateWithFlags(hipGraphExec_t* handle, hipGraph_t graph, unsigned long long flags) {
  return call("hipGraphInstantiateWithFlags", uses_device, [&](State& s, Lock&) {
    if (flags) return hipErrorInvalidValue;
    return instantiate(s, handle, graph);
  });
}

GLM53_EXPORT hipError_t hipGraphLaunch(hipGraphExec_t handle, hipStream_t stream_handle) {
  return call("hipGraphLaunch", plain, [&](State& s, Lock&) {
    std::shared_ptr<GraphExec> exec = find(s.graph_execs, handle);
    std::shared_ptr<Stream> stream = find_stream(s, stream_handle);
    if (!exec) return hipErrorInvalidValue;
    if (!stream) return hipErrorInvalidHandle;
    if (stream->device->lost != hipSuccess) return stream->device->lost;
    if (exec->device != stream->device) {
      s.message = "graph of device " + std::to_string(exec->device->index) + " launched on a stream of device " +
                  std::to_string(stream->device->index) + ": capture one graph per device";
      return hipErrorInvalidValue;
    }
    if (stream->capture) {
      stream->capture->invalidated = true;
      s.message = "a graph launch inside a capture (child graph) is not supported: capture its kernels instead";
      return hipErrorStreamCaptureUnsupported;
    }
    auto op = std::make_shared<GraphOp>(exec);
    std::shared_ptr<Op> last = exec->last_launch.lock();
    if (last && !last->done) op->after.push_back(last);
    hipError_t error = submit(s, stream, op);
    if (error == hipSuccess) exec->last_launch = op;
    return error;
  });
}

GLM53_EXPORT hipError_t hipGraphGetNodes(hipGraph_t handle, hipGraphNode_t* nodes, size_t* count) {
  return call("hipGraphGetNodes", plain, [&](State& s, Lock&) {
    std::shared_ptr<Graph> graph = find(s.graphs, handle);
    if (!graph || !count) return hipErrorInvalidValue;
    size_t have = graph->nodes.size();
    if (!nodes) {
      *count = have;
      return hipSuccess;
    }
    for (size_t i = 0; i < *count; i++) nodes[i] = i < have ? reinterpret_cast<hipGraphNode_t>(graph->nodes[i].handle) : nullptr;
    if (*count > have) *count = have;
    return hipSuccess;
  });
}

// Launches that are queued keep the nodes alive.
GLM53_EXPORT hipError_t hipGraphExecDestroy(hipGraphExec_t handle) {
  return call("hipGraphExecDestroy", plain, [&](State& s, Lock&) {
    return s.graph_execs.erase(reinterpret_cast<uint64_t>(handle)) ? hipSuccess : hipErrorInvalidValue;
  });
}

GLM53_EXPORT hipError_t hipGraphDestroy(hipGraph_t handle) {
  return call("hipGraphDestroy", plain, [&](State& s, Lock&) {
    return s.graphs.erase(reinterpret_cast<uint64_t>(handle)) ? hipSuccess : hipErrorInvalidValue;
  });
}
