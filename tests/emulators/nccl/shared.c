/* The segment that a communicator's members share, and how they wait for each other.
 *
 * A segment is a memfd, named by the file descriptor of the process that made it: others open it
 * as /proc/PID/fd/N, so there is nothing to unlink. Each member holds a lock on one byte of it; the
 * kernel takes that back when the process dies, which is how the others learn of it. */
#include "emulator.h"
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <sched.h>
#include <stdarg.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>

#define SLICE 20000000L /* nanoseconds of sleep after which a waiter looks who is still there */
#define PENDING 256

static pthread_mutex_t keeping = PTHREAD_MUTEX_INITIALIZER;
static int kept[PENDING]; /* descriptors of segments that not all members have opened, plus 1 */

static size_t header(int size) {
  size_t bytes = sizeof(struct shared) + size * sizeof(struct member);
  return (bytes + 4095) / 4096 * 4096;
}

size_t nccl_segment_size(int size) {
  return header(size) + (size_t)size * BOARD + (size_t)size * size * sizeof(struct ring);
}

char *nccl_board(ncclComm_t comm, int rank) {
  return (char *)comm->shared + header(comm->size) + (size_t)rank * BOARD;
}

struct ring *nccl_ring(ncclComm_t comm, int src, int dst) {
  return (struct ring *)nccl_board(comm, comm->size) + (src * comm->size + dst);
}

/* Make a segment, and its path for the others; it stays open here until all of them have it. The
 * path ends with the segment's name, since descriptors are used again. */
int nccl_segment_new(char *path) {
  char name[32];
  static atomic_int number;
  snprintf(name, sizeof name, "nccl-%d-%d", getpid(), atomic_fetch_add(&number, 1));
  int fd = memfd_create(name, MFD_CLOEXEC);
  if (fd < 0) return -1;
  snprintf(path, PATH, "/proc/%d/fd/%d %s", getpid(), fd, name);
  pthread_mutex_lock(&keeping);
  for (int i = 0; i < PENDING; i++)
    if (!kept[i]) { kept[i] = fd + 1; break; }
  pthread_mutex_unlock(&keeping);
  return fd;
}

/* All members have opened it: whoever made it needs its descriptor no more. */
static void let_go(const char *path) {
  int pid, fd;
  if (sscanf(path, "/proc/%d/fd/%d", &pid, &fd) != 2 || pid != getpid()) return;
  pthread_mutex_lock(&keeping);
  for (int i = 0; i < PENDING; i++)
    if (kept[i] == fd + 1) { kept[i] = 0; close(fd); }
  pthread_mutex_unlock(&keeping);
}

static int lock_byte(ncclComm_t comm, int command, int rank) {
  struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = rank, .l_len = 1};
  return fcntl(comm->fd, command, &lock) == 0 ? lock.l_type : -1;
}

static bool alive(ncclComm_t comm, int rank) { return rank == comm->rank || lock_byte(comm, F_OFD_GETLK, rank) == F_WRLCK; }

static unsigned long host_hash(void) {
  const char *text = getenv("NCCL_HOSTID");
  unsigned long hash = 5381;
  for (; text && *text; text++) hash = hash * 33 + (unsigned char)*text;
  return hash;
}

static ncclResult_t check_devices(ncclComm_t comm) {
  const char *shared_gpu = getenv("NCCL_MULTI_RANK_GPU_ENABLE");
  struct member *members = comm->shared->members, *mine = &members[comm->rank];
  for (int rank = 0; rank < comm->size; rank++) {
    if (rank == comm->rank || members[rank].host != mine->host || members[rank].device != mine->device) continue;
    if (shared_gpu && *shared_gpu == '1') continue;
    return nccl_fail(comm, ncclInvalidUsage, "Duplicate GPU detected : rank %d and rank %d both on CUDA device %d",
                     comm->rank, rank, mine->device);
  }
  return ncclSuccess;
}

static int open_segment(const char *path) {
  char file[PATH], name[PATH], target[PATH] = "", wanted[2 * PATH];
  if (sscanf(path, "%63s %63s", file, name) != 2 || readlink(file, target, sizeof target - 1) < 0) return -1;
  snprintf(wanted, sizeof wanted, "/memfd:%s (deleted)", name);
  return strcmp(target, wanted) ? -1 : open(file, O_RDWR | O_CLOEXEC);
}

/* Take my place in the segment at `path`, and wait until all members have. */
ncclResult_t nccl_attach(ncclComm_t comm, const char *path) {
  comm->fd = open_segment(path);
  REQUIRE(comm, comm->fd >= 0, ncclSystemError, "bootstrap: nobody is at %s", path);
  comm->mapped = nccl_segment_size(comm->size);
  REQUIRE(comm, ftruncate(comm->fd, comm->mapped) == 0, ncclSystemError, "no room for %zu bytes", comm->mapped);
  void *segment = mmap(NULL, comm->mapped, PROT_READ | PROT_WRITE, MAP_SHARED, comm->fd, 0);
  REQUIRE(comm, segment != MAP_FAILED, ncclSystemError, "no room for %zu bytes", comm->mapped);
  comm->shared = segment;
  int nobody = 0;
  if (!atomic_compare_exchange_strong(&comm->shared->size, &nobody, comm->size))
    REQUIRE(comm, nobody == comm->size, ncclInvalidUsage, "ranks disagree on their number: %d, %d", nobody, comm->size);
  struct member *mine = &comm->shared->members[comm->rank];
  REQUIRE(comm, lock_byte(comm, F_OFD_SETLK, comm->rank) != -1, ncclInvalidUsage, "rank %d is there twice", comm->rank);
  mine->host = host_hash();
  mine->device = comm->device;
  mine->process = getpid();
  atomic_store(&mine->presence, HERE);
  REQUIRE(comm, nccl_meet(comm), ncclInternalError, "aborted while ranks were awaited");
  let_go(path);
  ncclResult_t result = check_devices(comm);
  const char *sync = getenv("NC10D_EMULATED_INIT_SYNC"); /* what is freed and pinned meanwhile */
  if (result != ncclSuccess || !sync || !atoi(sync)) return result;
  nccl_wait_for_device(comm->device);
  REQUIRE(comm, nccl_meet(comm), ncclInternalError, "aborted while ranks were awaited");
  return ncclSuccess;
}

/* Drop a reference; the last one unmaps. The struct stays, so that a late call is an error. */
void nccl_release(ncclComm_t comm) {
  if (atomic_fetch_sub(&comm->references, 1) != 1) return;
  if (comm->shared) munmap(comm->shared, comm->mapped);
  if (comm->fd >= 0) close(comm->fd);
  if (!comm->tail) return;
  nccl_enter(comm->device);
  nccl_driver()->event_destroy(comm->tail);
  nccl_exit(comm->device);
}

/* Waiting */

void nccl_ring_bell(ncclComm_t comm) {
  atomic_fetch_add(&comm->shared->bell, 1);
  if (atomic_load(&comm->shared->sleepers))
    syscall(SYS_futex, &comm->shared->bell, FUTEX_WAKE, 1 << 30, NULL, NULL, 0);
}

static void sleep_until_bell(ncclComm_t comm, unsigned heard) {
  struct timespec slice = {0, SLICE};
  atomic_fetch_add(&comm->shared->sleepers, 1);
  syscall(SYS_futex, &comm->shared->bell, FUTEX_WAIT, heard, &slice, NULL, 0);
  atomic_fetch_sub(&comm->shared->sleepers, 1);
}

/* Somebody of another host has gone: say so once. What waits for him goes on waiting, as a kernel
 * would. Of one's own host nobody is missed: what is shared with him stays in place. */
static void look_around(ncclComm_t comm) {
  for (int rank = 0; rank < comm->size; rank++) {
    if (comm->shared->members[rank].host == comm->shared->members[comm->rank].host) continue;
    int presence = atomic_load(&comm->shared->members[rank].presence);
    bool gone = presence == LEFT || presence == ABORTED || (presence == HERE && !alive(comm, rank));
    int expected = ncclSuccess;
    if (rank == comm->rank || !gone || atomic_load(&comm->state) != expected) continue;
    snprintf(comm->message, sizeof comm->message, "rank %d has gone: it %s", rank,
             presence == ABORTED ? "aborted" : presence == LEFT ? "destroyed its communicator" : "died");
    atomic_compare_exchange_strong(&comm->state, &expected, ncclRemoteError);
  }
}

/* Wait until `ready`; false if the communicator was aborted, or (on the device) revoked. */
bool nccl_wait(ncclComm_t comm, bool (*ready)(ncclComm_t, void *), void *argument, bool device) {
  for (int turn = 0;; turn++) {
    unsigned heard = atomic_load(&comm->shared->bell);
    if (ready(comm, argument)) return true;
    if (atomic_load(&comm->aborted) || (device && atomic_load(&comm->revoked))) return false;
    if (turn < 20) {
      sched_yield();
      continue;
    }
    if (device) look_around(comm);
    sleep_until_bell(comm, heard);
  }
}

static bool on_node(ncclComm_t comm, int rank) {
  const struct member *members = comm->shared->members;
  return rank != comm->rank && members[rank].host == members[comm->rank].host && alive(comm, rank) &&
         atomic_load(&members[rank].presence) == HERE;
}

static bool node_has_left(ncclComm_t comm, void *argument) {
  (void)argument;
  for (int rank = 0; rank < comm->size; rank++)
    if (on_node(comm, rank)) return false;
  return true;
}

/* Until no rank of this host is left, unless a rank of this process is: its last one waits for all
 * (init.cc, commReclaim). A rank serves its peers until they have gone (proxy.cc: `while (stop ==
 * PROXY_RUNNING || npeers > 0)`). */
void nccl_wait_for_node(ncclComm_t comm) {
  for (int rank = 0; rank < comm->size; rank++)
    if (comm->shared->members[rank].process == getpid() && on_node(comm, rank)) return;
  nccl_wait(comm, node_has_left, NULL, false);
}

static bool never(ncclComm_t comm, void *argument) {
  (void)comm, (void)argument;
  return false;
}

/* Calls that don't fit together: an error with these words, or, as a real library may, no end
 * (NC10D_EMULATED_MISMATCH=hang). */
bool nccl_mismatch(ncclComm_t comm, const char *format, ...) {
  const char *mode = getenv("NC10D_EMULATED_MISMATCH");
  if (mode && !strcmp(mode, "hang")) return nccl_wait(comm, never, NULL, true);
  va_list args;
  va_start(args, format);
  vsnprintf(comm->message, sizeof comm->message, format, args);
  va_end(args);
  atomic_store(&comm->state, ncclInvalidUsage);
  return false;
}

struct counted {
  size_t counter;
  unsigned long number;
};

static bool all_counted(ncclComm_t comm, void *argument) {
  struct counted *counted = argument;
  for (int rank = 0; rank < comm->size; rank++) {
    char *member = (char *)&comm->shared->members[rank];
    if (atomic_load((atomic_ulong *)(member + counted->counter)) < counted->number) return false;
  }
  return true;
}

static bool count_to(ncclComm_t comm, size_t counter, unsigned long number, bool device) {
  struct counted counted = {counter, number};
  atomic_store((atomic_ulong *)((char *)&comm->shared->members[comm->rank] + counter), number);
  nccl_ring_bell(comm);
  return nccl_wait(comm, all_counted, &counted, device);
}

/* Meet the other ranks' operations; false: stopped. */
bool nccl_barrier(ncclComm_t comm) { return count_to(comm, offsetof(struct member, arrived), ++comm->arrived, true); }

/* Meet the other ranks' hosts. */
bool nccl_meet(ncclComm_t comm) { return count_to(comm, offsetof(struct member, met), ++comm->met, false); }
