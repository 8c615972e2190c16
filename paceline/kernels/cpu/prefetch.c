/* Prefetched passes: a head starts its first pass while the host still processes the target's draws.

   After a pass over drafts and the draws from it, the accepted path and the token after it are known:

       rows of the pass    root   the   cat   a         accepted path: root, the
       drawn after them    the    dog   ...   ...       the head reads (root, the) and (the, dog)

   These are usually the rows of the head's next first pass. The pool's helpers start on them at once, without the
   caller. When the host asks for exactly this pass, it is done or nearly done, and the caller helps to finish it.
   "Exactly" means equal tokens, positions, slots, pages, hidden states and noise. When the host asks for any other
   pass, that pass is computed as usual and overwrites the slots that it needs. */
#include <stdlib.h>

#include "draw.h"
#include "program.h"

#define MAX_SEQUENCES 8    /* most sequences of a pass; with more, some are likely to end or to change drafter */
#define MAX_MISSES 4       /* passes in a row that were not asked for, before only one in RETRY_INTERVAL is started */
#define RETRY_INTERVAL 32  /* passes */

/* ---- rows of the pass ---- */

/* Append a row: the target's hidden states of `row`, and the token after it. */
static void put_row(prefetch *f, const batch *b, int s, int row, int32_t token, int width) {
    const int n = f->batch.rows++, position = b->positions[row], page = position / PAGE;
    const int32_t *pages = b->page_table + (int64_t)s * b->table_width;
    f->tokens[n] = token;
    f->positions[n] = position;
    f->slots[n] = page < b->table_width ? pages[page] * PAGE + position % PAGE : -1;
    memcpy(f->batch.features + (int64_t)n * width, b->features + (int64_t)row * width, sizeof(float) * (size_t)width);
}

/* Append the rows of a sequence's accepted path; the last of them has logits. */
static void put_sequence(prefetch *f, const batch *b, int s, const int32_t *drawn, int width) {
    f->row_starts[s] = f->batch.rows;
    for (int row = b->row_starts[s]; row >= 0; row = row_after(b, s, row, drawn[row]))
        put_row(f, b, s, row, drawn[row], width);
    const int last = f->batch.rows - 1;
    f->row_starts[s + 1] = f->batch.rows;
    f->logit_rows[s] = last;
    f->bases[s] = f->positions[last] + 1;
}

static void put_noise(prefetch *f, const draws *d) {
    for (int s = 0; s < f->batch.sequences; s++) {
        token_keys(f->keys + 2 * s, d->seeds ? d->seeds[s] : 0, f->bases[s] + 1);
        f->inverse_temperature[s] = d->inverse_temperature ? d->inverse_temperature[s] : 0.0f;
    }
    f->noise = (row_noise){f->inverse_temperature, f->keys, f->ids};
}

/* ---- memory ---- */

/* Cut the next array off a piece of memory, aligned to cache lines. */
static char *carve(char **memory, size_t count, size_t size) {
    char *part = *memory;
    *memory += (count * size + CACHE_LINE - 1) / CACHE_LINE * CACHE_LINE;
    return part;
}

/* Make room for at most as many rows as the target's pass has. False: out of memory. */
static int make_room(prefetch *f, const program *head, const batch *b) {
    const size_t rows = (size_t)b->rows, n = (size_t)b->sequences, number = sizeof(float), integer = sizeof(int32_t);
    const size_t needed = rows * (number * (size_t)head->shape.features + 3 * integer) +
                          n * (number * (size_t)f->vocab + integer * (size_t)(8 + b->table_width)) + 16 * CACHE_LINE;
    if (needed > f->capacity) {
        free(f->memory);
        f->memory = aligned_alloc(CACHE_LINE, (needed + CACHE_LINE - 1) / CACHE_LINE * CACHE_LINE);
        f->capacity = f->memory ? needed : 0;
        if (!f->memory) return 0;
    }
    char *at = f->memory;
    f->batch = (batch){.sequences = b->sequences, .outs = b->sequences, .table_width = b->table_width};
    f->batch.features = (float *)carve(&at, rows * (size_t)head->shape.features, number);
    f->batch.logits = (float *)carve(&at, n * (size_t)f->vocab, number);
    f->batch.argmax = (int32_t *)carve(&at, n, integer);
    f->batch.tokens = f->tokens = (int32_t *)carve(&at, rows, integer);
    f->batch.positions = f->positions = (int32_t *)carve(&at, rows, integer);
    f->batch.slots = f->slots = (int32_t *)carve(&at, rows, integer);
    f->batch.row_starts = f->row_starts = (int32_t *)carve(&at, n + 1, integer);
    f->batch.bases = f->bases = (int32_t *)carve(&at, n, integer);
    f->batch.logit_rows = f->logit_rows = (int32_t *)carve(&at, n, integer);
    f->batch.page_table = f->page_table = (int32_t *)carve(&at, n * (size_t)b->table_width, integer);
    f->inverse_temperature = (float *)carve(&at, n, number);
    f->keys = (uint32_t *)carve(&at, 2 * n, integer);
    return 1;
}

/* ---- starting ---- */

/* Whether every sequence is one committed row and a draft: such a sequence is likely to draft again. */
static int all_draft(const batch *b, const draws *d) {
    int all = b->features && d->roots && b->outs == b->rows && b->sequences <= MAX_SEQUENCES;
    for (int s = 0; s < b->sequences; s++)
        all = all && d->roots[s] == b->row_starts[s] && b->row_starts[s + 1] - b->row_starts[s] > 1;
    return all;
}

/* Whether this pass is not worth starting: if the host draws by other rules than this noise, every pass is a miss. */
static int is_in_vain(prefetch *f) { return f->misses >= MAX_MISSES && ++f->skipped % RETRY_INTERVAL; }

void start_prefetch(program *target, const batch *b, const draws *d) {
    program *head = target->prefetch.head;
    if (!head || pool_threads(target->pool) < 2 || !all_draft(b, d)) return;
    prefetch *f = &head->prefetch;
    drop_prefetched(head);
    if (is_in_vain(f) || !make_room(f, head, b)) return;
    memcpy(f->page_table, b->page_table, sizeof(int32_t) * (size_t)b->sequences * (size_t)b->table_width);
    for (int s = 0; s < b->sequences; s++) put_sequence(f, b, s, d->tokens, target->shape.features);
    put_noise(f, d);
    head->screen.noise = head->screen.available ? &f->noise : NULL;
    if (prepare_pass(head, &f->batch) == FINE) f->run = pool_start(head->pool, forward, head);
    if (f->run) f->misses++; /* until it is asked for */
    else head->screen.noise = NULL;
}

/* ---- taking ---- */

static int same(const void *a, const void *b, size_t count, size_t size) { return memcmp(a, b, count * size) == 0; }

static int same_pages(const batch *a, const batch *b, int s) {
    const int last = a->positions[a->logit_rows[s]] / PAGE;
    const int32_t *one = a->page_table + (int64_t)s * a->table_width;
    const int32_t *other = b->page_table + (int64_t)s * b->table_width;
    return last < b->table_width && same(one, other, (size_t)last + 1, sizeof(int32_t));
}

/* Whether the prefetched pass is the one over batch b under this noise. */
static int is_asked_for(const prefetch *f, const batch *b, const row_noise *noise, int width) {
    const batch *a = &f->batch;
    if (a->rows != b->rows || a->sequences != b->sequences || a->outs != b->outs || b->tails || !b->features) return 0;
    const size_t rows = (size_t)a->rows, n = (size_t)a->sequences, i = sizeof(int32_t);
    if (!same(a->tokens, b->tokens, rows, i) || !same(a->positions, b->positions, rows, i) ||
        !same(a->slots, b->slots, rows, i) || !same(a->row_starts, b->row_starts, n + 1, i) ||
        !same(a->logit_rows, b->logit_rows, n, i) ||
        !same(f->inverse_temperature, noise->inverse_temperature, n, sizeof(float)) ||
        !same(f->keys, noise->keys, 2 * n, i) || f->ids != noise->ids)
        return 0;
    for (int s = 0; s < a->sequences; s++)
        if (!same_pages(a, b, s)) return 0;
    return same(a->features, b->features, rows * (size_t)width, sizeof(float));
}

/* Wait for the pass in flight, and help to finish it. True: there was one, and it is done. */
static int land(program *head) {
    const unsigned run = head->prefetch.run;
    if (!run) return 0;
    head->prefetch.run = 0;
    const int done = pool_finish(head->pool, run);
    head->screen.noise = NULL;
    return done;
}

void drop_prefetched(program *head) { land(head); }

int take_prefetched(program *head, const batch *b, const row_noise *noise) {
    prefetch *f = &head->prefetch;
    if (!land(head) || !is_asked_for(f, b, noise, head->shape.features)) return 0;
    f->misses = 0, f->hits++;
    finish_pass(head);
    memcpy(b->argmax, f->batch.argmax, sizeof(int32_t) * (size_t)b->outs);
    if (!head->screen.available)
        memcpy(b->logits, f->batch.logits, sizeof(float) * (size_t)b->outs * (size_t)f->vocab);
    return 1;
}

/* ---- linking ---- */

EXPORT void paceline_prefetch(program *target, program *head, const int32_t *ids, int vocab) {
    if (target->pool != head->pool || target->shape.features != head->shape.features) return;
    if (target->prefetch.head) target->prefetch.head->prefetch.target = NULL;
    target->prefetch.head = head;
    head->prefetch.target = target;
    head->prefetch.ids = ids, head->prefetch.vocab = vocab;
}

void free_prefetch(program *p) {
    if (p->prefetch.head) drop_prefetched(p->prefetch.head), p->prefetch.head->prefetch.target = NULL;
    if (p->prefetch.target) p->prefetch.target->prefetch.head = NULL;
    drop_prefetched(p);
    free(p->prefetch.memory);
}
