/* Pack quantised matrices into tiles, and unpack rows of them.

   A tile holds 16 outputs, one group of 32 inputs after the other. Each group has its weights and then its scales, so
   that a kernel reads one stream in order: with separate scales the hardware prefetched half as fast.

   CHANNEL8  8 × [16 outputs][4 inputs] u8; 16 scales in float at the end of the tile
   GROUP8    8 × [16 outputs][4 inputs] u8, 16 scales in fp16
   GROUP4    4 × [16 outputs][4 inputs] of two nibbles (inputs j and j + 4), 16 scales and 16 minimums in fp16
   A weight is scale * (q - 128) in the 8-bit formats and scale * q + minimum in the 4-bit one. */
#include "pack.h"
#include "program.h"

/* Bytes of one group in a tile: weights, then their scales. */
static int64_t group_bytes(int format) { return format == CHANNEL8 ? 512 : format == GROUP8 ? 544 : 320; }

EXPORT int64_t paceline_tile_bytes(int format, int inputs) {
    return inputs / GROUP * group_bytes(format) + (format == CHANNEL8 ? 64 : 0);
}

/* Byte of the weight of output `lane` and input j in a tile; a byte of GROUP4 holds two weights. */
static int64_t byte_of(int format, int lane, int j) {
    const int block = j % GROUP / (format == GROUP4 ? 8 : 4);
    return j / GROUP * group_bytes(format) + block * 64 + lane * 4 + j % 4;
}

static uint16_t *group_constants(const uint8_t *tile, int format, int group) {
    return (uint16_t *)(tile + group * group_bytes(format) + (format == GROUP8 ? 512 : 256));
}

void pack_channel(uint8_t *tile, int format, int lane, int inputs, const uint8_t *q, const void *scale,
                  const uint16_t *minimum) {
    if (format == CHANNEL8) memcpy(tile + (int64_t)inputs * TILE + 4 * lane, scale, 4);
    for (int g = 0; format != CHANNEL8 && g < inputs / GROUP; g++) {
        group_constants(tile, format, g)[lane] = ((const uint16_t *)scale)[g];
        if (format == GROUP4) group_constants(tile, format, g)[TILE + lane] = minimum[g];
    }
    for (int j = 0; j < inputs; j += format == GROUP4 ? 8 : 4) { /* four bytes at once */
        uint32_t four, next;
        memcpy(&four, q + j, 4);
        if (format == GROUP4) memcpy(&next, q + j + 4, 4), four |= next << 4;
        memcpy(tile + byte_of(format, lane, j), &four, 4);
    }
}

EXPORT void paceline_pack(uint8_t *data, int64_t stride, int format, int outputs, int inputs, const uint8_t *q,
                          const void *scale, const void *minimum) {
    const int64_t width = format == CHANNEL8 ? 4 : inputs / GROUP * 2;
    for (int n = 0; n < outputs; n++)
        pack_channel(data + n / TILE * stride, format, n % TILE, inputs, q + (int64_t)n * inputs,
                     (const uint8_t *)scale + n * width,
                     minimum ? (const uint16_t *)((const uint8_t *)minimum + n * width) : NULL);
}

static float half_of_lane(const uint16_t *halves, int lane) {
    float values[TILE];
    vf_store(values, vf_load_half(halves));
    return values[lane];
}

void unpack_row(const matrix *m, int n, float *out) {
    const uint8_t *tile = m->data + n / TILE * m->stride;
    const int lane = n % TILE;
    float scale = 0.0f, minimum = 0.0f;
    if (m->format == CHANNEL8) scale = ((const float *)(tile + (int64_t)m->inputs * TILE))[lane];
    for (int j = 0; j < m->inputs; j++) {
        const int byte = tile[byte_of(m->format, lane, j)];
        if (m->format != CHANNEL8 && j % GROUP == 0) {
            const uint16_t *constants = group_constants(tile, m->format, j / GROUP);
            scale = half_of_lane(constants, lane);
            if (m->format == GROUP4) minimum = half_of_lane(constants + TILE, lane);
        }
        out[j] = m->format == GROUP4 ? scale * (float)(byte >> (j / 4 % 2 * 4) & 15) + minimum
                                     : scale * (float)(byte - 128);
    }
}

EXPORT int paceline_rows(const matrix *m, const int32_t *rows, int count, float *out) {
    for (int i = 0; i < count; i++) {
        if (rows[i] < 0 || rows[i] >= m->outputs) return -1;
        unpack_row(m, rows[i], out + (int64_t)i * m->inputs);
    }
    return 0;
}
