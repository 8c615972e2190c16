/* Vectors of 16 lanes, with the same functions in all variants: the only place that knows instruction sets.

   vf is 16 floats, vi 16 int32. All functions but vf_sum, vf_top and vi_sum work lane by lane: the result of a lane
   never depends on another lane. Each operation rounds once; only the portable vf_fma rounds twice. vf_sum adds the
   upper half of the lanes to the lower half, then halves again until one number is left. vf_top and vi_sum are exact in
   any order. vf_ge gives one bit for each lane; vf_select takes `yes` for lanes whose bit is set. vf_where_ge gives a
   lane of the first vector where the second is at least the third, and zero elsewhere.
   vi_load_upper_words clears the lower 16 bits of each lane.

   A weight tile holds 16 outputs. dot4 and dot8 add up, exactly and in integers, the products of weights with signed
   8-bit inputs: four inputs a call, and one group of 32 at most. dot4 takes its unsigned weights as they are. dot8
   takes 8-bit weights as q - 128; a variant may begin its sum with `offset` = -128 * sum of the inputs instead.
   store_inputs stores 16 quantised inputs, four after four, `step` apart: in q, and also in q8 if the variant has
   WIDE_INPUTS for 8-bit weights. NULL for q8: there are none. BLOCK is the number of rows that one walk over a tile
   serves.

   Pairs of bf16 numbers are multiplied in PAIR_PARTS parts, in order: both numbers of each pair at once if there is one
   part, otherwise the odd numbers of all pairs, then the even ones. vp is one part of 16 pairs. vp_load reads it from 16
   adjacent pairs, vp_set1 repeats the part of one pair of `narrow` numbers. A `narrow` number is a bf16 number in the
   form that a variant multiplies best; vf_narrow rounds floats to `narrow`, stores them and returns their values.
   vf_dot adds the products of a part to the sum: first of the odd numbers, then of the even ones, and rounds each time.
   AVX512_BF16 does the same, except that numbers below 2^-126 are zero there.

   prefetch_l1 and prefetch_l2 ask for a cache line in the first-level or second-level cache. */
#ifndef PACELINE_SIMD_H
#define PACELINE_SIMD_H

#include <stdint.h>
#include <string.h>

#if defined(PACELINE_AVX512)
#include "simd_avx512.h"
#elif defined(PACELINE_AVX2)
#include "simd_avx2.h"
#else
#include "simd_portable.h"
#endif

/* Round to the nearest bf16 number, to the even one of two equally near. */
static inline vf vf_to_bf16(vf x) {
    const vi bits = vf_bits(x), odd = vi_and(vi_shr(bits, 16), vi_set1(1));
    return vi_as_float(vi_and(vi_add(vi_add(bits, vi_set1(0x7fff)), odd), vi_set1(-65536)));
}

#ifndef PAIR_PARTS
#define PAIR_PARTS 2
typedef float narrow;
typedef vf vp;
static inline vf vf_narrow(narrow *p, vf x) {
    const vf rounded = vf_to_bf16(x);
    vf_store(p, rounded);
    return rounded;
}
static inline vp vp_load(const uint16_t *p, const int part) {
    const int32_t *pairs = (const int32_t *)p;
    return vi_as_float(part ? vi_shl(vi_load(pairs), 16) : vi_load_upper_words(pairs));
}
static inline vp vp_set1(const narrow *two, const int part) { return vf_set1(two[1 - part]); }
static inline vf vf_dot(vp a, vp b, vf sum) { return vf_fma(a, b, sum); }
#endif

static inline void store_inputs(int8_t *q, input8 *q8, vi x, int step) {
    int32_t fours[4];
    vi_store_bytes((int8_t *)fours, x);
    for (int i = 0; i < 4; i++) memcpy(q + i * step, fours + i, 4);
#ifdef WIDE_INPUTS
    if (q8) store_wide(q8, x, step);
#else
    (void)q8;
#endif
}

#define LANES 16      /* numbers of a vector */
#define CACHE_LINE 64 /* bytes */
#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16") /* before a loop of few turns over vectors: gcc keeps these in registers then */

#endif
