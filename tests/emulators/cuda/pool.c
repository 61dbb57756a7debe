/* The pool of cuMemAllocAsync. What cuMemFreeAsync gives back is filled with 0xCD when its stream
 * comes there, and is the first that the next allocation gets: at once on the same stream, on others
 * when it has been filled. So memory that is used after it was freed is soon somebody else's. */
#include "emulator.h"

#define MOST_FREE ((size_t)256 << 20) /* bytes of the pool; beyond, the oldest go to the system */

struct block {
  struct block *next;
  struct range range;
  CUstream stream; /* on which it was freed, at this task */
  uint64_t number;
};

static struct block *blocks;

static bool is_free(const struct block *block) { return block->stream->finished >= block->number; }

/* With the lock: take the latest block of enough room out of the pool; NULL if there is none. */
static struct block *find(size_t size, CUdevice device, CUstream stream) {
  for (struct block **link = &blocks; *link; link = &(*link)->next) {
    struct block *block = *link;
    if (block->range.device != device || block->range.room < size) continue;
    if (block->stream != stream && !is_free(block)) continue;
    *link = block->next;
    return block;
  }
  return NULL;
}

/* With the lock: the range that has been freed, but not yet in the order of its stream. */
struct range *cuemu_leaving(uintptr_t address, size_t size) {
  for (struct block *block = blocks; block; block = block->next)
    if (!is_free(block) && address >= block->range.base && address + size <= block->range.base + block->range.size)
      return &block->range;
  return NULL;
}

/* With the lock: keep what fits into the pool. */
static void trim(void) {
  size_t sum = 0;
  for (struct block **link = &blocks; *link;) {
    struct block *block = *link;
    sum += block->range.room;
    if (sum <= MOST_FREE || !is_free(block)) {
      link = &block->next;
      continue;
    }
    *link = block->next;
    cuemu_unmap(&block->range);
    free(block);
  }
}

CUresult cuMemAllocAsync(CUdeviceptr *pointer, size_t size, CUstream handle) {
  NEED_CONTEXT();
  REQUIRE(pointer && size, CUDA_ERROR_INVALID_VALUE);
  CUresult result = cuemu_unsafe();
  REQUIRE(result == CUDA_SUCCESS, result);
  CUstream stream = cuemu_stream(handle);
  pthread_mutex_lock(&cuemu_lock);
  result = cuemu_implicit(stream);
  struct block *block = result == CUDA_SUCCESS ? find(size, cuemu_context()->device, stream) : NULL;
  pthread_mutex_unlock(&cuemu_lock);
  REQUIRE(result == CUDA_SUCCESS, result);
  struct range range;
  if (block) {
    range = block->range;
    range.size = size;
    free(block);
  } else {
    REQUIRE(cuemu_map(&range, size), CUDA_ERROR_OUT_OF_MEMORY);
    range.pooled = true;
  }
  cuemu_add_range(&range);
  *pointer = (CUdeviceptr)range.base;
  return CUDA_SUCCESS;
}

struct spoiled {
  char *bytes;
  size_t size;
};

static void spoil(void *args) {
  struct spoiled *spoiled = args;
  memset(spoiled->bytes, 0xCD, spoiled->size);
}

static void free_later(void *args) {
  struct range range;
  if (cuemu_take_range(*(CUdeviceptr *)args, CU_MEMORYTYPE_DEVICE, &range)) cuemu_unmap(&range);
}

/* In a capture only memory of the graph itself can be freed, of which there is none here. */
CUresult cuMemFreeAsync(CUdeviceptr pointer, CUstream handle) {
  NEED_CONTEXT();
  CUstream stream = cuemu_stream(handle);
  REQUIRE(stream, CUDA_ERROR_INVALID_CONTEXT);
  struct range *found = cuemu_range(pointer, 1), range;
  REQUIRE(found && found->base == pointer && !stream->graph, CUDA_ERROR_INVALID_VALUE);
  if (!found->pooled) return cuemu_enqueue(handle, free_later, &pointer, sizeof pointer);
  struct spoiled spoiled = {found->shadow, found->room};
  CUresult result = cuemu_enqueue(handle, spoil, &spoiled, sizeof spoiled);
  REQUIRE(result == CUDA_SUCCESS, result);
  pthread_mutex_lock(&cuemu_lock); /* kernels on their way find it among the ranges, or in the pool */
  bool taken = cuemu_take_locked(pointer, CU_MEMORYTYPE_DEVICE, &range);
  if (taken) {
    struct block *block = malloc(sizeof *block);
    *block = (struct block){blocks, range, stream, stream->issued};
    blocks = block;
    trim();
  }
  pthread_mutex_unlock(&cuemu_lock);
  REQUIRE(taken, CUDA_ERROR_INVALID_VALUE);
  return CUDA_SUCCESS;
}
