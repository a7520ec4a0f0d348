// module.cpp - code objects, launches, graphs.
#include "driver.h"

#include <algorithm>
#include <functional>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <vector>

using namespace glm53_cuda;

namespace {

Module module_of(hipModule_t module) { return reinterpret_cast<Module>(module); }
Function function_of(hipFunction_t function) { return reinterpret_cast<Function>(function); }
Graph graph_of(hipGraph_t graph) { return reinterpret_cast<Graph>(graph); }
GraphExec exec_of(hipGraphExec_t exec) { return reinterpret_cast<GraphExec>(exec); }

// HIP's `extra` list (keys 1, 2, end 3) as CUDA's (keys 1, 2, end 0). Room for the two keys HIP has.
hipError_t translate_extra(void** extra, void* cuda[5]) {
  int out = 0;
  for (void** item = extra; *item != HIP_LAUNCH_PARAM_END; item += 2) {
    if (out >= 4) return fail(hipErrorInvalidValue, "hipModuleLaunchKernel: extra has no end");
    if (*item == HIP_LAUNCH_PARAM_BUFFER_POINTER) cuda[out] = reinterpret_cast<void*>(kLaunchBufferPointer);
    else if (*item == HIP_LAUNCH_PARAM_BUFFER_SIZE) cuda[out] = reinterpret_cast<void*>(kLaunchBufferSize);
    else return fail(hipErrorInvalidValue, "hipModuleLaunchKernel: unknown key in extra");
    cuda[out + 1] = item[1];
    out += 2;
  }
  cuda[out] = reinterpret_cast<void*>(kLaunchEnd);
  return hipSuccess;
}

// HIP's rules on shapes, so that a launch which passes here passes on AMD: grid y and z at most 65,535, grid * block below 2^32 each way.
bool shape_allowed(const unsigned int grid[3], const unsigned int block[3]) {
  for (int i = 0; i < 3; i++) {
    if (!grid[i] || !block[i]) return false;
    if ((uint64_t)grid[i] * block[i] >= (uint64_t)1 << 32) return false;
  }
  return grid[1] <= 65535 && grid[2] <= 65535;
}

// What a code object says about its kernels (portable_cuda.h): with kOverlapSymbol they wait themselves for the launch before, so a launch may begin
// before that has ended; a kernel `name` with a symbol name_lds takes so many bytes of dynamic workgroup memory, whatever its launch says.
// Sorted by function; guarded by known_mutex.
constexpr char kOverlapSymbol[] = "glm53_overlap";
struct Known {
  Function function;
  Module module;
  bool overlaps;
  unsigned int lds_bytes;
};
std::shared_mutex known_mutex;
std::vector<Known> known;

bool before(const Known& one, Function function) { return std::less<Function>()(one.function, function); }

Known known_of(Function function) {
  std::shared_lock<std::shared_mutex> lock(known_mutex);
  auto at = std::lower_bound(known.begin(), known.end(), function, before);
  return at != known.end() && at->function == function ? *at : Known{function, nullptr, false, 0};
}

void note(const Known& entry) {
  std::unique_lock<std::shared_mutex> lock(known_mutex);
  auto at = std::lower_bound(known.begin(), known.end(), entry.function, before);
  if (at == known.end() || at->function != entry.function) known.insert(at, entry);
  else *at = entry;
}

void forget(Module module) {
  std::unique_lock<std::shared_mutex> lock(known_mutex);
  known.erase(std::remove_if(known.begin(), known.end(), [&](const Known& entry) { return entry.module == module; }), known.end());
}

// Reads what the module says about a function, and tells the driver of its dynamic workgroup memory. Returns a CUresult.
int learn(const Driver* driver, Function function, Module module, const char* name) {
  Address symbol = 0;
  size_t bytes = 0;
  Known entry = {function, module, !driver->cuModuleGetGlobal_v2(&symbol, &bytes, module, kOverlapSymbol), 0};
  std::string lds = std::string(name) + "_lds";
  if (!driver->cuModuleGetGlobal_v2(&symbol, &bytes, module, lds.c_str())) {
    if (int result = driver->cuMemcpyDtoH_v2(&entry.lds_bytes, symbol, sizeof(entry.lds_bytes))) return result;
    if (int result = driver->cuFuncSetAttribute(function, kDynamicSharedBytesMax, (int)entry.lds_bytes)) return result;
  }
  if (entry.overlaps || entry.lds_bytes) note(entry);
  return 0;
}

}  // namespace

GLM53_EXPORT hipError_t hipModuleLoad(hipModule_t* module, const char* path) {
  if (!module || !path) return fail(hipErrorInvalidValue, "hipModuleLoad: module or path is null");
  Entered driver;
  if (hipError_t error = driver.enter()) return error;
  return finish(driver, driver->cuModuleLoad(reinterpret_cast<Module*>(module), path), "cuModuleLoad");
}

GLM53_EXPORT hipError_t hipModuleLoadData(hipModule_t* module, const void* image) {
  if (!module || !image) return fail(hipErrorInvalidValue, "hipModuleLoadData: module or image is null");
  Entered driver;
  if (hipError_t error = driver.enter()) return error;
  return finish(driver, driver->cuModuleLoadData(reinterpret_cast<Module*>(module), image), "cuModuleLoadData");
}

GLM53_EXPORT hipError_t hipModuleUnload(hipModule_t module) {
  if (!module) return fail(hipErrorInvalidHandle, "hipModuleUnload: module is null");
  Entered driver;
  if (hipError_t error = driver.enter()) return error;
  forget(module_of(module));
  return finish(driver, driver->cuModuleUnload(module_of(module)), "cuModuleUnload");
}

GLM53_EXPORT hipError_t hipModuleGetFunction(hipFunction_t* function, hipModule_t module, const char* name) {
  if (!function || !name) return fail(hipErrorInvalidValue, "hipModuleGetFunction: function or name is null");
  if (!module) return fail(hipErrorInvalidHandle, "hipModuleGetFunction: module is null");
  Entered driver;
  if (hipError_t error = driver.enter()) return error;
  int result = driver->cuModuleGetFunction(reinterpret_cast<Function*>(function), module_of(module), name);
  if (result) return finish(driver, result, "cuModuleGetFunction");
  return finish(driver, learn(driver, function_of(*function), module_of(module), name), "cuFuncSetAttribute");
}

GLM53_EXPORT hipError_t hipFuncGetAttribute(int* value, hipFunction_attribute what, hipFunction_t function) {
  if (!value) return fail(hipErrorInvalidValue, "hipFuncGetAttribute: value is null");
  if (!function) return fail(hipErrorInvalidDeviceFunction, "hipFuncGetAttribute: function is null");
  // The ten attributes have the same numbers in both interfaces (check_cuda_header.cpp).
  if (what < HIP_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK || what > HIP_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT)
    return fail(hipErrorInvalidValue, "hipFuncGetAttribute: unknown attribute");
  Entered driver;
  if (hipError_t error = driver.enter()) return error;
  return finish(driver, driver->cuFuncGetAttribute(value, what, function_of(function)), "cuFuncGetAttribute");
}

GLM53_EXPORT hipError_t hipModuleLaunchKernel(hipFunction_t function, unsigned int grid_x, unsigned int grid_y, unsigned int grid_z,
                                              unsigned int block_x, unsigned int block_y, unsigned int block_z, unsigned int shared_bytes,
                                              hipStream_t stream, void** params, void** extra) {
  if (!function) return fail(hipErrorInvalidDeviceFunction, "hipModuleLaunchKernel: function is null");
  const unsigned int grid[3] = {grid_x, grid_y, grid_z}, block[3] = {block_x, block_y, block_z};
  if (!shape_allowed(grid, block))
    return fail(hipErrorInvalidConfiguration, "hipModuleLaunchKernel: grid or block is outside HIP's limits");
  if (params && extra) return fail(hipErrorInvalidValue, "hipModuleLaunchKernel: kernelParams and extra exclude each other");
  void* cuda_extra[5] = {nullptr, nullptr, nullptr, nullptr, nullptr};
  if (extra)
    if (hipError_t error = translate_extra(extra, cuda_extra)) return error;
  Entered driver;
  if (hipError_t error = driver.enter()) return error;
  LaunchAttribute overlap = {kLaunchOverlap, 0, 1, {}};
  Known kernel = known_of(function_of(function));
  shared_bytes += kernel.lds_bytes;
  LaunchConfig config = {grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes, stream_of(stream), &overlap, kernel.overlaps};
  return finish(driver, driver->cuLaunchKernelEx(&config, function_of(function), params, extra ? cuda_extra : nullptr), "cuLaunchKernelEx");
}

GLM53_EXPORT hipError_t hipGraphInstantiateWithFlags(hipGraphExec_t* exec, hipGraph_t graph, unsigned long long flags) {
  if (!exec || !graph) return fail(hipErrorInvalidValue, "hipGraphInstantiateWithFlags: exec or graph is null");
  unsigned long long cuda = 0;
  if (flags & 1) cuda |= 1;  // hipGraphInstantiateFlagAutoFreeOnLaunch, CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH
  if (flags & 8) cuda |= 8;  // ...UseNodePriority, ...USE_NODE_PRIORITY
  if (flags & ~9ull) return fail(hipErrorInvalidValue, "hipGraphInstantiateWithFlags: unknown flag");
  Entered driver;
  if (hipError_t error = driver.enter()) return error;
  int result = driver->cuGraphInstantiateWithFlags(reinterpret_cast<GraphExec*>(exec), graph_of(graph), cuda);
  return finish(driver, result, "cuGraphInstantiateWithFlags");
}

// Neither failing node nor log is reported: the message of glm53_runtime_message says what the driver said.
GLM53_EXPORT hipError_t hipGraphInstantiate(hipGraphExec_t* exec, hipGraph_t graph, hipGraphNode_t* error_node, char* log,
                                            size_t log_bytes) {
  if (error_node) *error_node = nullptr;
  if (log && log_bytes) log[0] = '\0';
  return hipGraphInstantiateWithFlags(exec, graph, 0);
}

GLM53_EXPORT hipError_t hipGraphLaunch(hipGraphExec_t exec, hipStream_t stream) {
  if (!exec) return fail(hipErrorInvalidValue, "hipGraphLaunch: exec is null");
  Entered driver;
  if (hipError_t error = driver.enter()) return error;
  return finish(driver, driver->cuGraphLaunch(exec_of(exec), stream_of(stream)), "cuGraphLaunch");
}

// nodes null: *count becomes the number of nodes; otherwise at most *count nodes are written.
GLM53_EXPORT hipError_t hipGraphGetNodes(hipGraph_t graph, hipGraphNode_t* nodes, size_t* count) {
  if (!graph || !count) return fail(hipErrorInvalidValue, "hipGraphGetNodes: graph or count is null");
  Entered driver;
  if (hipError_t error = driver.enter()) return error;
  return finish(driver, driver->cuGraphGetNodes(graph_of(graph), reinterpret_cast<GraphNode*>(nodes), count), "cuGraphGetNodes");
}

GLM53_EXPORT hipError_t hipGraphExecDestroy(hipGraphExec_t exec) {
  if (!exec) return fail(hipErrorInvalidValue, "hipGraphExecDestroy: exec is null");
  Entered driver;
  if (hipError_t error = driver.enter()) return error;
  return finish(driver, driver->cuGraphExecDestroy(exec_of(exec)), "cuGraphExecDestroy");
}

GLM53_EXPORT hipError_t hipGraphDestroy(hipGraph_t graph) {
  if (!graph) return fail(hipErrorInvalidValue, "hipGraphDestroy: graph is null");
  Entered driver;
  if (hipError_t error = driver.enter()) return error;
  return finish(driver, driver->cuGraphDestroy(graph_of(graph)), "cuGraphDestroy");
}
