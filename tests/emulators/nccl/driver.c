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
          FIND(wait_event, cuStreamWaitEvent) && FIND(is_capturing, cuStreamIsCapturing) &&
          FIND(alloc, cuMemAlloc) && FIND(free, cuMemFree) && FIND(retain, cuDevicePrimaryCtxRetain) &&
          FIND(set_current, cuCtxSetCurrent);
}

const struct driver *nccl_driver(void) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  pthread_once(&once, find);
  return found ? &driver : NULL;
}

/* Where the bytes of device or pinned memory are, NULL if it is not all of that kind. */
void *nccl_bytes(const void *pointer, size_t size) {
  void *first, *last;
  CUdeviceptr address = (CUdeviceptr)pointer;
  if (driver.attribute(&first, CU_POINTER_ATTRIBUTE_HOST_POINTER, address)) return NULL;
  if (size && driver.attribute(&last, CU_POINTER_ATTRIBUTE_HOST_POINTER, address + size - 1)) return NULL;
  return !size || (char *)last - (char *)first == (ptrdiff_t)(size - 1) ? first : NULL;
}
