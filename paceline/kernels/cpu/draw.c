/* Draw the token after each row with logits: the best, or with noise of the sequence's seed and the row's position.

   Noise is computed only along the path that the target draws, row by row: each token decides which row comes next.
   That is about a third of the rows of a draft. Rows behind a drafted token that was not drawn get the best token,
   which is never used. */
#include "draw.h"

#include <stdlib.h>

#include "program.h"

/* Rows with logits that are drawn with noise; each array [outs]. */
typedef struct {
    const float **logits;
    float *inverse_temperature;
    float *bound; /* noisy value of the best logit */
    uint32_t *keys;
    int32_t *outs; /* index among the rows with logits */
    int32_t *tokens;
    int count;
} noisy_rows;

static void add_noisy(noisy_rows *n, const batch *b, int out, int vocab, uint64_t seed, float inverse_temperature) {
    const int i = n->count++, top = b->argmax[out];
    n->logits[i] = b->logits + (int64_t)out * vocab;
    n->inverse_temperature[i] = inverse_temperature;
    token_keys(n->keys + 2 * i, seed, b->positions[b->logit_rows[out]] + 1);
    n->bound[i] = noisy_value(n->logits[i][top], inverse_temperature, n->keys + 2 * i, top);
    n->outs[i] = out;
}

/* Depth of a row in its tree, from 0; -1: it belongs to no tree. */
static int depth_of(const batch *b, int s, int row) {
    return b->tails && b->positions[row] >= b->bases[s] ? b->positions[row] - b->bases[s] : -1;
}

static int is_child(const batch *b, int s, int row, int of) {
    const int depth = depth_of(b, s, row);
    if (depth < 0) return row == of + 1;
    if (depth == 0) return b->positions[of] == b->bases[s] - 1; /* the root */
    return b->tails[(int64_t)row * b->depth + depth - 1] == b->slots[of];
}

int row_after(const batch *b, int s, int of, int32_t token) {
    for (int row = of + 1; row < b->row_starts[s + 1]; row++)
        if (b->tokens[row] == token && is_child(b, s, row, of)) return row;
    return -1;
}

/* Collect the rows to draw after next: row at[s] of each sequence s, or all rows with logits where `at` is NULL. */
static void find_noisy(noisy_rows *n, const batch *b, int vocab, const draws *d, const int32_t *at) {
    n->count = 0;
    for (int out = 0, s = 0; out < b->outs; out++) {
        while (b->logit_rows[out] >= b->row_starts[s + 1]) s++;
        if (d->inverse_temperature[s] > 0.0f && (!at || at[s] == b->logit_rows[out]))
            add_noisy(n, b, out, vocab, d->seeds[s], d->inverse_temperature[s]);
    }
}

static int pick_noisy(const program *p, const noisy_rows *n, const draws *d) {
    pick work = {.logits = n->logits, .inverse_temperature = n->inverse_temperature, .keys = n->keys};
    work.bound = n->bound, work.rows = n->count, work.vocab = p->shape.vocab;
    if (pick_rows(p->pool, &work, n->tokens)) return OUT_OF_MEMORY;
    for (int i = 0; i < n->count; i++) d->tokens[n->outs[i]] = n->tokens[i];
    return FINE;
}

/* Move at[s] to the drafted row that was drawn after it; -1: the draft has no such row. */
static void advance(const noisy_rows *n, const batch *b, int32_t *at) {
    for (int s = 0, i = 0; s < b->sequences; s++) {
        const int drawn = i < n->count && b->logit_rows[n->outs[i]] == at[s];
        at[s] = drawn ? row_after(b, s, at[s], n->tokens[i]) : -1;
        i += drawn;
    }
}

static int any_noisy(const draws *d, int sequences) {
    int any = 0;
    for (int s = 0; d->inverse_temperature && s < sequences; s++) any |= d->inverse_temperature[s] > 0.0f;
    return any;
}

static int draw_noisy(const program *p, const batch *b, const draws *d) {
    const size_t n = (size_t)b->outs, sequences = (size_t)b->sequences;
    const size_t bytes = n * (sizeof(float *) + 2 * sizeof(float) + 4 * sizeof(int32_t)) + sizeof(int32_t) * sequences;
    char *memory = malloc(bytes);
    if (!memory) return OUT_OF_MEMORY;
    noisy_rows rows = {.logits = (const float **)memory};
    rows.inverse_temperature = (float *)(rows.logits + n), rows.bound = rows.inverse_temperature + n;
    rows.keys = (uint32_t *)(rows.bound + n);
    rows.outs = (int32_t *)(rows.keys + 2 * n), rows.tokens = rows.outs + n;
    int32_t *at = d->roots ? rows.tokens + n : NULL;
    int status = FINE;
    if (at) memcpy(at, d->roots, sizeof(int32_t) * sequences);
    do {
        find_noisy(&rows, b, p->shape.vocab, d, at);
        if (rows.count) status = pick_noisy(p, &rows, d);
        if (at) advance(&rows, b, at);
    } while (at && rows.count && status == FINE);
    free(memory);
    return status;
}

int draw_tokens(const program *p, const batch *b, const draws *d) {
    memcpy(d->tokens, b->argmax, sizeof(int32_t) * (size_t)b->outs);
    return any_noisy(d, b->sequences) ? draw_noisy(p, b, d) : FINE;
}
