/* Quantised matrices to tiles and back.

   A tile holds 16 outputs: first its scales, then its weights, both in the order a kernel reads them.
   CHANNEL8  16 scales in float; inputs/4 × [16 outputs][4 inputs] u8
   GROUP8    a group: 16 scales in fp16; 8 × [16 outputs][4 inputs] u8
   GROUP4    a group: 16 scales and 16 minimums in fp16; 4 × [16 outputs][4 inputs] of two nibbles, inputs j and j + 4
   A weight is scale * (q - 128) in the 8-bit formats and scale * q + minimum in the 4-bit one. */
#include "program.h"

/* Where weight (output lane, input j) lies behind the scales of a tile, without its nibble. */
static int64_t position(int format, int lane, int j) {
    const int within = lane * 4 + j % 4;
    return (int64_t)(format == GROUP4 ? j / 8 : j / 4) * 64 + within;
}

/* One output channel: q [inputs]; scale and minimum fp16 [groups], or one float scale. */
static void pack_channel(uint8_t *tile, int format, int lane, int inputs, const uint8_t *q, const void *scale,
                         const uint16_t *minimum) {
    uint16_t *constants = (uint16_t *)tile;
    if (format == CHANNEL8) ((float *)tile)[lane] = *(const float *)scale;
    for (int g = 0; format == GROUP8 && g < inputs / GROUP; g++)
        constants[g * LANES + lane] = ((const uint16_t *)scale)[g];
    for (int g = 0; format == GROUP4 && g < inputs / GROUP; g++) {
        constants[2 * g * LANES + lane] = ((const uint16_t *)scale)[g];
        constants[(2 * g + 1) * LANES + lane] = minimum[g];
    }
    tile += scale_bytes(format, inputs);
    for (int j = 0; j < inputs; j++) {
        uint8_t *byte = tile + position(format, lane, j);
        *byte = format == GROUP4 ? *byte | (uint8_t)(q[j] << (j / 4 % 2 * 4)) : q[j];
    }
}

/* data: zeroed memory of outputs/16 (rounded up) tiles. scale: fp16 [outputs, groups], or float [outputs] for
   CHANNEL8. minimum: fp16 [outputs, groups], for GROUP4 only. */
EXPORT void paceline_pack(uint8_t *data, int format, int outputs, int inputs, const uint8_t *q, const void *scale,
                          const void *minimum) {
    const int64_t width = format == CHANNEL8 ? 4 : inputs / GROUP * 2;
    for (int n = 0; n < outputs; n++)
        pack_channel(data + n / LANES * tile_bytes(format, inputs), format, n % LANES, inputs, q + (int64_t)n * inputs,
                     (const uint8_t *)scale + n * width,
                     minimum ? (const uint16_t *)((const uint8_t *)minimum + n * width) : NULL);
}

static float half_at(const uint8_t *tile, int index) {
    float values[LANES];
    vf_store(values, vf_load_half((const uint16_t *)tile + index / LANES * LANES));
    return values[index % LANES];
}

static void unpack_row(const matrix *m, int n, float *out) {
    const uint8_t *tile = m->data + n / LANES * tile_bytes(m->format, m->inputs);
    const uint8_t *weights = tile + scale_bytes(m->format, m->inputs);
    const int lane = n % LANES;
    float scale = m->format == CHANNEL8 ? ((const float *)tile)[lane] : 0.0f, minimum = 0.0f;
    for (int j = 0; j < m->inputs; j++) {
        const int g = j / GROUP, byte = weights[position(m->format, lane, j)];
        if (m->format == GROUP4 && j % GROUP == 0) {
            scale = half_at(tile, 2 * g * LANES + lane);
            minimum = half_at(tile, (2 * g + 1) * LANES + lane);
        }
        if (m->format == GROUP8 && j % GROUP == 0) scale = half_at(tile, g * LANES + lane);
        out[j] = m->format == GROUP4 ? scale * (float)(byte >> (j / 4 % 2 * 4) & 15) + minimum : scale * (float)(byte - 128);
    }
}

/* The embedding of each token, times operation.scale. */
void run_embed(member *self, program *p, const operation *o) {
    work_begin(self, p->batch->rows);
    for (int row; (row = work_next(self)) >= 0;) {
        float *out = row_of(p, RESIDUAL, row);
        unpack_row(&o->part[0], p->batch->tokens[row], out);
        for (int j = 0; j < p->shape.hidden; j++) out[j] *= o->scale;
    }
}
