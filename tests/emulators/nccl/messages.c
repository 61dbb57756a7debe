/* Messages: one ring of bytes for each pair of ranks, in the order of launch. All messages of a
 * launch go on side by side, so both of two ranks may send first. A send is over when it has been
 * read: a program that counts on room in between is found out. */
#include "emulator.h"

struct envelope {
  size_t bytes;
  ncclDataType_t type;
};

struct transfer {
  struct ring *ring;
  struct envelope envelope;
  char *data;
  size_t done; /* bytes, envelope included */
  bool sends, over;
  unsigned long end; /* where the ring's head was after the last byte */
};

static struct transfer transfer(ncclComm_t comm, const struct op *op) {
  bool sends = op->call.kind == SEND;
  int peer = op->call.root;
  struct ring *ring = sends ? nccl_ring(comm, comm->rank, peer) : nccl_ring(comm, peer, comm->rank);
  char *data = sends ? (char *)op->send : op->recv;
  struct envelope envelope = {op->call.count * nccl_width(op->call.type), op->call.type};
  return (struct transfer){ring, envelope, data, 0, sends, false, 0};
}

/* The next bytes of a transfer: of its envelope, then of its data. */
static char *next(struct transfer *t, struct envelope *envelope, size_t *count) {
  size_t head = sizeof *envelope;
  *count = t->done < head ? head - t->done : head + t->envelope.bytes - t->done;
  return t->done < head ? (char *)envelope + t->done : t->data + (t->done - head);
}

static size_t copy(struct transfer *t, char *bytes, size_t count) {
  unsigned long head = atomic_load(&t->ring->head), tail = atomic_load(&t->ring->tail);
  unsigned long at = t->sends ? head : tail;
  size_t free_bytes = t->sends ? RING - (head - tail) : head - tail, to_end = RING - at % RING;
  if (count > free_bytes) count = free_bytes;
  if (count > to_end) count = to_end;
  if (t->sends) memcpy(t->ring->data + at % RING, bytes, count);
  else memcpy(bytes, t->ring->data + at % RING, count);
  atomic_store(t->sends ? &t->ring->head : &t->ring->tail, at + count);
  return count;
}

static bool fits(ncclComm_t comm, const struct transfer *t, const struct envelope *got) {
  if (got->bytes == t->envelope.bytes && got->type == t->envelope.type) return true;
  return nccl_mismatch(comm, "a message of %zu bytes (type %d) where %zu (type %d) are expected", got->bytes, got->type,
                       t->envelope.bytes, t->envelope.type);
}

/* Move what can be moved; say whether anything was. */
static bool advance(ncclComm_t comm, struct transfer *t, struct envelope *envelope) {
  bool moved = false;
  size_t whole = sizeof *envelope + t->envelope.bytes, count;
  while (t->done < whole) {
    char *bytes = next(t, envelope, &count);
    size_t step = copy(t, bytes, count);
    if (!step) break;
    moved = true;
    t->done += step;
    if (t->done == sizeof *envelope && !t->sends && !fits(comm, t, envelope)) return false;
    if (t->done == whole) t->end = atomic_load(&t->ring->head);
  }
  if (t->done == whole && (!t->sends || atomic_load(&t->ring->tail) >= t->end)) t->over = moved = true;
  return moved;
}

/* Whether an earlier transfer of the launch has to use the ring first. */
static bool blocked(const struct transfer *all, size_t index) {
  for (size_t i = 0; i < index; i++)
    if (!all[i].over && all[i].ring == all[index].ring && all[i].sends == all[index].sends) return true;
  return false;
}

struct batch {
  struct transfer *transfers;
  struct envelope *envelopes;
  size_t count, left;
};

static bool ended(ncclComm_t comm, void *argument) {
  struct batch *batch = argument;
  bool moved = false;
  for (size_t i = 0; i < batch->count; i++) {
    struct transfer *t = &batch->transfers[i];
    if (t->over || blocked(batch->transfers, i)) continue;
    moved |= advance(comm, t, &batch->envelopes[i]);
    batch->left -= t->over;
  }
  if (moved) nccl_ring_bell(comm);
  return !batch->left || atomic_load(&comm->state) == ncclInvalidUsage;
}

bool nccl_messages(ncclComm_t comm, const struct op *ops, size_t count) {
  struct batch batch = {calloc(count, sizeof(struct transfer)), calloc(count, sizeof(struct envelope)), count, count};
  for (size_t i = 0; i < count; i++) {
    batch.transfers[i] = transfer(comm, &ops[i]);
    if (batch.transfers[i].sends) batch.envelopes[i] = batch.transfers[i].envelope;
  }
  bool done = nccl_wait(comm, ended, &batch, true);
  free(batch.transfers);
  free(batch.envelopes);
  return done && atomic_load(&comm->state) != ncclInvalidUsage;
}
