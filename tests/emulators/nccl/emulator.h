/* What the parts of the libnccl emulator share: communicators, operations, the shared segment.
 *
 * Contract: the API of nccl.h between processes or threads of one host. The members of a
 * communicator share one memfd, which has no name in any file system. An operation is a host
 * function on the caller's stream, so it begins when the stream comes there; nothing but official
 * functions of libcuda is used.
 */
#pragma once
#define _GNU_SOURCE
#include <cuda.h>
/* All that nccl.h needs of the runtime's headers is two names; they need a whole toolkit. */
#define __CUDA_RUNTIME_H__
#define __CUDA_FP16_H__
typedef CUstream cudaStream_t;
typedef CUevent cudaEvent_t;
#include <nccl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>


#define BOARD (1 << 18) /* bytes that a rank shows the others at a time */
#define RING (1 << 16)  /* bytes of messages on their way from one rank to another */
#define PATH 64
#define MOST_OPS 64 /* reductions that a communicator was given */

#define MOST_RANKS 64 /* of a communicator whose ranks exclude, or signal, each other */
#define MOST_WINDOWS 16
#define MOST_DEVICES 16

/* The calls. What each does with arrays stands in collective.c as a table, from PUT on in onesided.c. */
enum kind { ALL_REDUCE, REDUCE, BROADCAST, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, GATHER, SCATTER, SEND, RECV,
            PUT, SIGNAL, WAIT_SIGNAL };

struct call { /* what all ranks must have alike */
  enum kind kind;
  ncclDataType_t type;
  int op, root;
  size_t count;
};

struct op {
  struct call call; /* of a message, `root` is the peer */
  const char *send;
  char *recv;
  CUstream stream;
  int hang, error, stuck; /* faults: never progress; an asynchronous error; the call stays inside */
  double delay;    /* seconds */
  int window;      /* of a PUT: its number, and the place in it, in bytes */
  size_t offset;
  int awaited[MOST_RANKS]; /* of a WAIT_SIGNAL: signals by rank */
};

enum presence { ABSENT, HERE, LEFT, ABORTED };

struct exposed { /* a rank's part of a window: its bytes lie in that rank's process */
  int process;
  char *bytes;
  size_t size;
};

struct member { /* one rank's part of the shared segment */
  _Alignas(64) atomic_ulong arrived; /* barriers that its operations have entered */
  atomic_ulong met;                  /* the same for calls that the host makes: init, split */
  atomic_ulong shrunk, grown;
  atomic_int presence;
  int device, color, key, process;
  unsigned long host;
  struct call call;
  char path[PATH];
  struct exposed windows[MOST_WINDOWS];
  atomic_ulong signals[MOST_RANKS]; /* that have come, by their sender */
};

struct ring {
  _Alignas(64) atomic_ulong head, tail; /* bytes written, bytes read */
  char data[RING];
};

struct shared {
  atomic_int size;
  atomic_uint bell, sleepers; /* rung at every change; how many to wake */
  struct member members[];
};

struct factor {
  bool used, on_device;
  ncclDataType_t type;
  const void *device;
  char value[8];
};

struct ncclComm {
  unsigned magic;
  int rank, size, device, fd;
  bool blocking;
  struct shared *shared;
  size_t mapped;
  atomic_int state;      /* an ncclResult_t: what ncclCommGetAsyncError answers */
  atomic_int references; /* its owner, and launches that are not over */
  atomic_bool aborted, revoked, finalized, suspended;
  atomic_int pending; /* launches that are not over */
  atomic_int running; /* those that a stream's thread is in */
  atomic_int captured; /* launches that are in graphs, and may run again */
  atomic_bool left;    /* its owner has ended it */
  unsigned long arrived, met, shrinks, grows;
  unsigned long taken[MOST_RANKS]; /* signals that were waited for, by their sender */
  int windows;
  CUevent tail; /* where its latest launch ends */
  CUstream last;
  struct factor factors[MOST_OPS];
  char message[256];
};

/* driver.c: libcuda, found as NCCL finds it */
struct driver {
  __typeof__(&cuCtxGetDevice) get_device;
  __typeof__(&cuLaunchHostFunc) launch_host;
  __typeof__(&cuPointerGetAttribute) attribute;
  __typeof__(&cuEventCreate) event_create;
  __typeof__(&cuEventDestroy) event_destroy;
  __typeof__(&cuEventRecord) event_record;
  __typeof__(&cuStreamWaitEvent) wait_event;
  __typeof__(&cuStreamGetCaptureInfo) capture_info;
  __typeof__(&cuUserObjectCreate) object_create;
  __typeof__(&cuGraphRetainUserObject) graph_retain;
  __typeof__(&cuThreadExchangeStreamCaptureMode) exchange_mode;
  __typeof__(&cuCtxSynchronize) synchronize_device;
  __typeof__(&cuMemAlloc) alloc;
  __typeof__(&cuMemFreeAsync) free;
  __typeof__(&cuStreamCreate) stream_create;
  __typeof__(&cuStreamSynchronize) synchronize;
  __typeof__(&cuStreamDestroy) stream_destroy;
  __typeof__(&cuStreamGetCtx) stream_context;
  __typeof__(&cuDevicePrimaryCtxRetain) retain;
  __typeof__(&cuDevicePrimaryCtxRelease) let_go;
  __typeof__(&cuCtxSetCurrent) set_current;
  __typeof__(&cuCtxPushCurrent) push;
  __typeof__(&cuCtxPopCurrent) pop;
};
const struct driver *nccl_driver(void); /* NULL where there is no driver */
void *nccl_bytes(ncclComm_t comm, const void *pointer, size_t size);
void nccl_enter(int device);
void nccl_exit(int device);
void nccl_wait_for_device(int device);

/* shared.c */
size_t nccl_segment_size(int size);
int nccl_segment_new(char *path);
ncclResult_t nccl_attach(ncclComm_t comm, const char *path);
void nccl_release(ncclComm_t comm);
char *nccl_board(ncclComm_t comm, int rank);
struct ring *nccl_ring(ncclComm_t comm, int src, int dst);
void nccl_ring_bell(ncclComm_t comm);
bool nccl_wait(ncclComm_t comm, bool (*ready)(ncclComm_t, void *), void *argument, bool device);
bool nccl_mismatch(ncclComm_t comm, const char *format, ...);
bool nccl_barrier(ncclComm_t comm);
bool nccl_meet(ncclComm_t comm);
void nccl_wait_for_node(ncclComm_t comm);

/* comm.c */
ncclResult_t nccl_check(ncclComm_t comm);
ncclResult_t nccl_fail(ncclComm_t comm, ncclResult_t result, const char *format, ...);
ncclComm_t nccl_new(int size, int rank, const ncclConfig_t *config);
ncclResult_t nccl_check_config(const ncclConfig_t *config);
ncclResult_t nccl_stop(ncclComm_t comm);
ncclResult_t nccl_end_aborted(ncclComm_t comm);
ncclResult_t nccl_usable(ncclComm_t comm, const char *name);
ncclComm_t nccl_child(ncclComm_t parent, const ncclConfig_t *config);

/* group.c. A job is what a call does that waits for other ranks. */
typedef ncclResult_t (*job_fn)(ncclComm_t comm, void *args);
ncclResult_t nccl_submit(ncclComm_t comm, const struct op *op);
void nccl_note(ncclResult_t result);
ncclResult_t nccl_do(ncclComm_t comm, job_fn job, const void *args, size_t size);
bool nccl_end_later(ncclComm_t comm);
void nccl_pause(double seconds);

/* What operations do, on a stream's thread. False: stopped by an abort. */
bool nccl_collective(ncclComm_t comm, const struct op *op);
bool nccl_messages(ncclComm_t comm, const struct op *ops, size_t count);
bool nccl_one_sided(ncclComm_t comm, const struct op *op);
void nccl_fold(ncclComm_t comm, const struct call *call, char *out, const char *const *in, size_t count);
size_t nccl_width(ncclDataType_t type);

/* faults.c: true if the call must return `*result` at once */
bool nccl_fault(const char *function, int rank, struct op *op, ncclResult_t *result);

#define REQUIRE(comm, condition, error, ...) \
  do { if (!(condition)) return nccl_fail(comm, error, __VA_ARGS__); } while (0)
