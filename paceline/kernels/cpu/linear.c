/* Linear layers: norm (if any) and quantise the rows, multiply integers with packed weights, scale, run the epilogue.

   A row's outputs never depend on other rows. Sums inside a group are exact integers, groups are added in order, and
   the kernels for 1 … BLOCK rows do the same float operations for each row. */
#include "program.h"
#include "vmath.h"

/* Measured on two cores of a Zen 4: docs/experiments.md, "Several rows of one sequence", "Temperature 1 on two
   cores" and "Temperature 1 on two cores, once more". */
#define CACHED_INPUT_BYTES (1 << 19) /* quantised rows that stay in the second-level cache while weights are read */
#define L2_AHEAD_BYTES 32768         /* from the weights in use to those prefetched into the second-level cache */
#define L1_AHEAD_BYTES 1024          /* from the weights in use to those prefetched into the first-level cache */
#define LINES_PER_GROUP 5            /* cache lines that memory delivers while a thread quantises GROUP inputs */
#define GROUPS_AT_ONCE 24            /* groups of a row that are quantised together */
#define ROWS_WITHOUT_PREFETCH 3      /* rows up to which memory is the limit, and the hardware prefetches best alone */

_Static_assert(BLOCK <= ROWS_QUANTISED_ALONE, "quantise_rows has room for the factors of a block");

/* Whether the outputs are logits, exact or rough. If so, only rows with logits are computed. */
static int gives_logits(const operation *o) { return o->epilogue == LOGITS || o->epilogue == ROUGH; }

static int block_rows(const quantised *in, int block) {
    return in->rows - block * BLOCK < BLOCK ? in->rows - block * BLOCK : BLOCK;
}

/* Weights to prefetch while inputs are quantised. */
typedef struct {
    const uint8_t *next, *end;
} weight_span;

INLINE void prefetch_some(weight_span *w) {
    for (int line = 0; line < LINES_PER_GROUP && w->next < w->end; line++, w->next += CACHE_LINE) prefetch_l2(w->next);
}

/* Return where a group of a row begins in a block whose rows have `groups` groups. */
static quantised place_of(const quantised *in, int block, int groups, int group, int lane) {
    const int rows = block_rows(in, block);
    const int64_t at = (int64_t)block * BLOCK * groups + (int64_t)group * rows;
    return (quantised){in->q + at * GROUP + lane * 4, in->q8 + at * GROUP + lane * 4, in->scale + at + lane,
                       in->shift + at + lane, in->offset + at + lane, rows};
}

INLINE void next_group(quantised *in, const int rows) {
    in->q += GROUP * rows;
    in->q8 += GROUP * rows;
    in->scale += rows;
    in->shift += rows;
    in->offset += rows;
}

/* Quantise GROUP inputs to int8 with the given factor, store them among the rows of the block, and return their sum. */
INLINE int32_t quantise_group(const float *x, vf factor, int8_t *q, input8 *q8, int rows) {
    const vi first = vf_to_int(vf_mul(vf_load(x), factor)), second = vf_to_int(vf_mul(vf_load(x + LANES), factor));
    store_inputs(q, q8, first, 4 * rows);
    store_inputs(q + LANES * rows, q8 ? q8 + LANES * rows : NULL, second, 4 * rows);
    return vi_sum(vi_add(first, second));
}

INLINE void normalise_group(float *out, const float *x, const float *norm, vf factor) {
    vf_store(out, vf_mul(vf_mul(vf_load(x), factor), vf_load(norm)));
    vf_store(out + LANES, vf_mul(vf_mul(vf_load(x + LANES), factor), vf_load(norm + LANES)));
}

/* Quantise up to GROUPS_AT_ONCE groups of a row, multiplied by `factor` and `norm` where there is a norm, to the places
   that `in` begins with. All magnitudes come first: one whole group after the other would mostly wait for results. */
static void quantise_groups(quantised in, int wide, const float *x, const float *norm, vf factor, int groups,
                            weight_span *meanwhile) {
    float normalised[GROUPS_AT_ONCE * GROUP], tops[GROUPS_AT_ONCE];
    for (int g = 0; g < groups; g++) {
        prefetch_some(meanwhile);
        if (norm) normalise_group(normalised + g * GROUP, x + g * GROUP, norm + g * GROUP, factor);
        const float *from = (norm ? normalised : x) + g * GROUP;
        tops[g] = vf_top(vf_max(vf_abs(vf_load(from)), vf_abs(vf_load(from + LANES))));
    }
    const float *from = norm ? normalised : x;
    for (int g = 0; g < groups; g++, from += GROUP, next_group(&in, in.rows)) {
        const vf steps = vf_set1(tops[g] > 0.0f ? 127.0f / tops[g] : 0.0f);
        const int32_t sum = quantise_group(from, steps, in.q, wide ? in.q8 : NULL, in.rows);
        *in.scale = tops[g] * (1.0f / 127.0f);
        *in.shift = *in.scale * (float)sum;
        *in.offset = -128 * sum;
    }
}

/* Quantise groups [from, to) of a row of k inputs. wide: also for 8-bit weights. */
static void quantise_row(const quantised *in, int row, int wide, const float *x, const float *norm, vf factor, int k,
                         int from, int to, weight_span *meanwhile) {
    for (int g = from; g < to; g += GROUPS_AT_ONCE) {
        const quantised first = place_of(in, row / BLOCK, k / GROUP, g, row % BLOCK);
        quantise_groups(first, wide, x + g * GROUP, norm ? norm + g * GROUP : NULL, factor,
                        to - g < GROUPS_AT_ONCE ? to - g : GROUPS_AT_ONCE, meanwhile);
    }
}

static int has_8_bits(const operation *o) {
    for (int i = 0; i < o->parts; i++)
        if (o->part[i].format != GROUP4) return 1;
    return 0;
}

static const float *input_of(const program *p, const operation *o, int row) {
    return row_of(p, o->input, gives_logits(o) ? p->batch->logit_rows[row] : row) + o->column;
}

/* Quantise groups [from, to) of rows [first, last), at most ROWS_QUANTISED_ALONE, of the input. The factors of all rows
   come first: each is a long chain of dependent sums, and the chains of several rows overlap. */
static void quantise_rows(const program *p, const operation *o, const quantised *in, int first, int last, int from,
                          int to, weight_span meanwhile) {
    const int k = o->part[0].inputs, wide = has_8_bits(o);
    float factor[ROWS_QUANTISED_ALONE];
    for (int row = first; row < last; row++)
        factor[row - first] = o->norm ? rms_factor(input_of(p, o, row), k, o->epsilon) : 1.0f;
    for (int row = first; row < last; row++)
        quantise_row(in, row, wide, input_of(p, o, row), o->norm, vf_set1(factor[row - first]), k, from, to,
                     &meanwhile);
}

#define prefetch_ahead(w, rows)                                                                                        \
    do {                                                                                                               \
        if ((rows) > ROWS_WITHOUT_PREFETCH) prefetch_l2((w) + L2_AHEAD_BYTES);                                         \
        if ((rows) > ROWS_WITHOUT_PREFETCH) prefetch_l1((w) + L1_AHEAD_BYTES);                                         \
    } while (0)

/* Loop over the rows of a block, unrolled: gcc otherwise clears sums in memory, and then moves them to registers. */
#define EACH_ROW UNROLL for (int r = 0; r < rows; r++)

/* out[r] ← products of one group of 8-bit weights with row r */
INLINE void group8(const uint8_t *w, const quantised *in, const int rows, vf *out) {
    dot8 sum[BLOCK];
    EACH_ROW sum[r] = dot8_begin(in->offset + r);
#pragma GCC unroll 8
    for (int b = 0; b < 8; b++) {
        const vw8 weights = weights8(w + 64 * b);
        prefetch_ahead(w + 64 * b, rows);
        EACH_ROW sum[r] = dot8_add(sum[r], weights, in->q8 + 4 * (rows * b + r));
    }
    EACH_ROW out[r] = vi_to_float(dot8_end(sum[r]));
}

INLINE void tile_group8(const uint8_t *w, int groups, quantised in, const int rows, float *out) {
    vf total[BLOCK], sum[BLOCK];
    EACH_ROW total[r] = vf_set1(0.0f);
    for (int g = 0; g < groups; g++, w += 544, next_group(&in, rows)) {
        group8(w, &in, rows, sum);
        prefetch_ahead(w + 512, rows);
        const vf scale = vf_load_half((const uint16_t *)(w + 512));
        EACH_ROW total[r] = vf_fma(vf_mul(sum[r], vf_set1(in.scale[r])), scale, total[r]);
    }
    EACH_ROW vf_store(out + r * TILE, total[r]);
}

INLINE void tile_channel8(const uint8_t *w, int groups, quantised in, const int rows, float *out) {
    vf total[BLOCK], sum[BLOCK];
    EACH_ROW total[r] = vf_set1(0.0f);
    for (int g = 0; g < groups; g++, w += 512, next_group(&in, rows)) {
        group8(w, &in, rows, sum);
        EACH_ROW total[r] = vf_fma(sum[r], vf_set1(in.scale[r]), total[r]);
    }
    prefetch_ahead(w, rows);
    EACH_ROW vf_store(out + r * TILE, vf_mul(total[r], vf_load((const float *)w)));
}

INLINE void tile_group4(const uint8_t *w, int groups, quantised in, const int rows, float *out) {
    vf total[BLOCK];
    EACH_ROW total[r] = vf_set1(0.0f);
    for (int g = 0; g < groups; g++, w += 320, next_group(&in, rows)) {
        dot4 sum[BLOCK];
        EACH_ROW sum[r] = dot4_begin();
#pragma GCC unroll 4
        for (int b = 0; b < 4; b++) {
            vw4 even, odd;
            weights4(w + 64 * b, &even, &odd);
            prefetch_ahead(w + 64 * b, rows);
            EACH_ROW sum[r] = dot4_add(sum[r], even, in.q + 4 * (rows * 2 * b + r));
            EACH_ROW sum[r] = dot4_add(sum[r], odd, in.q + 4 * (rows * (2 * b + 1) + r));
        }
        const vf scale = vf_load_half((const uint16_t *)(w + 256)), minimum = vf_load_half((const uint16_t *)(w + 288));
        prefetch_ahead(w + 256, rows);
        EACH_ROW {
            total[r] = vf_fma(vf_mul(vi_to_float(dot4_end(sum[r])), vf_set1(in.scale[r])), scale, total[r]);
            total[r] = vf_fma(minimum, vf_set1(in.shift[r]), total[r]);
        }
    }
    EACH_ROW vf_store(out + r * TILE, total[r]);
}

#define DISPATCH(kernel)                                                                                               \
    static void kernel##_rows(const uint8_t *w, int groups, quantised in, float *out) {                                \
        ROWS_SWITCH(in.rows, kernel##_of)                                                                              \
    }
#define tile_group8_of(n) tile_group8(w, groups, in, n, out)
#define tile_group4_of(n) tile_group4(w, groups, in, n, out)
#define tile_channel8_of(n) tile_channel8(w, groups, in, n, out)
DISPATCH(tile_group8)
DISPATCH(tile_group4)
DISPATCH(tile_channel8)

/* Compute the outputs of one tile for the rows of one block: out [rows][TILE]. */
static void tile_product(const matrix *m, int tile, const quantised *inputs, int block, float *out) {
    const uint8_t *w = m->data + tile * m->stride;
    const int groups = m->inputs / GROUP;
    const quantised in = place_of(inputs, block, groups, 0, 0);
    if (m->format == GROUP8) tile_group8_rows(w, groups, in, out);
    else if (m->format == GROUP4) tile_group4_rows(w, groups, in, out);
    else tile_channel8_rows(w, groups, in, out);
    if (m->bias)
        for (int r = 0; r < in.rows; r++)
            vf_store(out + r * TILE, vf_add(vf_load(out + r * TILE), vf_load(m->bias + tile * TILE)));
}

/* Keep the highest logit: the lowest index among equals, and never a NaN. */
static void note_best(best *b, const float *values, int first, int count) {
    if (!vf_ge(vf_load(values), vf_set1(b->value)) && b->index != INT32_MAX) return;
    for (int i = 0; i < count; i++)
        if (values[i] > b->value || (values[i] == b->value && first + i < b->index)) *b = (best){values[i], first + i};
}

static void emit_logits(program *p, scratch *s, const matrix *m, int tile, int first_row, int rows, float *tile_out) {
    const int first = tile * TILE, count = m->outputs - first < TILE ? m->outputs - first : TILE;
    for (int r = 0; r < rows; r++) {
        float *values = tile_out + r * TILE;
        float *to = p->batch->logits + (int64_t)(first_row + r) * m->outputs + first;
        for (int i = 0; p->batch->adds && i < count; i++) values[i] += to[i];
        if (count == TILE) vf_store(to, vf_load(values));
        else memcpy(to, values, sizeof(float) * (size_t)count);
        note_best(&s->best[first_row + r], values, first, count);
    }
}

static void emit_gated(float *gate, const float *up, int rows, int epilogue) {
    for (int i = 0; i < rows * TILE; i += LANES) {
        const vf g = vf_load(gate + i);
        vf_store(gate + i, vf_mul(epilogue == SILU_GATE ? vf_silu(g) : vf_gelu_tanh(g), vf_load(up + i)));
    }
}

static void emit(program *p, const operation *o, int column, int first_row, int rows, const float *tile_out) {
    for (int r = 0; r < rows; r++) {
        float *out = row_of(p, o->output, first_row + r) + column;
        vf y = vf_load(tile_out + r * TILE);
        if (o->epilogue == ADD) y = vf_add(vf_load(out), y);
        if (o->epilogue == ADD_SILU) y = vf_add(vf_load(row_of(p, o->input, first_row + r) + column), vf_silu(y));
        vf_store(out, y);
    }
}

/* Compute one tile for rows [from, to), at most STRIPE, block after block: out [rows][TILE]. */
static void stripe_product(const matrix *m, int tile, const quantised *in, int from, int to, float *out) {
    for (int row = from; row < to; row += BLOCK) tile_product(m, tile, in, row / BLOCK, out + (row - from) * TILE);
}

static int is_gated(const operation *o) { return o->epilogue == SILU_GATE || o->epilogue == GELU_GATE; }

/* Find the matrix that a tile of the output belongs to, and make `tile` the index in it. A gated operation returns the
   first of its two matrices. */
static const matrix *part_of(const operation *o, int *tile) {
    const matrix *m = o->part;
    while (!is_gated(o) && *tile * TILE >= m->outputs) *tile -= (m++->outputs + TILE - 1) / TILE;
    return m;
}

/* Compute one tile of the output for rows [from, to), with the epilogue. */
static void run_tile(member *self, program *p, const operation *o, const quantised *in, int tile, int from, int to) {
    const int gated = is_gated(o);
    float out[STRIPE * TILE], up[STRIPE * TILE];
    const matrix *m = part_of(o, &tile);
    for (int first = from; first < to; first += STRIPE) {
        const int last = first + STRIPE < to ? first + STRIPE : to, rows = last - first;
        stripe_product(m, tile, in, first, last, out);
        if (gated) {
            stripe_product(m + 1, tile, in, first, last, up);
            emit_gated(out, up, rows, o->epilogue);
        }
        if (o->epilogue == LOGITS) emit_logits(p, &p->scratch[self->index], m, tile, first, rows, out);
        else if (o->epilogue == ROUGH) score_tile(p, tile, m->outputs, first, rows, out);
        else emit(p, o, m->column + tile * TILE, first, rows, out);
    }
}

static int count_tiles(const operation *o) {
    int tiles = 0;
    for (int i = 0; i < (is_gated(o) ? 1 : o->parts); i++) tiles += (o->part[i].outputs + TILE - 1) / TILE;
    return tiles;
}

/* Quantise all rows; threads share the work by blocks, since the rows of a block are interleaved. If there are few
   blocks, threads share the columns of each block, too. */
static void quantise_together(member *self, program *p, const operation *o, const quantised *in) {
    const int groups = o->part[0].inputs / GROUP, blocks = (in->rows + BLOCK - 1) / BLOCK;
    const int parts = blocks < 2 * self->count ? self->count : 1;
    work_begin(self, blocks * parts);
    for (int unit; (unit = work_next(self)) >= 0;) {
        const int first = unit / parts * BLOCK, part = unit % parts;
        quantise_rows(p, o, in, first, first + block_rows(in, unit / parts), groups * part / parts,
                      groups * (part + 1) / parts, (weight_span){NULL, NULL});
    }
    work_end(self);
}

/* Return the weights that a thread begins with. They are prefetched while it quantises, when memory would be idle;
   afterwards prefetch_ahead keeps the same distance. */
static weight_span first_weights(const member *self, const operation *o, int rows) {
    int tile = (int)((int64_t)self->units * self->index / self->count);
    const matrix *m = part_of(o, &tile);
    const uint8_t *first = m->data + tile * m->stride;
    return (weight_span){first, rows > ROWS_WITHOUT_PREFETCH ? first + L2_AHEAD_BYTES : first};
}

/* Quantise all rows for this thread alone. If the work is over before that is done, other threads may be writing to the
   inputs. The result is then meaningless, but no unit is left to use it. */
static void quantise_alone(member *self, program *p, const operation *o, const quantised *in) {
    if (work_over(self)) return;
    quantise_rows(p, o, in, 0, in->rows, 0, o->part[0].inputs / GROUP, first_weights(self, o, in->rows));
}

/* output ← epilogue of (norm of) input times the parts */
void run_linear(member *self, program *p, const operation *o) {
    const int rows = gives_logits(o) ? p->batch->outs : p->batch->rows, tiles = count_tiles(o);
    const int alone = rows <= ROWS_QUANTISED_ALONE;
    quantised in = alone ? p->scratch[self->index].inputs : p->shared;
    in.rows = rows;
    int slice = CACHED_INPUT_BYTES / o->part[0].inputs / BLOCK * BLOCK;
    slice = slice < BLOCK ? BLOCK : slice;
    if (!alone) quantise_together(self, p, o, &in);
    work_begin(self, tiles * ((rows + slice - 1) / slice));
    if (alone) quantise_alone(self, p, o, &in);
    for (int unit; (unit = work_next(self)) >= 0;) {
        const int from = unit / tiles * slice, to = from + slice < rows ? from + slice : rows;
        run_tile(self, p, o, &in, unit % tiles, from, to);
    }
}
