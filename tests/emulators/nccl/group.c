/* Groups, launches, and jobs.
 *
 * Operations of a group are kept until its end; then each communicator's become one launch: one
 * host function on its stream, which carries out the collectives in their order and then all
 * messages side by side. A job is what a call does that waits for other ranks: at once if the
 * communicator is blocking, in a thread of its own if it is not, at the group's end inside one. */
#include "emulator.h"
#include <errno.h>
#include <time.h>

#define GROUPED_ABORTS 22200 /* the first version with aborts in groups */

struct launch {
  ncclComm_t comm;
  size_t count;
  bool captured; /* run again and again: never freed */
  struct op ops[];
};

struct queued {
  ncclComm_t comm;
  struct op op;
};

struct job {
  ncclComm_t comm;
  job_fn run;
  ncclResult_t result;
  pthread_t thread;
  char args[];
};

static __thread int depth;
static __thread ncclResult_t failure; /* the first error inside the group */
static __thread struct queued *queue;
static __thread size_t queued, room;
static __thread struct job **jobs;
static __thread size_t job_count;
static __thread ncclComm_t *ending; /* aborted inside the group */
static __thread size_t ending_count;

/* On the stream's thread */

void nccl_pause(double seconds) {
  struct timespec time = {(time_t)seconds, (long)((seconds - (time_t)seconds) * 1e9)};
  while (nanosleep(&time, &time) && errno == EINTR) {}
}

static bool never(ncclComm_t comm, void *argument) {
  (void)comm, (void)argument;
  return false;
}

static bool begin(ncclComm_t comm, const struct op *op) {
  if (op->delay) nccl_pause(op->delay);
  if (op->error) atomic_store(&comm->state, op->error);
  return !(op->hang || op->error) || nccl_wait(comm, never, NULL, true);
}

static bool is_message(const struct op *op) { return op->call.kind == SEND || op->call.kind == RECV; }

/* At most NC10D_EMULATED_KERNELS kernels are on a device at a time, if that is set: a kernel takes
 * its place when it begins, and keeps it until it ends. */
static int kernels[MOST_DEVICES];
static pthread_mutex_t kernel_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t kernel_ended = PTHREAD_COND_INITIALIZER;

static void take_place(int device) {
  const char *most = getenv("NC10D_EMULATED_KERNELS");
  pthread_mutex_lock(&kernel_lock);
  while (most && atoi(most) && kernels[device] >= atoi(most)) pthread_cond_wait(&kernel_ended, &kernel_lock);
  kernels[device]++;
  pthread_mutex_unlock(&kernel_lock);
}

static void give_place(int device) {
  pthread_mutex_lock(&kernel_lock);
  kernels[device]--;
  pthread_cond_broadcast(&kernel_ended);
  pthread_mutex_unlock(&kernel_lock);
}

static void run(void *data) {
  struct launch *launch = data;
  ncclComm_t comm = launch->comm;
  size_t collectives = 0;
  take_place(comm->device);
  atomic_fetch_add(&comm->running, 1); /* before the look at `aborted`: an abort waits for it */
  bool going = !atomic_load(&comm->aborted) && !atomic_load(&comm->revoked);
  for (size_t i = 0; i < launch->count && going; i++) going = begin(comm, &launch->ops[i]);
  for (; collectives < launch->count && !is_message(&launch->ops[collectives]) && going; collectives++)
    going = (launch->ops[collectives].call.kind >= PUT ? nccl_one_sided : nccl_collective)(comm, &launch->ops[collectives]);
  if (going && collectives < launch->count)
    nccl_messages(comm, &launch->ops[collectives], launch->count - collectives);
  give_place(comm->device);
  atomic_fetch_sub(&comm->running, 1);
  if (launch->captured) return;
  atomic_fetch_sub(&comm->pending, 1);
  nccl_ring_bell(comm);
  nccl_release(comm);
  free(launch);
}

/* On the caller's thread */

/* Whether a stream is captured, and into which graph. */
static CUresult look_for_capture(CUstream stream, bool *captured, CUgraph *graph) {
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
#if CUDA_VERSION >= 13000
  CUresult result = nccl_driver()->capture_info(stream, &status, NULL, graph, NULL, NULL, NULL);
#else
  CUresult result = nccl_driver()->capture_info(stream, &status, NULL, graph, NULL, NULL);
#endif
  *captured = status != CU_STREAM_CAPTURE_STATUS_NONE;
  return result;
}

static void drop_captured(void *data) { atomic_fetch_sub(&((ncclComm_t)data)->captured, 1); }

/* A communicator lives as long as the graphs that it has launches in. */
static void count_captured(ncclComm_t comm, CUgraph graph) {
  CUuserObject object;
  if (!graph || nccl_driver()->object_create(&object, comm, drop_captured, 1, CU_USER_OBJECT_NO_DESTRUCTOR_SYNC)) return;
  atomic_fetch_add(&comm->captured, 1);
  nccl_driver()->graph_retain(graph, object, 1, CU_GRAPH_USER_OBJECT_MOVE);
}

/* Order `stream` after `other`, as it stands now. */
static void follow(CUstream stream, CUstream other) {
  CUevent event;
  nccl_driver()->event_create(&event, CU_EVENT_DISABLE_TIMING);
  nccl_driver()->event_record(event, other);
  nccl_driver()->wait_event(stream, event, 0);
  nccl_driver()->event_destroy(event);
}

/* Whether a stream is of the device that is current, as that of a kernel has to be. */
static bool is_here(CUstream stream) {
  CUcontext current, its_own;
  return !nccl_driver()->stream_context(NULL, &current) && !nccl_driver()->stream_context(stream, &its_own) && current == its_own;
}

/* One launch, on the first operation's stream; the others' wait for it, and it for them. The launch
 * is the stream's thread's as soon as it is enqueued, and may be over and gone. */
static ncclResult_t launch_there(ncclComm_t comm, struct launch *launch) {
  CUstream stream = launch->ops[0].stream, others[launch->count];
  size_t count = 0;
  bool captured;
  CUgraph graph = NULL;
  for (size_t i = 0; i < launch->count; i++)
    REQUIRE(comm, is_here(launch->ops[i].stream), ncclUnhandledCudaError, "the stream is of another device than the communicator");
  REQUIRE(comm, !look_for_capture(stream, &captured, &graph), ncclUnhandledCudaError, "the stream can't be used now");
  launch->captured = captured;
  launch->comm = comm;
  for (size_t i = 1; i < launch->count; i++)
    if (launch->ops[i].stream != stream) follow(stream, others[count++] = launch->ops[i].stream);
  if (!captured) {
    if (comm->last && comm->last != stream) nccl_driver()->wait_event(stream, comm->tail, 0);
    atomic_fetch_add(&comm->references, 1);
    atomic_fetch_add(&comm->pending, 1);
  }
  REQUIRE(comm, !nccl_driver()->launch_host(stream, run, launch), ncclUnhandledCudaError, "the launch failed");
  if (captured) count_captured(comm, graph);
  if (!captured) {
    nccl_driver()->event_record(comm->tail, stream);
    comm->last = stream;
  }
  for (size_t i = 0; i < count; i++) follow(others[i], stream);
  return ncclSuccess;
}

static ncclResult_t launch(ncclComm_t comm, struct launch *launch) {
  nccl_enter(comm->device);
  ncclResult_t result = launch_there(comm, launch);
  nccl_exit(comm->device);
  return result;
}

/* Take the operations of one communicator out of the queue: collectives first, then messages. */
static struct launch *collect(ncclComm_t comm) {
  struct launch *launch = calloc(1, sizeof *launch + queued * sizeof *launch->ops);
  for (int messages = 0; messages < 2; messages++)
    for (size_t i = 0; i < queued; i++)
      if (queue[i].comm == comm && is_message(&queue[i].op) == messages) launch->ops[launch->count++] = queue[i].op;
  for (size_t i = 0; i < queued; i++)
    if (queue[i].comm == comm) queue[i].comm = NULL;
  return launch;
}

static ncclResult_t launch_job(ncclComm_t comm, void *args) {
  const char *text = getenv("NC10D_EMULATED_IN_PROGRESS");
  if (!comm->blocking && text) nccl_pause(atof(text));
  return launch(comm, *(struct launch **)args);
}

static ncclResult_t launch_queue(void) {
  ncclResult_t result = ncclSuccess;
  for (size_t i = 0; i < queued; i++) {
    ncclComm_t comm = queue[i].comm;
    if (!comm) continue;
    struct launch *launch = collect(comm);
    ncclResult_t one = nccl_do(comm, launch_job, &launch, sizeof launch);
    if (result == ncclSuccess) result = one;
  }
  queued = 0;
  return result;
}

ncclResult_t nccl_submit(ncclComm_t comm, const struct op *op) {
  if (queued == room) queue = realloc(queue, (room = room ? 2 * room : 64) * sizeof *queue);
  queue[queued++] = (struct queued){comm, *op};
  return depth ? ncclSuccess : launch_queue();
}

/* Jobs */

static void *run_job(void *argument) {
  struct job *job = argument;
  job->result = job->run(job->comm, job->args);
  ncclResult_t expected = ncclInProgress; /* not over an error that came meanwhile */
  atomic_compare_exchange_strong(&job->comm->state, &expected, job->result);
  return NULL;
}

/* In a thread of its own the communicator's device becomes current, as in NCCL's threads. */
static void *run_thread(void *argument) {
  CUcontext context;
  if (!nccl_driver()->retain(&context, ((struct job *)argument)->comm->device)) nccl_driver()->set_current(context);
  return run_job(argument);
}

static void *run_alone(void *argument) {
  run_thread(argument);
  nccl_release(((struct job *)argument)->comm);
  free(argument);
  return NULL;
}

static struct job *make_job(ncclComm_t comm, job_fn run, const void *args, size_t size) {
  struct job *job = calloc(1, sizeof *job + size);
  job->comm = comm;
  job->run = run;
  memcpy(job->args, args, size);
  return job;
}

static ncclResult_t start_alone(struct job *job) {
  atomic_store(&job->comm->state, ncclInProgress);
  atomic_fetch_add(&job->comm->references, 1);
  pthread_create(&job->thread, NULL, run_alone, job);
  pthread_detach(job->thread);
  return ncclInProgress;
}

ncclResult_t nccl_do(ncclComm_t comm, job_fn run, const void *args, size_t size) {
  struct job *job = make_job(comm, run, args, size);
  if (depth) {
    jobs = realloc(jobs, (job_count + 1) * sizeof *jobs);
    jobs[job_count++] = job;
    return ncclSuccess;
  }
  if (!comm->blocking) return start_alone(job);
  run_job(job);
  ncclResult_t result = job->result;
  free(job);
  return result;
}

/* All at once: they may wait for each other. */
static ncclResult_t run_jobs(void) {
  ncclResult_t result = ncclSuccess;
  size_t count = job_count;
  job_count = 0;
  for (size_t i = 0; i < count; i++)
    if (jobs[i]->comm->blocking) pthread_create(&jobs[i]->thread, NULL, run_thread, jobs[i]);
  for (size_t i = 0; i < count; i++) {
    ncclResult_t one;
    if (jobs[i]->comm->blocking) {
      pthread_join(jobs[i]->thread, NULL);
      one = jobs[i]->result;
      free(jobs[i]);
    } else {
      one = start_alone(jobs[i]);
    }
    if (result == ncclSuccess) result = one;
  }
  return result;
}

/* Groups */

ncclResult_t ncclGroupStart(void) {
  ncclResult_t result;
  if (nccl_fault(__func__, -1, NULL, &result)) return result;
  if (!depth++) failure = ncclSuccess;
  return ncclSuccess;
}

/* An abort inside a group ends with it, when all that are aborted there have stopped; a version that
 * knows no group of aborts ends each at once. */
bool nccl_end_later(ncclComm_t comm) {
  int version;
  if (!depth || ncclGetVersion(&version) || version < GROUPED_ABORTS) return false;
  ending = realloc(ending, (ending_count + 1) * sizeof *ending);
  ending[ending_count++] = comm;
  return true;
}

static void end_aborted(void) {
  size_t count = ending_count;
  ending_count = 0;
  for (size_t i = 0; i < count; i++) nccl_end_aborted(ending[i]);
}

/* An error of a call inside the group is also the group's: nothing of it is launched. */
void nccl_note(ncclResult_t result) {
  if (depth && failure == ncclSuccess) failure = result;
}

ncclResult_t ncclGroupEnd(void) {
  REQUIRE(NULL, depth, ncclInvalidUsage, "ncclGroupEnd: not in a group call.");
  if (--depth) return ncclSuccess;
  end_aborted();
  ncclResult_t result = failure;
  nccl_fault(__func__, -1, NULL, &result);
  if (result != ncclSuccess) {
    queued = job_count = 0;
    return result;
  }
  if (job_count) result = run_jobs();
  if (result == ncclSuccess || result == ncclInProgress) {
    ncclResult_t launched = launch_queue();
    if (launched != ncclSuccess) result = launched;
  }
  return result;
}

/* A nonblocking communicator's group runs on a thread that knows of no simulation: as in NCCL's
 * group.cc, its operations are launched. An operation is estimated as a microsecond. */
ncclResult_t ncclGroupSimulateEnd(ncclSimInfo_t *info) {
  REQUIRE(NULL, depth, ncclInvalidUsage, "ncclGroupEnd: not in a group call.");
  REQUIRE(NULL, !info || info->magic == 0x74685283, ncclInvalidArgument,
          "ncclSimInfo_t argument not initialized via NCCL_SIM_INFO_INITIALIZER");
  if (queued && !queue[0].comm->blocking) return ncclGroupEnd();
  if (--depth) return ncclSuccess;
  if (info && failure == ncclSuccess) info->estimatedTime = (float)queued;
  queued = job_count = 0;
  return failure;
}
