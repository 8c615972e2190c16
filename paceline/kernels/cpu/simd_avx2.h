/* Vectors of 16 lanes for AVX2 with FMA and F16C, and AVX-VNNI if a CPU has it: two registers each. simd.h says what
   each function does. */
#include <immintrin.h>

typedef struct { __m256 a, b; } vf;
typedef struct { __m256i a, b; } vi;

/* Sizes of kernels: simd_avx512.h says what each counts. */
#define BLOCK 4
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

/* Add to a sum where it is. Otherwise gcc adds products in a tree, and moves sums and inputs to the stack. */
#define IN_PLACE(sum) __asm__("" : "+x"((sum).a), "+x"((sum).b))
static inline __m256i broadcast4(const void *x) {
    int32_t four;
    memcpy(&four, x, 4);
    return _mm256_set1_epi32(four);
}
typedef vi vw4;
static inline void weights4(const uint8_t *p, vw4 *even, vw4 *odd) {
    const vi nibbles = vi_load((const int32_t *)p), low = vi_set1(0x0f0f0f0f);
    *even = vi_and(nibbles, low);
    *odd = vi_and(vi_shr(nibbles, 4), low);
}

#ifdef PACELINE_AVXVNNI
typedef vi vw8;
typedef vi dot8;
typedef vi dot4;
typedef int8_t input8;
static inline vw8 weights8(const uint8_t *p) { return vi_load((const int32_t *)p); }
static inline vi dot_fours(vi sum, vi w, const int8_t *x) {
    const __m256i four = broadcast4(x);
    return (vi){_mm256_dpbusd_epi32(sum.a, w.a, four), _mm256_dpbusd_epi32(sum.b, w.b, four)};
}
static inline dot8 dot8_begin(const int32_t *offset) { return vi_set1(*offset); }
static inline dot8 dot8_add(dot8 sum, vw8 w, const input8 *x) { return dot_fours(sum, w, x); }
static inline vi dot8_end(dot8 sum) { return sum; }
static inline dot4 dot4_begin(void) { return vi_zero(); }
static inline dot4 dot4_add(dot4 sum, vw4 w, const int8_t *x) { return dot_fours(sum, w, x); }
static inline vi dot4_end(dot4 sum) { return sum; }
#else
/* Inputs of 8-bit weights, in 16 bits: four are in the order 0, 2, 1, 3, since weights8 takes four weights apart into
   0, 2 and 1, 3. */
#define WIDE_INPUTS
typedef int16_t input8;
static inline void store_wide(input8 *q8, vi x, int step) {
    const __m128i swap = _mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15);
    const __m256i words = _mm256_packs_epi32(x.a, x.b); /* inputs 0-3 and 8-11, then 4-7 and 12-15 */
    const __m256i wide = _mm256_shuffle_epi8(words, _mm256_broadcastsi128_si256(swap));
    const __m128i low = _mm256_castsi256_si128(wide), high = _mm256_extracti128_si256(wide, 1);
    _mm_storel_epi64((__m128i *)q8, low);
    _mm_storel_epi64((__m128i *)(q8 + step), high);
    _mm_storeh_pd((double *)(q8 + 2 * step), _mm_castsi128_pd(low));
    _mm_storeh_pd((double *)(q8 + 3 * step), _mm_castsi128_pd(high));
}

/* Sums of two 8-bit products need 17 bits, so that maddubs would saturate. Each half of the weights is widened to 16
   bits instead: as many multiplications as |q - 128| in maddubs with its signs moved to the inputs, then a madd to
   widen, but no third instruction on the same ports. */
typedef struct { vi even, odd; } vw8;
typedef vi dot8;
static inline vw8 weights8(const uint8_t *p) {
    const vi four = vi_load((const int32_t *)p);
    return (vw8){vi_and(four, vi_set1(0x00ff00ff)), {_mm256_srli_epi16(four.a, 8), _mm256_srli_epi16(four.b, 8)}};
}
static inline dot8 dot8_begin(const int32_t *offset) { return vi_set1(*offset); }
static inline dot8 dot8_pairs(dot8 sum, vi w, const input8 *x) {
    const __m256i pair = broadcast4(x);
    sum = vi_add(sum, (vi){_mm256_madd_epi16(w.a, pair), _mm256_madd_epi16(w.b, pair)});
    IN_PLACE(sum);
    return sum;
}
static inline dot8 dot8_add(dot8 sum, vw8 w, const input8 *x) {
    return dot8_pairs(dot8_pairs(sum, w.even, x), w.odd, x + 2);
}
static inline vi dot8_end(dot8 sum) { return sum; }

/* Sums of a group stay in 16 bits: it has eight pairs of 4-bit weights, of at most 2 * 15 * 127 each. */
typedef vi dot4;
static inline dot4 dot4_begin(void) { return vi_zero(); }
static inline dot4 dot4_add(dot4 sum, vw4 w, const int8_t *x) {
    const __m256i four = broadcast4(x);
    sum.a = _mm256_add_epi16(sum.a, _mm256_maddubs_epi16(w.a, four));
    sum.b = _mm256_add_epi16(sum.b, _mm256_maddubs_epi16(w.b, four));
    IN_PLACE(sum);
    return sum;
}
static inline vi dot4_end(dot4 sum) {
    const __m256i ones = _mm256_set1_epi16(1);
    return (vi){_mm256_madd_epi16(sum.a, ones), _mm256_madd_epi16(sum.b, ones)};
}
#endif

#define prefetch_l1(p) _mm_prefetch((const char *)(p), _MM_HINT_T0) /* a macro, since gcc drops it from a function */
#define prefetch_l2(p) _mm_prefetch((const char *)(p), _MM_HINT_T1)
static inline void pause_cpu(void) { _mm_pause(); }
#undef BOTH
