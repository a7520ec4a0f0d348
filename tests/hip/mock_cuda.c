/* mock_cuda.c - a libcuda.so.1 without a GPU, for tests of the cuda runtime: each call appends a line to a log, memory is the host's,
 * streams run at once, graphs replay counter_step launches. mock_fail(name, code) makes the next call of that name return code. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define DEVICES 2
typedef unsigned long long Address;

static char log_text[1 << 20];
static size_t log_used;
static char fail_name[64];
static int fail_code;
static _Thread_local void* current;
static char contexts[DEVICES], other_context;
static int handles;
static int capture_status;
static int event_status;
static unsigned pointer_type = 2;
static size_t allocated[DEVICES];
static void* overlap_module;

struct call { char name[32]; unsigned char args[64]; };
static struct call recorded[64];
static int recorded_count;

const char* mock_log(void) { return log_text; }
void mock_clear(void) { log_used = 0; log_text[0] = 0; }
void mock_fail(const char* name, int code) { snprintf(fail_name, sizeof fail_name, "%s", name); fail_code = code; }
void mock_pointer_type(unsigned type) { pointer_type = type; }
void mock_overlap_module(void* module) { overlap_module = module; }
void mock_event_status(int status) { event_status = status; }

static int note(const char* name, const char* text) {
  if (log_used + 512 < sizeof log_text) log_used += (size_t)snprintf(log_text + log_used, 512, "%s(%s)\n", name, text);
  if (fail_code && !strcmp(fail_name, name)) { int code = fail_code; fail_code = 0; return code; }
  return 0;
}
#define NOTE(name, ...)                        \
  do {                                         \
    char text[400];                            \
    snprintf(text, sizeof text, __VA_ARGS__);  \
    int error = note(name, text);              \
    if (error) return error;                   \
  } while (0)
#define NEED_CONTEXT if (!current) return 201

int cuInit(unsigned flags) { NOTE("cuInit", "%u", flags); return 0; }
int cuDriverGetVersion(int* v) { *v = 13000; return 0; }
int cuGetErrorName(int e, const char** s) { *s = e == 2 ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_MOCK"; return 0; }
int cuGetErrorString(int e, const char** s) { *s = e == 2 ? "out of memory" : "mocked"; return 0; }
int cuDeviceGetCount(int* n) { *n = DEVICES; return 0; }
int cuDeviceGet(int* d, int i) { if (i < 0 || i >= DEVICES) return 101; *d = i + 40; return 0; }
int cuDeviceGetName(char* s, int n, int d) { snprintf(s, (size_t)n, "Mock %d", d - 40); return 0; }
int cuDeviceTotalMem_v2(size_t* n, int d) { (void)d; *n = 1 << 30; return 0; }
int cuDeviceGetAttribute(int* v, int what, int d) {
  (void)d;
  switch (what) {
    case 1: *v = 1024; break;
    case 10: *v = 32; break;
    case 16: *v = 132; break;
    case 33: *v = 0x1b; break;
    case 75: *v = 9; break;
    case 76: *v = 0; break;
    default: *v = 1000 + what;
  }
  return 0;
}
int cuDeviceGetPCIBusId(char* s, int n, int d) { snprintf(s, (size_t)n, "0000:1b:00.%d", d - 40); return 0; }
int cuDeviceCanAccessPeer(int* v, int a, int b) { *v = a != b; return 0; }
int cuDevicePrimaryCtxRetain(void** c, int d) { NOTE("cuDevicePrimaryCtxRetain", "%d", d - 40); *c = &contexts[d - 40]; return 0; }
int cuCtxGetCurrent(void** c) { *c = current; return 0; }
static int device_of(void* c) { return c == &other_context ? 1 : (int)((char*)c - contexts); }
int cuCtxGetDevice(int* d) { NEED_CONTEXT; *d = device_of(current) + 40; return 0; }
int cuCtxSetCurrent(void* c) {
  char name[16] = "none";
  if (c == &other_context) snprintf(name, sizeof name, "other");
  else if (c) snprintf(name, sizeof name, "%d", device_of(c));
  NOTE("cuCtxSetCurrent", "%s", name);
  current = c;
  return 0;
}
/* What another user of CUDA in this thread does: makes a context current, the primary one of a device, another one on device 1 (2), or none. */
void mock_context(int which) { current = which < 0 ? NULL : which == 2 ? &other_context : &contexts[which]; }
int mock_current(void) { return !current ? -1 : current == &other_context ? 2 : device_of(current); }
int cuCtxSynchronize(void) { NEED_CONTEXT; NOTE("cuCtxSynchronize", "%s", ""); return 0; }
int cuCtxEnablePeerAccess(void* c, unsigned f) {
  NEED_CONTEXT;
  NOTE("cuCtxEnablePeerAccess", "%d, %u", (int)((char*)c - contexts), f);
  return 0;
}
int cuCtxDisablePeerAccess(void* c) { NEED_CONTEXT; NOTE("cuCtxDisablePeerAccess", "%d", (int)((char*)c - contexts)); return 0; }
int cuMemAlloc_v2(Address* a, size_t n) {
  NEED_CONTEXT;
  NOTE("cuMemAlloc_v2", "%zu", n);
  int d = (int)((char*)current - contexts);
  if (allocated[d] + n > (1u << 30)) return 2;
  allocated[d] += n;
  size_t* p = aligned_alloc(256, (n + 511) / 256 * 256);
  *p = 0;
  *a = (Address)(uintptr_t)p;
  return 0;
}
int cuMemFree_v2(Address a) {
  NEED_CONTEXT;
  NOTE("cuMemFree_v2", "%d", (int)((char*)current - contexts));
  free((void*)(uintptr_t)a);
  return 0;
}
int cuMemGetInfo_v2(size_t* f, size_t* t) { NEED_CONTEXT; *t = 1 << 30; *f = *t - allocated[(char*)current - contexts]; return 0; }
int cuMemHostAlloc(void** p, size_t n, unsigned f) { NEED_CONTEXT; NOTE("cuMemHostAlloc", "%zu, %u", n, f); *p = malloc(n); return 0; }
int cuMemFreeHost(void* p) { NOTE("cuMemFreeHost", "%s", ""); free(p); return 0; }
int cuMemHostRegister_v2(void* p, size_t n, unsigned f) { (void)p; NEED_CONTEXT; NOTE("cuMemHostRegister_v2", "%zu, %u", n, f); return 0; }
int cuMemHostUnregister(void* p) { (void)p; NOTE("cuMemHostUnregister", "%s", ""); return 0; }
int cuMemHostGetDevicePointer_v2(Address* a, void* p, unsigned f) {
  NOTE("cuMemHostGetDevicePointer_v2", "%u", f);
  *a = (Address)(uintptr_t)p;
  return 0;
}
int cuPointerGetAttributes(unsigned n, int* what, void** out, Address a) {
  for (unsigned i = 0; i < n; i++) switch (what[i]) {
    case 2: *(unsigned*)out[i] = pointer_type; break;
    case 3: *(Address*)out[i] = a; break;
    case 4: *(void**)out[i] = pointer_type == 1 ? (void*)(uintptr_t)a : NULL; break;
    case 8: *(unsigned*)out[i] = 0; break;
    case 9: *(int*)out[i] = 1; break;
    default: return 1;
  }
  return 0;
}
static int copy(Address t, Address s, size_t n) { memmove((void*)(uintptr_t)t, (void*)(uintptr_t)s, n); return 0; }
int cuMemcpy(Address t, Address s, size_t n) { NEED_CONTEXT; NOTE("cuMemcpy", "%zu", n); return copy(t, s, n); }
int cuMemcpyAsync(Address t, Address s, size_t n, void* q) { (void)q; NEED_CONTEXT; NOTE("cuMemcpyAsync", "%zu", n); return copy(t, s, n); }
int cuMemcpyPeerAsync(Address t, void* tc, Address s, void* sc, size_t n, void* q) {
  (void)q;
  NOTE("cuMemcpyPeerAsync", "%d, %d, %zu", (int)((char*)tc - contexts), (int)((char*)sc - contexts), n);
  return copy(t, s, n);
}
struct copy2d {
  size_t sx, sy;
  unsigned st;
  const void* sh;
  Address sd;
  void* sa;
  size_t sp, tx, ty;
  unsigned tt;
  void* th;
  Address td;
  void* ta;
  size_t tp, w, h;
};
int cuMemcpy2DAsync_v2(const struct copy2d* c, void* q) {
  (void)q;
  NOTE("cuMemcpy2DAsync_v2", "%u, %u, %zu, %zu, %zu, %zu", c->st, c->tt, c->sp, c->tp, c->w, c->h);
  const char* s = c->st == 1 ? c->sh : (const char*)(uintptr_t)c->sd;
  char* t = c->tt == 1 ? c->th : (char*)(uintptr_t)c->td;
  for (size_t i = 0; i < c->h; i++) memmove(t + i * c->tp, s + i * c->sp, c->w);
  return 0;
}
int cuMemcpyDtoH_v2(void* t, Address s, size_t n) { NOTE("cuMemcpyDtoH_v2", "%zu", n); return copy((Address)(uintptr_t)t, s, n); }
int cuMemcpyHtoD_v2(Address t, const void* s, size_t n) { NOTE("cuMemcpyHtoD_v2", "%zu", n); return copy(t, (Address)(uintptr_t)s, n); }
int cuMemcpyDtoHAsync_v2(void* t, Address s, size_t n, void* q) { (void)q; return copy((Address)(uintptr_t)t, s, n); }
int cuMemcpyHtoDAsync_v2(Address t, const void* s, size_t n, void* q) { (void)q; return copy(t, (Address)(uintptr_t)s, n); }
int cuMemsetD8_v2(Address t, unsigned char v, size_t n) {
  NOTE("cuMemsetD8_v2", "%u, %zu", v, n);
  memset((void*)(uintptr_t)t, v, n);
  return 0;
}
int cuMemsetD8Async(Address t, unsigned char v, size_t n, void* q) {
  (void)q;
  NOTE("cuMemsetD8Async", "%u, %zu", v, n);
  memset((void*)(uintptr_t)t, v, n);
  return 0;
}
static void* handle(void) { return (void*)(uintptr_t)(0x1000 + 16 * ++handles); }
int cuStreamCreate(void** s, unsigned f) { NEED_CONTEXT; NOTE("cuStreamCreate", "%u", f); *s = handle(); return 0; }
int cuStreamCreateWithPriority(void** s, unsigned f, int p) {
  NEED_CONTEXT;
  NOTE("cuStreamCreateWithPriority", "%u, %d", f, p);
  *s = handle();
  return 0;
}
int cuStreamDestroy_v2(void* s) { (void)s; NOTE("cuStreamDestroy_v2", "%s", ""); return 0; }
int cuStreamSynchronize(void* s) { NOTE("cuStreamSynchronize", "%s", s ? "stream" : "null"); return 0; }
int cuStreamQuery(void* s) { (void)s; return event_status; }
int cuStreamWaitEvent(void* s, void* e, unsigned f) { (void)s; (void)e; NOTE("cuStreamWaitEvent", "%u", f); return 0; }
int cuStreamIsCapturing(void* s, int* v) { (void)s; *v = capture_status; return 0; }
int cuStreamBeginCapture_v2(void* s, int m) {
  (void)s;
  NOTE("cuStreamBeginCapture_v2", "%d", m);
  capture_status = 1;
  recorded_count = 0;
  return 0;
}
int cuStreamEndCapture(void* s, void** g) { (void)s; NOTE("cuStreamEndCapture", "%s", ""); capture_status = 0; *g = recorded; return 0; }
int cuEventCreate(void** e, unsigned f) { NEED_CONTEXT; NOTE("cuEventCreate", "%u", f); *e = handle(); return 0; }
int cuEventRecord(void* e, void* s) { (void)e; (void)s; NOTE("cuEventRecord", "%s", ""); return 0; }
int cuEventQuery(void* e) { (void)e; return event_status; }
int cuEventSynchronize(void* e) { (void)e; NOTE("cuEventSynchronize", "%s", ""); return 0; }
int cuEventElapsedTime(float* ms, void* a, void* b) { (void)a; (void)b; *ms = 1.5f; return 0; }
int cuEventDestroy_v2(void* e) { (void)e; return 0; }
int cuModuleLoad(void** m, const char* path) { NEED_CONTEXT; NOTE("cuModuleLoad", "%s", path); *m = handle(); return 0; }
int cuModuleLoadData(void** m, const void* p) { (void)p; NOTE("cuModuleLoadData", "%s", ""); *m = handle(); return 0; }
int cuModuleUnload(void* m) { (void)m; return 0; }
int cuModuleGetFunction(void** f, void* m, const char* name) {
  (void)m;
  if (!strcmp(name, "absent")) return 500;
  *f = strdup(name);
  return 0;
}
int cuFuncGetAttribute(int* v, int what, void* f) { (void)f; *v = 100 + what; return 0; }
int cuFuncSetAttribute(void* f, int what, int v) { NOTE("cuFuncSetAttribute", "%s, %d, %d", (char*)f, what, v); return 0; }
static void run(const char* name, const unsigned char* args) {
  if (strcmp(name, "counter_step")) return;
  uint64_t *state, *step;
  uint32_t slot;
  memcpy(&state, args, 8);
  memcpy(&step, args + 8, 8);
  memcpy(&slot, args + 16, 4);
  state[slot] = state[slot] * 6364136223846793005ull + *step;
}
struct attribute { int id, padding, value, rest[15]; };
struct config { unsigned gx, gy, gz, bx, by, bz, lds; void* stream; struct attribute* attributes; unsigned attribute_count; };
int cuModuleGetGlobal_v2(uint64_t* p, size_t* bytes, void* m, const char* name) {
  static const int wide_lds = 70000;
  if (!strcmp(name, "wide_lds")) {
    *p = (uintptr_t)&wide_lds;
    *bytes = 4;
    return 0;
  }
  if (strcmp(name, "glm53_overlap") || m != overlap_module) return 500;
  *p = 4096;
  *bytes = 4;
  return 0;
}
int cuLaunchKernelEx(const struct config* l, void* f, void** params, void** extra) {
  NEED_CONTEXT;
  struct call* c = &recorded[recorded_count % 64];
  snprintf(c->name, sizeof c->name, "%s", (char*)f);
  size_t bytes = 0;
  if (extra) {
    const void* buffer = NULL;
    for (void** e = extra; *e; e += 2) { if (*e == (void*)1) buffer = e[1]; else bytes = *(size_t*)e[1]; }
    memcpy(c->args, buffer, bytes);
  } else memcpy(c->args, params[0], 24);
  int overlap = l->attribute_count == 1 && l->attributes->id == 6 && l->attributes->value == 1;
  NOTE("cuLaunchKernelEx", "%s, %u %u %u, %u %u %u, %u, extra %zu%s", (char*)f, l->gx, l->gy, l->gz, l->bx, l->by, l->bz, l->lds, bytes,
       overlap ? ", overlap" : l->attribute_count ? ", unknown attributes" : "");
  if (capture_status) recorded_count++;
  else run(c->name, c->args);
  return 0;
}
int cuGraphInstantiateWithFlags(void** x, void* g, unsigned long long f) {
  (void)g;
  NOTE("cuGraphInstantiateWithFlags", "%llu", f);
  *x = handle();
  return 0;
}
int cuGraphLaunch(void* x, void* s) {
  (void)x;
  (void)s;
  for (int i = 0;
  i < recorded_count;
  i++) run(recorded[i].name, recorded[i].args);
  return 0;
}
int cuGraphGetNodes(void* g, void** n, size_t* c) { (void)g; (void)n; *c = (size_t)recorded_count; return 0; }
int cuGraphExecDestroy(void* x) { (void)x; return 0; }
int cuGraphDestroy(void* g) { (void)g; return 0; }
