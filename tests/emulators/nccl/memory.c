/* Version, words, and registration: NCCL's memory is the driver's, and a handle is a record that
 * must be given back once. */
#include "emulator.h"

struct ncclWindow_vidmem {
  ncclComm_t comm;
  void *base;
};

/* NC10D_EMULATED_NCCL_VERSION stands for another version, as in 22809; the header's otherwise. */
ncclResult_t ncclGetVersion(int *version) {
  const char *text = getenv("NC10D_EMULATED_NCCL_VERSION");
  REQUIRE(NULL, version, ncclInvalidArgument, "GetVersion : version argument is NULL");
  *version = text ? atoi(text) : NCCL_VERSION_CODE;
  return ncclSuccess;
}

const char *ncclGetErrorString(ncclResult_t code) {
  static const char *const words[] = {
    "no error", "unhandled cuda error", "unhandled system error", "internal error", "invalid argument",
    "invalid usage", "remote process exited or there was a network error", "NCCL operation in progress", "timeout",
  };
  return code >= 0 && code < sizeof words / sizeof *words ? words[code] : "unknown result code";
}

ncclResult_t ncclMemAlloc(void **pointer, size_t size) {
  REQUIRE(NULL, nccl_driver(), ncclUnhandledCudaError, "CUDA driver version is insufficient for CUDA runtime version");
  REQUIRE(NULL, pointer && size, ncclInvalidArgument, "MemAlloc : invalid argument");
  REQUIRE(NULL, !nccl_driver()->alloc((CUdeviceptr *)pointer, size), ncclUnhandledCudaError, "out of memory");
  return ncclSuccess;
}

/* Unmapped at once, whatever is queued: a stream with nothing on it waits for nobody. */
ncclResult_t ncclMemFree(void *pointer) {
  CUstream idle;
  if (!pointer) return ncclSuccess;
  const struct driver *driver = nccl_driver();
  REQUIRE(NULL, driver && !driver->stream_create(&idle, CU_STREAM_NON_BLOCKING), ncclUnhandledCudaError, "no stream");
  CUresult freed = driver->free((CUdeviceptr)pointer, idle);
  driver->synchronize(idle);
  driver->stream_destroy(idle);
  REQUIRE(NULL, !freed, ncclInvalidArgument, "MemFree : not my memory");
  return ncclSuccess;
}

static ncclResult_t enter(ncclComm_t comm, void *base, size_t size, void **handle) {
  ncclResult_t result = nccl_check(comm);
  if (result != ncclSuccess) return result;
  REQUIRE(comm, handle && base && size && nccl_bytes(base, size), ncclInvalidArgument, "only device memory can be registered");
  ncclWindow_t window = malloc(sizeof *window);
  *window = (struct ncclWindow_vidmem){comm, base};
  *handle = window;
  return ncclSuccess;
}

static ncclResult_t take_out(ncclComm_t comm, ncclWindow_t window) {
  if (!window) return ncclSuccess;
  REQUIRE(NULL, comm, ncclInvalidArgument, "comm argument is NULL");
  REQUIRE(comm, window->comm == comm, ncclInvalidArgument, "this handle is of another communicator, or was given back");
  window->comm = NULL; /* the record stays: a second time must be an error */
  return ncclSuccess;
}

ncclResult_t ncclCommRegister(const ncclComm_t comm, void *base, size_t size, void **handle) {
  ncclResult_t result = nccl_check(comm);
  if (result != ncclSuccess || nccl_fault(__func__, comm->rank, NULL, &result)) return result;
  return enter(comm, base, size, handle);
}

ncclResult_t ncclCommDeregister(const ncclComm_t comm, void *handle) {
  ncclResult_t result;
  if (comm && nccl_fault(__func__, comm->rank, NULL, &result)) return result;
  return take_out(comm, handle);
}

/* All ranks call: a window is found by its peers. */
static ncclResult_t meet(ncclComm_t comm, void *args) {
  (void)args;
  REQUIRE(comm, nccl_meet(comm), ncclInternalError, "aborted while a window was registered");
  return ncclSuccess;
}

ncclResult_t ncclCommWindowRegister(ncclComm_t comm, void *base, size_t size, ncclWindow_t *window, int flags) {
  (void)flags;
  ncclResult_t result = nccl_check(comm);
  if (result != ncclSuccess) return result;
  REQUIRE(comm, (size_t)base % NCCL_WIN_REQUIRED_ALIGNMENT == 0, ncclInvalidArgument, "a window must be aligned to %d bytes",
          NCCL_WIN_REQUIRED_ALIGNMENT);
  if ((result = enter(comm, base, size, (void **)window)) != ncclSuccess) return result;
  return nccl_do(comm, meet, "", 1);
}

ncclResult_t ncclCommWindowDeregister(ncclComm_t comm, ncclWindow_t window) { return take_out(comm, window); }

ncclResult_t ncclWinGetUserPtr(ncclComm_t comm, ncclWindow_t window, void **pointer) {
  REQUIRE(comm, window && window->comm == comm && pointer, ncclInvalidArgument, "no such window");
  *pointer = window->base;
  return ncclSuccess;
}
