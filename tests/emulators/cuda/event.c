/* Events: a point in a stream, and the time at which the stream came there. An event that was
 * recorded under capture is part of the graph, and can't be asked or waited for outside. */
#include "emulator.h"

struct stamp {
  CUevent event;
  uint64_t number;
};

/* With the lock. */
static void release(CUevent event) {
  if (!--event->references) free(event);
}

static void stamp_event(void *args) {
  struct stamp *stamp = args;
  pthread_mutex_lock(&cuemu_lock);
  if (stamp->event->number == stamp->number) stamp->event->stamp = cuemu_now();
  release(stamp->event);
  pthread_mutex_unlock(&cuemu_lock);
}

bool cuemu_is_stamp(cuemu_run run) { return run == stamp_event; }

CUresult cuEventCreate(CUevent *event, unsigned flags) {
  NEED_CONTEXT();
  REQUIRE(event, CUDA_ERROR_INVALID_VALUE);
  *event = calloc(1, sizeof **event);
  (*event)->references = 1;
  (*event)->ctx = cuemu_context();
  (*event)->flags = flags;
  return CUDA_SUCCESS;
}

CUresult cuEventDestroy(CUevent event) {
  NEED_CONTEXT();
  REQUIRE(event, CUDA_ERROR_INVALID_HANDLE);
  pthread_mutex_lock(&cuemu_lock);
  release(event);
  pthread_mutex_unlock(&cuemu_lock);
  return CUDA_SUCCESS;
}

CUresult cuEventRecord(CUevent event, CUstream handle) {
  NEED_CONTEXT();
  REQUIRE(event, CUDA_ERROR_INVALID_HANDLE);
  CUstream stream = cuemu_stream(handle);
  REQUIRE(stream, CUDA_ERROR_INVALID_CONTEXT);
  REQUIRE(event->ctx == stream->ctx, CUDA_ERROR_INVALID_HANDLE);
  pthread_mutex_lock(&cuemu_lock);
  CUresult result = cuemu_implicit(stream);
  if (result != CUDA_SUCCESS) {
    pthread_mutex_unlock(&cuemu_lock);
    return result;
  }
  event->stream = stream;
  event->graph = stream->graph;
  if (!stream->graph) {
    cuemu_keep_order(stream);
    struct stamp stamp = {event, event->number = stream->issued + 1};
    event->references++;
    cuemu_push(stream, stamp_event, &stamp, sizeof stamp);
  }
  pthread_mutex_unlock(&cuemu_lock);
  return CUDA_SUCCESS;
}

CUresult cuEventRecordWithFlags(CUevent event, CUstream stream, unsigned flags) {
  (void)flags;
  return cuEventRecord(event, stream);
}

/* Order the stream after the event; with an event of a capture, the stream joins that capture. */
CUresult cuStreamWaitEvent(CUstream handle, CUevent event, unsigned flags) {
  NEED_CONTEXT();
  (void)flags;
  REQUIRE(event, CUDA_ERROR_INVALID_HANDLE);
  CUstream stream = cuemu_stream(handle);
  REQUIRE(stream, CUDA_ERROR_INVALID_CONTEXT);
  pthread_mutex_lock(&cuemu_lock);
  CUresult result = cuemu_implicit(stream);
  if (result != CUDA_SUCCESS) {
    /* refused */
  } else if (event->graph) {
    if (stream->graph && stream->graph != event->graph) {
      result = CUDA_ERROR_STREAM_CAPTURE_MERGE;
    } else {
      stream->graph = event->graph;
      event->stream->loose = false;
      /* Who waited has to be waited for in its turn, unless it is where the capture began. */
      if (stream != event->graph->origin && stream != event->stream) stream->loose = true;
    }
  } else if (stream->graph && event->stream) {
    stream->graph->broken = true;
    result = CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
  } else if (event->stream) {
    cuemu_hold(stream, event->stream, event->number);
  }
  pthread_mutex_unlock(&cuemu_lock);
  return result;
}

CUresult cuEventQuery(CUevent event) {
  REQUIRE(event, CUDA_ERROR_INVALID_HANDLE);
  CUresult unsafe = cuemu_unsafe();
  REQUIRE(unsafe == CUDA_SUCCESS, unsafe);
  pthread_mutex_lock(&cuemu_lock);
  bool captured = event->graph != NULL;
  bool done = !event->stream || event->stream->finished >= event->number;
  pthread_mutex_unlock(&cuemu_lock);
  return captured ? CUDA_ERROR_CAPTURED_EVENT : done ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

CUresult cuEventSynchronize(CUevent event) {
  NEED_CONTEXT();
  REQUIRE(event, CUDA_ERROR_INVALID_HANDLE);
  CUresult unsafe = cuemu_unsafe();
  REQUIRE(unsafe == CUDA_SUCCESS, unsafe);
  REQUIRE(!event->graph, CUDA_ERROR_CAPTURED_EVENT);
  pthread_mutex_lock(&cuemu_lock);
  CUstream stream = event->stream;
  uint64_t number = event->number; /* a later record is not waited for */
  while (stream && stream->finished < number) pthread_cond_wait(&cuemu_progress, &cuemu_lock);
  pthread_mutex_unlock(&cuemu_lock);
  return CUDA_SUCCESS;
}

CUresult cuEventElapsedTime(float *milliseconds, CUevent start, CUevent end) {
  NEED_CONTEXT();
  REQUIRE(start && end && start->stream && end->stream, CUDA_ERROR_INVALID_HANDLE);
  REQUIRE(!((start->flags | end->flags) & CU_EVENT_DISABLE_TIMING), CUDA_ERROR_INVALID_HANDLE);
  pthread_mutex_lock(&cuemu_lock);
  bool done = start->stream->finished >= start->number && end->stream->finished >= end->number;
  *milliseconds = (float)((end->stamp - start->stamp) * 1e3);
  pthread_mutex_unlock(&cuemu_lock);
  return done ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}
