// A stand-in for libcuda.so.1: every driver call succeeds at once and does nothing, so that what remains of a
// product's time is the host's own work. It describes one GPU, an H200.
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

static int nothing(void) { return 0; }
static int get_one(int* value) { *value = 1; return 0; }
static int get_zero(int* value) { *value = 0; return 0; }
static int get_version(int* value) { *value = 13000; return 0; }
static int get_handle(void** handle) { *handle = (void*)0x1000; return 0; }
static int get_name(char* name, int length, int device) { strncpy(name, "NVIDIA H200", length); return 0; }
static int get_id(void* stream, unsigned long long* id) { *id = (unsigned long long)(uintptr_t)stream + 1; return 0; }
static int allocate(uintptr_t* address, size_t bytes) { *address = (uintptr_t)aligned_alloc(256, (bytes + 511) / 256 * 256); return 0; }
static int is_capturing(void* stream, int* status) { *status = 0; return 0; }
static int pointer_attribute(int* value, int attribute, uintptr_t address) { *value = 0; return 0; }
static int attribute(int* value, int which, int device) {
  switch (which) {
    case 1: *value = 1024; break;        // threads of a block
    case 10: *value = 32; break;         // warp
    case 12: *value = 65536; break;      // registers of a block
    case 13: *value = 1980000; break;    // kHz
    case 16: *value = 132; break;        // SMs
    case 36: *value = 3201000; break;    // memory kHz
    case 37: *value = 6016; break;       // bus bits
    case 38: *value = 62914560; break;   // L2
    case 39: *value = 2048; break;       // threads of an SM
    case 75: *value = 9; break;
    case 76: *value = 0; break;
    case 81: *value = 233472; break;     // shared memory of an SM
    case 82: *value = 65536; break;      // registers of an SM
    case 97: *value = 232448; break;     // shared memory of a block
    case 106: *value = 32; break;        // blocks of an SM
    case 111: *value = 1024; break;      // reserved shared memory
    default: *value = 0;
  }
  return 0;
}

static const struct { const char* name; void* function; } known[] = {
    {"cuDriverGetVersion", get_version}, {"cuDeviceGetCount", get_one}, {"cuDeviceGet", get_zero},
    {"cuDeviceGetName", get_name}, {"cuDeviceGetAttribute", attribute}, {"cuDevicePrimaryCtxRetain", get_handle},
    {"cuCtxGetCurrent", get_handle}, {"cuCtxGetDevice", get_zero}, {"cuLibraryLoadData", get_handle},
    {"cuLibraryGetKernel", get_handle}, {"cuKernelGetFunction", get_handle}, {"cuStreamGetId", get_id},
    {"cuMemAllocAsync", allocate}, {"cuStreamIsCapturing", is_capturing}, {"cuPointerGetAttribute", pointer_attribute},
};
int cuGetProcAddress_v2(const char* symbol, void** function, int version, uint64_t flags, int* status) {
  *function = nothing;
  for (size_t i = 0; i < sizeof known / sizeof *known; ++i)
    if (!strcmp(symbol, known[i].name)) *function = known[i].function;
  if (!strcmp(symbol, "cuGetProcAddress")) *function = cuGetProcAddress_v2;
  if (status) *status = 0;
  return 0;
}
int cuGetProcAddress(const char* s, void** f, int v, uint64_t fl) { return cuGetProcAddress_v2(s, f, v, fl, 0); }
int cuInit(unsigned flags) { return 0; }
