/* The collectives, on a stream's thread: every rank shows a piece on its board, all meet, each takes
 * what it needs, all meet again. What differs from call to call is a line of a table. */
#include "emulator.h"

static const struct shape {
  bool from_root; /* only the root shows something */
  bool apart;     /* what is shown has a part for each rank */
  bool to_root;   /* only the root takes something */
  enum { FOLD, GATHERED, ONE } takes; /* all ranks' parts as one, in a row, or the root's */
} shapes[] = {
  [ALL_REDUCE] = {false, false, false, FOLD},  [REDUCE] = {false, false, true, FOLD},
  [BROADCAST] = {true, false, false, ONE},     [ALL_GATHER] = {false, false, false, GATHERED},
  [REDUCE_SCATTER] = {false, true, false, FOLD}, [ALL_TO_ALL] = {false, true, false, GATHERED},
  [GATHER] = {false, false, true, GATHERED},   [SCATTER] = {true, true, false, ONE},
};

struct piece { /* elements [offset, offset + count) of each part */
  const struct shape *shape;
  size_t offset, count, width;
};

static void show(ncclComm_t comm, const struct op *op, struct piece piece) {
  if (piece.shape->from_root && op->call.root != comm->rank) return;
  int parts = piece.shape->apart ? comm->size : 1;
  size_t bytes = piece.count * piece.width;
  for (int part = 0; part < parts; part++)
    memcpy(nccl_board(comm, comm->rank) + part * bytes,
           op->send + (part * op->call.count + piece.offset) * piece.width, bytes);
}

static void take(ncclComm_t comm, const struct op *op, struct piece piece) {
  if (piece.shape->to_root && op->call.root != comm->rank) return;
  size_t bytes = piece.count * piece.width, mine = piece.shape->apart ? comm->rank * bytes : 0;
  char *to = op->recv + piece.offset * piece.width;
  const char *parts[comm->size];
  for (int rank = 0; rank < comm->size; rank++) parts[rank] = nccl_board(comm, rank) + mine;
  if (piece.shape->takes == FOLD) nccl_fold(comm, &op->call, to, parts, piece.count);
  else if (piece.shape->takes == ONE) memcpy(to, parts[op->call.root], bytes);
  else
    for (int rank = 0; rank < comm->size; rank++)
      memcpy(to + rank * op->call.count * piece.width, parts[rank], bytes);
}

static bool same(const struct call *a, const struct call *b) {
  return a->kind == b->kind && a->type == b->type && a->op == b->op && a->root == b->root && a->count == b->count;
}

static bool agreed(ncclComm_t comm) {
  for (int rank = 1; rank < comm->size; rank++) {
    const struct call *first = &comm->shared->members[0].call, *other = &comm->shared->members[rank].call;
    if (same(first, other)) continue;
    return nccl_mismatch(comm, "rank 0 is in call %d (type %d, op %d, root %d, %zu elements), rank %d in %d (%d, %d, %d, %zu)",
                         first->kind, first->type, first->op, first->root, first->count, rank, other->kind,
                         other->type, other->op, other->root, other->count);
  }
  return true;
}

bool nccl_collective(ncclComm_t comm, const struct op *op) {
  const struct shape *shape = &shapes[op->call.kind];
  size_t width = nccl_width(op->call.type);
  size_t most = BOARD / width / (shape->apart ? comm->size : 1), offset = 0;
  comm->shared->members[comm->rank].call = op->call;
  do {
    size_t left = op->call.count - offset;
    struct piece piece = {shape, offset, left < most ? left : most, width};
    if (piece.count) show(comm, op, piece);
    if (!nccl_barrier(comm) || !agreed(comm)) return false;
    if (piece.count) take(comm, op, piece);
    if (!nccl_barrier(comm)) return false;
    offset += piece.count;
  } while (offset < op->call.count);
  return true;
}
