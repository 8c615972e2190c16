/* Read rows of weights as files store them.

   GGUF's blocks, bytes in order; d, e and m are fp16, a run of n bytes holds 2n numbers: first the low, then the high
   halves.

   Q4_0  d, run of 16                       d * (q - 8)
   Q4_1  d, m, run of 16                    d * q + m
   Q5_0  d, 32 fifth bits, run of 16        d * (q - 16)
   Q5_1  d, m, 32 fifth bits, run of 16     d * q + m
   Q8_0  d, 32 bytes                        d * q
   Q4_K  d, e, 8 pairs, 4 runs of 32        d * s * q - e * m for each of 8 groups
   Q5_K  d, e, 8 pairs, 32 × 8 fifth bits, 4 runs of 32
   Q6_K  2 runs of 64, 2 × 32 × 4 top pairs of bits, 16 scales s of 8 bits, d: d * s * (q - 32)

   Products and sums are in the order of the gguf package and of models/gguf_blocks.py, so that all bits agree. */
#include "stored.h"

#include <string.h>

#include "abi.h"

#define SUPER 256 /* numbers of a block with groups inside */

float half_bits_value(uint16_t h) {
    const uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = h >> 10 & 31, fraction = h & 1023;
    uint32_t bits;
    float x = (float)fraction * 0x1p-24f;
    memcpy(&bits, &x, 4);
    if (exponent) bits = (exponent == 31 ? 255u : exponent + 112) << 23 | fraction << 13;
    bits |= sign;
    memcpy(&x, &bits, 4);
    return x;
}

float half_value(const void *at) {
    uint16_t bits;
    memcpy(&bits, at, 2);
    return half_bits_value(bits);
}

/* Round to fp16, ties to even; too large numbers become infinite. */
uint16_t half_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    const uint16_t sign = (uint16_t)(bits >> 16 & 0x8000);
    bits &= 0x7fffffff;
    if (bits > 0x7f800000) return sign | 0x7e00;  /* NaN */
    if (bits >= 0x477ff000) return sign | 0x7c00; /* rounds to 65536 or more */
    if (bits < 0x38800000) {                      /* below 2^-14: a multiple of 2^-24 */
        float tiny;
        memcpy(&tiny, &bits, 4);
        tiny += 0.5f; /* the last bit of 0.5 is 2^-24: the addition rounds */
        memcpy(&bits, &tiny, 4);
        return sign | (uint16_t)(bits - 0x3f000000);
    }
    return sign | (uint16_t)((bits - 0x38000000 + 0xfff + (bits >> 13 & 1)) >> 13);
}

/* Unpack a run of n bytes to 2n numbers below 16. */
static void unpack_run(const uint8_t *run, int n, uint8_t *q) {
    for (int i = 0; i < n; i++) q[i] = run[i] & 15, q[n + i] = run[i] >> 4;
}

static void add_fifth_bits(const uint8_t *fifth, uint8_t *q) {
    for (int i = 0; i < 32; i++) q[i] |= (uint8_t)((fifth[i / 8] >> (i % 8) & 1) << 4);
}

/* Unpack scale and minimum of group g, 6 bits each: models/gguf_blocks.py has the picture. */
static void pair(const uint8_t *packed, int g, float *scale, float *minimum) {
    const uint8_t *low = packed + g % 4, *middle = low + 4, *high = low + 8;
    *scale = (float)(g < 4 ? *low & 63 : (*high & 15) | (*low >> 6 << 4));
    *minimum = (float)(g < 4 ? *middle & 63 : *high >> 4 | (*middle >> 6 << 4));
}

/* Unpack the numbers of a block with the size of a group: q [32]. */
static void small_block(int kind, const uint8_t *block, uint8_t *q, float *scale, float *minimum) {
    *scale = half_value(block);
    *minimum = kind == Q4_1 || kind == Q5_1 ? half_value(block + 2) : 0.0f;
    block += kind == Q4_1 || kind == Q5_1 ? 4 : 2;
    if (kind == Q8_0) {
        memcpy(q, block, 32);
        return;
    }
    const int five = kind == Q5_0 || kind == Q5_1;
    unpack_run(block + 4 * five, 16, q);
    if (five) add_fifth_bits(block, q);
}

static int small_bytes(int kind) {
    return kind == Q4_0 ? 18 : kind == Q4_1 ? 20 : kind == Q5_0 ? 22 : kind == Q5_1 ? 24 : 34;
}

/* Unpack a block of 8 groups: q [256], scale and minimum [8] as products; the minimum is subtracted. */
static void large_block(int kind, const uint8_t *block, uint8_t *q, float *scale, float *minimum) {
    const uint8_t *fifth = block + 16, *runs = kind == Q5_K ? block + 48 : block + 16;
    const float d = half_value(block), e = half_value(block + 2);
    for (int g = 0; g < 8; g++) {
        float s, m;
        pair(block + 4, g, &s, &m);
        scale[g] = d * s, minimum[g] = e * m;
    }
    for (int run = 0; run < 4; run++) unpack_run(runs + 32 * run, 32, q + 64 * run);
    for (int i = 0; kind == Q5_K && i < SUPER; i++) q[i] |= (uint8_t)((fifth[i % 32] >> (i / 32) & 1) << 4);
}

static void q6_block(const uint8_t *block, float *out) {
    const uint8_t *low = block, *top = block + 128;
    const int8_t *scales = (const int8_t *)block + 192;
    const float d = half_value(block + 208);
    for (int group = 0; group < SUPER / 16; group++) {
        const float scale = d * (float)scales[group];
        const int half = group / 8, part = group % 8 / 2, at = group % 2 * 16;
        for (int i = 0; i < 16; i++) {
            const int bits = low[64 * half + part % 2 * 32 + at + i] >> (part / 2 * 4) & 15;
            const int q = (bits | (top[32 * half + at + i] >> (2 * part) & 3) << 4) - 32;
            out[16 * group + i] = scale * (float)q;
        }
    }
}

static void small_floats(int kind, const uint8_t *block, float *out) {
    uint8_t q[32];
    float d, m;
    small_block(kind, block, q, &d, &m);
    for (int i = 0; i < 32; i++) {
        if (kind == Q8_0) out[i] = (float)(int8_t)q[i] * d;
        else if (kind == Q4_0 || kind == Q5_0) out[i] = d * (float)(q[i] - (kind == Q4_0 ? 8 : 16));
        else out[i] = d * (float)q[i] + m;
    }
}

static void large_floats(int kind, const uint8_t *block, float *out) {
    uint8_t q[SUPER];
    float scale[8], minimum[8];
    large_block(kind, block, q, scale, minimum);
    for (int i = 0; i < SUPER; i++) out[i] = scale[i / 32] * (float)q[i] - minimum[i / 32];
}

static void plain_floats(int kind, const uint8_t *row, int inputs, float *out) {
    for (int j = 0; j < inputs; j++) {
        uint16_t bits;
        memcpy(&bits, row + 2 * j, 2);
        const uint32_t wide = (uint32_t)bits << 16;
        if (kind == F16) out[j] = half_bits_value(bits);
        else memcpy(out + j, &wide, 4); /* BF16 */
    }
}

void stored_floats(int kind, const uint8_t *row, int inputs, float *out) {
    switch (kind) {
        case F32: memcpy(out, row, sizeof(float) * (size_t)inputs); return;
        case F16:
        case BF16: plain_floats(kind, row, inputs, out); return;
        case Q4_K:
        case Q5_K:
            for (int j = 0; j < inputs; j += SUPER, row += kind == Q4_K ? 144 : 176) large_floats(kind, row, out + j);
            return;
        case Q6_K:
            for (int j = 0; j < inputs; j += SUPER, row += 210) q6_block(row, out + j);
            return;
        default:
            for (int j = 0; j < inputs; j += GROUP, row += small_bytes(kind)) small_floats(kind, row, out + j);
    }
}

int stored_in_groups(int kind) {
    return kind == Q4_0 || kind == Q4_1 || kind == Q5_0 || kind == Q8_0 || kind == Q4_K;
}

void stored_groups(int kind, const uint8_t *row, int inputs, uint8_t *q, float *scale, float *minimum) {
    if (kind == Q4_K) {
        for (int j = 0; j < inputs; j += SUPER, row += 144, scale += 8, minimum += 8) {
            large_block(kind, row, q + j, scale, minimum);
            for (int g = 0; g < 8; g++) minimum[g] = -minimum[g];
        }
        return;
    }
    const int shift = kind == Q8_0 ? 128 : kind == Q5_0 ? 112 : 0; /* 8-bit formats have their zero at 128 */
    for (int j = 0; j < inputs; j += GROUP, row += small_bytes(kind), scale++, minimum++) {
        small_block(kind, row, q + j, scale, minimum);
        for (int i = 0; shift && i < GROUP; i++) q[j + i] = (uint8_t)(q[j + i] + shift);
        if (kind == Q4_0) *minimum = -8 * *scale;
    }
}
