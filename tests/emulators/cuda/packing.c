/* nc10d's packing kernels (nc10d/kernels/gpu/gpu_pack.py) and strided copies (gpu_strided.py) in C,
 * element by element: every process that takes this for a driver has them. A test of the kernels' own
 * loops registers those instead. */
#include "emulator.h"
#include <stdio.h>

#define CHUNK (16 << 10) /* the bytes of a source that a block moves */

/* One value, whatever its type; narrow floats go to the nearest even. */
static float from_bf16(const char *at) {
  uint16_t bits;
  memcpy(&bits, at, sizeof bits);
  union { uint32_t u; float f; } word = {.u = (uint32_t)bits << 16};
  return word.f;
}

static void to_bf16(char *at, float value) {
  union { float f; uint32_t u; } word = {.f = value};
  uint16_t bits = value != value ? 0x7fc0 : (word.u + 0x7fff + ((word.u >> 16) & 1)) >> 16;
  memcpy(at, &bits, sizeof bits);
}

static float from_half(const char *at) {
  _Float16 half;
  memcpy(&half, at, sizeof half);
  return (float)half;
}

static void to_half(char *at, float value) {
  _Float16 half = (_Float16)value;
  memcpy(at, &half, sizeof half);
}

static float from_float(const char *at) {
  float value;
  memcpy(&value, at, sizeof value);
  return value;
}

static void to_float(char *at, float value) { memcpy(at, &value, sizeof value); }

struct kind {
  const char *name;
  int width;
  float (*read)(const char *at);
  void (*write)(char *at, float value);
};
static const struct kind kinds[] = {
  {"float32", 4, from_float, to_float}, {"float16", 2, from_half, to_half}, {"bfloat16", 2, from_bf16, to_bf16}};
#define KINDS 3

/* The share of one block: row and first byte of its chunk, then dst, src and nbytes of that row. */
static void move_chunk(const int64_t *table, const int64_t *chunk, double factor, const struct kind *from,
                       const struct kind *to) {
  const int64_t *row = table + 3 * chunk[0];
  int64_t first = chunk[1], size = row[2] - first < CHUNK ? row[2] - first : CHUNK;
  char *src = cuemu_bytes(row[1] + first, size);
  if (!from) {
    memmove(cuemu_bytes(row[0] + first, size), src, size);
    return;
  }
  int64_t count = size / from->width;
  char *dst = cuemu_bytes(row[0] + first / from->width * to->width, count * to->width);
  for (int64_t i = 0; i < count; i++)
    to->write(dst + i * to->width, from->read(src + i * from->width) * (float)factor);
}

static void move(const unsigned *grid, void **args, const struct kind *from, const struct kind *to) {
  const int64_t *table = cuemu_bytes(*(uintptr_t *)args[0], 1), *chunks = cuemu_bytes(*(uintptr_t *)args[1], 1);
  for (unsigned block = 0; block < grid[0]; block++)
    move_chunk(table, chunks + 2 * block, *(double *)args[2], from, to);
}

static void copy(const unsigned *grid, const unsigned *block, void **args) {
  (void)block;
  move(grid, args, NULL, NULL);
}

/* A function for each pair of types, since a twin knows nothing but its arguments. */
#define CAST(i, j)                                                                 \
  static void cast_##i##j(const unsigned *grid, const unsigned *block, void **args) { \
    (void)block;                                                                   \
    move(grid, args, &kinds[i], &kinds[j]);                                        \
  }
CAST(0, 0) CAST(0, 1) CAST(0, 2) CAST(1, 0) CAST(1, 1) CAST(1, 2) CAST(2, 0) CAST(2, 1) CAST(2, 2)
static const twin_fn casts[KINDS][KINDS] = {
  {cast_00, cast_01, cast_02}, {cast_10, cast_11, cast_12}, {cast_20, cast_21, cast_22}};

/* As cuemu_bytes, for many addresses in the same range. */
static char *bytes_near(struct range *last, uintptr_t address, int size) {
  if (address < last->base || address + size > last->base + last->size) {
    struct range *found = cuemu_range(address, size);
    if (!found) return cuemu_bytes(address, size);
    *last = *found;
  }
  return last->shadow + (address - last->base);
}

/* dst, src, count, used, dst_step, src_step; then reciprocal, shift, and the factors in dst and src. */
static void strided(void **args, int word) {
  struct range written = {0}, read = {0};
  int64_t count = *(int64_t *)args[2], used = *(int64_t *)args[3];
  for (int64_t i = 0; i < count; i++) {
    uintptr_t to = *(uintptr_t *)args[0] + i * *(int64_t *)args[4];
    uintptr_t at = *(uintptr_t *)args[1] + i * *(int64_t *)args[5];
    for (void **side = args + 6; side < args + 6 + 4 * (used - 1); side += 4) {
      int64_t quotient = (uint64_t)((unsigned __int128)i * *(uint64_t *)side[0] >> 64) >> *(int64_t *)side[1];
      to += quotient * *(int64_t *)side[2];
      at += quotient * *(int64_t *)side[3];
    }
    memcpy(bytes_near(&written, to, word), bytes_near(&read, at, word), word);
  }
}

#define STRIDED(word)                                                                    \
  static void strided_##word(const unsigned *grid, const unsigned *block, void **args) { \
    (void)grid, (void)block;                                                             \
    strided(args, word);                                                                 \
  }
STRIDED(1) STRIDED(2) STRIDED(4) STRIDED(8) STRIDED(16)
static const struct { const char *name; twin_fn run; } copies[] = {
  {"strided_copy_b8", strided_1}, {"strided_copy_b16", strided_2}, {"strided_copy_b32", strided_4},
  {"strided_copy_b64", strided_8}, {"strided_copy_b128", strided_16}};
#define STRIDED_ARGUMENTS 35

twin_fn cuemu_packing(const char *name, int *arguments) {
  *arguments = STRIDED_ARGUMENTS;
  for (size_t i = 0; i < sizeof copies / sizeof *copies; i++)
    if (!strcmp(name, copies[i].name)) return copies[i].run;
  *arguments = 4;
  char part[64];
  for (int i = 0; i < KINDS; i++)
    for (int j = 0; j < KINDS; j++) {
      snprintf(part, sizeof part, "cast_%s_to_%s", kinds[i].name, kinds[j].name);
      if (!strcmp(name, part)) return casts[i][j];
    }
  return !strcmp(name, "copy_chunk") ? copy : NULL;
}
