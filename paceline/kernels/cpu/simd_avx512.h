/* Vectors of 16 lanes for AVX-512 (F, BW, DQ, VL, VNNI; one variant also has BF16). simd.h says what each
   function does. */
#include <immintrin.h>

typedef __m512 vf;
typedef __m512i vi;

#define BLOCK 8          /* rows that one pass over a weight tile serves from registers */
#define SCORE_QUERIES 12 /* queries that one pass over keys serves */
#define SCORE_PAGES 2    /* pages of keys in one pass */
#define VALUE_QUERIES 6  /* queries that one pass over values serves */
#define VALUE_VECTORS 4  /* vectors of dimensions in one pass over values */

static inline vf vf_set1(float x) { return _mm512_set1_ps(x); }
static inline vf vf_load(const float *p) { return _mm512_loadu_ps(p); }
static inline void vf_store(float *p, vf x) { _mm512_storeu_ps(p, x); }
static inline vf vf_add(vf a, vf b) { return _mm512_add_ps(a, b); }
static inline vf vf_sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
static inline vf vf_mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
static inline vf vf_div(vf a, vf b) { return _mm512_div_ps(a, b); }
static inline vf vf_fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
static inline vf vf_max(vf a, vf b) { return _mm512_max_ps(a, b); }
static inline vf vf_min(vf a, vf b) { return _mm512_min_ps(a, b); }
static inline vf vf_abs(vf a) { return _mm512_abs_ps(a); }
static inline vf vf_round(vf a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
static inline vf vf_load_half(const uint16_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
static inline vf vf_load_bytes(const int8_t *p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
}
static inline unsigned vf_ge(vf a, vf b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }
static inline vf vf_where_ge(vf yes, vf a, vf b) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a, b, _CMP_GE_OQ), yes);
}
static inline vf vf_select(unsigned mask, vf yes, vf no) { return _mm512_mask_blend_ps((__mmask16)mask, no, yes); }
static inline float vf_top(vf a) { return _mm512_reduce_max_ps(a); }
static inline float vf_sum(vf a) {
    const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}
static inline vi vf_to_int(vf a) { return _mm512_cvtps_epi32(a); }
static inline vf vi_to_float(vi a) { return _mm512_cvtepi32_ps(a); }
static inline vi vf_bits(vf a) { return _mm512_castps_si512(a); }
static inline vf vi_as_float(vi a) { return _mm512_castsi512_ps(a); }

static inline vi vi_zero(void) { return _mm512_setzero_si512(); }
static inline vi vi_set1(int32_t x) { return _mm512_set1_epi32(x); }
static inline vi vi_load(const int32_t *p) { return _mm512_loadu_si512(p); }
static inline vi vi_add(vi a, vi b) { return _mm512_add_epi32(a, b); }
static inline vi vi_sub(vi a, vi b) { return _mm512_sub_epi32(a, b); }
static inline vi vi_mul(vi a, vi b) { return _mm512_mullo_epi32(a, b); }
static inline vi vi_and(vi a, vi b) { return _mm512_and_si512(a, b); }
static inline vi vi_load_upper_words(const int32_t *p) { return vi_and(vi_load(p), vi_set1(~0xffff)); }
static inline vi vi_xor(vi a, vi b) { return _mm512_xor_si512(a, b); }
#define vi_shl(a, n) _mm512_slli_epi32(a, n)
#define vi_shr(a, n) _mm512_srli_epi32(a, n)
#define vi_sar(a, n) _mm512_srai_epi32(a, n)
static inline int32_t vi_sum(vi a) { return _mm512_reduce_add_epi32(a); }
static inline void vi_store_bytes(int8_t *p, vi a) { _mm_storeu_si128((__m128i *)p, _mm512_cvtsepi32_epi8(a)); }
static inline void vi_store_words(uint16_t *p, vi a) { _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16(a)); }
static inline void vi_store(int32_t *p, vi a) { _mm512_storeu_si512(p, a); }

#ifdef __AVX512BF16__
#define PAIR_PARTS 1
typedef uint16_t narrow;
typedef __m512bh vp;
static inline vf vf_narrow(narrow *p, vf x) {
    const __m256i rounded = (__m256i)_mm512_cvtneps_pbh(x);
    _mm256_storeu_si256((__m256i *)p, rounded);
    return vi_as_float(vi_shl(_mm512_cvtepu16_epi32(rounded), 16));
}
static inline vp vp_load(const uint16_t *p, const int part) {
    __m512i pairs = _mm512_loadu_si512(p);
    (void)part;
    __asm__("" : "+v"(pairs)); /* otherwise gcc loads them again for every product */
    return (vp)pairs;
}
static inline vp vp_set1(const narrow *two, const int part) {
    int32_t both;
    (void)part;
    memcpy(&both, two, 4);
    return (vp)_mm512_set1_epi32(both);
}
static inline vf vf_dot(vp a, vp b, vf sum) { return _mm512_dpbf16_ps(sum, a, b); }
#endif

/* Weights of 16 outputs × 4 inputs, in the order of a tile. */
typedef __m512i vw8;
typedef __m512i vw4;
typedef int8_t input8;
typedef __m512i dot8;
typedef __m512i dot4;
static inline vw8 weights8(const uint8_t *p) { return _mm512_loadu_si512(p); }
static inline void weights4(const uint8_t *p, vw4 *even, vw4 *odd) {
    const __m512i nibbles = _mm512_loadu_si512(p), low = _mm512_set1_epi8(15);
    *even = _mm512_and_si512(nibbles, low);
    *odd = _mm512_and_si512(_mm512_srli_epi16(nibbles, 4), low);
}
static inline __m512i broadcast4(const int8_t *x) {
    int32_t four;
    memcpy(&four, x, 4);
    return _mm512_set1_epi32(four);
}
static inline dot8 dot8_begin(const int32_t *offset) { return _mm512_set1_epi32(*offset); }
static inline dot8 dot8_add(dot8 sum, vw8 w, const input8 *x) { return _mm512_dpbusd_epi32(sum, w, broadcast4(x)); }
static inline vi dot8_end(dot8 sum) { return sum; }
static inline dot4 dot4_begin(void) { return _mm512_setzero_si512(); }
static inline dot4 dot4_add(dot4 sum, vw4 w, const int8_t *x) { return _mm512_dpbusd_epi32(sum, w, broadcast4(x)); }
static inline vi dot4_end(dot4 sum) { return sum; }

#define prefetch_l1(p) _mm_prefetch((const char *)(p), _MM_HINT_T0) /* a macro, since gcc drops it from a function */
#define prefetch_l2(p) _mm_prefetch((const char *)(p), _MM_HINT_T1)
static inline void pause_cpu(void) { _mm_pause(); }
