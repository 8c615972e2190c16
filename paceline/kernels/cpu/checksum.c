/* A checksum of packed weights, fast enough to be taken whenever they are mapped.

   It notices damage, not malice. Every piece has a sum of its own, made of 8 lanes of 64 bits; the sums are folded in
   order, so that the result does not depend on threads. */
#include <stdlib.h>
#include <string.h>

#include "pool.h"

#define PIECE_BYTES (1 << 20)
#define SUM_LANES 8
#define MULTIPLIER 0x9e3779b97f4a7c15u /* odd: the golden ratio times 2^64 */

typedef struct {
    const uint8_t *data;
    int64_t bytes;
    uint64_t *sums;
} summing;

static uint64_t mixed(uint64_t sum, uint64_t word) {
    sum = (sum ^ word) * MULTIPLIER;
    return sum ^ sum >> 29;
}

static uint64_t sum_piece(const uint8_t *data, int64_t bytes) {
    uint64_t lane[SUM_LANES] = {0}, word[SUM_LANES];
    int64_t at = 0;
    for (; at + (int64_t)sizeof word <= bytes; at += (int64_t)sizeof word) {
        memcpy(word, data + at, sizeof word);
        for (int i = 0; i < SUM_LANES; i++) lane[i] = mixed(lane[i], word[i]);
    }
    memset(word, 0, sizeof word);
    memcpy(word, data + at, (size_t)(bytes - at));
    uint64_t sum = (uint64_t)bytes;
    for (int i = 0; i < SUM_LANES; i++) sum = mixed(sum, mixed(lane[i], word[i]));
    return sum;
}

static void sum_pieces(member *self, void *argument) {
    const summing *s = argument;
    work_begin(self, (int)((s->bytes + PIECE_BYTES - 1) / PIECE_BYTES));
    for (int unit; (unit = work_next(self)) >= 0;) {
        const int64_t at = (int64_t)unit * PIECE_BYTES, left = s->bytes - at;
        s->sums[unit] = sum_piece(s->data + at, left < PIECE_BYTES ? left : PIECE_BYTES);
    }
    work_end(self);
}

EXPORT int paceline_checksum(pool *pool, const uint8_t *data, int64_t bytes, uint64_t *sum) {
    const int64_t pieces = (bytes + PIECE_BYTES - 1) / PIECE_BYTES;
    summing s = {data, bytes, malloc(sizeof(uint64_t) * (size_t)(pieces + 1))};
    if (!s.sums) return OUT_OF_MEMORY;
    pool_run(pool, sum_pieces, &s);
    *sum = 0;
    for (int64_t i = 0; i < pieces; i++) *sum = mixed(*sum, s.sums[i]);
    free(s.sums);
    return FINE;
}
