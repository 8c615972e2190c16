/* Prefetched passes: the next pass starts while the host still processes the target's draws.

   After a pass over drafts and the draws from it, the accepted path and the token after it are known:

       rows of the pass    root   the   cat   a         accepted path: root, the
       drawn after them    the    dog   ...   ...       the head reads (root, the) and (the, dog)

   These are usually the rows of the head's next first pass. After a plain pass, the drawn tokens are usually the rows
   of the target's next pass. The pool's helpers start on them at once, without the caller. When the host asks for
   exactly this pass, it is done or on its way, and the caller helps to finish it. "Exactly" means equal tokens,
   positions, slots and pages; for a head also equal hidden states and noise. When the host asks for any other pass, the
   prefetched one is cancelled, and the other is computed as usual and overwrites the slots that it needs. */
#include <stdlib.h>

#include "draw.h"
#include "program.h"

#define MAX_SEQUENCES 8    /* most sequences of a pass; with more, some are likely to end or to change drafter */
#define MAX_MISSES 4       /* passes in a row that were not asked for, before only one in RETRY_INTERVAL is started */
#define RETRY_INTERVAL 32  /* passes */

/* ---- rows of the pass ---- */

/* Append a row of sequence s. */
static void put_row(prefetch *f, const batch *b, int s, int32_t token, int position) {
    const int n = f->batch.rows++, page = position / PAGE;
    const int32_t *pages = b->page_table + (int64_t)s * b->table_width;
    f->tokens[n] = token;
    f->positions[n] = position;
    f->slots[n] = page < b->table_width ? pages[page] * PAGE + position % PAGE : -1;
}

/* End the rows of sequence s; the last of them has logits. */
static void end_sequence(prefetch *f, int s) {
    const int last = f->batch.rows - 1;
    f->row_starts[s + 1] = f->batch.rows;
    f->logit_rows[s] = last;
    f->bases[s] = f->positions[last] + 1;
}

/* Append what a head reads of a sequence's accepted path: the target's hidden states, and the token after each. */
static void put_path(prefetch *f, const batch *b, int s, const int32_t *drawn, int width) {
    const size_t bytes = sizeof(float) * (size_t)width;
    for (int row = b->row_starts[s]; row >= 0; row = row_after(b, s, row, drawn[row])) {
        memcpy(f->batch.features + (int64_t)f->batch.rows * width, b->features + (int64_t)row * width, bytes);
        put_row(f, b, s, drawn[row], b->positions[row]);
    }
    end_sequence(f, s);
}

/* Append the token that was drawn after the only row of a sequence. */
static void put_drawn(prefetch *f, const batch *b, int s, const int32_t *drawn) {
    put_row(f, b, s, drawn[s], b->positions[s] + 1);
    end_sequence(f, s);
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

/* Make room for at most as many rows as the target's pass has, and copy its page table. False: out of memory. */
static int make_room(prefetch *f, const batch *b, int width) {
    const size_t rows = (size_t)b->rows, n = (size_t)b->sequences, number = sizeof(float), integer = sizeof(int32_t);
    const size_t needed = rows * (number * (size_t)width + 3 * integer) +
                          n * (number * (size_t)f->vocab + integer * (size_t)(8 + b->table_width)) + 16 * CACHE_LINE;
    if (needed > f->capacity) {
        free(f->memory);
        f->memory = aligned_alloc(CACHE_LINE, (needed + CACHE_LINE - 1) / CACHE_LINE * CACHE_LINE);
        f->capacity = f->memory ? needed : 0;
        if (!f->memory) return 0;
    }
    char *at = f->memory;
    f->batch = (batch){.sequences = b->sequences, .outs = b->sequences, .table_width = b->table_width};
    f->batch.features = b->features ? (float *)carve(&at, rows * (size_t)width, number) : NULL;
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
    memcpy(f->page_table, b->page_table, integer * n * (size_t)b->table_width);
    f->row_starts[0] = 0;
    return 1;
}

/* ---- starting ---- */

/* Whether every sequence is one committed row and a draft: such a sequence is likely to draft again. */
static int all_draft(const batch *b, const draws *d) {
    int all = b->features && d->roots && b->outs == b->rows;
    for (int s = 0; s < b->sequences; s++)
        all = all && d->roots[s] == b->row_starts[s] && b->row_starts[s + 1] - b->row_starts[s] > 1;
    return all;
}

/* Whether every sequence is one row, and its page has room for the next: such a sequence is likely to go on so. Pages
   behind that one may belong to others. */
static int all_plain(const batch *b) {
    int all = b->outs == b->rows && b->rows == b->sequences && !b->states && !b->tails;
    for (int s = 0; s < b->sequences && all; s++)
        all = b->row_starts[s] == s && b->logit_rows[s] == s && (b->positions[s] + 1) % PAGE;
    return all;
}

/* Whether this pass is not worth starting: if the host draws by other rules than this noise, every pass is a miss. */
static int is_in_vain(prefetch *f) { return f->misses >= MAX_MISSES && ++f->skipped % RETRY_INTERVAL; }

/* Begin a prefetched pass of a program behind the batch b of the target. False: it is not worth it. */
static int begin(program *p, const batch *b) {
    drop_prefetched(p);
    return !is_in_vain(&p->prefetch) && make_room(&p->prefetch, b, p->shape.features);
}

static void start(program *p) {
    p->prefetch.run = pool_start(p->pool, forward, p);
    if (p->prefetch.run) p->prefetch.misses++; /* until it is asked for */
    else p->screen.noise = NULL;
}

static void start_draft(program *head, const batch *b, const draws *d) {
    prefetch *f = &head->prefetch;
    if (!begin(head, b)) return;
    for (int s = 0; s < b->sequences; s++) put_path(f, b, s, d->tokens, head->shape.features);
    put_noise(f, d);
    if (prepare_pass(head, &f->batch) != FINE) return;
    head->screen.noise = head->screen.available ? &f->noise : NULL;
    start(head);
}

/* Index of the operation that computes logits. */
static int first_output(const program *p) {
    int i = 0;
    while (i < p->count && (p->operations[i].kind != LINEAR || p->operations[i].epilogue != LOGITS)) i++;
    return i;
}

/* The pass waits before its logits: their memory is the caller's, who may still read those of the last pass. */
static void start_next_pass(program *p, const batch *b, const draws *d) {
    prefetch *f = &p->prefetch;
    if (!begin(p, b)) return;
    for (int s = 0; s < b->sequences; s++) put_drawn(f, b, s, d->tokens);
    if (prepare_pass(p, &f->batch) != FINE) return;
    p->held = first_output(p);
    atomic_store(&p->asked, 0);
    start(p);
}

void start_prefetch(program *target, const batch *b, const draws *d) {
    if (pool_threads(target->pool) < 2 || b->sequences > MAX_SEQUENCES) return;
    if (target->prefetch.head && all_draft(b, d)) start_draft(target->prefetch.head, b, d);
    else if (all_plain(b)) start_next_pass(target, b, d);
}

/* ---- taking ---- */

static int same(const void *a, const void *b, size_t count, size_t size) { return memcmp(a, b, count * size) == 0; }

static int same_pages(const batch *a, const batch *b, int s) {
    const int last = a->positions[a->logit_rows[s]] / PAGE;
    const int32_t *one = a->page_table + (int64_t)s * a->table_width;
    const int32_t *other = b->page_table + (int64_t)s * b->table_width;
    return last < b->table_width && same(one, other, (size_t)last + 1, sizeof(int32_t));
}

/* Whether the prefetched pass is over the rows of batch b. */
static int has_rows_of(const batch *a, const batch *b) {
    if (a->rows != b->rows || a->sequences != b->sequences || a->outs != b->outs || b->tails || b->carry) return 0;
    const size_t rows = (size_t)a->rows, n = (size_t)a->sequences, i = sizeof(int32_t);
    int all = same(a->tokens, b->tokens, rows, i) && same(a->positions, b->positions, rows, i) &&
              same(a->slots, b->slots, rows, i) && same(a->row_starts, b->row_starts, n + 1, i) &&
              same(a->logit_rows, b->logit_rows, n, i) && !a->features == !b->features && !b->states;
    for (int s = 0; s < a->sequences && all; s++) all = same_pages(a, b, s);
    return all;
}

/* Whether the tokens after the prefetched pass would be drawn with this noise. */
static int has_noise(const prefetch *f, const row_noise *noise) {
    const size_t n = (size_t)f->batch.sequences;
    return same(f->inverse_temperature, noise->inverse_temperature, n, sizeof(float)) &&
           same(f->keys, noise->keys, 2 * n, sizeof(int32_t)) && f->ids == noise->ids;
}

static size_t feature_bytes(const program *p, const batch *b) {
    return b->features ? sizeof(float) * (size_t)b->rows * (size_t)p->shape.features : 0;
}

/* Finish the pass in flight with the caller's help. False: it was cancelled. */
static int land(program *p) {
    const int done = pool_finish(p->pool, p->prefetch.run);
    p->prefetch.run = 0;
    p->screen.noise = NULL;
    return done;
}

void drop_prefetched(program *p) {
    if (!p->prefetch.run) return;
    pool_cancel(p->pool);
    p->prefetch.run = 0;
    p->screen.noise = NULL;
    p->last_rows = 0;
}

/* Land the pass in flight if it is the one that is asked for; otherwise drop it. */
static int land_if(program *p, int is_asked_for) {
    if (!is_asked_for) drop_prefetched(p);
    if (!is_asked_for || !land(p)) return 0;
    p->prefetch.misses = 0, p->prefetch.hits++;
    return 1;
}

int take_prefetched(program *head, const batch *b, const row_noise *noise) {
    const prefetch *f = &head->prefetch;
    const int is_asked_for = f->run && head->held < 0 && has_rows_of(&f->batch, b) && has_noise(f, noise) &&
                             same(f->batch.features, b->features, feature_bytes(head, b), 1);
    if (!land_if(head, is_asked_for)) return 0;
    finish_pass(head);
    memcpy(b->argmax, f->batch.argmax, sizeof(int32_t) * (size_t)b->outs);
    if (!head->screen.available)
        memcpy(b->logits, f->batch.logits, sizeof(float) * (size_t)b->outs * (size_t)f->vocab);
    return 1;
}

int take_next_pass(program *p, const batch *b) {
    batch *a = &p->prefetch.batch;
    const int is_asked_for = p->prefetch.run && p->held >= 0 && has_rows_of(a, b);
    if (is_asked_for) {
        a->logits = b->logits, a->argmax = b->argmax;
        atomic_store(&p->asked, 1);
    }
    if (!land_if(p, is_asked_for)) return 0;
    if (b->features) memcpy(b->features, a->features, feature_bytes(p, b));
    finish_pass(p);
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
