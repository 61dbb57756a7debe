/* What may happen to a communicator as a whole: it grows, and its memory is given up for a while. */
#include "emulator.h"

#define MEBIBYTE (1UL << 20)

struct growth {
  ncclComm_t child;
  int size, rank;
  char path[PATH]; /* empty: of the rank that made the id */
};

/* The rank that is asked makes the segment, and shows it in its part of the parent's. */
ncclResult_t ncclCommGetUniqueId(ncclComm_t comm, ncclUniqueId *id) {
  ncclResult_t result = nccl_usable(comm, __func__);
  if (result != ncclSuccess || nccl_fault(__func__, comm->rank, NULL, &result)) return result;
  struct member *mine = &comm->shared->members[comm->rank];
  REQUIRE(comm, atomic_load(&mine->grown) == comm->grows, ncclInvalidUsage, "the id before has not been used");
  memset(id, 0, sizeof *id);
  REQUIRE(comm, nccl_segment_new(mine->path) >= 0, ncclSystemError, "no shared memory");
  memcpy(id->internal, mine->path, PATH);
  atomic_store(&mine->grown, comm->grows + 1);
  nccl_ring_bell(comm);
  return ncclSuccess;
}

static int leader_of(ncclComm_t comm) {
  for (int rank = 0; rank < comm->size; rank++)
    if (atomic_load(&comm->shared->members[rank].grown) == comm->grows) return rank;
  return -1;
}

static bool shown(ncclComm_t comm, void *argument) {
  (void)argument;
  return leader_of(comm) >= 0;
}

static ncclResult_t join(ncclComm_t comm, void *args) {
  struct growth *growth = args;
  comm->size = growth->size;
  comm->rank = growth->rank;
  return nccl_attach(comm, growth->path);
}

static ncclResult_t grow(ncclComm_t parent, void *args) {
  struct growth *growth = args;
  parent->grows++;
  REQUIRE(parent, nccl_wait(parent, shown, NULL, false), ncclInternalError, "aborted while it grew");
  memcpy(growth->path, parent->shared->members[leader_of(parent)].path, PATH);
  ncclResult_t result = join(growth->child, growth);
  atomic_store(&growth->child->state, result);
  return result;
}

ncclResult_t ncclCommGrow(ncclComm_t comm, int size, const ncclUniqueId *id, int rank, ncclComm_t *result,
                          ncclConfig_t *config) {
  ncclResult_t checked = comm ? nccl_usable(comm, __func__) : ncclSuccess;
  if (checked != ncclSuccess) return checked;
  if (nccl_fault(__func__, comm ? comm->rank : rank, NULL, &checked)) return checked;
  if ((checked = nccl_check_config(config)) != ncclSuccess) return checked;
  REQUIRE(comm, result && size > 0, ncclInvalidArgument, "ncclCommGrow: total ranks must be positive, got %d", size);
  struct growth growth = {.size = size, .rank = rank};
  if (comm) {
    REQUIRE(comm, size > comm->size, ncclInvalidArgument, "ncclCommGrow: total ranks %d is less than current ranks %d", size, comm->size);
    REQUIRE(comm, rank == -1, ncclInvalidArgument, "ncclCommGrow: existing ranks must pass rank=-1, got %d", rank);
    REQUIRE(comm, !atomic_load(&comm->pending), ncclInvalidUsage, "ncclCommGrow: operations are under way");
    growth.rank = comm->rank;
    growth.child = *result = nccl_child(comm, config);
    return nccl_do(comm, grow, &growth, sizeof growth);
  }
  REQUIRE(NULL, id && rank >= 0 && rank < size, ncclInvalidArgument, "ncclCommGrow: new ranks need an id and a rank below %d, got %d", size, rank);
  int device;
  REQUIRE(NULL, nccl_driver() && !nccl_driver()->get_device(&device), ncclUnhandledCudaError, "no device is current");
  ncclComm_t child = *result = nccl_new(size, rank, config);
  child->device = device;
  nccl_driver()->event_create(&child->tail, CU_EVENT_DISABLE_TIMING);
  memcpy(growth.path, id->internal, PATH);
  return nccl_do(child, join, &growth, sizeof growth);
}

/* All ranks call, and none may have work under way. */
static ncclResult_t change(ncclComm_t comm, void *args) {
  REQUIRE(comm, nccl_meet(comm), ncclInternalError, "aborted while all ranks were awaited");
  atomic_store(&comm->suspended, *(bool *)args);
  return ncclSuccess;
}

static ncclResult_t turn(ncclComm_t comm, const char *name, bool suspended) {
  ncclResult_t result = nccl_check(comm);
  if (result != ncclSuccess || nccl_fault(name, comm->rank, NULL, &result)) return result;
  REQUIRE(comm, !atomic_load(&comm->pending), ncclInvalidUsage, "%s : operations are under way", name);
  REQUIRE(comm, atomic_load(&comm->suspended) != suspended, ncclInvalidUsage, "%s : that is so already", name);
  return nccl_do(comm, change, &suspended, sizeof suspended);
}

ncclResult_t ncclCommSuspend(ncclComm_t comm, int flags) {
  REQUIRE(comm, flags == NCCL_SUSPEND_MEM, ncclInvalidArgument, "ncclCommSuspend : flags %d", flags);
  return turn(comm, __func__, true);
}

ncclResult_t ncclCommResume(ncclComm_t comm) { return turn(comm, __func__, false); }

ncclResult_t ncclCommMemStats(ncclComm_t comm, ncclCommMemStat_t stat, uint64_t *value) {
  ncclResult_t result = nccl_check(comm);
  if (result != ncclSuccess) return result;
  const uint64_t values[] = {4 * MEBIBYTE, atomic_load(&comm->suspended), MEBIBYTE, 5 * MEBIBYTE};
  REQUIRE(comm, value && stat >= 0 && stat <= ncclStatGpuMemTotal, ncclInvalidArgument, "ncclCommMemStats : stat %d", stat);
  *value = values[stat];
  return ncclSuccess;
}
