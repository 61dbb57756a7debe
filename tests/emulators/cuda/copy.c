/* Copies and fills. Pinned memory is read and written when the stream comes there; plain memory
 * when the call is made, as the driver stages it. So a caller who touches a pinned array too early
 * gets what a GPU would give him. */
#include "emulator.h"

struct copy {
  char *to;
  const char *from;
  size_t size;
  void *staged; /* freed when done */
};

static void run_copy(void *args) {
  struct copy *copy = args;
  memmove(copy->to, copy->from, copy->size);
  free(copy->staged);
}

static bool plain(uintptr_t address) { return !cuemu_range(address, 1); }

#define ON_DEVICE(address, size) REQUIRE(!(size) || cuemu_range(address, size), CUDA_ERROR_INVALID_VALUE)

static CUresult copy_async(uintptr_t to, uintptr_t from, size_t size, CUstream stream) {
  NEED_CONTEXT();
  REQUIRE(size, CUDA_SUCCESS);
  struct copy copy = {cuemu_bytes(to, size), cuemu_bytes(from, size), size, NULL};
  REQUIRE(copy.to && copy.from, CUDA_ERROR_INVALID_VALUE);
  if (plain(from)) copy.from = copy.staged = memcpy(malloc(size), copy.from, size);
  CUresult result = cuemu_enqueue(stream, run_copy, &copy, sizeof copy);
  if (result == CUDA_SUCCESS && plain(to)) result = cuemu_drain(cuemu_stream(stream));
  return result;
}

static CUresult copy_now(uintptr_t to, uintptr_t from, size_t size) {
  NEED_CONTEXT();
  CUresult unsafe = cuemu_unsafe();
  REQUIRE(unsafe == CUDA_SUCCESS, unsafe);
  CUresult result = copy_async(to, from, size, NULL);
  return result == CUDA_SUCCESS ? cuemu_drain(cuemu_stream(NULL)) : result;
}

CUresult cuMemcpyHtoDAsync(CUdeviceptr to, const void *from, size_t size, CUstream stream) {
  NEED_CONTEXT();
  ON_DEVICE(to, size);
  return copy_async(to, (uintptr_t)from, size, stream);
}

CUresult cuMemcpyDtoHAsync(void *to, CUdeviceptr from, size_t size, CUstream stream) {
  NEED_CONTEXT();
  ON_DEVICE(from, size);
  return copy_async((uintptr_t)to, from, size, stream);
}

CUresult cuMemcpyDtoDAsync(CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream) {
  NEED_CONTEXT();
  ON_DEVICE(to, size);
  ON_DEVICE(from, size);
  return copy_async(to, from, size, stream);
}

CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream) {
  return copy_async(to, from, size, stream);
}

CUresult cuMemcpyHtoD(CUdeviceptr to, const void *from, size_t size) {
  NEED_CONTEXT();
  ON_DEVICE(to, size);
  return copy_now(to, (uintptr_t)from, size);
}

CUresult cuMemcpyDtoH(void *to, CUdeviceptr from, size_t size) {
  NEED_CONTEXT();
  ON_DEVICE(from, size);
  return copy_now((uintptr_t)to, from, size);
}

CUresult cuMemcpyDtoD(CUdeviceptr to, CUdeviceptr from, size_t size) {
  NEED_CONTEXT();
  ON_DEVICE(to, size);
  ON_DEVICE(from, size);
  return copy_now(to, from, size);
}

CUresult cuMemcpy(CUdeviceptr to, CUdeviceptr from, size_t size) { return copy_now(to, from, size); }

/* Rows, a pitch apart */

static CUresult side(CUmemorytype kind, const void *host, CUdeviceptr device, size_t x, size_t y, size_t pitch,
                     uintptr_t *address) {
  REQUIRE(kind != CU_MEMORYTYPE_ARRAY, CUDA_ERROR_NOT_SUPPORTED);
  *address = (kind == CU_MEMORYTYPE_HOST ? (uintptr_t)host : (uintptr_t)device) + y * pitch + x;
  return CUDA_SUCCESS;
}

CUresult cuMemcpy2DAsync(const CUDA_MEMCPY2D *c, CUstream stream) {
  NEED_CONTEXT();
  uintptr_t to, from;
  CUresult result = side(c->srcMemoryType, c->srcHost, c->srcDevice, c->srcXInBytes, c->srcY, c->srcPitch, &from);
  REQUIRE(result == CUDA_SUCCESS, result);
  result = side(c->dstMemoryType, c->dstHost, c->dstDevice, c->dstXInBytes, c->dstY, c->dstPitch, &to);
  for (size_t row = 0; result == CUDA_SUCCESS && row < c->Height; row++)
    result = copy_async(to + row * c->dstPitch, from + row * c->srcPitch, c->WidthInBytes, stream);
  return result;
}

CUresult cuMemcpy2D(const CUDA_MEMCPY2D *copy) {
  NEED_CONTEXT();
  CUresult result = cuMemcpy2DAsync(copy, NULL);
  return result == CUDA_SUCCESS ? cuemu_drain(cuemu_stream(NULL)) : result;
}

CUresult cuMemcpy2DUnaligned(const CUDA_MEMCPY2D *copy) { return cuMemcpy2D(copy); }

/* Fills */

struct fill {
  char *to;
  size_t count;
  unsigned value, width;
};

static void run_fill(void *args) {
  struct fill *fill = args;
  for (size_t i = 0; i < fill->count; i++) memcpy(fill->to + i * fill->width, &fill->value, fill->width);
}

static CUresult fill_async(CUdeviceptr to, unsigned value, unsigned width, size_t count, CUstream stream) {
  NEED_CONTEXT();
  REQUIRE(count, CUDA_SUCCESS);
  REQUIRE(to % width == 0 && cuemu_range(to, width * count), CUDA_ERROR_INVALID_VALUE);
  struct fill fill = {cuemu_bytes(to, width * count), count, value, width};
  return cuemu_enqueue(stream, run_fill, &fill, sizeof fill);
}

CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t count, CUstream stream) {
  return fill_async(to, value, 1, count, stream);
}

CUresult cuMemsetD16Async(CUdeviceptr to, unsigned short value, size_t count, CUstream stream) {
  return fill_async(to, value, 2, count, stream);
}

CUresult cuMemsetD32Async(CUdeviceptr to, unsigned value, size_t count, CUstream stream) {
  return fill_async(to, value, 4, count, stream);
}

CUresult cuMemsetD8(CUdeviceptr to, unsigned char value, size_t count) { return fill_async(to, value, 1, count, NULL); }

CUresult cuMemsetD16(CUdeviceptr to, unsigned short value, size_t count) {
  return fill_async(to, value, 2, count, NULL);
}

CUresult cuMemsetD32(CUdeviceptr to, unsigned value, size_t count) { return fill_async(to, value, 4, count, NULL); }

/* A word in memory as a signal between streams, or between the host and a stream */

struct word {
  volatile uint64_t *at;
  uint64_t value;
  unsigned flags, width;
};

static uint64_t load(struct word *word) {
  return word->width == 4 ? __atomic_load_n((volatile uint32_t *)word->at, __ATOMIC_ACQUIRE)
                          : __atomic_load_n(word->at, __ATOMIC_ACQUIRE);
}

static bool reached(struct word *word) {
  uint64_t now = load(word);
  switch (word->flags & 3) {
    case CU_STREAM_WAIT_VALUE_GEQ:
      return word->width == 4 ? (int32_t)(now - word->value) >= 0 : (int64_t)(now - word->value) >= 0;
    case CU_STREAM_WAIT_VALUE_EQ: return now == word->value;
    case CU_STREAM_WAIT_VALUE_AND: return now & word->value;
    default: return ~(now | word->value);
  }
}

static void wait_word(void *args) {
  struct timespec moment = {0, 100000}; /* a GPU looks again and again, too */
  while (!reached(args)) nanosleep(&moment, NULL);
}

static void write_word(void *args) {
  struct word *word = args;
  if (word->width == 4) __atomic_store_n((volatile uint32_t *)word->at, (uint32_t)word->value, __ATOMIC_RELEASE);
  else __atomic_store_n(word->at, word->value, __ATOMIC_RELEASE);
}

static CUresult on_word(CUstream stream, cuemu_run run, CUdeviceptr at, uint64_t value, unsigned flags, unsigned width) {
  REQUIRE(at % width == 0 && cuemu_range(at, width), CUDA_ERROR_INVALID_VALUE);
  struct word word = {cuemu_bytes(at, width), value, flags, width};
  return cuemu_enqueue(stream, run, &word, sizeof word);
}

CUresult cuStreamWaitValue32(CUstream stream, CUdeviceptr at, cuuint32_t value, unsigned flags) {
  return on_word(stream, wait_word, at, value, flags, 4);
}

CUresult cuStreamWaitValue64(CUstream stream, CUdeviceptr at, cuuint64_t value, unsigned flags) {
  return on_word(stream, wait_word, at, value, flags, 8);
}

CUresult cuStreamWriteValue32(CUstream stream, CUdeviceptr at, cuuint32_t value, unsigned flags) {
  return on_word(stream, write_word, at, value, flags, 4);
}

CUresult cuStreamWriteValue64(CUstream stream, CUdeviceptr at, cuuint64_t value, unsigned flags) {
  return on_word(stream, write_word, at, value, flags, 8);
}
