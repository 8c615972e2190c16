/* exp, log, two activations and the RMS norm of vectors, composed of single operations in a fixed order. */
#ifndef PACELINE_VMATH_H
#define PACELINE_VMATH_H

#include <math.h>

#include "simd.h"

/* e^x to about one unit in the last place, for x in [-87, 88]; anything for other x */
static inline vf exp_within(vf x) {
    const vf big = vf_set1(0x1.8p23f); /* a float of this size has no fraction: to add it is to round */
    const vf shifted = vf_add(vf_mul(x, vf_set1(1.44269504f)), big), n = vf_sub(shifted, big);
    vf r = vf_sub(x, vf_mul(n, vf_set1(0.693359375f))); /* ln 2 in two parts, the first exact times n */
    r = vf_sub(r, vf_mul(n, vf_set1(-2.12194440e-4f)));
    vf p = vf_set1(0.0013933733571320772f);
    p = vf_fma(p, r, vf_set1(0.008363235741853714f));
    p = vf_fma(p, r, vf_set1(0.041666463017463684f));
    p = vf_fma(p, r, vf_set1(0.16666576266288757f));
    p = vf_fma(p, r, vf_set1(0.5f));
    p = vf_add(vf_fma(p, vf_mul(r, r), r), vf_set1(1.0f));
    return vi_as_float(vi_add(vf_bits(p), vi_shl(vf_bits(shifted), 23))); /* p * 2^n, which is a normal number */
}

/* e^x: 0 below -87 and for NaN, finite above 88 */
static inline vf vf_exp(vf x) {
    const vf low = vf_set1(-87.0f);
    return vf_where_ge(exp_within(vf_min(vf_max(x, low), vf_set1(88.0f))), x, low);
}

/* e^x for x <= 0: 0 below -87 and for NaN */
static inline vf vf_exp_negative(vf x) { return vf_where_ge(exp_within(x), x, vf_set1(-87.0f)); }

/* ln x for normal x > 0, without fma: paceline/kernels/noise.py computes the same bits with torch */
static inline vf vf_log(vf x) {
    const vi shifted = vi_sub(vf_bits(x), vi_set1(0x3f3504f3)); /* m is in [√½, √2) */
    const vf e = vi_to_float(vi_sar(shifted, 23));
    const vf m = vi_as_float(vi_add(vi_and(shifted, vi_set1(0x7fffff)), vi_set1(0x3f3504f3)));
    const vf t = vf_sub(m, vf_set1(1.0f)), square = vf_mul(t, t);
    vf p = vf_set1(0.07149753719568253f);
    p = vf_add(vf_mul(p, t), vf_set1(-0.115712009370327f));
    p = vf_add(vf_mul(p, t), vf_set1(0.11661510914564133f));
    p = vf_add(vf_mul(p, t), vf_set1(-0.12411050498485565f));
    p = vf_add(vf_mul(p, t), vf_set1(0.14249937236309052f));
    p = vf_add(vf_mul(p, t), vf_set1(-0.1666848063468933f));
    p = vf_add(vf_mul(p, t), vf_set1(0.20000708103179932f));
    p = vf_add(vf_mul(p, t), vf_set1(-0.24999989569187164f));
    p = vf_add(vf_mul(p, t), vf_set1(0.3333333134651184f));
    p = vf_mul(vf_mul(p, t), square);
    p = vf_add(p, vf_mul(e, vf_set1(-2.12194440e-4f)));
    p = vf_sub(p, vf_mul(square, vf_set1(0.5f)));
    return vf_add(vf_add(t, p), vf_mul(e, vf_set1(0.693359375f)));
}

static inline vf vf_negate(vf x) { return vf_sub(vf_set1(0.0f), x); }

static inline vf vf_silu(vf x) { return vf_div(x, vf_add(vf_set1(1.0f), vf_exp(vf_negate(x)))); }

/* x/2 (1 + tanh u) = x sigmoid(2u) with u = √(2/π) (x + 0.044715 x³) */
static inline vf vf_gelu_tanh(vf x) {
    const vf cube = vf_mul(vf_mul(x, x), x);
    const vf u = vf_mul(vf_set1(1.5957691216057308f), vf_fma(vf_set1(0.044715f), cube, x));
    return vf_div(x, vf_add(vf_set1(1.0f), vf_exp(vf_negate(u))));
}

/* 1 / root mean square of x [k]; k is a multiple of LANES */
static inline float rms_factor(const float *x, int k, float epsilon) {
    vf sum = vf_set1(0.0f);
    for (int j = 0; j < k; j += LANES) {
        const vf v = vf_load(x + j);
        sum = vf_fma(v, v, sum);
    }
    return 1.0f / sqrtf(vf_sum(sum) / (float)k + epsilon);
}

/* out ← x / root mean square of x * weight */
static inline void rms_norm(float *out, const float *x, const float *weight, int k, float epsilon) {
    const vf factor = vf_set1(rms_factor(x, k, epsilon));
    for (int j = 0; j < k; j += LANES) vf_store(out + j, vf_mul(vf_mul(vf_load(x + j), factor), vf_load(weight + j)));
}

#endif
