/* Reductions of every type, in rank order, rounded to the type after each step: NumPy's results.
 * A real library adds in an order of its own and divides before it adds; tests on GPUs must allow
 * for that, tests on this emulator can ask for every bit. */
#include "emulator.h"
#include <math.h>

static const size_t widths[ncclNumTypes] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};

size_t nccl_width(ncclDataType_t type) { return widths[type]; }

/* Narrow floats: bits to float and back, to the nearest even. */

static float from_bf16(uint16_t bits) {
  union { uint32_t u; float f; } word = {.u = (uint32_t)bits << 16};
  return word.f;
}

static uint16_t to_bf16(float value) {
  union { float f; uint32_t u; } word = {.f = value};
  if (isnan(value)) return 0x7fc0;
  return (uint16_t)((word.u + 0x7fff + ((word.u >> 16) & 1)) >> 16);
}

static float from_half(uint16_t bits) {
  union { uint16_t u; _Float16 h; } word = {.u = bits};
  return (float)word.h;
}

static uint16_t to_half(float value) {
  union { _Float16 h; uint16_t u; } word = {.h = (_Float16)value};
  return word.u;
}

/* 8-bit floats (OCP 8-bit floating point specification, 2023): `bits` of fraction, smallest normal
 * exponent `least`, codes above `most` are not numbers. E5M2 has infinities, E4M3 has none. */
struct format { int bits, least, most, overflow; };
static const struct format e4m3 = {3, -6, 0x7e, 0x7f}, e5m2 = {2, -14, 0x7b, 0x7c};

static float from_8(uint8_t code, struct format f) {
  int magnitude = code & 0x7f, exponent = magnitude >> f.bits, fraction = magnitude & ((1 << f.bits) - 1);
  float value = exponent ? ldexpf((float)(fraction + (1 << f.bits)), exponent - 1 + f.least - f.bits)
                         : ldexpf((float)fraction, f.least - f.bits);
  if (magnitude > f.most) value = magnitude == f.overflow && f.overflow == 0x7c ? INFINITY : NAN;
  return code & 0x80 ? -value : value;
}

static uint8_t to_8(float value, struct format f) {
  int sign = signbit(value) ? 0x80 : 0, exponent;
  if (isnan(value)) return 0x7f;
  if (isinf(value)) return (uint8_t)(sign | f.overflow);
  frexpf(value, &exponent); /* |value| in [0.5, 1) * 2**exponent */
  exponent = exponent - 1 > f.least && value != 0 ? exponent - 1 : f.least;
  int quanta = (int)rintf(ldexpf(fabsf(value), f.bits - exponent));
  int code = ((exponent - f.least) << f.bits) + quanta;
  return (uint8_t)(sign | (code > f.most ? f.overflow : code));
}

static float from_e4m3(uint8_t code) { return from_8(code, e4m3); }
static uint8_t to_e4m3(float value) { return to_8(value, e4m3); }
static float from_e5m2(uint8_t code) { return from_8(code, e5m2); }
static uint8_t to_e5m2(float value) { return to_8(value, e5m2); }

/* One function for each type: T in memory, W to compute in. */

#define SAME(x) (x)
#define NAN_OR(x, y, better) ((better) || (x) != (x) ? (x) : (y))
#define DEFINE(name, T, W, LOAD, STORE)                                                                      \
  static void name(int op, const void *scalar, char *out, const char *const *in, int ranks, size_t count) { \
    for (size_t i = 0; i < count; i++) {                                                                     \
      W total = 0;                                                                                           \
      for (int rank = 0; rank < ranks; rank++) {                                                             \
        T bits;                                                                                              \
        memcpy(&bits, in[rank] + i * sizeof bits, sizeof bits);                                              \
        W x = LOAD(bits);                                                                                    \
        if (scalar) {                                                                                        \
          memcpy(&bits, scalar, sizeof bits);                                                                \
          bits = STORE((W)(x * LOAD(bits)));                                                                 \
          x = LOAD(bits);                                                                                    \
        }                                                                                                    \
        W y = total;                                                                                         \
        if (!rank) y = x;                                                                                    \
        else if (op == ncclProd) y = (W)(y * x);                                                             \
        else if (op == ncclMax) y = NAN_OR(y, x, y > x);                                                     \
        else if (op == ncclMin) y = NAN_OR(y, x, y < x);                                                     \
        else y = (W)(y + x);                                                                                 \
        bits = STORE(y);                                                                                     \
        total = LOAD(bits);                                                                                  \
      }                                                                                                      \
      if (op == ncclAvg) total = total / (W)ranks;                                                           \
      T result = STORE(total);                                                                               \
      memcpy(out + i * sizeof result, &result, sizeof result);                                               \
    }                                                                                                        \
  }

DEFINE(fold_i8, int8_t, int32_t, SAME, (int8_t))
DEFINE(fold_u8, uint8_t, uint32_t, SAME, (uint8_t))
DEFINE(fold_i32, int32_t, int64_t, SAME, (int32_t))
DEFINE(fold_u32, uint32_t, uint64_t, SAME, (uint32_t))
DEFINE(fold_i64, int64_t, int64_t, SAME, SAME)
DEFINE(fold_u64, uint64_t, uint64_t, SAME, SAME)
DEFINE(fold_f16, uint16_t, float, from_half, to_half)
DEFINE(fold_f32, float, float, SAME, SAME)
DEFINE(fold_f64, double, double, SAME, SAME)
DEFINE(fold_bf16, uint16_t, float, from_bf16, to_bf16)
DEFINE(fold_e4m3, uint8_t, float, from_e4m3, to_e4m3)
DEFINE(fold_e5m2, uint8_t, float, from_e5m2, to_e5m2)

typedef void (*fold_fn)(int, const void *, char *, const char *const *, int, size_t);
static const fold_fn folds[ncclNumTypes] = {
  fold_i8, fold_u8, fold_i32, fold_u32, fold_i64, fold_u64, fold_f16, fold_f32, fold_f64, fold_bf16, fold_e4m3, fold_e5m2,
};

/* out := the reduction of in[0] ... in[size - 1] */
void nccl_fold(ncclComm_t comm, const struct call *call, char *out, const char *const *in, size_t count) {
  const void *scalar = NULL;
  if (call->op >= ncclNumOps) {
    const struct factor *factor = &comm->factors[call->op - ncclNumOps];
    scalar = factor->on_device ? factor->device : factor->value;
  }
  folds[call->type](call->op, scalar, out, in, comm->size, count);
}
