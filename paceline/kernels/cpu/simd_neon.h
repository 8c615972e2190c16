/* Vectors of 16 lanes for AArch64: four registers each. One variant has sdot (FEAT_DotProd), the other multiplies
   bytes in pairs. simd.h says what each function does. */
#include <arm_neon.h>

typedef struct { float32x4_t a, b, c, d; } vf;
typedef struct { int32x4_t a, b, c, d; } vi;

/* Sizes of kernels: simd_avx512.h says what each counts. */
#define BLOCK 4
#define SCORE_QUERIES 6
#define SCORE_PAGES 1
#define VALUE_QUERIES 5
#define VALUE_VECTORS 1
#define EACH(f) { f(x.a), f(x.b), f(x.c), f(x.d) }
#define BOTH(f) { f(x.a, y.a), f(x.b, y.b), f(x.c, y.c), f(x.d, y.d) }
#define QUARTERS(f, p, step) { f(p), f((p) + (step)), f((p) + 2 * (step)), f((p) + 3 * (step)) }

static inline vf vf_set1(float v) { const float32x4_t x = vdupq_n_f32(v); vf r = {x, x, x, x}; return r; }
static inline vf vf_load(const float *p) { vf r = QUARTERS(vld1q_f32, p, 4); return r; }
static inline void vf_store(float *p, vf x) {
    vst1q_f32(p, x.a), vst1q_f32(p + 4, x.b), vst1q_f32(p + 8, x.c), vst1q_f32(p + 12, x.d);
}
static inline vf vf_add(vf x, vf y) { vf r = BOTH(vaddq_f32); return r; }
static inline vf vf_sub(vf x, vf y) { vf r = BOTH(vsubq_f32); return r; }
static inline vf vf_mul(vf x, vf y) { vf r = BOTH(vmulq_f32); return r; }
static inline vf vf_div(vf x, vf y) { vf r = BOTH(vdivq_f32); return r; }
/* Comparisons choose y if one of the two is NaN, as on x86; vmaxq would give NaN. */
static inline float32x4_t greater(float32x4_t x, float32x4_t y) { return vbslq_f32(vcgtq_f32(x, y), x, y); }
static inline float32x4_t lesser(float32x4_t x, float32x4_t y) { return vbslq_f32(vcltq_f32(x, y), x, y); }
static inline vf vf_max(vf x, vf y) { vf r = BOTH(greater); return r; }
static inline vf vf_min(vf x, vf y) { vf r = BOTH(lesser); return r; }
static inline vf vf_fma(vf x, vf y, vf z) {
    vf r = {vfmaq_f32(z.a, x.a, y.a), vfmaq_f32(z.b, x.b, y.b), vfmaq_f32(z.c, x.c, y.c), vfmaq_f32(z.d, x.d, y.d)};
    return r;
}
static inline vf vf_abs(vf x) { vf r = EACH(vabsq_f32); return r; }
static inline vf vf_round(vf x) { vf r = EACH(vrndnq_f32); return r; }
static inline float32x4_t load_four_halves(const uint16_t *p) {
    return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
}
static inline vf vf_load_half(const uint16_t *p) { vf r = QUARTERS(load_four_halves, p, 4); return r; }
static inline vf vf_load_bytes(const int8_t *p) {
    const int8x16_t bytes = vld1q_s8(p);
    const int16x8_t low = vmovl_s8(vget_low_s8(bytes)), high = vmovl_high_s8(bytes);
    vf r = {vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))), vcvtq_f32_s32(vmovl_high_s16(low)),
            vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))), vcvtq_f32_s32(vmovl_high_s16(high))};
    return r;
}
static inline unsigned vf_ge(vf x, vf y) {
    static const uint8_t bits[16] = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
    const uint16x8_t low = vmovn_high_u32(vmovn_u32(vcgeq_f32(x.a, y.a)), vcgeq_f32(x.b, y.b));
    const uint16x8_t high = vmovn_high_u32(vmovn_u32(vcgeq_f32(x.c, y.c)), vcgeq_f32(x.d, y.d));
    const uint8x16_t set = vandq_u8(vmovn_high_u16(vmovn_u16(low), high), vld1q_u8(bits));
    return vaddv_u8(vget_low_u8(set)) | (unsigned)vaddv_u8(vget_high_u8(set)) << 8;
}
static inline float32x4_t keep_where(uint32x4_t mask, float32x4_t x) {
    return vreinterpretq_f32_u32(vandq_u32(mask, vreinterpretq_u32_f32(x)));
}
static inline vf vf_where_ge(vf yes, vf x, vf y) {
    vf r = {keep_where(vcgeq_f32(x.a, y.a), yes.a), keep_where(vcgeq_f32(x.b, y.b), yes.b),
            keep_where(vcgeq_f32(x.c, y.c), yes.c), keep_where(vcgeq_f32(x.d, y.d), yes.d)};
    return r;
}
static inline uint32x4_t spread_mask(unsigned mask) { /* bit i of the lowest 4 → all of lane i */
    static const uint32_t bits[4] = {1, 2, 4, 8};
    return vtstq_u32(vdupq_n_u32(mask), vld1q_u32(bits));
}
static inline vf vf_select(unsigned mask, vf x, vf y) {
    vf r = {vbslq_f32(spread_mask(mask), x.a, y.a), vbslq_f32(spread_mask(mask >> 4), x.b, y.b),
            vbslq_f32(spread_mask(mask >> 8), x.c, y.c), vbslq_f32(spread_mask(mask >> 12), x.d, y.d)};
    return r;
}
static inline float vf_top(vf x) {
    return vmaxnmvq_f32(greater(greater(x.a, x.c), greater(x.b, x.d)));
}
static inline float vf_sum(vf x) {
    const float32x4_t four = vaddq_f32(vaddq_f32(x.a, x.c), vaddq_f32(x.b, x.d));
    return vpadds_f32(vadd_f32(vget_low_f32(four), vget_high_f32(four)));
}
static inline int32x4_t nearest_ints(float32x4_t x) { /* numbers too large for an int32 give INT32_MIN, as on x86 */
    return vbslq_s32(vcaltq_f32(x, vdupq_n_f32(0x1p31f)), vcvtnq_s32_f32(x), vdupq_n_s32(INT32_MIN));
}
static inline vi vf_to_int(vf x) { vi r = EACH(nearest_ints); return r; }
static inline vf vi_to_float(vi x) { vf r = EACH(vcvtq_f32_s32); return r; }
static inline vi vf_bits(vf x) { vi r = EACH(vreinterpretq_s32_f32); return r; }
static inline vf vi_as_float(vi x) { vf r = EACH(vreinterpretq_f32_s32); return r; }

static inline vi vi_set1(int32_t v) { const int32x4_t x = vdupq_n_s32(v); vi r = {x, x, x, x}; return r; }
static inline vi vi_zero(void) { return vi_set1(0); }
static inline vi vi_load(const int32_t *p) { vi r = QUARTERS(vld1q_s32, p, 4); return r; }
static inline int32x4_t upper_words(const int32_t *p) { return vbicq_s32(vld1q_s32(p), vdupq_n_s32(0xffff)); }
static inline vi vi_load_upper_words(const int32_t *p) { vi r = QUARTERS(upper_words, p, 4); return r; }
static inline vi vi_add(vi x, vi y) { vi r = BOTH(vaddq_s32); return r; }
static inline vi vi_sub(vi x, vi y) { vi r = BOTH(vsubq_s32); return r; }
static inline vi vi_mul(vi x, vi y) { vi r = BOTH(vmulq_s32); return r; }
static inline vi vi_and(vi x, vi y) { vi r = BOTH(vandq_s32); return r; }
static inline vi vi_xor(vi x, vi y) { vi r = BOTH(veorq_s32); return r; }
/* Operators of vectors, since the intrinsics want literal distances. */
#define SHR(x) (int32x4_t)((uint32x4_t)(x) >> n)
#define SHL(x) (int32x4_t)((uint32x4_t)(x) << n)
#define SAR(x) (x) >> n
static inline vi vi_shl(vi x, int n) { vi r = EACH(SHL); return r; }
static inline vi vi_shr(vi x, int n) { vi r = EACH(SHR); return r; }
static inline vi vi_sar(vi x, int n) { vi r = EACH(SAR); return r; }
static inline int32_t vi_sum(vi x) { return vaddvq_s32(vaddq_s32(vaddq_s32(x.a, x.c), vaddq_s32(x.b, x.d))); }
static inline void vi_store_bytes(int8_t *p, vi x) {
    const int16x8_t low = vqmovn_high_s32(vqmovn_s32(x.a), x.b), high = vqmovn_high_s32(vqmovn_s32(x.c), x.d);
    vst1q_s8(p, vqmovn_high_s16(vqmovn_s16(low), high));
}
static inline void vi_store_words(uint16_t *p, vi x) {
    vst1q_u16(p, vreinterpretq_u16_s16(vmovn_high_s32(vmovn_s32(x.a), x.b)));
    vst1q_u16(p + 8, vreinterpretq_u16_s16(vmovn_high_s32(vmovn_s32(x.c), x.d)));
}
static inline void vi_store(int32_t *p, vi x) {
    vst1q_s32(p, x.a), vst1q_s32(p + 4, x.b), vst1q_s32(p + 8, x.c), vst1q_s32(p + 12, x.d);
}

/* Weights are signed bytes here: 8-bit ones as q - 128, 4-bit ones as they are. So dot8 and dot4 are one function. */
typedef struct { int8x16_t a, b, c, d; } vw8;
typedef vw8 vw4;
typedef int8_t input8;
typedef vi dot8;
typedef vi dot4;
static inline int8x16_t centred(const uint8_t *p) {
    return vreinterpretq_s8_u8(veorq_u8(vld1q_u8(p), vdupq_n_u8(128)));
}
static inline vw8 weights8(const uint8_t *p) { vw8 r = QUARTERS(centred, p, 16); return r; }
static inline int8x16_t low_halves(const uint8_t *p) {
    return vreinterpretq_s8_u8(vandq_u8(vld1q_u8(p), vdupq_n_u8(15)));
}
static inline int8x16_t high_halves(const uint8_t *p) { return vreinterpretq_s8_u8(vshrq_n_u8(vld1q_u8(p), 4)); }
static inline void weights4(const uint8_t *p, vw4 *even, vw4 *odd) {
    *even = (vw4)QUARTERS(low_halves, p, 16);
    *odd = (vw4)QUARTERS(high_halves, p, 16);
}
#ifdef __ARM_FEATURE_DOTPROD
typedef int8x8_t inputs4; /* four inputs in the first lanes */
static inline inputs4 load_inputs(const int8_t *x) {
    int32_t four;
    memcpy(&four, x, 4);
    return vreinterpret_s8_s32((int32x2_t){four, 0});
}
static inline int32x4_t dot_quarter(int32x4_t sum, int8x16_t w, inputs4 x) { return vdotq_lane_s32(sum, w, x, 0); }
#else
typedef int8x16_t inputs4; /* four inputs, repeated */
static inline inputs4 load_inputs(const int8_t *x) {
    int32_t four;
    memcpy(&four, x, 4);
    return vreinterpretq_s8_s32(vdupq_n_s32(four));
}
/* Sums of two products stay within 2 * 128 * 127 < 2^15. */
static inline int32x4_t dot_quarter(int32x4_t sum, int8x16_t w, inputs4 x) {
    return vpadalq_s16(sum, vpaddq_s16(vmull_s8(vget_low_s8(w), vget_low_s8(x)), vmull_high_s8(w, x)));
}
#endif
static inline vi dot_fours(vi sum, vw8 w, const int8_t *inputs) {
    const inputs4 x = load_inputs(inputs);
    vi r = {dot_quarter(sum.a, w.a, x), dot_quarter(sum.b, w.b, x), dot_quarter(sum.c, w.c, x),
            dot_quarter(sum.d, w.d, x)};
    return r;
}
static inline dot8 dot8_begin(const int32_t *offset) { (void)offset; return vi_zero(); }
static inline dot8 dot8_add(dot8 sum, vw8 w, const input8 *x) { return dot_fours(sum, w, x); }
static inline vi dot8_end(dot8 sum) { return sum; }
static inline dot4 dot4_begin(void) { return vi_zero(); }
static inline dot4 dot4_add(dot4 sum, vw4 w, const int8_t *x) { return dot_fours(sum, w, x); }
static inline vi dot4_end(dot4 sum) { return sum; }

#define prefetch_l1(p) __builtin_prefetch(p)
#define prefetch_l2(p) __builtin_prefetch(p, 0, 2)
static inline void pause_cpu(void) { __asm__ volatile("isb" ::: "memory"); } /* yield returns at once on most cores */
#undef EACH
#undef BOTH
#undef QUARTERS
#undef SHL
#undef SHR
#undef SAR
