/* KV memory outside of a pass: copy slots, and read them back. */
#include <stdlib.h>

#include "program.h"

/* Read the key and the value of a slot, [head_dim] each. */
static void read_slot(const shape *s, int layer, int slot, int head, uint16_t *key, uint16_t *value) {
    const uint16_t *keys = key_at(s, layer, slot, head), *values = value_at(s, layer, slot, head);
    for (int d = 0; d < s->head_dim; d++) key[d] = keys[d / 2 * 2 * PAGE + d % 2], value[d] = values[2 * d];
}

static void write_slot(const shape *s, int layer, int slot, int head, const uint16_t *key, const uint16_t *value) {
    uint16_t *keys = key_at(s, layer, slot, head), *values = value_at(s, layer, slot, head);
    for (int d = 0; d < s->head_dim; d++) keys[d / 2 * 2 * PAGE + d % 2] = key[d], values[2 * d] = value[d];
}

EXPORT int paceline_kv_move(const shape *s, const int32_t *source, const int32_t *target, int count) {
    const int dim = s->head_dim;
    uint16_t *copies = malloc(sizeof(uint16_t) * 2 * (size_t)dim * (size_t)(count ? count : 1));
    if (!copies) return -1;
    for (int job = 0; job < s->layers * s->kv_heads; job++) {
        const int layer = job / s->kv_heads, head = job % s->kv_heads;
        for (int i = 0; i < count; i++)
            read_slot(s, layer, source[i], head, copies + 2 * i * dim, copies + (2 * i + 1) * dim);
        for (int i = 0; i < count; i++)
            write_slot(s, layer, target[i], head, copies + 2 * i * dim, copies + (2 * i + 1) * dim);
    }
    free(copies);
    return 0;
}

EXPORT void paceline_kv_read(const shape *s, const int32_t *slots, int count, uint16_t *keys, uint16_t *values) {
    for (int layer = 0; layer < s->layers; layer++)
        for (int i = 0; i < count; i++)
            for (int head = 0; head < s->kv_heads; head++, keys += s->head_dim, values += s->head_dim)
                read_slot(s, layer, slots[i], head, keys, values);
}
