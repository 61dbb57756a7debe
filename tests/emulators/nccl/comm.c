/* Communicators: made, asked, ended. The states are NCCL's: a nonblocking one is ncclInProgress
 * until its other ranks have come, and every call meanwhile is an ncclInvalidArgument. */
#include "emulator.h"
#include <sched.h>
#include <limits.h>
#include <stdarg.h>

#define MAGIC 0x6e63636cu

static __thread char last_error[256] = "";

/* Keep the words for ncclGetLastError; return `result`. */
ncclResult_t nccl_fail(ncclComm_t comm, ncclResult_t result, const char *format, ...) {
  va_list args;
  va_start(args, format);
  vsnprintf(last_error, sizeof last_error, format, args);
  va_end(args);
  if (comm) memcpy(comm->message, last_error, sizeof last_error);
  return result;
}

const char *ncclGetLastError(ncclComm_t comm) {
  if (comm && comm->magic == MAGIC && *comm->message) return comm->message;
  return last_error;
}

/* What every call asks first. */
ncclResult_t nccl_check(ncclComm_t comm) {
  if (!comm) return nccl_fail(NULL, ncclInvalidArgument, "comm argument is NULL");
  if (comm->magic != MAGIC) return nccl_fail(NULL, ncclInvalidArgument, "comm argument has been destroyed");
  ncclResult_t state = atomic_load(&comm->state);
  if (state == ncclInProgress)
    return nccl_fail(NULL, ncclInvalidArgument,
                     "Attempt to use communicator before the previous operation returned ncclSuccess");
  return state;
}

/* What every call that launches asks first. */
ncclResult_t nccl_usable(ncclComm_t comm, const char *name) {
  ncclResult_t result = nccl_check(comm);
  if (result != ncclSuccess) return result;
  REQUIRE(comm, !atomic_load(&comm->finalized), ncclInvalidArgument, "%s : communicator is finalized", name);
  REQUIRE(comm, !atomic_load(&comm->revoked), ncclInvalidUsage, "%s : communicator is revoked", name);
  REQUIRE(comm, !atomic_load(&comm->suspended), ncclInvalidUsage, "%s : communicator is suspended", name);
  return ncclSuccess;
}

static bool blocking(const ncclConfig_t *config) {
  return !config || config->size <= offsetof(ncclConfig_t, blocking) || config->blocking != 0;
}

/* A new communicator without its segment. */
ncclComm_t nccl_new(int size, int rank, const ncclConfig_t *config) {
  ncclComm_t comm = calloc(1, sizeof *comm);
  comm->magic = MAGIC;
  comm->rank = rank;
  comm->size = size;
  comm->fd = -1;
  comm->blocking = blocking(config);
  atomic_init(&comm->state, ncclInProgress);
  atomic_init(&comm->references, 1);
  return comm;
}

/* Making them */

ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
  ncclResult_t result;
  if (nccl_fault(__func__, -1, NULL, &result)) return result;
  REQUIRE(NULL, id, ncclInvalidArgument, "GetUniqueId : argument is NULL");
  memset(id, 0, sizeof *id);
  REQUIRE(NULL, nccl_segment_new(id->internal) >= 0, ncclSystemError, "no shared memory");
  return ncclSuccess;
}

static ncclResult_t join(ncclComm_t comm, void *path) { return nccl_attach(comm, path); }

/* What a field may be, if it is set (init.cc, parseCommConfig). */
static const struct { const char *name; size_t offset; int least, most; } fields[] = {
#define FIELD(name, least, most) {#name, offsetof(ncclConfig_t, name), least, most}
  FIELD(blocking, 0, 1),      FIELD(cgaClusterSize, 0, INT_MAX),     FIELD(minCTAs, 1, INT_MAX),
  FIELD(maxCTAs, 1, INT_MAX), FIELD(splitShare, 0, 1),               FIELD(collnetEnable, 0, 1),
  FIELD(CTAPolicy, 0, 2),     FIELD(shrinkShare, 0, 1),              FIELD(nvlsCTAs, 1, INT_MAX),
  FIELD(nChannelsPerNetPeer, 1, 64), FIELD(nvlinkCentricSched, 0, 1), FIELD(graphUsageMode, 0, 2),
};

ncclResult_t nccl_check_config(const ncclConfig_t *config) {
  if (!config) return ncclSuccess;
  REQUIRE(NULL, config->magic == NCCL_API_MAGIC, ncclInvalidArgument, "ncclConfig_t was not initialized");
  REQUIRE(NULL, config->size >= 16 && config->size <= 4096, ncclInvalidArgument, "ncclConfig_t has a bad size");
  for (size_t i = 0; i < sizeof fields / sizeof *fields && fields[i].offset < config->size; i++) {
    int value = *(const int *)((const char *)config + fields[i].offset);
    REQUIRE(NULL, value == NCCL_CONFIG_UNDEF_INT || (value >= fields[i].least && value <= fields[i].most),
            ncclInvalidArgument, "Invalid config %s attribute value %d", fields[i].name, value);
  }
  /* One that is not set counts as the least of all numbers: minCTAs alone is refused. */
  if (config->size > offsetof(ncclConfig_t, maxCTAs))
    REQUIRE(NULL, config->minCTAs <= config->maxCTAs, ncclInvalidArgument,
            "Invalid config min/max channels attribute value %d/%d", config->minCTAs, config->maxCTAs);
  return ncclSuccess;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t *result, int size, ncclUniqueId id, int rank, ncclConfig_t *config) {
  ncclResult_t faulty;
  if (nccl_fault("ncclCommInitRankConfig", rank, NULL, &faulty)) return faulty;
  REQUIRE(NULL, nccl_driver(), ncclUnhandledCudaError, "CUDA driver version is insufficient for CUDA runtime version");
  REQUIRE(NULL, result && size > 0 && rank >= 0 && rank < size, ncclInvalidArgument,
          "Invalid rank requested : %d/%d", rank, size);
  ncclResult_t checked = nccl_check_config(config);
  if (checked != ncclSuccess) return checked;
  int device;
  REQUIRE(NULL, !nccl_driver()->get_device(&device), ncclUnhandledCudaError, "no device is current");
  ncclComm_t comm = *result = nccl_new(size, rank, config);
  comm->device = device;
  nccl_driver()->event_create(&comm->tail, CU_EVENT_DISABLE_TIMING);
  return nccl_do(comm, join, id.internal, PATH);
}

ncclResult_t ncclCommInitRank(ncclComm_t *comm, int size, ncclUniqueId id, int rank) {
  return ncclCommInitRankConfig(comm, size, id, rank, NULL);
}

ncclResult_t ncclCommInitRankScalable(ncclComm_t *comm, int size, int rank, int ids, ncclUniqueId *id,
                                      ncclConfig_t *config) {
  REQUIRE(NULL, id && ids > 0, ncclInvalidArgument, "no unique ids");
  return ncclCommInitRankConfig(comm, size, *id, rank, config);
}

/* One process, one rank a device: a group of inits. */
ncclResult_t ncclCommInitAll(ncclComm_t *comms, int count, const int *devices) {
  ncclUniqueId id;
  REQUIRE(NULL, comms && count > 0, ncclInvalidArgument, "Invalid device count requested : %d", count);
  REQUIRE(NULL, nccl_driver(), ncclUnhandledCudaError, "CUDA driver version is insufficient for CUDA runtime version");
  ncclResult_t result = ncclGetUniqueId(&id);
  if (result == ncclSuccess) result = ncclGroupStart();
  for (int i = 0; i < count && result == ncclSuccess; i++) {
    CUcontext ctx;
    if (nccl_driver()->retain(&ctx, devices ? devices[i] : i) || nccl_driver()->set_current(ctx))
      result = nccl_fail(NULL, ncclUnhandledCudaError, "invalid device ordinal");
    else result = ncclCommInitRank(&comms[i], count, id, i);
  }
  ncclResult_t ended = ncclGroupEnd();
  return result == ncclSuccess ? ended : result;
}

/* Asking them */

static bool usable(ncclComm_t comm) { return comm && comm->magic == MAGIC; }

#define NEED(comm) REQUIRE(NULL, usable(comm), ncclInvalidArgument, "%s : comm argument is NULL", __func__)

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *error) {
  NEED(comm);
  *error = atomic_load(&comm->state);
  return ncclSuccess;
}

ncclResult_t ncclCommCount(const ncclComm_t comm, int *count) {
  NEED(comm);
  *count = comm->size;
  return ncclSuccess;
}

ncclResult_t ncclCommUserRank(const ncclComm_t comm, int *rank) {
  NEED(comm);
  *rank = comm->rank;
  return ncclSuccess;
}

ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int *device) {
  NEED(comm);
  *device = comm->device;
  return ncclSuccess;
}

/* Ending them */

static bool quiet(ncclComm_t comm, void *argument) {
  (void)argument;
  return atomic_load(&comm->pending) == 0;
}

static ncclResult_t flush(ncclComm_t comm, void *args) {
  (void)args;
  nccl_wait(comm, quiet, NULL, false);
  return ncclSuccess;
}

/* End what is in flight, and wait until it has ended. */
ncclResult_t nccl_stop(ncclComm_t comm) {
  atomic_store(&comm->revoked, true);
  nccl_ring_bell(comm);
  return flush(comm, NULL);
}

ncclResult_t ncclCommFinalize(ncclComm_t comm) {
  ncclResult_t result;
  if (!comm) return ncclSuccess;
  if (nccl_fault(__func__, comm->rank, NULL, &result)) return result;
  if ((result = nccl_check(comm)) != ncclSuccess) return result;
  REQUIRE(comm, !atomic_load(&comm->revoked), ncclInvalidUsage, "the communicator has been revoked");
  REQUIRE(comm, !atomic_exchange(&comm->finalized, true), ncclInvalidArgument, "communicator already finalized");
  return nccl_do(comm, flush, "", 1);
}

static void show(ncclComm_t comm, enum presence presence) {
  if (!comm->shared) return;
  atomic_store(&comm->shared->members[comm->rank].presence, presence);
  nccl_ring_bell(comm);
}

/* Give its memory back. Graphs with its launches have to be gone (init.cc, commDestroySync), and
 * whatever runs on the device has to be over. */
static void leave(ncclComm_t comm) {
  while (atomic_load(&comm->captured)) nccl_pause(0.001);
  nccl_wait_for_device(comm->device);
  if (atomic_exchange(&comm->left, true)) return;
  comm->magic = 0;
  nccl_release(comm);
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  ncclResult_t result;
  if (!comm) return ncclSuccess;
  NEED(comm);
  if (nccl_fault(__func__, comm->rank, NULL, &result)) return result;
  if (comm->shared) flush(comm, NULL);
  show(comm, LEFT);
  if (comm->shared) nccl_wait_for_node(comm);
  leave(comm);
  return ncclSuccess;
}

/* What an abort does once all that are in its group have stopped their operations. */
ncclResult_t nccl_end_aborted(ncclComm_t comm) {
  while (atomic_load(&comm->running)) sched_yield();
  leave(comm);
  return ncclSuccess;
}

/* Any thread, whatever the communicator is doing: what waits stops waiting. Afterwards no operation
 * touches memory. */
ncclResult_t ncclCommAbort(ncclComm_t comm) {
  ncclResult_t result;
  if (!comm) return ncclSuccess;
  NEED(comm);
  if (nccl_fault(__func__, comm->rank, NULL, &result)) return result;
  atomic_store(&comm->aborted, true);
  show(comm, ABORTED);
  return nccl_end_later(comm) ? ncclSuccess : nccl_end_aborted(comm);
}
