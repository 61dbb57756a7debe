/* The calls: checked at the door, then submitted. Arrays must lie in device or pinned memory, all
 * of them: a real library would let the GPU fault. */
#include "emulator.h"
#include <time.h>

static ncclResult_t check_buffer(ncclComm_t comm, const char *name, const void *pointer, size_t size, char **bytes) {
  *bytes = NULL;
  if (!size) return ncclSuccess;
  REQUIRE(comm, pointer, ncclInvalidArgument, "%s : NULL pointer with %zu bytes", name, size);
  *bytes = nccl_bytes(comm, pointer, size);
  REQUIRE(comm, *bytes, ncclInvalidArgument, "%s : %zu bytes at %p are no device memory", name, size, pointer);
  return ncclSuccess;
}

static bool is_op(ncclComm_t comm, int op) {
  if (op < ncclNumOps) return op >= 0;
  return op - ncclNumOps < MOST_OPS && comm->factors[op - ncclNumOps].used;
}

/* How much of the arrays a rank uses, in units of `count`. */
struct extent {
  size_t send, recv;
};

static struct extent extent(ncclComm_t comm, const struct call *call) {
  size_t all = comm->size;
  bool root = call->root == comm->rank;
  switch (call->kind) {
    case ALL_REDUCE: return (struct extent){1, 1};
    case REDUCE: return (struct extent){1, root};
    case BROADCAST: return (struct extent){root, 1};
    case ALL_GATHER: return (struct extent){1, all};
    case REDUCE_SCATTER: return (struct extent){all, 1};
    case ALL_TO_ALL: return (struct extent){all, all};
    case GATHER: return (struct extent){1, root ? all : 0};
    case SCATTER: return (struct extent){root ? all : 0, 1};
    case SEND: return (struct extent){1, 0};
    default: return (struct extent){0, 1};
  }
}

static ncclResult_t prepare(ncclComm_t comm, const char *name, struct op *op, const void *send, void *recv) {
  ncclResult_t result = nccl_usable(comm, name);
  if (result != ncclSuccess) return result;
  const struct call *call = &op->call;
  REQUIRE(comm, call->type >= 0 && call->type < ncclNumTypes, ncclInvalidArgument, "%s : invalid type %d", name, call->type);
  REQUIRE(comm, is_op(comm, call->op), ncclInvalidArgument, "%s : invalid reduction operation %d", name, call->op);
  REQUIRE(comm, call->root >= 0 && call->root < comm->size, ncclInvalidArgument, "%s : invalid root %d (root should be in the 0..%d range)",
          name, call->root, comm->size);
  size_t width = nccl_width(call->type) * call->count;
  struct extent uses = extent(comm, call);
  char *from, *to;
  if ((result = check_buffer(comm, name, send, width * uses.send, &from)) != ncclSuccess) return result;
  if ((result = check_buffer(comm, name, recv, width * uses.recv, &to)) != ncclSuccess) return result;
  op->send = from;
  op->recv = to;
  return ncclSuccess;
}

/* Stay inside a call until another thread aborts the communicator. */
static ncclResult_t stay(ncclComm_t comm) {
  atomic_fetch_add(&comm->references, 1);
  struct timespec moment = {0, 1000000};
  while (!atomic_load(&comm->aborted)) nanosleep(&moment, NULL);
  nccl_release(comm);
  return nccl_fail(NULL, ncclInternalError, "aborted while the call was under way");
}

static ncclResult_t submit(const char *name, ncclComm_t comm, struct call call, const void *send, void *recv,
                           cudaStream_t stream) {
  struct op op = {.call = call, .stream = stream};
  ncclResult_t result = prepare(comm, name, &op, send, recv);
  if (result == ncclSuccess && !nccl_fault(name, comm->rank, &op, &result)) {
    if (!op.stuck) return nccl_submit(comm, &op);
    result = stay(comm);
  }
  nccl_note(result);
  return result;
}

#define CALL(send, recv, ...) submit(__func__, comm, (struct call){__VA_ARGS__}, send, recv, stream)

ncclResult_t ncclAllReduce(const void *send, void *recv, size_t count, ncclDataType_t type, ncclRedOp_t op,
                           ncclComm_t comm, cudaStream_t stream) {
  return CALL(send, recv, ALL_REDUCE, type, op, 0, count);
}

ncclResult_t ncclReduce(const void *send, void *recv, size_t count, ncclDataType_t type, ncclRedOp_t op, int root,
                        ncclComm_t comm, cudaStream_t stream) {
  return CALL(send, recv, REDUCE, type, op, root, count);
}

ncclResult_t ncclBroadcast(const void *send, void *recv, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                           cudaStream_t stream) {
  return CALL(send, recv, BROADCAST, type, 0, root, count);
}

ncclResult_t ncclBcast(void *buffer, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                       cudaStream_t stream) {
  return CALL(buffer, buffer, BROADCAST, type, 0, root, count);
}

ncclResult_t ncclAllGather(const void *send, void *recv, size_t count, ncclDataType_t type, ncclComm_t comm,
                           cudaStream_t stream) {
  return CALL(send, recv, ALL_GATHER, type, 0, 0, count);
}

ncclResult_t ncclReduceScatter(const void *send, void *recv, size_t count, ncclDataType_t type, ncclRedOp_t op,
                               ncclComm_t comm, cudaStream_t stream) {
  return CALL(send, recv, REDUCE_SCATTER, type, op, 0, count);
}

ncclResult_t ncclAlltoAll(const void *send, void *recv, size_t count, ncclDataType_t type, ncclComm_t comm,
                          cudaStream_t stream) {
  return CALL(send, recv, ALL_TO_ALL, type, 0, 0, count);
}

ncclResult_t ncclGather(const void *send, void *recv, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                        cudaStream_t stream) {
  return CALL(send, recv, GATHER, type, 0, root, count);
}

ncclResult_t ncclScatter(const void *send, void *recv, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                         cudaStream_t stream) {
  return CALL(send, recv, SCATTER, type, 0, root, count);
}

ncclResult_t ncclSend(const void *send, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  return CALL(send, NULL, SEND, type, 0, peer, count);
}

ncclResult_t ncclRecv(void *recv, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream) {
  return CALL(NULL, recv, RECV, type, 0, peer, count);
}

/* Reductions of the caller's own */

ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t *op, void *scalar, ncclDataType_t type,
                                      ncclScalarResidence_t residence, ncclComm_t comm) {
  ncclResult_t result = nccl_check(comm);
  if (result != ncclSuccess) return result;
  if (nccl_fault(__func__, comm->rank, NULL, &result)) return result;
  REQUIRE(comm, op && scalar && type >= 0 && type < ncclNumTypes, ncclInvalidArgument, "RedOpCreatePreMulSum : invalid argument");
  int free_slot = 0;
  while (free_slot < MOST_OPS && comm->factors[free_slot].used) free_slot++;
  REQUIRE(comm, free_slot < MOST_OPS, ncclInternalError, "more than %d reductions: is none destroyed?", MOST_OPS);
  struct factor *factor = &comm->factors[free_slot];
  *factor = (struct factor){.used = true, .on_device = residence == ncclScalarDevice, .type = type};
  if (factor->on_device) {
    factor->device = nccl_bytes(comm, scalar, nccl_width(type));
    REQUIRE(comm, factor->device, ncclInvalidArgument, "RedOpCreatePreMulSum : the scalar is not in device memory");
  } else {
    memcpy(factor->value, scalar, nccl_width(type));
  }
  *op = (ncclRedOp_t)(ncclNumOps + free_slot);
  return ncclSuccess;
}

ncclResult_t ncclRedOpDestroy(ncclRedOp_t op, ncclComm_t comm) {
  REQUIRE(NULL, (int)op >= ncclNumOps, ncclInvalidArgument, "ncclRedOpDestroy : operator is a NCCL builtin.");
  ncclResult_t result = nccl_check(comm);
  if (result != ncclSuccess) return result;
  REQUIRE(comm, is_op(comm, op), ncclInvalidArgument, "ncclRedOpDestroy : operator unknown to this communicator.");
  comm->factors[op - ncclNumOps].used = false;
  return ncclSuccess;
}
