/* A head begins to read while the host still looks at what the target has said.

   After a pass over drafts and the draws from it, it is known which drafts are right and what comes after them:

       rows of the pass    root   the   cat   a         the path of what was drawn: root, the
       drawn after them    the    dog   ...   ...       the head reads:  (root, the) (the, dog)

   These are the rows of the head's next first pass, if the host goes on as it mostly does. The helpers of the team begin
   with them at once, without the caller. Where the host then asks for exactly this pass (tokens, places, hidden states
   and noise are compared), it is there, or nearly: the caller helps to finish it. Where the host asks for something else
   the rows are computed as ever, over the same slots. */
#include <stdlib.h>

#include "program.h"

#define MOST_SEQUENCES 8 /* with more of them, some will not go on */
#define MOST_MISSES 4    /* passes in a row that were not asked for: then only one in TRIALS is begun */
#define TRIALS 32

/* ---- the rows of the next pass ---- */

/* One more row of the head: what the target thought of `row`, and the token after it. */
static void put_row(beginning *next, const batch *b, int s, int row, int32_t token, int width) {
    const int n = next->rows.rows++, position = b->positions[row], page = position / PAGE;
    next->tokens[n] = token;
    next->positions[n] = position;
    next->slots[n] = page < b->table_width ? b->page_table[(int64_t)s * b->table_width + page] * PAGE + position % PAGE : -1;
    memcpy(next->rows.features + (int64_t)n * width, b->features + (int64_t)row * width, sizeof(float) * (size_t)width);
}

static void put_sequence(beginning *next, const batch *b, int s, const int32_t *drawn, int width) {
    next->starts[s] = next->rows.rows;
    for (int row = b->row_starts[s]; row >= 0; row = row_after(b, s, row, drawn[row]))
        put_row(next, b, s, row, drawn[row], width);
    const int last = next->rows.rows - 1;
    next->starts[s + 1] = next->rows.rows;
    next->logit_rows[s] = last;
    next->bases[s] = next->positions[last] + 1;
}

/* ---- memory ---- */

static char *carve(char **memory, size_t count, size_t size) {
    char *part = *memory;
    *memory += (count * size + 63) / 64 * 64;
    return part;
}

/* Room for as many rows as the pass has; 0: there is none. */
static int make_room(beginning *next, const program *head, const batch *b) {
    const size_t rows = (size_t)b->rows, n = (size_t)b->sequences, f = sizeof(float), i = sizeof(int32_t);
    const size_t needed = rows * (f * (size_t)head->shape.features + 3 * i) +
                          n * (f * (size_t)next->vocab + i * (size_t)(8 + b->table_width)) + 16 * 64;
    if (needed > next->capacity) {
        free(next->memory);
        next->memory = aligned_alloc(64, (needed + 63) / 64 * 64);
        next->capacity = next->memory ? needed : 0;
        if (!next->memory) return 0;
    }
    char *at = next->memory;
    next->rows = (batch){.sequences = b->sequences, .outs = b->sequences, .table_width = b->table_width};
    next->rows.features = (float *)carve(&at, rows * (size_t)head->shape.features, f);
    next->rows.logits = (float *)carve(&at, n * (size_t)next->vocab, f);
    next->rows.argmax = (int32_t *)carve(&at, n, i);
    next->rows.tokens = next->tokens = (int32_t *)carve(&at, rows, i);
    next->rows.positions = next->positions = (int32_t *)carve(&at, rows, i);
    next->rows.slots = next->slots = (int32_t *)carve(&at, rows, i);
    next->rows.row_starts = next->starts = (int32_t *)carve(&at, n + 1, i);
    next->rows.bases = next->bases = (int32_t *)carve(&at, n, i);
    next->rows.logit_rows = next->logit_rows = (int32_t *)carve(&at, n, i);
    next->rows.page_table = next->table = (int32_t *)carve(&at, n * (size_t)b->table_width, i);
    next->warmths = (float *)carve(&at, n, f);
    next->keys = (uint32_t *)carve(&at, 2 * n, i);
    return 1;
}

/* ---- beginning ---- */

/* Whether every sequence is a root and a draft: then it will want another. */
static int goes_on(const batch *b, const draws *d) {
    int going = b->features && d->roots && b->outs == b->rows && b->sequences <= MOST_SEQUENCES;
    for (int s = 0; s < b->sequences; s++)
        going = going && d->roots[s] == b->row_starts[s] && b->row_starts[s + 1] - b->row_starts[s] > 1;
    return going;
}

/* Who draws by other rules than the noise goes another way, each time. */
static int is_in_vain(beginning *next) {
    return next->misses >= MOST_MISSES && ++next->left_out % TRIALS;
}

static void put_noise(beginning *next, const draws *d) {
    for (int s = 0; s < next->rows.sequences; s++) {
        token_keys(next->keys + 2 * s, d->seeds ? d->seeds[s] : 0, next->bases[s] + 1);
        next->warmths[s] = d->inverse_temperature ? d->inverse_temperature[s] : 0.0f;
    }
    next->noise = (screening){next->warmths, next->keys, next->ids};
}

void begin_to_follow(program *p, const batch *b, const draws *d) {
    program *head = p->follower;
    if (!head || pool_threads(p->pool) < 2 || !goes_on(b, d)) return;
    beginning *next = &head->begun;
    end_following(head);
    if (is_in_vain(next) || !make_room(next, head, b)) return;
    memcpy(next->table, b->page_table, sizeof(int32_t) * (size_t)b->sequences * (size_t)b->table_width);
    for (int s = 0; s < b->sequences; s++) put_sequence(next, b, s, d->tokens, p->shape.features);
    put_noise(next, d);
    head->screening = head->refines ? &next->noise : NULL;
    if (begin_pass(head, &next->rows) == FINE) next->number = pool_start(head->pool, forward, head);
    if (next->number) next->misses++; /* until it is asked for */
    else head->screening = NULL;
}

/* ---- and what became of it ---- */

static int same(const void *a, const void *b, size_t count, size_t size) { return memcmp(a, b, count * size) == 0; }

static int same_pages(const batch *a, const batch *b, int s) {
    const int last = a->positions[a->logit_rows[s]] / PAGE;
    return last < b->table_width && same(a->page_table + (int64_t)s * a->table_width,
                                         b->page_table + (int64_t)s * b->table_width, (size_t)last + 1, sizeof(int32_t));
}

static int is_asked_for(const beginning *next, const batch *b, const screening *noise, int width) {
    const batch *a = &next->rows;
    if (a->rows != b->rows || a->sequences != b->sequences || a->outs != b->outs || b->tails || !b->features) return 0;
    const size_t rows = (size_t)a->rows, n = (size_t)a->sequences, i = sizeof(int32_t);
    if (!same(a->tokens, b->tokens, rows, i) || !same(a->positions, b->positions, rows, i) ||
        !same(a->slots, b->slots, rows, i) || !same(a->row_starts, b->row_starts, n + 1, i) ||
        !same(a->logit_rows, b->logit_rows, n, i) || !same(next->warmths, noise->inverse_temperature, n, i) ||
        !same(next->keys, noise->keys, 2 * n, i) || next->ids != noise->ids)
        return 0;
    for (int s = 0; s < a->sequences; s++)
        if (!same_pages(a, b, s)) return 0;
    return same(a->features, b->features, rows * (size_t)width, sizeof(float));
}

/* True: a pass was begun and is over. */
static int settle(program *p) {
    const unsigned number = p->begun.number;
    if (!number) return 0;
    p->begun.number = 0;
    const int done = pool_finish(p->pool, number);
    p->screening = NULL;
    return done;
}

void end_following(program *p) { settle(p); }

int was_begun(program *p, const batch *b, const screening *noise) {
    beginning *next = &p->begun;
    if (!settle(p) || !is_asked_for(next, b, noise, p->shape.features)) return 0;
    next->misses = 0, next->hits++;
    end_pass(p);
    memcpy(b->argmax, next->rows.argmax, sizeof(int32_t) * (size_t)b->outs);
    if (!p->refines) memcpy(b->logits, next->rows.logits, sizeof(float) * (size_t)b->outs * (size_t)next->vocab);
    return 1;
}

EXPORT int64_t paceline_prefetched(const program *head) { return head->begun.hits; }

/* Passes of `head` follow those of `target`; both outlive what is begun, and may be freed in any order. */
EXPORT void paceline_prefetch(program *target, program *head, const int32_t *ids, int vocab) {
    if (target->pool != head->pool || target->shape.features != head->shape.features) return;
    if (target->follower) target->follower->leader = NULL;
    target->follower = head;
    head->leader = target;
    head->begun.ids = ids, head->begun.vocab = vocab;
}
