/* Reductions of two blocks, element by element, in the type of the elements. */
#include <complex.h>
#include <string.h>

#include "emulator.h"

static float widen_bf16(uint16_t x) {
    uint32_t bits = (uint32_t)x << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static uint16_t narrow_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if (value != value) return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* Loops for `T`; GET and PUT convert to and from the type in which is computed. */
#define EACH(T, GET, PUT, RULE)                                                                    \
    for (size_t i = 0; i < count; i++) {                                                           \
        __auto_type a = GET(((T *)total)[i]);                                                      \
        __auto_type b = GET(((const T *)next)[i]);                                                 \
        ((T *)total)[i] = (T)PUT(RULE);                                                            \
    }                                                                                              \
    return true
#define SAME(x) (x)
#define ARITHMETIC(T, GET, PUT)                                                                    \
    case UCC_OP_AVG:                                                                               \
    case UCC_OP_SUM: EACH(T, GET, PUT, a + b);                                                     \
    case UCC_OP_PROD: EACH(T, GET, PUT, a * b)
#define CHOICES(T, GET, PUT)                                                                       \
    case UCC_OP_MAX: EACH(T, GET, PUT, a > b ? a : b);                                             \
    case UCC_OP_MIN: EACH(T, GET, PUT, a < b ? a : b)
#define BITS(T)                                                                                    \
    case UCC_OP_BAND: EACH(T, SAME, SAME, a & b);                                                  \
    case UCC_OP_BOR: EACH(T, SAME, SAME, a | b);                                                   \
    case UCC_OP_BXOR: EACH(T, SAME, SAME, a ^ b)
#define INTS(T) switch (op) { ARITHMETIC(T, SAME, SAME); CHOICES(T, SAME, SAME); BITS(T); default: return false; }
#define FLOATS(T, GET, PUT) switch (op) { ARITHMETIC(T, GET, PUT); CHOICES(T, GET, PUT); default: return false; }
#define COMPLEX(T) switch (op) { ARITHMETIC(T, SAME, SAME); default: return false; }

bool reduce(void *total, const void *next, size_t count, ucc_datatype_t type,
            ucc_reduction_op_t op) {
    switch (type) {
    case UCC_DT_INT8: INTS(int8_t)
    case UCC_DT_INT16: INTS(int16_t)
    case UCC_DT_INT32: INTS(int32_t)
    case UCC_DT_INT64: INTS(int64_t)
    case UCC_DT_UINT8: INTS(uint8_t)
    case UCC_DT_UINT16: INTS(uint16_t)
    case UCC_DT_UINT32: INTS(uint32_t)
    case UCC_DT_UINT64: INTS(uint64_t)
    case UCC_DT_FLOAT16: FLOATS(_Float16, (float), (_Float16))
    case UCC_DT_BFLOAT16: FLOATS(uint16_t, widen_bf16, narrow_bf16)
    case UCC_DT_FLOAT32: FLOATS(float, SAME, SAME)
    case UCC_DT_FLOAT64: FLOATS(double, SAME, SAME)
    case UCC_DT_FLOAT32_COMPLEX: COMPLEX(float complex)
    case UCC_DT_FLOAT64_COMPLEX: COMPLEX(double complex)
    default: return false;
    }
}

#define SHARE(T, GET, PUT)                                                                         \
    for (size_t i = 0; i < count; i++) ((T *)total)[i] = (T)PUT(GET(((T *)total)[i]) / (float)by);  \
    break

void divide(void *total, size_t count, ucc_datatype_t type, unsigned by) {
    switch (type) {
    case UCC_DT_FLOAT16: SHARE(_Float16, (float), (_Float16));
    case UCC_DT_BFLOAT16: SHARE(uint16_t, widen_bf16, narrow_bf16);
    case UCC_DT_FLOAT32: SHARE(float, SAME, SAME);
    case UCC_DT_FLOAT64: SHARE(double, SAME, SAME);
    case UCC_DT_INT64: for (size_t i = 0; i < count; i++) ((int64_t *)total)[i] /= by; break;
    case UCC_DT_INT32: for (size_t i = 0; i < count; i++) ((int32_t *)total)[i] /= (int)by; break;
    default: break;
    }
}
