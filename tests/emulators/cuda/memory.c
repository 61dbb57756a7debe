/* Memory: device, pinned and registered host ranges. With NC10D_EMULATED_GUARD=1 a device address
 * can't be read or written by the CPU, as on a real GPU: its bytes lie elsewhere. */
#include "emulator.h"
#include <sys/mman.h>

#define PAGE 4096
#define ROUND(n, to) (((n) + (to) - 1) / (to) * (to))

static struct range *ranges;
static size_t in_use[MOST_DEVICES];

static bool guarded(void) { return cuemu_number("NC10D_EMULATED_GUARD", 0); }

/* The range that has all of [address, address + size), NULL if none has: a copy that this thread's
 * next call overwrites, because another thread may free the range just now. */
struct range *cuemu_range(uintptr_t address, size_t size) {
  static __thread struct range copy;
  pthread_mutex_lock(&cuemu_lock);
  struct range *found = ranges;
  while (found && !(address >= found->base && address + size <= found->base + found->size)) found = found->next;
  if (!found) found = cuemu_leaving(address, size);
  if (found) copy = *found;
  pthread_mutex_unlock(&cuemu_lock);
  return found ? &copy : NULL;
}

/* Where the bytes of an address are: a range's own, or the address itself for plain host memory. */
void *cuemu_bytes(uintptr_t address, size_t size) {
  struct range *range = cuemu_range(address, size);
  if (range) return range->shadow + (address - range->base);
  /* A copy that begins in a range and runs over its end is an error, not plain memory. */
  return cuemu_range(address, 1) ? NULL : (void *)address;
}

void cuemu_add_range(const struct range *added) {
  struct range *range = malloc(sizeof *range);
  *range = *added;
  pthread_mutex_lock(&cuemu_lock);
  range->next = ranges;
  ranges = range;
  if (range->kind == CU_MEMORYTYPE_DEVICE) in_use[range->device] += range->size;
  pthread_mutex_unlock(&cuemu_lock);
}

/* With the lock: take out the range that begins at `base`; false if there is none of that kind. */
bool cuemu_take_locked(uintptr_t base, CUmemorytype kind, struct range *taken) {
  for (struct range **link = &ranges; *link; link = &(*link)->next) {
    struct range *range = *link;
    if (range->base != base || range->kind != kind) continue;
    *taken = *range;
    *link = range->next;
    if (kind == CU_MEMORYTYPE_DEVICE) in_use[range->device] -= range->size;
    free(range);
    return true;
  }
  return false;
}

bool cuemu_take_range(uintptr_t base, CUmemorytype kind, struct range *taken) {
  pthread_mutex_lock(&cuemu_lock);
  bool found = cuemu_take_locked(base, kind, taken);
  pthread_mutex_unlock(&cuemu_lock);
  return found;
}

/* New memory of the current device, not yet among the ranges; false: there is not so much. */
bool cuemu_map(struct range *range, size_t size) {
  if (size >= (size_t)80 << 30) return false;
  size_t room = ROUND(size, PAGE);
  void *shadow = mmap(NULL, room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0), *base = shadow;
  if (guarded()) base = mmap(NULL, room, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (shadow == MAP_FAILED || base == MAP_FAILED) return false;
  memset(shadow, 0xCD, size); /* nothing may rely on zeros */
  CUdevice device = cuemu_context()->device;
  *range = (struct range){NULL, (uintptr_t)base, size, room, false, shadow, CU_MEMORYTYPE_DEVICE, device};
  return true;
}

void cuemu_unmap(const struct range *range) {
  munmap(range->shadow, range->room);
  if (range->shadow != (char *)range->base) munmap((void *)range->base, range->room);
}

CUresult cuMemAlloc(CUdeviceptr *pointer, size_t size) {
  NEED_CONTEXT();
  REQUIRE(pointer && size, CUDA_ERROR_INVALID_VALUE);
  CUresult unsafe = cuemu_unsafe();
  REQUIRE(unsafe == CUDA_SUCCESS, unsafe);
  struct range range;
  REQUIRE(cuemu_map(&range, size), CUDA_ERROR_OUT_OF_MEMORY);
  cuemu_add_range(&range);
  *pointer = (CUdeviceptr)range.base;
  return CUDA_SUCCESS;
}

/* Waits for the device, as the driver does: what is on its way may use the memory. */
CUresult cuMemFree(CUdeviceptr pointer) {
  NEED_CONTEXT();
  struct range range;
  REQUIRE(pointer, CUDA_SUCCESS);
  CUresult unsafe = cuemu_unsafe();
  REQUIRE(unsafe == CUDA_SUCCESS, unsafe);
  if (cuemu_context()) cuCtxSynchronize();
  REQUIRE(cuemu_take_range(pointer, CU_MEMORYTYPE_DEVICE, &range), CUDA_ERROR_INVALID_VALUE);
  cuemu_unmap(&range);
  return CUDA_SUCCESS;
}

/* Host memory */

static void add_host(void *base, size_t size) {
  CUdevice device = cuemu_context()->device;
  cuemu_add_range(&(struct range){NULL, (uintptr_t)base, size, ROUND(size, PAGE), false, base, CU_MEMORYTYPE_HOST, device});
}

CUresult cuMemHostAlloc(void **pointer, size_t size, unsigned flags) {
  (void)flags;
  NEED_CONTEXT();
  REQUIRE(pointer && size, CUDA_ERROR_INVALID_VALUE);
  CUresult unsafe = cuemu_unsafe();
  REQUIRE(unsafe == CUDA_SUCCESS, unsafe);
  void *base = mmap(NULL, ROUND(size, PAGE), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  REQUIRE(base != MAP_FAILED, CUDA_ERROR_OUT_OF_MEMORY);
  add_host(base, size);
  *pointer = base;
  return CUDA_SUCCESS;
}

CUresult cuMemAllocHost(void **pointer, size_t size) { return cuMemHostAlloc(pointer, size, 0); }

CUresult cuMemFreeHost(void *pointer) {
  NEED_CONTEXT();
  struct range range;
  if (cuemu_context()) cuCtxSynchronize();
  REQUIRE(cuemu_take_range((uintptr_t)pointer, CU_MEMORYTYPE_HOST, &range), CUDA_ERROR_INVALID_VALUE);
  cuemu_unmap(&range);
  return CUDA_SUCCESS;
}

CUresult cuMemHostRegister(void *pointer, size_t size, unsigned flags) {
  (void)flags;
  NEED_CONTEXT();
  REQUIRE(pointer && size, CUDA_ERROR_INVALID_VALUE);
  REQUIRE(!cuemu_range((uintptr_t)pointer, 1), CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
  add_host(pointer, size);
  return CUDA_SUCCESS;
}

CUresult cuMemHostUnregister(void *pointer) {
  NEED_CONTEXT();
  struct range range;
  REQUIRE(cuemu_take_range((uintptr_t)pointer, CU_MEMORYTYPE_HOST, &range), CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
  return CUDA_SUCCESS;
}

CUresult cuMemHostGetDevicePointer(CUdeviceptr *pointer, void *host, unsigned flags) {
  NEED_CONTEXT();
  (void)flags;
  REQUIRE(cuemu_range((uintptr_t)host, 1), CUDA_ERROR_INVALID_VALUE);
  *pointer = (CUdeviceptr)host;
  return CUDA_SUCCESS;
}

/* What is known of memory */

CUresult cuMemGetInfo(size_t *available, size_t *total) {
  NEED_CONTEXT();
  *total = (size_t)80 << 30;
  *available = *total - in_use[cuemu_context()->device];
  return CUDA_SUCCESS;
}

CUresult cuMemGetAddressRange(CUdeviceptr *base, size_t *size, CUdeviceptr pointer) {
  NEED_CONTEXT();
  struct range *range = cuemu_range(pointer, 1);
  REQUIRE(range && range->kind == CU_MEMORYTYPE_DEVICE, CUDA_ERROR_NOT_FOUND);
  if (base) *base = range->base;
  if (size) *size = range->size;
  return CUDA_SUCCESS;
}

/* HOST_POINTER of device memory is an error on a GPU; here it is how other emulators, which play
 * the part of kernels, find the bytes of guarded memory. */
CUresult cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr pointer) {
  NEED_CONTEXT();
  struct range *range = cuemu_range(pointer, 1);
  REQUIRE(range, CUDA_ERROR_INVALID_VALUE);
  switch (attribute) {
    case CU_POINTER_ATTRIBUTE_CONTEXT: *(CUcontext *)data = cuemu_context_of(range->device); break;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE: *(unsigned *)data = range->kind; break;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER: *(CUdeviceptr *)data = pointer; break;
    case CU_POINTER_ATTRIBUTE_HOST_POINTER: *(void **)data = range->shadow + (pointer - range->base); break;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *(int *)data = range->device; break;
    case CU_POINTER_ATTRIBUTE_IS_MANAGED: *(int *)data = 0; break;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR: *(CUdeviceptr *)data = range->base; break;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE: *(size_t *)data = range->size; break;
    default: return CUDA_ERROR_NOT_SUPPORTED;
  }
  return CUDA_SUCCESS;
}
