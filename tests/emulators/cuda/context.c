/* Devices and contexts: NC10D_EMULATED_GPUS (4) devices of an imaginary kind, one primary context
 * each. A context is current for a thread, on a stack, as in the driver. */
#include "emulator.h"
#include <stdio.h>
#include <time.h>

#define DEEPEST 32

bool cuemu_ready;
int cuemu_devices;
static struct CUctx_st primary[MOST_DEVICES];
static __thread CUcontext stack[DEEPEST];
static __thread int depth;

int cuemu_number(const char *variable, int otherwise) {
  const char *text = getenv(variable);
  return text && *text ? atoi(text) : otherwise;
}

double cuemu_now(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec + 1e-9 * now.tv_nsec;
}

CUcontext cuemu_context(void) { return depth ? stack[depth - 1] : NULL; }

CUcontext cuemu_context_of(CUdevice device) { return &primary[device]; }

static bool known(CUdevice device) { return device >= 0 && device < cuemu_devices; }

CUresult cuInit(unsigned flags) {
  REQUIRE(flags == 0, CUDA_ERROR_INVALID_VALUE);
  int count = cuemu_number("NC10D_EMULATED_GPUS", 4);
  REQUIRE(count > 0, CUDA_ERROR_NO_DEVICE);
  pthread_mutex_lock(&cuemu_lock);
  if (!cuemu_ready) cuemu_devices = count < MOST_DEVICES ? count : MOST_DEVICES;
  for (int i = 0; i < cuemu_devices; i++) primary[i].device = i;
  cuemu_ready = true;
  pthread_mutex_unlock(&cuemu_lock);
  return CUDA_SUCCESS;
}

CUresult cuDriverGetVersion(int *version) {
  REQUIRE(version, CUDA_ERROR_INVALID_VALUE);
  *version = CUDA_VERSION;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetCount(int *count) {
  REQUIRE(cuemu_ready, CUDA_ERROR_NOT_INITIALIZED);
  *count = cuemu_devices;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice *device, int ordinal) {
  REQUIRE(cuemu_ready, CUDA_ERROR_NOT_INITIALIZED);
  REQUIRE(known(ordinal), CUDA_ERROR_INVALID_DEVICE);
  *device = ordinal;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetName(char *name, int length, CUdevice device) {
  REQUIRE(known(device), CUDA_ERROR_INVALID_DEVICE);
  snprintf(name, length, "nc10d emulated GPU");
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice device) {
  REQUIRE(known(device), CUDA_ERROR_INVALID_DEVICE);
  memset(uuid, 0, sizeof *uuid);
  memcpy(uuid->bytes, "emulated", 8);
  uuid->bytes[15] = (char)device;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetPCIBusId(char *text, int length, CUdevice device) {
  REQUIRE(known(device), CUDA_ERROR_INVALID_DEVICE);
  snprintf(text, length, "0000:%02X:00.0", device + 1);
  return CUDA_SUCCESS;
}

CUresult cuDeviceTotalMem(size_t *bytes, CUdevice device) {
  REQUIRE(known(device), CUDA_ERROR_INVALID_DEVICE);
  *bytes = (size_t)80 << 30;
  return CUDA_SUCCESS;
}

/* What programs ask of a device; anything else is 0, "not there". */
static const struct { CUdevice_attribute what; int value; } attributes[] = {
  {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 9}, {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, 0},
  {CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 132},   {CU_DEVICE_ATTRIBUTE_WARP_SIZE, 32},
  {CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK, 1024}, {CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X, 1024},
  {CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y, 1024},       {CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z, 64},
  {CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X, 0x7fffffff},  {CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y, 65535},
  {CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z, 65535},       {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK, 49152},
  {CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY, 65536}, {CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK, 65536},
  {CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR, 2048}, {CU_DEVICE_ATTRIBUTE_CLOCK_RATE, 1980000},
  {CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE, 2619000},  {CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH, 5120},
  {CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE, 50 << 20},     {CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING, 1},
  {CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY, 1},      {CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT, 2},
  {CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS, 1},       {CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED, 1},
  {CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED, 1},   {CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY, 0},
};

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute what, CUdevice device) {
  REQUIRE(cuemu_ready, CUDA_ERROR_NOT_INITIALIZED);
  REQUIRE(known(device), CUDA_ERROR_INVALID_DEVICE);
  *value = what == CU_DEVICE_ATTRIBUTE_PCI_BUS_ID ? device + 1 : 0;
  for (size_t i = 0; i < sizeof attributes / sizeof *attributes; i++)
    if (attributes[i].what == what) *value = attributes[i].value;
  return CUDA_SUCCESS;
}

/* Primary contexts */

CUresult cuDevicePrimaryCtxRetain(CUcontext *ctx, CUdevice device) {
  REQUIRE(cuemu_ready, CUDA_ERROR_NOT_INITIALIZED);
  REQUIRE(known(device), CUDA_ERROR_INVALID_DEVICE);
  *ctx = &primary[device];
  __atomic_fetch_add(&primary[device].retained, 1, __ATOMIC_RELAXED);
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRelease(CUdevice device) {
  REQUIRE(known(device), CUDA_ERROR_INVALID_DEVICE);
  REQUIRE(primary[device].retained, CUDA_ERROR_INVALID_CONTEXT);
  __atomic_fetch_sub(&primary[device].retained, 1, __ATOMIC_RELAXED);
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
  REQUIRE(known(device), CUDA_ERROR_INVALID_DEVICE);
  *flags = 0;
  *active = primary[device].retained > 0;
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxSetFlags(CUdevice device, unsigned flags) {
  (void)flags;
  return known(device) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

CUresult cuDevicePrimaryCtxReset(CUdevice device) {
  return known(device) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

CUresult cuCtxSetCurrent(CUcontext ctx) {
  if (!ctx) {
    if (depth) depth--;
    return CUDA_SUCCESS;
  }
  if (!depth) depth = 1;
  stack[depth - 1] = ctx;
  return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *ctx) {
  REQUIRE(cuemu_ready, CUDA_ERROR_NOT_INITIALIZED);
  *ctx = cuemu_context();
  return CUDA_SUCCESS;
}

CUresult cuCtxPushCurrent(CUcontext ctx) {
  REQUIRE(ctx && depth < DEEPEST, CUDA_ERROR_INVALID_CONTEXT);
  stack[depth++] = ctx;
  return CUDA_SUCCESS;
}

CUresult cuCtxPopCurrent(CUcontext *ctx) {
  REQUIRE(depth, CUDA_ERROR_INVALID_CONTEXT);
  depth--;
  if (ctx) *ctx = stack[depth];
  return CUDA_SUCCESS;
}

CUresult cuCtxGetDevice(CUdevice *device) {
  NEED_CONTEXT();
  *device = cuemu_context()->device;
  return CUDA_SUCCESS;
}

CUresult cuCtxGetApiVersion(CUcontext ctx, unsigned *version) {
  (void)ctx;
  *version = 3020;
  return CUDA_SUCCESS;
}

CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest) {
  NEED_CONTEXT();
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return CUDA_SUCCESS;
}

CUresult cuCtxGetLimit(size_t *value, CUlimit limit) {
  (void)limit;
  NEED_CONTEXT();
  *value = 0;
  return CUDA_SUCCESS;
}

CUresult cuDeviceCanAccessPeer(int *can, CUdevice device, CUdevice peer) {
  REQUIRE(known(device) && known(peer), CUDA_ERROR_INVALID_DEVICE);
  *can = device != peer;
  return CUDA_SUCCESS;
}
