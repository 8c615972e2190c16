/* Vectors of 16 lanes in plain C for any machine; the compiler vectorises what it can. simd.h says what each function
   does. */
#include <math.h>

typedef struct { float v[16]; } vf;
typedef struct { int32_t v[16]; } vi;

/* Sizes of kernels: simd_avx512.h says what each counts. */
#define BLOCK 1
#define SCORE_QUERIES 1
#define SCORE_PAGES 1
#define VALUE_QUERIES 1
#define VALUE_VECTORS 4
#define EACH_LANE for (int i = 0; i < 16; i++)
#define MAP(type, expression) { type r; EACH_LANE r.v[i] = (expression); return r; }

static inline float half_to_float(uint16_t h) {
    const uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = h >> 10 & 31, fraction = h & 1023;
    uint32_t bits;
    float x;
    if (exponent == 0) {
        x = (float)fraction * 0x1p-24f;
        memcpy(&bits, &x, 4);
        bits |= sign;
    } else {
        bits = sign | (exponent == 31 ? 255u : exponent + 112) << 23 | fraction << 13;
    }
    memcpy(&x, &bits, 4);
    return x;
}

static inline vf vf_set1(float x) MAP(vf, x)
static inline vf vf_load(const float *p) MAP(vf, p[i])
static inline vf vf_load_bytes(const int8_t *p) MAP(vf, (float)p[i])
static inline void vf_store(float *p, vf x) { EACH_LANE p[i] = x.v[i]; }
static inline vf vf_add(vf a, vf b) MAP(vf, a.v[i] + b.v[i])
static inline vf vf_sub(vf a, vf b) MAP(vf, a.v[i] - b.v[i])
static inline vf vf_mul(vf a, vf b) MAP(vf, a.v[i] * b.v[i])
static inline vf vf_div(vf a, vf b) MAP(vf, a.v[i] / b.v[i])
static inline vf vf_fma(vf a, vf b, vf c) MAP(vf, a.v[i] * b.v[i] + c.v[i])
static inline vf vf_max(vf a, vf b) MAP(vf, a.v[i] > b.v[i] ? a.v[i] : b.v[i])
static inline vf vf_min(vf a, vf b) MAP(vf, a.v[i] < b.v[i] ? a.v[i] : b.v[i])
static inline vf vf_abs(vf a) MAP(vf, fabsf(a.v[i]))
static inline vf vf_round(vf a) MAP(vf, rintf(a.v[i]))
static inline vf vf_load_half(const uint16_t *p) MAP(vf, half_to_float(p[i]))
static inline unsigned vf_ge(vf a, vf b) {
    unsigned mask = 0;
    EACH_LANE mask |= (unsigned)(a.v[i] >= b.v[i]) << i;
    return mask;
}
static inline vf vf_where_ge(vf yes, vf a, vf b) MAP(vf, a.v[i] >= b.v[i] ? yes.v[i] : 0.0f)
static inline vf vf_select(unsigned mask, vf yes, vf no) MAP(vf, mask >> i & 1 ? yes.v[i] : no.v[i])
static inline float vf_top(vf a) {
    float top = a.v[0];
    EACH_LANE top = a.v[i] > top ? a.v[i] : top;
    return top;
}
static inline float vf_sum(vf a) {
    for (int width = 8; width; width /= 2)
        for (int i = 0; i < width; i++) a.v[i] = a.v[i] + a.v[i + width];
    return a.v[0];
}
static inline int32_t nearest_int(float x) { return x >= -0x1p31f && x < 0x1p31f ? (int32_t)rintf(x) : INT32_MIN; }
static inline vi vf_to_int(vf a) MAP(vi, nearest_int(a.v[i]))
static inline vf vi_to_float(vi a) MAP(vf, (float)a.v[i])
static inline vi vf_bits(vf a) { vi r; memcpy(&r, &a, sizeof r); return r; }
static inline vf vi_as_float(vi a) { vf r; memcpy(&r, &a, sizeof r); return r; }

static inline vi vi_zero(void) MAP(vi, 0)
static inline vi vi_set1(int32_t x) MAP(vi, x)
static inline vi vi_load(const int32_t *p) { vi r; memcpy(&r, p, sizeof r); return r; }
static inline vi vi_load_upper_words(const int32_t *p) MAP(vi, p[i] & ~0xffff)
static inline vi vi_add(vi a, vi b) MAP(vi, (int32_t)((uint32_t)a.v[i] + (uint32_t)b.v[i]))
static inline vi vi_sub(vi a, vi b) MAP(vi, (int32_t)((uint32_t)a.v[i] - (uint32_t)b.v[i]))
static inline vi vi_mul(vi a, vi b) MAP(vi, (int32_t)((uint32_t)a.v[i] * (uint32_t)b.v[i]))
static inline vi vi_and(vi a, vi b) MAP(vi, a.v[i] & b.v[i])
static inline vi vi_xor(vi a, vi b) MAP(vi, a.v[i] ^ b.v[i])
static inline vi vi_shl(vi a, int n) MAP(vi, (int32_t)((uint32_t)a.v[i] << n))
static inline vi vi_shr(vi a, int n) MAP(vi, (int32_t)((uint32_t)a.v[i] >> n))
static inline vi vi_sar(vi a, int n) MAP(vi, a.v[i] >> n)
static inline int32_t vi_sum(vi a) {
    int32_t sum = 0;
    EACH_LANE sum += a.v[i];
    return sum;
}
static inline void vi_store_bytes(int8_t *p, vi a) {
    EACH_LANE p[i] = (int8_t)(a.v[i] > 127 ? 127 : a.v[i] < -128 ? -128 : a.v[i]);
}
static inline void vi_store_words(uint16_t *p, vi a) { EACH_LANE p[i] = (uint16_t)a.v[i]; }
static inline void vi_store(int32_t *p, vi a) { EACH_LANE p[i] = a.v[i]; }

typedef struct { uint8_t v[64]; } vw8;
typedef vw8 vw4;
typedef int8_t input8;
typedef vi dot8;
typedef vi dot4;
static inline vw8 weights8(const uint8_t *p) { vw8 r; memcpy(&r, p, 64); return r; }
static inline void weights4(const uint8_t *p, vw4 *even, vw4 *odd) {
    for (int i = 0; i < 64; i++) {
        even->v[i] = p[i] & 15;
        odd->v[i] = p[i] >> 4;
    }
}
static inline dot8 dot8_begin(const int32_t *offset) { return vi_set1(*offset); }
static inline dot8 dot8_add(dot8 sum, vw8 w, const input8 *x) {
    EACH_LANE {
        const uint8_t *q = w.v + 4 * i;
        sum.v[i] += q[0] * x[0] + q[1] * x[1] + q[2] * x[2] + q[3] * x[3];
    }
    return sum;
}
static inline vi dot8_end(dot8 sum) { return sum; }
static inline dot4 dot4_begin(void) { return vi_zero(); }
static inline dot4 dot4_add(dot4 sum, vw4 w, const int8_t *x) { return dot8_add(sum, w, x); }
static inline vi dot4_end(dot4 sum) { return sum; }

#define prefetch_l1(p) __builtin_prefetch(p)
#define prefetch_l2(p) __builtin_prefetch(p, 0, 2)
static inline void pause_cpu(void) {}
#undef MAP
#undef EACH_LANE
