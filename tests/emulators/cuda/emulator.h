/* What the parts of the libcuda emulator share: tasks, streams, events, memory, capture.
 *
 * Contract: the driver API of cuda.h on one host without a GPU. "Devices" are numbers, device
 * memory is host memory, and each stream has a thread of its own that runs its tasks in order, so
 * that a caller who forgets to wait reads what is not there yet. One lock guards all bookkeeping;
 * tasks run without it.
 */
#pragma once
#define _GNU_SOURCE
#include <cuda.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define MOST_DEVICES 16
#define MOST_QUEUES 64

/* A piece of work: `run` gets a copy of the arguments that it was enqueued with. */
typedef void (*cuemu_run)(void *args);

struct task {
  struct task *next;
  cuemu_run run;
  uint64_t ticket; /* its turn in its stream's hardware queue */
  size_t size;
  char args[];
};

struct CUctx_st {
  CUdevice device;
  unsigned retained;
  CUstream legacy; /* the default stream: in order with every stream that was not made NON_BLOCKING */
  unsigned streams; /* made so far: each gets the next hardware queue */
  struct queue { uint64_t issued, taken; } queues[MOST_QUEUES];
};

struct CUstream_st {
  CUstream next; /* all streams of the process */
  CUcontext ctx;
  pthread_t worker;
  pthread_cond_t more;
  struct queue *queue; /* which it shares with other streams; NULL: it has one of its own */
  uint64_t chance; /* the next random delay of its tasks */
  struct task *first, **last;
  uint64_t issued, finished; /* numbers of tasks: a point in a stream is one of them */
  unsigned flags;
  int priority;
  bool closing;
  CUgraph graph; /* what it is captured into, if it is */
  CUstreamCaptureMode mode;
  bool loose; /* captured work that no other captured stream has waited for */
};

struct CUevent_st {
  CUcontext ctx;
  unsigned references; /* its owner, and tasks that will stamp it */
  unsigned flags;
  CUstream stream; /* where it was recorded last, NULL: never */
  uint64_t number;
  double stamp; /* seconds */
  CUgraph graph; /* recorded while this was captured */
};

/* A captured graph is its tasks in the order of capture: one of the orders that the graph allows. */
struct CUgraph_st {
  struct task *first, **last;
  struct held *held; /* user objects that live as long as it does */
  CUstream origin;
  bool broken;
  pthread_t owner;
};

struct range {
  struct range *next;
  uintptr_t base;
  size_t size, room; /* bytes that were asked for, and that are there */
  bool pooled;       /* goes back to the pool, not to the system */
  char *shadow; /* where the bytes really are: elsewhere if device memory is guarded */
  CUmemorytype kind;
  CUdevice device;
};

extern pthread_mutex_t cuemu_lock;
extern pthread_cond_t cuemu_progress; /* some stream has finished a task */
extern int cuemu_devices;
extern bool cuemu_ready;
extern CUstream cuemu_streams; /* all that there are */

/* Streams. `enqueue` refuses what can't be captured only by its caller's word. */
CUstream cuemu_stream(CUstream handle);
CUresult cuemu_enqueue(CUstream handle, cuemu_run run, const void *args, size_t size);
CUresult cuemu_drain(CUstream stream);
CUstream cuemu_clash(CUstream stream);
CUresult cuemu_implicit(CUstream stream);
void cuemu_keep_order(CUstream stream);
bool cuemu_is_stamp(cuemu_run run);
void cuemu_push(CUstream stream, cuemu_run run, const void *args, size_t size);
void cuemu_hold(CUstream stream, CUstream other, uint64_t number);
struct task *cuemu_task(cuemu_run run, const void *args, size_t size);

/* Memory. A range is found by any address inside it. */
struct range *cuemu_range(uintptr_t address, size_t size);
struct range *cuemu_leaving(uintptr_t address, size_t size);
void *cuemu_bytes(uintptr_t address, size_t size);
bool cuemu_map(struct range *range, size_t size);
void cuemu_unmap(const struct range *range);
void cuemu_add_range(const struct range *range);
bool cuemu_take_range(uintptr_t base, CUmemorytype kind, struct range *taken);
bool cuemu_take_locked(uintptr_t base, CUmemorytype kind, struct range *taken);

/* Kernels. A twin is called with the launch's six dimensions, and copies of its arguments. */
typedef void (*twin_fn)(const unsigned *grid, const unsigned *block, void **args);
twin_fn cuemu_packing(const char *name, int *arguments); /* of one of nc10d's own kernels, else NULL */

/* Capture. `unsafe` is what a call does first that may not happen while somebody captures. */
CUresult cuemu_unsafe(void);
void cuemu_count_wait(void); /* a call that waits for the device has begun */
void cuemu_capture(CUstream stream, cuemu_run run, const void *args, size_t size);
void cuemu_keep_objects(CUgraph graph, CUgraph other);
void cuemu_drop_objects(CUgraph graph);

/* Context of the calling thread; NULL if there is none. */
CUcontext cuemu_context(void);
CUcontext cuemu_context_of(CUdevice device);
double cuemu_now(void);
int cuemu_number(const char *variable, int otherwise);

#define REQUIRE(condition, error) do { if (!(condition)) return (error); } while (0)
/* As cuda.h lists it (CUDA_ERROR_INVALID_CONTEXT), of calls that could do without one. */
#define NEED_CONTEXT() REQUIRE(cuemu_context(), cuemu_ready ? CUDA_ERROR_INVALID_CONTEXT : CUDA_ERROR_NOT_INITIALIZED)
