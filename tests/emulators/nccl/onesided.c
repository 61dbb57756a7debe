/* Windows and signals. A window is memory of every rank, under a number that all ranks count alike.
 * A put writes into the peer's process and then raises the peer's count of signals from this rank;
 * the peer takes no part. */
#include "emulator.h"
#include <sys/uio.h>

struct ncclWindow_vidmem {
  ncclComm_t comm; /* NULL: given back */
  void *base;
  int number;
};

static struct window_range { /* this process's windows, where a put may read */
  struct window_range *next;
  ncclWindow_t window;
  size_t size;
} *ranges;
static pthread_mutex_t keeping = PTHREAD_MUTEX_INITIALIZER;

static bool in_window(ncclComm_t comm, const char *bytes, size_t size) {
  pthread_mutex_lock(&keeping);
  struct window_range *found = ranges;
  while (found && !(found->window->comm == comm && bytes >= (char *)found->window->base &&
                    bytes + size <= (char *)found->window->base + found->size))
    found = found->next;
  pthread_mutex_unlock(&keeping);
  return found;
}

/* All ranks call: a window is found by its peers. */
static ncclResult_t meet(ncclComm_t comm, void *args) {
  (void)args;
  REQUIRE(comm, nccl_meet(comm), ncclInternalError, "aborted while all ranks were awaited");
  return ncclSuccess;
}

/* NC10D_EMULATED_NO_WINDOWS=1 stands for a machine without symmetric memory: NCCL then succeeds,
 * and there is no window. */
ncclResult_t ncclCommWindowRegister(ncclComm_t comm, void *base, size_t size, ncclWindow_t *result, int flags) {
  ncclResult_t checked = nccl_usable(comm, __func__);
  if (checked != ncclSuccess || nccl_fault(__func__, comm->rank, NULL, &checked)) return checked;
  REQUIRE(comm, result && base && size && nccl_bytes(comm, base, size), ncclInvalidArgument, "only device memory can be registered");
  REQUIRE(comm, (size_t)base % NCCL_WIN_REQUIRED_ALIGNMENT == 0, ncclInvalidArgument, "a window must be aligned to %d bytes",
          NCCL_WIN_REQUIRED_ALIGNMENT);
  REQUIRE(comm, comm->windows < MOST_WINDOWS, ncclInternalError, "more than %d windows", MOST_WINDOWS);
  (void)flags;
  *result = NULL;
  if (getenv("NC10D_EMULATED_NO_WINDOWS")) return ncclSuccess;
  ncclWindow_t window = *result = malloc(sizeof *window);
  *window = (struct ncclWindow_vidmem){comm, base, comm->windows++};
  struct window_range *range = malloc(sizeof *range);
  pthread_mutex_lock(&keeping);
  *range = (struct window_range){ranges, window, size};
  ranges = range;
  pthread_mutex_unlock(&keeping);
  comm->shared->members[comm->rank].windows[window->number] = (struct exposed){getpid(), nccl_bytes(comm, base, size), size};
  return nccl_do(comm, meet, "", 1);
}

ncclResult_t ncclCommWindowDeregister(ncclComm_t comm, ncclWindow_t window) {
  ncclResult_t result;
  if (!window) return ncclSuccess;
  REQUIRE(NULL, comm, ncclInvalidArgument, "comm argument is NULL");
  if (nccl_fault(__func__, comm->rank, NULL, &result)) return result;
  REQUIRE(comm, window->comm == comm, ncclInvalidArgument, "this window is of another communicator, or was given back");
  window->comm = NULL; /* the record stays: a second time must be an error */
  return ncclSuccess;
}

ncclResult_t ncclWinGetUserPtr(ncclComm_t comm, ncclWindow_t window, void **pointer) {
  REQUIRE(comm, window && window->comm == comm && pointer, ncclInvalidArgument, "no such window");
  *pointer = window->base;
  return ncclSuccess;
}

/* The calls, checked at the door as in NCCL's enqueue.cc. */

static ncclResult_t check(ncclComm_t comm, const char *name, int peer, int signal, int context, unsigned flags) {
  ncclResult_t result = nccl_usable(comm, name);
  if (result != ncclSuccess) return result;
  REQUIRE(comm, comm->size <= MOST_RANKS, ncclInvalidUsage, "%s : more than %d ranks", name, MOST_RANKS);
  REQUIRE(comm, peer >= 0 && peer < comm->size, ncclInvalidArgument, "%s : invalid peer %d", name, peer);
  REQUIRE(comm, !signal && !context && !flags, ncclInvalidArgument, "%s : sigIdx, ctx and flags must be 0", name);
  return ncclSuccess;
}

static ncclResult_t submit(ncclComm_t comm, const char *name, struct op op) {
  ncclResult_t result;
  if (nccl_fault(name, comm->rank, &op, &result)) return result;
  return nccl_submit(comm, &op);
}

ncclResult_t ncclPutSignal(const void *local, size_t count, ncclDataType_t type, int peer, ncclWindow_t window,
                           size_t offset, int signal, int context, unsigned flags, ncclComm_t comm, cudaStream_t stream) {
  ncclResult_t result = check(comm, __func__, peer, signal, context, flags);
  if (result != ncclSuccess) return result;
  size_t size = count * nccl_width(type);
  REQUIRE(comm, window && window->comm == comm, ncclInvalidArgument, "ncclPutSignal: peerWin is NULL");
  REQUIRE(comm, in_window(comm, local, size), ncclInvalidArgument, "ncclPutSignal: srcWinHost is not in a valid symmetric window");
  struct exposed *target = &comm->shared->members[peer].windows[window->number];
  REQUIRE(comm, offset + size <= target->size, ncclInvalidArgument, "ncclPutSignal: past the end of the window");
  struct op op = {.call = {PUT, type, 0, peer, count}, .send = nccl_bytes(comm, local, size), .stream = stream};
  op.window = window->number;
  op.offset = offset;
  return submit(comm, __func__, op);
}

ncclResult_t ncclSignal(int peer, int signal, int context, unsigned flags, ncclComm_t comm, cudaStream_t stream) {
  ncclResult_t result = check(comm, __func__, peer, signal, context, flags);
  if (result != ncclSuccess) return result;
  return submit(comm, __func__, (struct op){.call = {SIGNAL, ncclInt8, 0, peer, 0}, .stream = stream});
}

ncclResult_t ncclWaitSignal(int count, ncclWaitSignalDesc_t *wanted, ncclComm_t comm, cudaStream_t stream) {
  struct op op = {.call = {WAIT_SIGNAL, ncclInt8, 0, 0, 0}, .stream = stream};
  REQUIRE(comm, wanted && count > 0, ncclInvalidArgument, "ncclWaitSignal: invalid arguments");
  for (int i = 0; i < count; i++) {
    ncclResult_t result = check(comm, __func__, wanted[i].peer, wanted[i].sigIdx, wanted[i].ctx, 0);
    if (result != ncclSuccess) return result;
    REQUIRE(comm, wanted[i].opCnt > 0, ncclInvalidArgument, "ncclWaitSignal: descriptor %d has invalid opCnt %d", i, wanted[i].opCnt);
    op.awaited[wanted[i].peer] += wanted[i].opCnt;
  }
  return submit(comm, __func__, op);
}

/* On a stream's thread */

static bool signalled(ncclComm_t comm, void *argument) {
  const struct op *op = argument;
  struct member *mine = &comm->shared->members[comm->rank];
  for (int rank = 0; rank < comm->size; rank++)
    if (atomic_load(&mine->signals[rank]) < comm->taken[rank] + op->awaited[rank]) return false;
  return true;
}

static bool put(ncclComm_t comm, const struct op *op) {
  struct exposed *target = &comm->shared->members[op->call.root].windows[op->window];
  size_t size = op->call.count * nccl_width(op->call.type);
  if (target->process == getpid()) {
    memmove(target->bytes + op->offset, op->send, size);
    return true;
  }
  struct iovec from = {(void *)op->send, size}, to = {target->bytes + op->offset, size};
  if (!size || process_vm_writev(target->process, &from, 1, &to, 1, 0) == (ssize_t)size) return true;
  snprintf(comm->message, sizeof comm->message, "rank %d's window can't be written", op->call.root);
  atomic_store(&comm->state, ncclRemoteError);
  return false;
}

bool nccl_one_sided(ncclComm_t comm, const struct op *op) {
  if (op->call.kind == WAIT_SIGNAL) {
    if (!nccl_wait(comm, signalled, (void *)op, true)) return false;
    for (int rank = 0; rank < comm->size; rank++) comm->taken[rank] += op->awaited[rank];
    return true;
  }
  if (op->call.kind == PUT && !put(comm, op)) return false;
  atomic_fetch_add(&comm->shared->members[op->call.root].signals[comm->rank], 1);
  nccl_ring_bell(comm);
  return true;
}
