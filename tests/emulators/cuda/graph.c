/* Capture and graphs. While a stream is captured its work goes into a graph instead; an event
 * carries the capture to other streams. A graph is run in the order of its capture.
 *
 * What the driver forbids meanwhile is forbidden here: asking a captured stream or event, and, in a
 * capture that is not RELAXED, calls that may synchronise, by any thread (GLOBAL) or by the one
 * that captures (THREAD_LOCAL). Such a call breaks the capture, which its end then reports. */
#include "emulator.h"
#include <stdatomic.h>

#define MOST_CAPTURES 64

static CUstream captured[MOST_CAPTURES]; /* the streams where captures began */
static __thread CUstreamCaptureMode allowed = CU_STREAM_CAPTURE_MODE_GLOBAL;

struct CUgraphExec_st {
  CUgraph graph;
};

static CUgraph create(void) {
  CUgraph graph = calloc(1, sizeof *graph);
  graph->last = &graph->first;
  return graph;
}

/* With the lock: append what the stream would have done. */
void cuemu_capture(CUstream stream, cuemu_run run, const void *args, size_t size) {
  struct task *task = cuemu_task(run, args, size);
  *stream->graph->last = task;
  stream->graph->last = &task->next;
  if (stream != stream->graph->origin) stream->loose = true;
}

/* Whether this thread may make a call that a capture in `mode` by `graph`'s owner forbids. */
static bool forbidden(CUstream stream) {
  if (allowed == CU_STREAM_CAPTURE_MODE_RELAXED) return false;
  if (stream->mode == CU_STREAM_CAPTURE_MODE_GLOBAL && allowed == CU_STREAM_CAPTURE_MODE_GLOBAL) return true;
  return stream->mode != CU_STREAM_CAPTURE_MODE_RELAXED && pthread_equal(stream->graph->owner, pthread_self());
}

/* Not part of the driver: how often a program has waited for the device, or asked it, so far. */
static atomic_ulong host_waits;
unsigned long cuemuHostWaits(void);
unsigned long cuemuHostWaits(void) { return atomic_load(&host_waits); }
void cuemu_count_wait(void) { atomic_fetch_add(&host_waits, 1); }

CUresult cuemu_unsafe(void) {
  CUresult result = CUDA_SUCCESS;
  cuemu_count_wait();
  pthread_mutex_lock(&cuemu_lock);
  for (int i = 0; i < MOST_CAPTURES; i++)
    if (captured[i] && forbidden(captured[i])) {
      captured[i]->graph->broken = true;
      result = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
  pthread_mutex_unlock(&cuemu_lock);
  return result;
}

CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode) {
  CUstreamCaptureMode before = allowed;
  allowed = *mode;
  *mode = before;
  return CUDA_SUCCESS;
}

CUresult cuStreamBeginCapture(CUstream handle, CUstreamCaptureMode mode) {
  REQUIRE(handle && handle != CU_STREAM_LEGACY, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  CUstream stream = cuemu_stream(handle);
  CUresult result = CUDA_ERROR_OUT_OF_MEMORY;
  pthread_mutex_lock(&cuemu_lock);
  if (stream->graph) result = CUDA_ERROR_ILLEGAL_STATE;
  for (int i = 0; i < MOST_CAPTURES && result == CUDA_ERROR_OUT_OF_MEMORY; i++)
    if (!captured[i]) {
      captured[i] = stream;
      stream->graph = create();
      stream->graph->origin = stream;
      stream->graph->owner = pthread_self();
      stream->mode = mode;
      result = CUDA_SUCCESS;
    }
  pthread_mutex_unlock(&cuemu_lock);
  return result;
}

static void leave(CUgraph graph, bool *loose);

CUresult cuStreamEndCapture(CUstream handle, CUgraph *result) {
  CUstream stream = cuemu_stream(handle);
  *result = NULL;
  REQUIRE(stream && stream->graph, CUDA_ERROR_ILLEGAL_STATE);
  CUgraph graph = stream->graph;
  REQUIRE(graph->origin == stream, CUDA_ERROR_STREAM_CAPTURE_UNMATCHED);
  if (stream->mode != CU_STREAM_CAPTURE_MODE_RELAXED)
    REQUIRE(pthread_equal(graph->owner, pthread_self()), CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD);
  bool loose = false;
  pthread_mutex_lock(&cuemu_lock);
  for (int i = 0; i < MOST_CAPTURES; i++)
    if (captured[i] == stream) captured[i] = NULL;
  leave(graph, &loose);
  pthread_mutex_unlock(&cuemu_lock);
  if (!graph->broken && !loose) *result = graph;
  else cuGraphDestroy(graph);
  return graph->broken ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : loose ? CUDA_ERROR_STREAM_CAPTURE_UNJOINED : CUDA_SUCCESS;
}

/* With the lock: let every stream of a capture go; say whether one's work was not waited for. */
static void leave(CUgraph graph, bool *loose) {
  for (CUstream stream = cuemu_streams; stream; stream = stream->next)
    if (stream->graph == graph) {
      *loose |= stream->loose;
      stream->graph = NULL;
      stream->loose = false;
    }
}

CUresult cuStreamIsCapturing(CUstream handle, CUstreamCaptureStatus *status) {
  CUstream stream = cuemu_stream(handle);
  REQUIRE(stream, CUDA_ERROR_INVALID_CONTEXT);
  pthread_mutex_lock(&cuemu_lock);
  CUresult result = cuemu_clash(stream) ? CUDA_ERROR_STREAM_CAPTURE_IMPLICIT : CUDA_SUCCESS;
  *status = !stream->graph ? CU_STREAM_CAPTURE_STATUS_NONE
            : stream->graph->broken ? CU_STREAM_CAPTURE_STATUS_INVALIDATED
                                    : CU_STREAM_CAPTURE_STATUS_ACTIVE;
  pthread_mutex_unlock(&cuemu_lock);
  return result;
}

/* What is captured may be tied to the graph, by user objects. */
#if CUDA_VERSION >= 13000
CUresult cuStreamGetCaptureInfo(CUstream handle, CUstreamCaptureStatus *status, cuuint64_t *number, CUgraph *graph,
                                const CUgraphNode **after, const CUgraphEdgeData **edges, size_t *count) {
  (void)edges;
#else
CUresult cuStreamGetCaptureInfo(CUstream handle, CUstreamCaptureStatus *status, cuuint64_t *number, CUgraph *graph,
                                const CUgraphNode **after, size_t *count) {
#endif
  if (after) *after = NULL; /* a graph here is a list: nothing asks for its edges */
  if (count) *count = 0;
  CUresult result = cuStreamIsCapturing(handle, status);
  REQUIRE(result == CUDA_SUCCESS && *status == CU_STREAM_CAPTURE_STATUS_ACTIVE, result);
  CUgraph found = cuemu_stream(handle)->graph;
  if (number) *number = (cuuint64_t)(uintptr_t)found;
  if (graph) *graph = found;
  return CUDA_SUCCESS;
}

CUresult cuGraphInstantiate(CUgraphExec *exec, CUgraph graph, unsigned long long flags) {
  (void)flags;
  REQUIRE(exec && graph, CUDA_ERROR_INVALID_VALUE);
  *exec = malloc(sizeof **exec);
  (*exec)->graph = create();
  for (struct task *task = graph->first; task; task = task->next) {
    *(*exec)->graph->last = cuemu_task(task->run, task->args, task->size);
    (*exec)->graph->last = &(*(*exec)->graph->last)->next;
  }
  cuemu_keep_objects((*exec)->graph, graph);
  return CUDA_SUCCESS;
}

CUresult cuGraphLaunch(CUgraphExec exec, CUstream stream) {
  REQUIRE(exec, CUDA_ERROR_INVALID_VALUE);
  CUresult result = CUDA_SUCCESS;
  for (struct task *task = exec->graph->first; task && result == CUDA_SUCCESS; task = task->next)
    result = cuemu_enqueue(stream, task->run, task->args, task->size);
  return result;
}

CUresult cuGraphGetNodes(CUgraph graph, CUgraphNode *nodes, size_t *count) {
  REQUIRE(graph && !nodes, CUDA_ERROR_NOT_SUPPORTED);
  *count = 0;
  for (struct task *task = graph->first; task; task = task->next) ++*count;
  return CUDA_SUCCESS;
}

/* A captured graph's own struct stays, for events that still name it, a broken one's too. */
CUresult cuGraphDestroy(CUgraph graph) {
  REQUIRE(graph, CUDA_ERROR_INVALID_VALUE);
  for (struct task *task = graph->first, *next; task; task = next) {
    next = task->next;
    free(task);
  }
  graph->first = NULL;
  graph->last = &graph->first;
  cuemu_drop_objects(graph);
  return CUDA_SUCCESS;
}

CUresult cuGraphExecDestroy(CUgraphExec exec) {
  REQUIRE(exec, CUDA_ERROR_INVALID_VALUE);
  cuGraphDestroy(exec->graph);
  free(exec->graph);
  free(exec);
  return CUDA_SUCCESS;
}
