/* Vectors of 16 lanes for AVX2 with FMA and F16C: two registers each. simd.h says what each function does. */
#include <immintrin.h>

typedef struct { __m256 a, b; } vf;
typedef struct { __m256i a, b; } vi;

/* Sizes of kernels: simd_avx512.h says what each counts. */
#define MAX_KERNEL_ROWS 2
#define SCORE_QUERIES 6
#define SCORE_PAGES 1
#define VALUE_QUERIES 6
#define VALUE_VECTORS 1
#define BOTH(f) { f(x.a, y.a), f(x.b, y.b) }

static inline vf vf_set1(float x) { vf r = {_mm256_set1_ps(x), _mm256_set1_ps(x)}; return r; }
static inline vf vf_load(const float *p) { vf r = {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; return r; }
static inline void vf_store(float *p, vf x) { _mm256_storeu_ps(p, x.a); _mm256_storeu_ps(p + 8, x.b); }
static inline vf vf_add(vf x, vf y) { vf r = BOTH(_mm256_add_ps); return r; }
static inline vf vf_sub(vf x, vf y) { vf r = BOTH(_mm256_sub_ps); return r; }
static inline vf vf_mul(vf x, vf y) { vf r = BOTH(_mm256_mul_ps); return r; }
static inline vf vf_div(vf x, vf y) { vf r = BOTH(_mm256_div_ps); return r; }
static inline vf vf_max(vf x, vf y) { vf r = BOTH(_mm256_max_ps); return r; }
static inline vf vf_min(vf x, vf y) { vf r = BOTH(_mm256_min_ps); return r; }
static inline vf vf_fma(vf x, vf y, vf z) {
    vf r = {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
    return r;
}
static inline vf vf_abs(vf y) { const vf x = vf_set1(-0.0f); vf r = BOTH(_mm256_andnot_ps); return r; }
#define NEAREST (_MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)
static inline vf vf_round(vf x) { vf r = {_mm256_round_ps(x.a, NEAREST), _mm256_round_ps(x.b, NEAREST)}; return r; }
static inline vf vf_load_half(const uint16_t *p) {
    const __m128i *q = (const __m128i *)p;
    vf r = {_mm256_cvtph_ps(_mm_loadu_si128(q)), _mm256_cvtph_ps(_mm_loadu_si128(q + 1))};
    return r;
}
static inline vf vf_load_bytes(const int8_t *p) {
    const __m128i bytes = _mm_loadu_si128((const __m128i *)p);
    const __m256i low = _mm256_cvtepi8_epi32(bytes), high = _mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8));
    vf r = {_mm256_cvtepi32_ps(low), _mm256_cvtepi32_ps(high)};
    return r;
}
static inline unsigned vf_ge(vf x, vf y) {
    const unsigned a = (unsigned)_mm256_movemask_ps(_mm256_cmp_ps(x.a, y.a, _CMP_GE_OQ));
    return a | (unsigned)_mm256_movemask_ps(_mm256_cmp_ps(x.b, y.b, _CMP_GE_OQ)) << 8;
}
static inline vf vf_where_ge(vf yes, vf x, vf y) {
    vf r = {_mm256_and_ps(yes.a, _mm256_cmp_ps(x.a, y.a, _CMP_GE_OQ)),
            _mm256_and_ps(yes.b, _mm256_cmp_ps(x.b, y.b, _CMP_GE_OQ))};
    return r;
}
static inline __m256 spread_mask(unsigned mask) { /* bit i of the lowest 8 → all of lane i */
    const __m256i bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    return _mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32((int)mask), bit), bit));
}
static inline vf vf_select(unsigned mask, vf yes, vf no) {
    vf r = {_mm256_blendv_ps(no.a, yes.a, spread_mask(mask)), _mm256_blendv_ps(no.b, yes.b, spread_mask(mask >> 8))};
    return r;
}
static inline float vf_top(vf x) {
    const __m256 eight = _mm256_max_ps(x.a, x.b);
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    four = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}
static inline float vf_sum(vf x) {
    const __m256 eight = _mm256_add_ps(x.a, x.b);
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}
static inline vi vf_to_int(vf x) { vi r = {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; return r; }
static inline vf vi_to_float(vi x) { vf r = {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; return r; }
static inline vi vf_bits(vf x) { vi r = {_mm256_castps_si256(x.a), _mm256_castps_si256(x.b)}; return r; }
static inline vf vi_as_float(vi x) { vf r = {_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)}; return r; }

static inline vi vi_zero(void) { vi r = {_mm256_setzero_si256(), _mm256_setzero_si256()}; return r; }
static inline vi vi_set1(int32_t x) { vi r = {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; return r; }
static inline vi vi_load(const int32_t *p) {
    vi r = {_mm256_loadu_si256((const __m256i *)p), _mm256_loadu_si256((const __m256i *)p + 1)};
    return r;
}
/* Mask and words come from memory: gcc would keep both in registers, and then sums of attention's tiles in memory. */
static const int32_t upper_words[8] __attribute__((aligned(32))) = {~0xffff, ~0xffff, ~0xffff, ~0xffff,
                                                                    ~0xffff, ~0xffff, ~0xffff, ~0xffff};
static inline __m256i load_upper_words(const __m256i_u *p) {
    __m256i r;
    __asm__("vmovdqa %1, %0\n\tvpand %2, %0, %0" : "=x"(r) : "m"(upper_words), "m"(*p));
    return r;
}
static inline vi vi_load_upper_words(const int32_t *p) {
    vi r = {load_upper_words((const __m256i_u *)p), load_upper_words((const __m256i_u *)p + 1)};
    return r;
}
static inline vi vi_add(vi x, vi y) { vi r = BOTH(_mm256_add_epi32); return r; }
static inline vi vi_sub(vi x, vi y) { vi r = BOTH(_mm256_sub_epi32); return r; }
static inline vi vi_mul(vi x, vi y) { vi r = BOTH(_mm256_mullo_epi32); return r; }
static inline vi vi_and(vi x, vi y) { vi r = BOTH(_mm256_and_si256); return r; }
static inline vi vi_xor(vi x, vi y) { vi r = BOTH(_mm256_xor_si256); return r; }
static inline vi vi_shl(vi x, int n) { vi r = {_mm256_slli_epi32(x.a, n), _mm256_slli_epi32(x.b, n)}; return r; }
static inline vi vi_shr(vi x, int n) { vi r = {_mm256_srli_epi32(x.a, n), _mm256_srli_epi32(x.b, n)}; return r; }
static inline vi vi_sar(vi x, int n) { vi r = {_mm256_srai_epi32(x.a, n), _mm256_srai_epi32(x.b, n)}; return r; }
static inline int32_t vi_sum(vi x) {
    const __m256i eight = _mm256_add_epi32(x.a, x.b);
    __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    four = _mm_add_epi32(four, _mm_unpackhi_epi64(four, four));
    return _mm_cvtsi128_si32(four) + _mm_extract_epi32(four, 1);
}
static inline void vi_store_bytes(int8_t *p, vi x) {
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), 0xd8);
    _mm_storeu_si128((__m128i *)p, _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
}
static inline void vi_store_words(uint16_t *p, vi x) {
    const __m256i low = _mm256_set1_epi32(0xffff);
    const __m256i words = _mm256_packus_epi32(_mm256_and_si256(x.a, low), _mm256_and_si256(x.b, low));
    _mm256_storeu_si256((__m256i *)p, _mm256_permute4x64_epi64(words, 0xd8));
}
static inline void vi_store(int32_t *p, vi x) {
    _mm256_storeu_si256((__m256i *)p, x.a);
    _mm256_storeu_si256((__m256i *)p + 1, x.b);
}

typedef vi vw;
typedef vi dot8;
typedef vi dot4;
static inline vw weights8(const uint8_t *p) { return vi_load((const int32_t *)p); }
static inline void weights4(const uint8_t *p, vw *even, vw *odd) {
    const vi nibbles = vi_load((const int32_t *)p), low = vi_set1(0x0f0f0f0f);
    *even = vi_and(nibbles, low);
    *odd = vi_and(vi_shr(nibbles, 4), low);
}
static inline __m256i broadcast4(const int8_t *x) {
    int32_t four;
    memcpy(&four, x, 4);
    return _mm256_set1_epi32(four);
}
/* Products of u8 and s8 may saturate in 16 bits. So the weight is taken as |q - 128| and its sign moves to the input:
   sums of two products stay within 2 * 128 * 127 < 2^15. */
static inline __m256i dot8_half(__m256i sum, __m256i w, __m256i x) {
    const __m256i centred = _mm256_xor_si256(w, _mm256_set1_epi8(-128));
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(centred), _mm256_sign_epi8(x, centred));
    return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
static inline dot8 dot8_begin(const int32_t *offset) { (void)offset; return vi_zero(); }
static inline dot8 dot8_add(dot8 sum, vw w, const int8_t *x) {
    const __m256i four = broadcast4(x);
    dot8 r = {dot8_half(sum.a, w.a, four), dot8_half(sum.b, w.b, four)};
    return r;
}
static inline vi dot8_end(dot8 sum) { return sum; }
/* Sums of a group stay in 16 bits: it has eight pairs of 4-bit weights, of at most 2 * 15 * 127 each. */
static inline dot4 dot4_begin(void) { return vi_zero(); }
static inline dot4 dot4_add(dot4 sum, vw w, const int8_t *x) {
    const __m256i four = broadcast4(x);
    dot4 r = {_mm256_add_epi16(sum.a, _mm256_maddubs_epi16(w.a, four)),
              _mm256_add_epi16(sum.b, _mm256_maddubs_epi16(w.b, four))};
    return r;
}
static inline vi dot4_end(dot4 sum) {
    const __m256i ones = _mm256_set1_epi16(1);
    vi r = {_mm256_madd_epi16(sum.a, ones), _mm256_madd_epi16(sum.b, ones)};
    return r;
}

#define prefetch_l1(p) _mm_prefetch((const char *)(p), _MM_HINT_T0) /* a macro, since gcc drops it from a function */
#define prefetch_l2(p) _mm_prefetch((const char *)(p), _MM_HINT_T1)
static inline void pause_cpu(void) { _mm_pause(); }
#undef BOTH
