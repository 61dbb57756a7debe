/* Streams: a thread and a queue each. A point in a stream is the number of a task; events, waits
 * and synchronisation are all "until that stream has finished that number".
 *
 * CUDA_DEVICE_MAX_CONNECTIONS is the number of hardware queues: 8 by default, at most 32. Streams
 * take queues in turn, and a queue its work in the order of issue, whichever stream it is of. A wait
 * or a record holds the queue until it is over, anything else until it begins. Which stream a driver
 * gives which queue is not documented.
 *
 * NC10D_EMULATED_DELAYS is a seed: each task begins after a random time, other for each stream. */
#include "emulator.h"
#include <time.h>

pthread_mutex_t cuemu_lock = PTHREAD_MUTEX_INITIALIZER;
pthread_cond_t cuemu_progress = PTHREAD_COND_INITIALIZER;
CUstream cuemu_streams;
static __thread CUstream own; /* what CU_STREAM_PER_THREAD means to this thread */

struct task *cuemu_task(cuemu_run run, const void *args, size_t size) {
  struct task *task = malloc(sizeof *task + size);
  task->next = NULL;
  task->run = run;
  task->size = size;
  memcpy(task->args, args, size);
  return task;
}

static bool holds_queue(const struct task *task);

/* With the lock: wait for a task's turn in its queue, and let the next have it. */
static void take_turn(CUstream stream, const struct task *task) {
  struct queue *queue = stream->queue;
  while (queue && queue->taken != task->ticket) pthread_cond_wait(&cuemu_progress, &cuemu_lock);
}

static void give_turn(CUstream stream) {
  if (stream->queue) stream->queue->taken++;
  pthread_cond_broadcast(&cuemu_progress);
}

/* With the lock, which is let go: up to 3 ms, by the stream's own chance (splitmix64). */
static void delay(CUstream stream) {
  uint64_t z = stream->chance += 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  struct timespec time = {0, (long)((z ^ (z >> 31)) % 3000000)};
  pthread_mutex_unlock(&cuemu_lock);
  nanosleep(&time, NULL);
  pthread_mutex_lock(&cuemu_lock);
}

static void *work(void *argument) {
  CUstream stream = argument;
  cuCtxPushCurrent(stream->ctx);
  pthread_mutex_lock(&cuemu_lock);
  for (;;) {
    while (!stream->first && !stream->closing) pthread_cond_wait(&stream->more, &cuemu_lock);
    struct task *task = stream->first;
    if (!task) break;
    bool holds = holds_queue(task);
    if (stream->chance) delay(stream);
    take_turn(stream, task);
    if (!holds) give_turn(stream);
    pthread_mutex_unlock(&cuemu_lock);
    task->run(task->args);
    pthread_mutex_lock(&cuemu_lock);
    if (holds) give_turn(stream);
    stream->first = task->next;
    if (!stream->first) stream->last = &stream->first;
    stream->finished++;
    pthread_cond_broadcast(&cuemu_progress);
    free(task);
  }
  pthread_mutex_unlock(&cuemu_lock);
  return NULL;
}

/* With the lock: append a task, whatever the stream's state. */
void cuemu_push(CUstream stream, cuemu_run run, const void *args, size_t size) {
  struct task *task = cuemu_task(run, args, size);
  if (stream->queue) task->ticket = stream->queue->issued++;
  *stream->last = task;
  stream->last = &task->next;
  stream->issued++;
  pthread_cond_signal(&stream->more);
}

struct point {
  CUstream stream;
  uint64_t number;
};

static void wait_for_point(void *args) {
  struct point *point = args;
  pthread_mutex_lock(&cuemu_lock);
  while (point->stream->finished < point->number) pthread_cond_wait(&cuemu_progress, &cuemu_lock);
  pthread_mutex_unlock(&cuemu_lock);
}

static bool holds_queue(const struct task *task) { return task->run == wait_for_point || cuemu_is_stamp(task->run); }

/* With the lock: let `stream` go on when `other` has finished `number`. */
void cuemu_hold(CUstream stream, CUstream other, uint64_t number) {
  struct point point = {other, number};
  if (other != stream && other->finished < number) cuemu_push(stream, wait_for_point, &point, sizeof point);
}

/* The legacy stream and blocking streams of a context are in order with each other. */
void cuemu_keep_order(CUstream stream) {
  CUstream legacy = stream->ctx->legacy;
  if (stream == legacy) {
    for (CUstream other = cuemu_streams; other; other = other->next)
      if (other->ctx == stream->ctx && !(other->flags & CU_STREAM_NON_BLOCKING))
        cuemu_hold(stream, other, other->issued);
  } else if (legacy && !(stream->flags & CU_STREAM_NON_BLOCKING)) {
    cuemu_hold(stream, legacy, legacy->issued);
  }
}

static CUstream create(CUcontext ctx, unsigned flags, int priority) {
  CUstream stream = calloc(1, sizeof *stream);
  stream->ctx = ctx;
  stream->flags = flags;
  stream->priority = priority;
  stream->last = &stream->first;
  int queues = cuemu_number("CUDA_DEVICE_MAX_CONNECTIONS", 8);
  uint64_t seed = cuemu_number("NC10D_EMULATED_DELAYS", 0);
  pthread_cond_init(&stream->more, NULL);
  pthread_mutex_lock(&cuemu_lock);
  unsigned number = ctx->streams++;
  stream->queue = &ctx->queues[number % (queues < MOST_QUEUES ? queues : MOST_QUEUES)];
  if (seed) stream->chance = seed << 32 | (uint64_t)ctx->device << 16 | (number + 1);
  pthread_create(&stream->worker, NULL, work, stream);
  stream->next = cuemu_streams;
  cuemu_streams = stream;
  pthread_mutex_unlock(&cuemu_lock);
  return stream;
}

/* Return the stream that a handle means to this thread, NULL without a context. */
CUstream cuemu_stream(CUstream handle) {
  CUcontext ctx = cuemu_context();
  if (handle == CU_STREAM_PER_THREAD) {
    if (!own && ctx) own = create(ctx, CU_STREAM_DEFAULT, 0);
    return own;
  }
  if (handle != NULL && handle != CU_STREAM_LEGACY) return handle;
  if (!ctx) return NULL;
  if (!__atomic_load_n(&ctx->legacy, __ATOMIC_ACQUIRE)) {
    static pthread_mutex_t making = PTHREAD_MUTEX_INITIALIZER;
    pthread_mutex_lock(&making);
    if (!ctx->legacy) __atomic_store_n(&ctx->legacy, create(ctx, CU_STREAM_DEFAULT, 0), __ATOMIC_RELEASE);
    pthread_mutex_unlock(&making);
  }
  return ctx->legacy;
}

/* With the lock: the blocking stream that is captured while the legacy stream of its context, if
 * this is that, is used. */
CUstream cuemu_clash(CUstream stream) {
  if (stream != stream->ctx->legacy) return NULL;
  CUstream other = cuemu_streams;
  while (other && !(other->ctx == stream->ctx && other->graph && !(other->flags & CU_STREAM_NON_BLOCKING)))
    other = other->next;
  return other;
}

/* With the lock: what is done with the legacy stream while a blocking stream of its context is
 * captured would be part of that capture, and breaks it. */
CUresult cuemu_implicit(CUstream stream) {
  CUstream other = cuemu_clash(stream);
  if (!other) return CUDA_SUCCESS;
  other->graph->broken = true;
  return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
}

/* Append a task to the stream, or to the graph that it is captured into. */
CUresult cuemu_enqueue(CUstream handle, cuemu_run run, const void *args, size_t size) {
  CUstream stream = cuemu_stream(handle);
  REQUIRE(stream, CUDA_ERROR_INVALID_CONTEXT);
  pthread_mutex_lock(&cuemu_lock);
  CUresult result = cuemu_implicit(stream);
  if (result != CUDA_SUCCESS) {
    /* refused */
  } else if (stream->graph) {
    if (stream->graph->broken) result = CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    else cuemu_capture(stream, run, args, size);
  } else {
    cuemu_keep_order(stream);
    cuemu_push(stream, run, args, size);
  }
  pthread_mutex_unlock(&cuemu_lock);
  return result;
}

/* Block until all that was enqueued so far is done. */
CUresult cuemu_drain(CUstream stream) {
  cuemu_count_wait();
  pthread_mutex_lock(&cuemu_lock);
  CUresult result = cuemu_implicit(stream);
  if (stream->graph) {
    stream->graph->broken = true;
    result = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  }
  struct point point = {stream, stream->issued};
  pthread_mutex_unlock(&cuemu_lock);
  if (result == CUDA_SUCCESS) wait_for_point(&point);
  return result;
}

CUresult cuStreamCreateWithPriority(CUstream *stream, unsigned flags, int priority) {
  NEED_CONTEXT();
  REQUIRE(stream && flags <= CU_STREAM_NON_BLOCKING, CUDA_ERROR_INVALID_VALUE);
  int clamped = priority > 0 ? 0 : priority < -5 ? -5 : priority;
  *stream = create(cuemu_context(), flags, clamped);
  return CUDA_SUCCESS;
}

CUresult cuStreamCreate(CUstream *stream, unsigned flags) {
  return cuStreamCreateWithPriority(stream, flags, 0);
}

/* Returns at once, as the driver does: what is enqueued still runs. The struct stays, because
 * events may point at it. */
CUresult cuStreamDestroy(CUstream stream) {
  NEED_CONTEXT();
  REQUIRE(stream && stream != CU_STREAM_LEGACY, CUDA_ERROR_INVALID_HANDLE);
  pthread_mutex_lock(&cuemu_lock);
  stream->closing = true;
  for (CUstream *link = &cuemu_streams; *link; link = &(*link)->next)
    if (*link == stream) { *link = stream->next; break; }
  pthread_cond_signal(&stream->more);
  pthread_mutex_unlock(&cuemu_lock);
  pthread_detach(stream->worker);
  return CUDA_SUCCESS;
}

CUresult cuStreamSynchronize(CUstream handle) {
  NEED_CONTEXT();
  CUstream stream = cuemu_stream(handle);
  REQUIRE(stream, CUDA_ERROR_INVALID_CONTEXT);
  return cuemu_drain(stream);
}

CUresult cuStreamQuery(CUstream handle) {
  NEED_CONTEXT();
  CUstream stream = cuemu_stream(handle);
  REQUIRE(stream, CUDA_ERROR_INVALID_CONTEXT);
  CUresult unsafe = cuemu_unsafe();
  REQUIRE(unsafe == CUDA_SUCCESS, unsafe);
  pthread_mutex_lock(&cuemu_lock);
  CUresult implicit = cuemu_implicit(stream);
  bool captured = stream->graph != NULL, done = stream->finished == stream->issued;
  pthread_mutex_unlock(&cuemu_lock);
  return implicit ? implicit : captured ? CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED : done ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

CUresult cuCtxSynchronize(void) {
  NEED_CONTEXT();
  CUresult unsafe = cuemu_unsafe();
  REQUIRE(unsafe == CUDA_SUCCESS, unsafe);
  pthread_mutex_lock(&cuemu_lock);
  size_t count = 0;
  for (CUstream stream = cuemu_streams; stream; stream = stream->next) count++;
  struct point points[count + 1]; /* as they stand now: what comes later is not waited for */
  count = 0;
  for (CUstream stream = cuemu_streams; stream; stream = stream->next)
    if (stream->ctx == cuemu_context()) points[count++] = (struct point){stream, stream->issued};
  pthread_mutex_unlock(&cuemu_lock);
  for (size_t i = 0; i < count; i++) wait_for_point(&points[i]);
  return CUDA_SUCCESS;
}

CUresult cuStreamGetPriority(CUstream handle, int *priority) {
  NEED_CONTEXT();
  CUstream stream = cuemu_stream(handle);
  REQUIRE(stream, CUDA_ERROR_INVALID_CONTEXT);
  *priority = stream->priority;
  return CUDA_SUCCESS;
}

CUresult cuStreamGetFlags(CUstream handle, unsigned *flags) {
  NEED_CONTEXT();
  CUstream stream = cuemu_stream(handle);
  REQUIRE(stream, CUDA_ERROR_INVALID_CONTEXT);
  *flags = stream->flags;
  return CUDA_SUCCESS;
}

CUresult cuStreamGetCtx(CUstream handle, CUcontext *ctx) {
  NEED_CONTEXT();
  CUstream stream = cuemu_stream(handle);
  REQUIRE(stream, CUDA_ERROR_INVALID_CONTEXT);
  *ctx = stream->ctx;
  return CUDA_SUCCESS;
}

/* Host functions */

struct call {
  CUhostFn function;
  void *data;
};

static void call_host(void *args) {
  struct call *call = args;
  call->function(call->data);
}

CUresult cuLaunchHostFunc(CUstream stream, CUhostFn function, void *data) {
  NEED_CONTEXT();
  REQUIRE(function, CUDA_ERROR_INVALID_VALUE);
  struct call call = {function, data};
  return cuemu_enqueue(stream, call_host, &call, sizeof call);
}
