/* KV memory outside of a pass: copying slots and reading them back. */
#include <stdlib.h>

#include "program.h"

typedef struct { /* where the numbers of one (slot, head) lie: the key every PAGE-th, the value in one piece */
    uint16_t *key, *value;
} place;

static place place_of(const shape *s, int layer, int slot, int head) {
    place at = {keys_of(s, layer, slot / PAGE, head) + slot % PAGE,
                values_of(s, layer, slot / PAGE, head) + slot % PAGE * s->head_dim};
    return at;
}

/* Copy slots onto slots in every layer, reading all before writing any. Non-zero: out of memory. */
EXPORT int paceline_kv_move(const shape *s, const int32_t *source, const int32_t *target, int count) {
    const int dim = s->head_dim;
    uint16_t *held = malloc(sizeof(uint16_t) * 2 * (size_t)dim * (size_t)(count ? count : 1));
    if (!held) return -1;
    for (int job = 0; job < s->layers * s->kv_heads; job++) {
        const int layer = job / s->kv_heads, head = job % s->kv_heads;
        for (int i = 0; i < count; i++) {
            const place from = place_of(s, layer, source[i], head);
            for (int d = 0; d < dim; d++) held[2 * i * dim + d] = from.key[d * PAGE];
            memcpy(held + (2 * i + 1) * dim, from.value, sizeof(uint16_t) * (size_t)dim);
        }
        for (int i = 0; i < count; i++) {
            const place to = place_of(s, layer, target[i], head);
            for (int d = 0; d < dim; d++) to.key[d * PAGE] = held[2 * i * dim + d];
            memcpy(to.value, held + (2 * i + 1) * dim, sizeof(uint16_t) * (size_t)dim);
        }
    }
    free(held);
    return 0;
}

/* keys, values: fp16 [layers][count][kv_heads][head_dim] */
EXPORT void paceline_kv_read(const shape *s, const int32_t *slots, int count, uint16_t *keys, uint16_t *values) {
    for (int layer = 0; layer < s->layers; layer++)
        for (int i = 0; i < count; i++)
            for (int head = 0; head < s->kv_heads; head++, keys += s->head_dim, values += s->head_dim) {
                const place from = place_of(s, layer, slots[i], head);
                for (int d = 0; d < s->head_dim; d++) keys[d] = from.key[d * PAGE];
                memcpy(values, from.value, sizeof(uint16_t) * (size_t)s->head_dim);
            }
}
