// api_module.cpp - code objects and kernel launches.
#include <cstring>

#include "api.h"
#include "kernel.h"

using namespace glm53_cpu;

namespace glm53_cpu {

constexpr uint64_t args_bytes_most = 4096;
constexpr uint32_t block_size_most = 1024;
constexpr uint32_t grid_yz_most = 65535;

static hipError_t keep_module(State& s, hipModule_t* handle, std::shared_ptr<Module> module, hipError_t error, const std::string& message) {
  if (error != hipSuccess) {
    s.message = message;
    return error;
  }
  module->device = this_thread().device;
  uint64_t number = s.new_handle();
  s.modules[number] = std::move(module);
  *handle = reinterpret_cast<hipModule_t>(number);
  return hipSuccess;
}

static hipError_t refuse(State& s, const glm53_host_kernel& kernel, hipError_t error, const std::string& why) {
  s.message = "launch of " + std::string(kernel.name) + ": " + why;
  return error;
}

static hipError_t check_shape(State& s, const glm53_host_kernel& kernel, const glm53_dim3& grid, const glm53_dim3& block,
                              uint32_t shared_bytes) {
  auto number = [](uint64_t value) { return std::to_string(value); };
  if (!grid.x || !grid.y || !grid.z || !block.x || !block.y || !block.z) {
    return refuse(s, kernel, hipErrorInvalidConfiguration, "a grid or block dimension is 0");
  }
  if (grid.y > grid_yz_most || grid.z > grid_yz_most) {
    return refuse(s, kernel, hipErrorInvalidConfiguration,
                  "grid y and z are " + number(grid.y) + " and " + number(grid.z) + ", at most 65535");
  }
  if (static_cast<uint64_t>(block.x) * block.y * block.z > block_size_most) {
    return refuse(s, kernel, hipErrorInvalidConfiguration, "more than 1024 work-items a block");
  }
  if (block.x != kernel.block_size || block.y != 1 || block.z != 1) {
    return refuse(s, kernel, hipErrorInvalidConfiguration,
                  "block is " + number(block.x) + " x " + number(block.y) + " x " + number(block.z) + ", the kernel was written for " +
                      number(kernel.block_size) + " x 1 x 1");
  }
  if (static_cast<uint64_t>(grid.x) * block.x >= 1ull << 32) {
    return refuse(s, kernel, hipErrorInvalidConfiguration, "grid x times block x is " + number(static_cast<uint64_t>(grid.x) * block.x) +
                                                               ", it must stay below 2^32");
  }
  if (shared_bytes) {
    return refuse(s, kernel, hipErrorInvalidValue, "dynamic shared memory is not used by host kernels, got " + number(shared_bytes));
  }
  return hipSuccess;
}

// The bytes of the `extra` array: key, value pairs up to HIP_LAUNCH_PARAM_END.
static bool parse_extra(void** extra, const void** buffer, size_t* bytes) {
  *buffer = nullptr;
  const size_t* size = nullptr;
  for (int i = 0; i < 8 && extra[i] != HIP_LAUNCH_PARAM_END; i += 2) {
    if (extra[i] == HIP_LAUNCH_PARAM_BUFFER_POINTER) *buffer = extra[i + 1];
    else if (extra[i] == HIP_LAUNCH_PARAM_BUFFER_SIZE) size = static_cast<const size_t*>(extra[i + 1]);
    else return false;
  }
  if (!*buffer || !size) return false;
  *bytes = *size;
  return true;
}

static hipError_t take_args(State& s, Launch& launch, void** params, void** extra) {
  const glm53_host_kernel& kernel = *launch.kernel;
  if (params && extra) return refuse(s, kernel, hipErrorInvalidValue, "both kernelParams and extra are given");
  if (kernel.args_bytes > args_bytes_most) return refuse(s, kernel, hipErrorInvalidValue, "more than 4096 bytes of arguments");
  const void* source = nullptr;
  if (extra) {
    size_t bytes = 0;
    if (!parse_extra(extra, &source, &bytes)) return refuse(s, kernel, hipErrorInvalidValue, "`extra` is malformed");
    if (bytes != kernel.args_bytes) {
      return refuse(s, kernel, hipErrorInvalidValue, "got " + std::to_string(bytes) + " bytes of arguments, the kernel takes " +
                                                         std::to_string(kernel.args_bytes));
    }
  } else if (kernel.args_bytes) {
    if (!params || !params[0]) return refuse(s, kernel, hipErrorInvalidValue, "no arguments are given");
    source = params[0];
  }
  launch.args.resize(kernel.args_bytes / sizeof(std::max_align_t) + 1);
  if (kernel.args_bytes) memcpy(launch.args.data(), source, kernel.args_bytes);
  return hipSuccess;
}

}  // namespace glm53_cpu

GLM53_EXPORT hipError_t hipModuleLoad(hipModule_t* handle, const char* path) {
  return call("hipModuleLoad", uses_device, [&](State& s, Lock&) {
    if (!handle || !path) return hipErrorInvalidValue;
    std::shared_ptr<Module> module;
    std::string message;
    hipError_t error = load_module_file(path, &module, &message);
    return keep_module(s, handle, std::move(module), error, message);
  });
}

GLM53_EXPORT hipError_t hipModuleLoadData(hipModule_t* handle, const void* image) {
  return call("hipModuleLoadData", uses_device, [&](State& s, Lock&) {
    if (!handle || !image) return hipErrorInvalidValue;
    std::shared_ptr<Module> module;
    std::string message;
    hipError_t error = load_module_image(image, &module, &message);
    return keep_module(s, handle, std::move(module), error, message);
  });
}

// Kernels that are queued keep their code; handles of its functions end here.
GLM53_EXPORT hipError_t hipModuleUnload(hipModule_t handle) {
  return call("hipModuleUnload", plain, [&](State& s, Lock&) {
    std::shared_ptr<Module> module = find(s.modules, handle);
    if (!module) return hipErrorInvalidHandle;
    for (auto function = s.functions.begin(); function != s.functions.end();) {
      if (function->second->module == module) function = s.functions.erase(function);
      else ++function;
    }
    s.modules.erase(reinterpret_cast<uint64_t>(handle));
    return hipSuccess;
  });
}

GLM53_EXPORT hipError_t hipModuleGetFunction(hipFunction_t* function, hipModule_t handle, const char* name) {
  return call("hipModuleGetFunction", plain, [&](State& s, Lock&) {
    if (!function || !name) return hipErrorInvalidValue;
    *function = nullptr;
    std::shared_ptr<Module> module = find(s.modules, handle);
    if (!module) return hipErrorInvalidHandle;
    for (uint32_t i = 0; i < module->table->kernel_count; i++) {
      if (strcmp(module->table->kernels[i].name, name) != 0) continue;
      auto made = std::make_shared<Function>();
      made->module = module;
      made->kernel = &module->table->kernels[i];
      uint64_t number = s.new_handle();
      s.functions[number] = made;
      *function = reinterpret_cast<hipFunction_t>(number);
      return hipSuccess;
    }
    s.message = std::string("the code object has no kernel named ") + name;
    return hipErrorNotFound;
  });
}

GLM53_EXPORT hipError_t hipFuncGetAttribute(int* value, hipFunction_attribute attribute, hipFunction_t handle) {
  return call("hipFuncGetAttribute", plain, [&](State& s, Lock&) {
    if (!value) return hipErrorInvalidValue;
    std::shared_ptr<Function> function = find(s.functions, handle);
    if (!function) return hipErrorInvalidHandle;
    if (attribute < HIP_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK || attribute > HIP_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT) {
      return hipErrorInvalidValue;
    }
    *value = attribute == HIP_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? static_cast<int>(function->kernel->block_size) : 0;
    return hipSuccess;
  });
}

GLM53_EXPORT hipError_t hipModuleLaunchKernel(hipFunction_t handle, unsigned int grid_x, unsigned int grid_y, unsigned int grid_z,
                                              unsigned int block_x, unsigned int block_y, unsigned int block_z, unsigned int shared_bytes,
                                              hipStream_t stream_handle, void** params, void** extra) {
  return call("hipModuleLaunchKernel", uses_device, [&](State& s, Lock&) {
    std::shared_ptr<Function> function = find(s.functions, handle);
    std::shared_ptr<Stream> stream = find_stream(s, stream_handle);
    if (!function || !stream) return hipErrorInvalidHandle;
    const glm53_host_kernel& kernel = *function->kernel;
    if (stream->device->lost != hipSuccess) return stream->device->lost;
    if (function->module->device != stream->device->index) {
      return refuse(s, kernel, hipErrorInvalidHandle, "its code object was loaded on device " + std::to_string(function->module->device) +
                                                          ", the stream is of device " + std::to_string(stream->device->index));
    }
    auto launch = std::make_shared<Launch>();
    launch->module = function->module;
    launch->kernel = function->kernel;
    launch->grid = {grid_x, grid_y, grid_z};
    hipError_t error = check_shape(s, kernel, launch->grid, {block_x, block_y, block_z}, shared_bytes);
    if (error == hipSuccess) error = take_args(s, *launch, params, extra);
    if (error != hipSuccess) return error;
    return submit(s, stream, std::make_shared<KernelOp>(s.memory, s.pool, launch));
  });
}
