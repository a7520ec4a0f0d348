// kernels.hip - the one translation unit of every code object: all kernel families, over portable.h.
//
// By hand, from the repository root (hipsrc/CMakeLists.txt does the same and writes the manifest):
//   mkdir -p build && python3 glm53/ops/args.py build/args.h
//   host:   g++ -shared -fPIC -x c++ -DGLM53_HOST -std=c++17 -O3 -march=x86-64-v3 -ffp-contract=fast -fno-math-errno -fno-trapping-math
//             -fvisibility=hidden -Ihipsrc/include -Ibuild hipsrc/kernels/kernels.hip -o build/kernels.so
//   AMD:    clang++-19 -x hip --offload-device-only --no-gpu-bundle-output --offload-arch=gfx1100 -nogpuinc -nogpulib -mcode-object-version=5
//             -fuse-cuid=none -O3 -std=c++17 -fno-exceptions -ffp-contract=fast -fno-math-errno -Ihipsrc/include -Ibuild
//             hipsrc/kernels/kernels.hip -o build/kernels.gfx1100.hsaco
//   NVIDIA: nvcc -cubin -arch=sm_90 -O3 -std=c++17 -x cu -Ihipsrc/include -Ibuild hipsrc/kernels/kernels.hip -o build/kernels.sm_90.cubin
// A line `// LAUNCH name block=256 key=value ...` above a kernel declares its launch constants; hipsrc/manifest.py hands them to Python.
#include "portable.h"

#include "basic.hip"
#include "matmul.hip"
#include "history.hip"
#include "rows.hip"
#include "weights.hip"
#include "litmus.hip"
#include "indexer.hip"
#include "topk.hip"
#include "hotcache.hip"
#include "step_select.hip"
#include "step_state.hip"
#include "mtp.hip"
#include "attention.hip"
#include "step_attention.hip"
#include "router.hip"
#include "step.hip"
#include "step_head.hip"
#include "step_halves.hip"
#include "experts.hip"
#include "step_experts.hip"
#include "sampling.hip"
#include "exchange.hip"
#include "merge.hip"
#include "select_both.hip"
#if defined(GLM53_HOST)
#include "../host/fast.h"
#endif
