/* Communicators from communicators: split, shrink, revoke. Whoever will be rank 0 of the new one
 * makes its segment and shows the path in its part of the old one. */
#include "emulator.h"

struct plan {
  ncclComm_t child; /* there at once, and ncclInProgress until it has its segment */
  int color, key, flags, count;
  int excluded[MOST_RANKS];
  ncclComm_t *result; /* where a split's child is shown, once the parent takes calls again */
};

/* Whether `a` comes before `b` in the new communicator. */
static bool before(const struct member *members, int a, int b) {
  return members[a].key < members[b].key || (members[a].key == members[b].key && a < b);
}

static ncclResult_t start(ncclComm_t comm, int size, int rank, const char *path) {
  comm->size = size;
  comm->rank = rank;
  ncclResult_t result = nccl_attach(comm, path);
  atomic_store(&comm->state, result);
  return result;
}

static ncclResult_t split(ncclComm_t parent, void *args) {
  struct plan *plan = args;
  struct member *members = parent->shared->members, *mine = &members[parent->rank];
  mine->color = plan->color;
  mine->key = plan->key;
  REQUIRE(parent, nccl_meet(parent), ncclInternalError, "aborted in a split");
  int size = 0, rank = 0, leader = parent->rank;
  for (int other = 0; other < parent->size; other++) {
    if (members[other].color != plan->color) continue;
    size++;
    rank += before(members, other, parent->rank);
    if (before(members, other, leader)) leader = other;
  }
  bool takes_part = plan->color != NCCL_SPLIT_NOCOLOR;
  if (takes_part && leader == parent->rank) nccl_segment_new(mine->path);
  REQUIRE(parent, nccl_meet(parent), ncclInternalError, "aborted in a split");
  if (!takes_part) return ncclSuccess;
  ncclResult_t result = start(plan->child, size, rank, members[leader].path);
  *plan->result = plan->child;
  return result;
}

static bool excluded(const struct plan *plan, int rank) {
  for (int i = 0; i < plan->count; i++)
    if (plan->excluded[i] == rank) return true;
  return false;
}

struct awaited {
  atomic_ulong *counter;
  unsigned long number;
};

static bool reached(ncclComm_t comm, void *argument) {
  (void)comm;
  struct awaited *awaited = argument;
  return atomic_load(awaited->counter) >= awaited->number;
}

/* Only those who stay call; the others may be dead. */
static ncclResult_t shrink(ncclComm_t parent, void *args) {
  struct plan *plan = args;
  struct member *members = parent->shared->members;
  if (plan->flags & NCCL_SHRINK_ABORT) nccl_stop(parent);
  int size = 0, rank = 0, leader = -1;
  for (int other = 0; other < parent->size; other++) {
    if (excluded(plan, other)) continue;
    if (leader < 0) leader = other;
    size++;
    rank += other < parent->rank;
  }
  unsigned long number = ++parent->shrinks;
  if (leader == parent->rank) {
    nccl_segment_new(members[leader].path);
    atomic_store(&members[leader].shrunk, number);
    nccl_ring_bell(parent);
  }
  struct awaited awaited = {&members[leader].shrunk, number};
  REQUIRE(parent, nccl_wait(parent, reached, &awaited, false), ncclInternalError, "aborted in a shrink");
  return start(plan->child, size, rank, members[leader].path);
}

/* What a communicator may still do after an error on it: be left for another one. */
static ncclResult_t check_parent(ncclComm_t comm, bool despite_errors) {
  ncclResult_t result = nccl_check(comm);
  if (despite_errors && comm && result != ncclInvalidArgument) return ncclSuccess;
  return result;
}

ncclComm_t nccl_child(ncclComm_t parent, const ncclConfig_t *config) {
  ncclComm_t comm = nccl_new(0, 0, config);
  if (!config) comm->blocking = parent->blocking;
  comm->device = parent->device;
  nccl_enter(comm->device);
  nccl_driver()->event_create(&comm->tail, CU_EVENT_DISABLE_TIMING);
  nccl_exit(comm->device);
  return comm;
}

ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t *result, ncclConfig_t *config) {
  ncclResult_t checked = check_parent(comm, comm && atomic_load(&comm->revoked));
  if (checked != ncclSuccess) return checked;
  if (nccl_fault(__func__, comm->rank, NULL, &checked)) return checked;
  if ((checked = nccl_check_config(config)) != ncclSuccess) return checked;
  REQUIRE(comm, result, ncclInvalidArgument, "newcomm argument is NULL");
  REQUIRE(comm, color >= 0 || color == NCCL_SPLIT_NOCOLOR, ncclInvalidArgument, "invalid color %d", color);
  REQUIRE(comm, !atomic_load(&comm->pending), ncclInvalidUsage, "ncclCommSplit: operations are under way");
  struct plan plan = {.color = color, .key = key, .result = result};
  if (color != NCCL_SPLIT_NOCOLOR) plan.child = nccl_child(comm, config);
  *result = NULL;
  return nccl_do(comm, split, &plan, sizeof plan);
}

ncclResult_t ncclCommShrink(ncclComm_t comm, int *ranks, int count, ncclComm_t *result, ncclConfig_t *config,
                            int flags) {
  bool aborts = flags & NCCL_SHRINK_ABORT;
  ncclResult_t checked = check_parent(comm, aborts || (comm && atomic_load(&comm->revoked)));
  if (checked != ncclSuccess) return checked;
  if (nccl_fault(__func__, comm->rank, NULL, &checked)) return checked;
  if ((checked = nccl_check_config(config)) != ncclSuccess) return checked;
  REQUIRE(comm, result && ranks && count > 0 && count < comm->size && count <= MOST_RANKS, ncclInvalidArgument,
          "invalid list of %d ranks to exclude", count);
  struct plan plan = {.flags = flags, .count = count};
  memcpy(plan.excluded, ranks, count * sizeof *ranks);
  REQUIRE(comm, !excluded(&plan, comm->rank), ncclInvalidArgument, "rank %d excludes itself", comm->rank);
  plan.child = *result = nccl_child(comm, config);
  return nccl_do(comm, shrink, &plan, sizeof plan);
}

static ncclResult_t stop(ncclComm_t comm, void *args) {
  (void)args;
  return nccl_stop(comm);
}

ncclResult_t ncclCommRevoke(ncclComm_t comm, int flags) {
  ncclResult_t checked = check_parent(comm, true);
  if (checked != ncclSuccess) return checked;
  if (nccl_fault(__func__, comm->rank, NULL, &checked)) return checked;
  REQUIRE(comm, flags == NCCL_REVOKE_DEFAULT, ncclInvalidArgument, "revokeFlags must be 0, not %d", flags);
  return nccl_do(comm, stop, "", 1);
}
