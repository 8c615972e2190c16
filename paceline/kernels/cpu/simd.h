/* The only place that knows instruction sets: vectors of 16 lanes, the same functions in three variants.

   vf is 16 floats, vi 16 int32. Every function is lane-wise, so what is computed for a lane never depends on another
   lane, and each rounds once (vf_fma: once with hardware FMA, twice in the portable variant). Sums over lanes go
   through vf_sum, which adds the upper half to the lower, then again (vf_top and vi_sum are exact in any order). vf_ge gives a bit a lane; vf_select takes `yes` where the bit is set.

   A weight tile holds 16 outputs. dot4 and dot8 accumulate exactly, in integers, the products of weights with signed
   8-bit inputs, four inputs a call and one group of 32 at most. dot4 takes its unsigned weights as they are; dot8 takes
   8-bit weights as q - 128, for which it may be given `offset` = -128 * sum of the inputs to begin with. */
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

#define LANES 16
#define INLINE static inline __attribute__((always_inline))

#endif
