/* Version, words, and registration: NCCL's memory is the driver's, and a handle is a record that
 * must be given back once. Windows are in onesided.c. */
#include "emulator.h"

struct handle {
  ncclComm_t comm;
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
  REQUIRE(comm, handle && base && size && nccl_bytes(comm, base, size), ncclInvalidArgument, "only device memory can be registered");
  struct handle *window = malloc(sizeof *window);
  *window = (struct handle){comm};
  *handle = window;
  return ncclSuccess;
}

static ncclResult_t take_out(ncclComm_t comm, struct handle *window) {
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
