/* Programs and their passes: a list of operations, each run by all threads together once the one before is done. */
#include "program.h"

#include <math.h>
#include <stdlib.h>

#include "draw.h"

#define OPERATION_WORKS_MAX 2 /* works that an operation other than SUM consists of at most */

static void *zeroed(int64_t bytes) {
    void *p = aligned_alloc(CACHE_LINE, (size_t)(bytes + 2 * CACHE_LINE - 1) / CACHE_LINE * CACHE_LINE);
    if (p) memset(p, 0, (size_t)bytes);
    return p;
}

/* ---- memory ---- */

static int make_quantised(quantised *x, int64_t rows, int64_t inputs) {
    const int64_t blocks = (rows + BLOCK - 1) / BLOCK * BLOCK, scales = blocks * (inputs / GROUP) * 4;
    x->q = zeroed(blocks * inputs);
    x->q8 = sizeof(input8) == 1 ? (input8 *)x->q : zeroed(blocks * inputs * (int64_t)sizeof(input8));
    x->scale = zeroed(scales);
    x->shift = zeroed(scales);
    x->offset = zeroed(scales);
    return x->q && x->q8 && x->scale && x->shift && x->offset;
}

static void free_quantised(quantised *x) {
    if ((void *)x->q8 != x->q) free(x->q8);
    free(x->q), free(x->scale), free(x->shift), free(x->offset);
}

static int make_scratch(scratch *s, const shape *shape, int inputs, int slice) {
    const int64_t dim = shape->head_dim;
    s->slice = zeroed(4 * (int64_t)slice);
    s->row = zeroed(4 * (int64_t)inputs);
    s->queries = zeroed((int64_t)sizeof(narrow) * QUERY_BLOCK * dim);
    s->scores = zeroed(4 * QUERY_BLOCK * CHUNK);
    s->weights = zeroed((int64_t)sizeof(narrow) * QUERY_BLOCK * CHUNK);
    s->gathered = zeroed(2 * CHUNK * dim);
    s->sums = zeroed(4 * QUERY_BLOCK * (dim + 2));
    s->state = zeroed(4 * QUERY_BLOCK * (dim + 2));
    return make_quantised(&s->inputs, ROWS_QUANTISED_ALONE, inputs) && s->row && s->queries && s->scores &&
           s->weights && s->gathered && s->sums && s->state && s->slice;
}

static void free_scratch(scratch *s) {
    free_quantised(&s->inputs);
    free(s->row), free(s->queries), free(s->scores), free(s->sums), free(s->state), free(s->tail_scores);
    free(s->weights), free(s->gathered), free(s->best), free(s->slice);
}

EXPORT void paceline_program_free(program *p) {
    free_prefetch(p);
    for (int i = 0; p->scratch && i < p->shape.threads; i++) free_scratch(&p->scratch[i]);
    for (int i = 0; i < OWN_BUFFERS; i++) free(p->buffer[i]);
    free_quantised(&p->shared);
    free(p->plan.blocks), free(p->plan.partials), free(p->plan.finished), free(p->plan.tails.memory);
    free(p->scratch), free(p->operations), free(p->screen.lists);
    free(p);
}

static int has_pairs(const operation *operations, int count) {
    for (int i = 0; i < count; i++)
        if (operations[i].kind == PAIR) return 1;
    return 0;
}

/* Count the outputs of one slice, rounded up; 0: the program makes no shortlists. */
static int slice_outputs(const operation *operations, int count) {
    for (int i = 0; i < count; i++)
        if (operations[i].kind == REFINE) return operations[i].part[0].outputs / SLICES + LANES;
    return 0;
}

static int has_normed(const operation *operations, int count) {
    for (int i = 0; i < count; i++)
        if (operations[i].kind == NORM && operations[i].output == NORMED) return 1;
    return 0;
}

static int sketch_width(const operation *operations, int count) {
    for (int i = 0; i < count; i++)
        if (operations[i].kind == LINEAR && operations[i].output == SKETCHED) return operations[i].part[0].outputs;
    return 0;
}

/* Count the columns that products write to the branch: several parts of a sum lie side by side. */
static int branch_width(const operation *operations, int count, int hidden) {
    int most = hidden;
    for (int i = 0; i < count; i++) {
        const operation *o = &operations[i];
        if (o->kind != LINEAR || o->output != BRANCH) continue;
        if (o->part[0].column + o->part[0].outputs > most) most = o->part[0].column + o->part[0].outputs;
    }
    return most;
}

/* Count the columns of deltas, in whole tiles; 0: the program has no convolutions. */
static int delta_width(const operation *operations, int count) {
    for (int i = 0; i < count; i++)
        if (operations[i].kind == LINEAR && operations[i].output == DELTAS)
            return (operations[i].part[0].outputs + TILE - 1) / TILE * TILE;
    return 0;
}

static int widest_input(const operation *operations, int count) {
    int most = GROUP;
    for (int i = 0; i < count; i++)
        if (operations[i].kind == LINEAR && operations[i].part[0].inputs > most) most = operations[i].part[0].inputs;
    return most;
}

static void set_strides(program *p, const operation *operations) {
    const shape *s = &p->shape;
    p->stride[RESIDUAL] = s->hidden;
    p->stride[PROJECTED] = (s->heads + 2 * s->kv_heads) * s->head_dim;
    p->stride[ATTENDED] = s->heads * s->head_dim;
    p->stride[GATED] = s->intermediate;
    p->stride[BRANCH] = branch_width(operations, p->count, s->hidden);
    p->stride[PAIRED] = has_pairs(operations, p->count) ? 2 * s->hidden : 0;
    p->stride[SKETCHED] = sketch_width(operations, p->count);
    p->stride[NORMED] = has_normed(operations, p->count) ? s->features : 0;
    p->stride[DELTAS] = delta_width(operations, p->count);
    p->stride[CONVOLVED] = p->stride[DELTAS] ? s->hidden : 0;
    p->stride[FEATURES] = s->features;
    p->stride[STATES] = s->hidden;
}

EXPORT program *paceline_program_new(pool *pool, const shape *s, const operation *operations, int count) {
    program *p = calloc(1, sizeof *p);
    if (!p) return NULL;
    p->pool = pool;
    p->shape = *s;
    p->shape.threads = pool_threads(pool);
    p->count = count;
    p->inputs_max = widest_input(operations, count);
    const int slice = slice_outputs(operations, count);
    p->screen.available = slice > 0;
    set_strides(p, operations);
    p->operations = zeroed((int64_t)sizeof *operations * count);
    p->scratch = calloc((size_t)p->shape.threads, sizeof *p->scratch);
    int fine = p->operations && p->scratch;
    for (int i = 0; fine && i < p->shape.threads; i++) fine = make_scratch(&p->scratch[i], s, p->inputs_max, slice);
    if (fine) {
        memcpy(p->operations, operations, sizeof *operations * (size_t)count);
        return p;
    }
    paceline_program_free(p);
    return NULL;
}

int reserve_rows(program *p, int rows) {
    if (rows <= p->row_capacity) return 1;
    drop_prefetched(p); /* it uses the memory that is freed below */
    p->row_capacity = 0;
    free_quantised(&p->shared);
    free(p->plan.blocks), free(p->plan.finished);
    p->plan.blocks = zeroed((int64_t)sizeof *p->plan.blocks * rows);
    p->plan.finished = zeroed((int64_t)sizeof *p->plan.finished * rows * p->shape.kv_heads);
    int fine = make_quantised(&p->shared, rows, p->inputs_max) && p->plan.blocks && p->plan.finished;
    for (int i = 0; i < OWN_BUFFERS; i++) {
        free(p->buffer[i]);
        p->buffer[i] = zeroed(4 * (int64_t)rows * p->stride[i]);
        fine = fine && p->buffer[i];
    }
    if (fine) p->row_capacity = rows;
    return fine;
}

static int reserve_outs(program *p, int outs) {
    if (outs <= p->out_capacity) return 1;
    p->out_capacity = 0;
    for (int i = 0; i < p->shape.threads; i++) {
        free(p->scratch[i].best);
        if (!(p->scratch[i].best = zeroed((int64_t)sizeof(best) * outs))) return 0;
    }
    free(p->screen.lists);
    p->screen.lists = p->screen.available ? zeroed((int64_t)sizeof(shortlist) * outs * SLICES) : NULL;
    if (p->screen.available && !p->screen.lists) return 0;
    p->out_capacity = outs;
    return 1;
}

/* ---- checks ---- */

static int outside(const int32_t *values, int count, int limit) {
    for (int i = 0; i < count; i++)
        if (values[i] < 0 || values[i] >= limit) return 1;
    return 0;
}

/* Check that every row of a sequence finds its keys: pages for positions below its base, slots of its ancestors
   above. */
static int check_sequence(const program *p, const batch *b, int s) {
    const int first = b->row_starts[s], last = b->row_starts[s + 1];
    int known = 0; /* positions that are found through the page table */
    if (first < 0 || last < first || last > b->rows) return BAD_ROWS;
    for (int r = first; r < last; r++) {
        const int tail = b->tails ? b->positions[r] - b->bases[s] + 1 : 0;
        if (tail > 0 && (tail > b->depth || b->bases[s] < 0)) return BAD_POSITION;
        if (tail > 0 && outside(b->tails + (int64_t)r * b->depth, tail, p->shape.pages * PAGE)) return BAD_SLOT;
        const int below = tail > 0 ? b->bases[s] : (b->lasts ? b->lasts[r] : b->positions[r]) + 1;
        known = below > known ? below : known;
    }
    const int pages = (known + PAGE - 1) / PAGE;
    if (pages > b->table_width) return BAD_PAGE;
    return outside(b->page_table + (int64_t)s * b->table_width, pages, p->shape.pages) ? BAD_PAGE : FINE;
}

static int check(const program *p, const batch *b) {
    if (b->carry && outside(b->carry, b->rows, p->last_rows)) return BAD_ROWS;
    if (outside(b->tokens, b->rows, p->shape.vocab)) return BAD_TOKEN;
    if (outside(b->positions, b->rows, p->shape.positions)) return BAD_POSITION;
    if (b->lasts && (b->tails || outside(b->lasts, b->rows, p->shape.positions))) return BAD_POSITION;
    if (outside(b->slots, b->rows, p->shape.pages * PAGE)) return BAD_SLOT;
    if (outside(b->logit_rows, b->outs, b->rows)) return BAD_ROWS;
    if (b->row_starts[0] != 0 || b->row_starts[b->sequences] != b->rows) return BAD_ROWS;
    for (int s = 0, status; s < b->sequences; s++)
        if ((status = check_sequence(p, b, s)) != FINE) return status;
    return FINE;
}

/* ---- running ---- */

static void run_operation(member *self, program *p, const operation *o) {
    switch (o->kind) {
        case EMBED: run_embed(self, p, o); break;
        case LINEAR: (o->part[0].format == HALF ? run_linear_half : run_linear)(self, p, o); break;
        case ROTATE: run_rotate(self, p, o); break;
        case ATTEND: run_attend(self, p, o); break;
        case ADD_NORM: run_add_norm(self, p, o); break;
        case KEEP: run_keep(self, p, o); break;
        case PAIR: run_pair(self, p, o); break;
        case NORM: run_norm(self, p, o); break;
        case REFINE: run_refine(self, p, o); break;
        case SUM: run_sum(self, p, o); break;
        case CONVOLVE: run_convolve(self, p, o); break;
    }
}

/* Prefetch the first data of the next operation, since memory is idle while threads wait for each other. */
static void fetch_for(const member *self, const program *p, const operation *next) {
    if (next->kind == ROTATE) fetch_slots(self, p, next);
}

/* Whether this pass has memory for the hidden states that a KEEP writes. */
static int is_kept(const program *p, const operation *o) { return p->buffer[o->output] != NULL; }

/* Count the operations that a pass needs. Without logits a pass ends once the last layer's keys and values are stored,
   unless hidden states are kept after that. */
static int needed_operations(const program *p) {
    int n = p->count;
    if (p->batch->outs) return n;
    for (; n > 0 && p->operations[n - 1].kind != ROTATE; n--)
        if (p->operations[n - 1].kind == KEEP && is_kept(p, &p->operations[n - 1])) return p->count;
    return n;
}

/* Whether this pass skips an operation. A pass without features skips operations for features, and a pass with features
   the norm of rows that continue from the last pass. A pass without shortlists skips operations for shortlists, and one
   with shortlists the logits. */
static int is_skipped(const program *p, const operation *o) {
    if (o->kind == KEEP) return !is_kept(p, o);
    if (o->kind == NORM && o->input == RESIDUAL && o->output == RESIDUAL) return p->batch->features != NULL;
    if (o->input == FEATURES || o->input == NORMED) return !p->batch->features;
    if (o->input == SKETCHED || o->output == SKETCHED) return !p->screen.noise;
    return o->kind == LINEAR && o->epilogue == LOGITS && p->screen.noise;
}

void forward(member *self, void *argument) {
    program *p = argument;
    const int count = needed_operations(p), sums = sum_works(p);
    const int works = sums > OPERATION_WORKS_MAX ? sums : OPERATION_WORKS_MAX;
    for (int i = 0; i < count; i++) {
        if (is_skipped(p, &p->operations[i])) continue;
        if (i == p->held && !work_await(self, &p->asked)) return;
        if (work_cancelled(self, works * (count - i)) || has_lost_a_rank(self, p, works * (count - i))) return;
        run_operation(self, p, &p->operations[i]);
        if (i + 1 < count) fetch_for(self, p, &p->operations[i + 1]);
        work_end(self);
    }
}

/* Clear the best logits of every thread. A thread that comes too late for this pass must not contribute results of an
   earlier one. */
static void clear_best(program *p) {
    for (int t = 0; t < p->shape.threads; t++)
        for (int i = 0; i < p->batch->outs; i++) p->scratch[t].best[i] = (best){-INFINITY, NOTHING};
}

static void gather_argmax(const program *p, int threads) {
    for (int i = 0; i < p->batch->outs; i++) {
        best top = p->scratch[0].best[i];
        for (int t = 1; t < threads; t++) {
            const best other = p->scratch[t].best[i];
            if (other.value > top.value || (other.value == top.value && other.index < top.index)) top = other;
        }
        p->batch->argmax[i] = top.index == NOTHING ? 0 : top.index; /* all NaN: 0 */
    }
}

/* Copy the rows of the last pass that this one continues from. Several rows may continue from one, in any order, so
   they go through a buffer that is not in use yet. */
static void carry_rows(program *p) {
    const size_t bytes = sizeof(float) * (size_t)p->shape.hidden;
    const batch *b = p->batch;
    if (!b->carry) return;
    for (int r = 0; r < b->rows; r++) memcpy(row_of(p, BRANCH, r), row_of(p, RESIDUAL, b->carry[r]), bytes);
    for (int r = 0; r < b->rows; r++) memcpy(row_of(p, RESIDUAL, r), row_of(p, BRANCH, r), bytes);
}

int prepare_pass(program *p, const batch *b) {
    const int status = check(p, b);
    if (status != FINE) return status;
    if (!reserve_rows(p, b->rows) || !reserve_outs(p, b->outs)) return OUT_OF_MEMORY;
    p->batch = b;
    p->buffer[FEATURES] = b->features;
    p->buffer[STATES] = b->states;
    p->held = -1;
    carry_rows(p);
    p->last_rows = b->outs ? b->rows : 0; /* without logits a pass may end before the residual stream does */
    if (plan_attention(p)) return OUT_OF_MEMORY;
    clear_best(p);
    return FINE;
}

void finish_pass(const program *p) { gather_argmax(p, pool_threads(p->pool)); }

int run_pass(program *p, const batch *b) {
    if (take_next_pass(p, b)) return FINE;
    if (b->rows == 0) return check(p, b);
    const int status = prepare_pass(p, b);
    if (status != FINE) return status;
    pool_run(p->pool, forward, p);
    finish_pass(p);
    return atomic_load(&p->lost);
}

EXPORT int paceline_program_run(program *p, const batch *b) { return run_pass(p, b); }

EXPORT int paceline_program_draw(program *p, const batch *b, const draws *d) {
    int status = run_pass(p, b);
    if (status != FINE || !b->outs) return status;
    status = draw_tokens(p, b, d);
    if (status == FINE) start_prefetch(p, b, d);
    return status;
}
