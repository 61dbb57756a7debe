/* libcuda as this emulator uses it: dlopen by its soname, official functions only. */
#include "emulator.h"
#include <dlfcn.h>

#define TEXT(name) #name
#define SYMBOL(name) TEXT(name) /* cuda.h makes cuMemAlloc a macro for cuMemAlloc_v2 */
#define FIND(field, name) ((driver.field = (__typeof__(driver.field))dlsym(library, SYMBOL(name))) != NULL)

static struct driver driver;
static bool found;

static void find(void) {
  void *library = dlopen("libcuda.so.1", RTLD_NOW);
  found = library && FIND(get_device, cuCtxGetDevice) && FIND(launch_host, cuLaunchHostFunc) &&
          FIND(attribute, cuPointerGetAttribute) && FIND(event_create, cuEventCreate) &&
          FIND(event_destroy, cuEventDestroy) && FIND(event_record, cuEventRecord) &&
          FIND(wait_event, cuStreamWaitEvent) && FIND(capture_info, cuStreamGetCaptureInfo) &&
          FIND(object_create, cuUserObjectCreate) && FIND(graph_retain, cuGraphRetainUserObject) &&
          FIND(exchange_mode, cuThreadExchangeStreamCaptureMode) && FIND(synchronize_device, cuCtxSynchronize) &&
          FIND(alloc, cuMemAlloc) && FIND(free, cuMemFreeAsync) &&
          FIND(stream_create, cuStreamCreate) && FIND(synchronize, cuStreamSynchronize) &&
          FIND(stream_destroy, cuStreamDestroy) && FIND(retain, cuDevicePrimaryCtxRetain) &&
          FIND(let_go, cuDevicePrimaryCtxRelease) && FIND(stream_context, cuStreamGetCtx) &&
          FIND(set_current, cuCtxSetCurrent) && FIND(push, cuCtxPushCurrent) && FIND(pop, cuCtxPopCurrent);
}

const struct driver *nccl_driver(void) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  pthread_once(&once, find);
  return found ? &driver : NULL;
}

/* A device is current from `enter` to `exit`, whatever the calling thread has: NCCL switches, too. */
void nccl_enter(int device) {
  CUcontext context;
  if (!driver.retain(&context, device)) driver.push(context);
}

void nccl_exit(int device) {
  driver.pop(NULL);
  driver.let_go(device);
}

/* As cudaFree and cudaFreeHost do, with which a communicator's memory is made and freed. What others
 * capture is not broken by it: NCCL relaxes its own threads. */
void nccl_wait_for_device(int device) {
  CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
  nccl_enter(device);
  driver.exchange_mode(&mode);
  driver.synchronize_device();
  driver.exchange_mode(&mode);
  nccl_exit(device);
}

static void *bytes_of(CUdeviceptr address, size_t size) {
  void *bytes;
  CUdeviceptr first, last;
  if (driver.attribute(&bytes, CU_POINTER_ATTRIBUTE_HOST_POINTER, address)) return NULL;
  if (!size) return bytes;
  if (driver.attribute(&first, CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, address)) return NULL;
  if (driver.attribute(&last, CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, address + size - 1)) return NULL;
  return first == last ? bytes : NULL; /* the next allocation may begin where this one ends */
}

/* Where the bytes of device or pinned memory are, NULL if they are not all of one allocation. */
void *nccl_bytes(ncclComm_t comm, const void *pointer, size_t size) {
  nccl_enter(comm->device);
  void *bytes = bytes_of((CUdeviceptr)pointer, size);
  nccl_exit(comm->device);
  return bytes;
}
