/* Gumbel noise from a counter. paceline/kernels/noise.py defines it; every operation here rounds as the one there. */
#ifndef PACELINE_NOISE_H
#define PACELINE_NOISE_H

#include "simd.h"
#include "vmath.h"

#define MAX_NOISE 17.0f /* above all noise: 23 bits give at most -log(-log(1 - 2^-24)) = 16.64 */

/* 16 numbers in (0, 1) for the counters j. */
INLINE vf uniform(vi j, vi k0, vi k1) {
    vi x = vi_add(vi_mul(j, vi_set1((int32_t)0x9E3779B9)), k0);
    x = vi_mul(vi_xor(x, vi_shr(x, 16)), vi_set1((int32_t)0x85EBCA6B));
    x = vi_mul(vi_xor(x, vi_shr(x, 13)), vi_set1((int32_t)0xC2B2AE35));
    x = vi_mul(vi_xor(vi_xor(x, vi_shr(x, 16)), k1), vi_set1(0x27D4EB2F));
    x = vi_xor(x, vi_shr(x, 15));
    return vf_mul(vf_add(vi_to_float(vi_shr(x, 9)), vf_set1(0.5f)), vf_set1(0x1p-23f));
}

INLINE vf gumbel(vf u) {
    return vf_negate(vf_log(vf_negate(vf_log(u))));
}

/* 0, 1 … LANES - 1 */
static inline vi count_up(void) {
    int32_t j[LANES];
    for (int i = 0; i < LANES; i++) j[i] = i;
    return vi_load(j);
}

#endif
