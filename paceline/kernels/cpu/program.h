/* A forward pass from the inside: the program, its buffers, and the memory of each thread.

   abi.h declares the structures that Python passes. The program has one field each for the plan of attention, for
   shortlists and for prefetched passes; attend_plan.h, screen.h and prefetch.h declare them. */
#ifndef PACELINE_PROGRAM_H
#define PACELINE_PROGRAM_H

#include "abi.h"
#include "attend_plan.h"
#include "pick.h"
#include "pool.h"
#include "prefetch.h"
#include "screen.h"
#include "simd.h"

#define ROWS_QUANTISED_ALONE 8      /* rows up to which each thread quantises all rows for itself, and saves a wait */
#define STRIPE 32                   /* rows that are multiplied with a tile while it is in the first-level cache */
#define CHUNK 128                   /* keys of one softmax; chunks begin at multiples of it */
#define CHUNK_PAGES (CHUNK / PAGE)
#define OWN_BUFFERS FEATURES        /* number of buffers before FEATURES and STATES, which are the caller's memory */

_Static_assert(TILE == LANES, "the outputs of a tile are one vector");
_Static_assert(BLOCK <= 8 && STRIPE % BLOCK == 0, "ROWS_SWITCH has a case for each number of rows");

/* Call kernel(n) with the constant n = rows, so that the kernel keeps its sums in registers. Cases above BLOCK are
   empty. */
#define ROWS_CASE(n, kernel)                                                                                           \
    case n:                                                                                                            \
        if (n <= BLOCK) kernel((n <= BLOCK ? n : 1));                                                                  \
        break;
#define ROWS_SWITCH(rows, kernel)                                                                                      \
    switch (rows) {                                                                                                    \
        ROWS_CASE(1, kernel) ROWS_CASE(2, kernel) ROWS_CASE(3, kernel) ROWS_CASE(4, kernel)                            \
        ROWS_CASE(5, kernel) ROWS_CASE(6, kernel) ROWS_CASE(7, kernel) ROWS_CASE(8, kernel)                            \
    }

/* Rows quantised to int8, with a scale for each group of 32 inputs.

   BLOCK rows are interleaved, so that one pointer walks over all of them; the last block has the remaining rows.
   With `rows` rows in a block: q and q8 [inputs / 4][rows][4]; scale, shift and offset [groups][rows]. */
typedef struct {
    int8_t *q;
    input8 *q8; /* factors of 8-bit weights: q itself, or a copy of it in the form that the variant multiplies best */
    float *scale;
    float *shift;    /* scale * sum of q */
    int32_t *offset; /* -128 * sum of q */
    int32_t rows;    /* rows of all blocks */
} quantised;

/* Memory of one thread. */
typedef struct {
    quantised inputs;     /* inputs of ROWS_QUANTISED_ALONE rows */
    float *row;           /* one normalised row */
    narrow *queries;      /* [QUERY_BLOCK][head_dim] */
    float *scores;        /* [QUERY_BLOCK][CHUNK] */
    narrow *weights;      /* [QUERY_BLOCK][CHUNK] softmax of the scores, not yet divided by its sum */
    uint16_t *gathered;   /* [CHUNK / 2][head_dim][2] values of one row's ancestors in a tree */
    float *sums;          /* [QUERY_BLOCK * (head_dim + 2)] results of one chunk */
    float *state;         /* [QUERY_BLOCK * (head_dim + 2)] results of all chunks so far */
    float *tail_scores;   /* [QUERY_BLOCK][tail_plan.widest * PAGE] scores of the nodes of a tree */
    int32_t tail_pages;   /* pages that tail_scores has room for */
    best *best;           /* [outs] highest logit that this thread has seen */
    float *slice;         /* rough scores of one slice, for shortlists */
} scratch;

struct program {
    pool *pool;
    shape shape;
    operation *operations;
    int32_t count; /* operations */
    int32_t row_capacity;
    int32_t out_capacity;
    int32_t inputs_max; /* inputs of the widest linear operation */
    int32_t last_rows;  /* rows of the last pass whose residual stream is still valid */
    float *buffer[OWN_BUFFERS + 2];
    int32_t stride[OWN_BUFFERS + 2]; /* floats of a row */
    quantised shared;                /* inputs of a linear operation that threads quantise together */
    scratch *scratch;                /* [threads] */
    const batch *batch;              /* batch of the current pass */
    int32_t held;                    /* operation that waits until the prefetched pass is asked for; -1: none */
    atomic_int asked;                /* whether the prefetched pass is asked for */
    atomic_int handed;               /* rows of the current SUM that are in this rank's slot */
    atomic_int lost;                 /* FINE, or RANK_GONE or RANK_SILENT: no later pass makes sense */
    attend_plan plan;
    screen screen;
    prefetch prefetch;
};

/* ---- operations: each is called by every thread ---- */

void run_embed(member *, program *, const operation *);
void run_pair(member *, program *, const operation *);
void run_norm(member *, program *, const operation *);
void run_add_norm(member *, program *, const operation *);
void run_keep(member *, program *, const operation *);
void run_linear(member *, program *, const operation *);
void run_linear_half(member *, program *, const operation *);
void run_rotate(member *, program *, const operation *);
void run_attend(member *, program *, const operation *);
void run_refine(member *, program *, const operation *);
void run_convolve(member *, program *, const operation *);
void run_sum(member *, program *, const operation *);

/* Most works of a SUM in the current pass. */
int sum_works(const program *);

/* Whether the pass has lost a rank. The member must then return; `works`: most works of the run that it leaves out. */
int has_lost_a_rank(member *, const program *, int works);

/* Prefetch the KV slots that ROTATE is about to write in this thread. */
void fetch_slots(const member *, const program *, const operation *);

/* Unpack row n of a matrix: out [inputs]. */
void unpack_row(const matrix *, int n, float *out);

/* ---- passes ---- */

/* Run a pass: FINE, or why nothing was computed. */
int run_pass(program *, const batch *);

/* The three parts of a pass: check the batch and prepare (FINE, or the reason for refusal), run `forward` in every
   thread, gather the results. */
int prepare_pass(program *, const batch *);
void forward(member *, void *program);
void finish_pass(const program *);

/* Make room for rows. False: out of memory. If memory grows, the results of the last pass are lost. */
int reserve_rows(program *, int rows);

/* ---- places ---- */

static inline float *row_of(const program *p, int buffer, int row) {
    return p->buffer[buffer] + (int64_t)row * p->stride[buffer];
}

static inline uint16_t *keys_of(const shape *s, int layer, int64_t page, int head) {
    const int64_t index = ((int64_t)layer * s->pages + page) * s->kv_heads + head;
    return s->kv + index * 2 * PAGE * s->head_dim;
}

static inline uint16_t *values_of(const shape *s, int layer, int64_t page, int head) {
    return keys_of(s, layer, page, head) + PAGE * s->head_dim;
}

/* The key of a slot: pairs of its numbers are 2 * PAGE apart. */
static inline uint16_t *key_at(const shape *s, int layer, int64_t slot, int head) {
    return keys_of(s, layer, slot / PAGE, head) + 2 * (slot % PAGE);
}

/* The value of a slot: its numbers are 2 apart. */
static inline uint16_t *value_at(const shape *s, int layer, int64_t slot, int head) {
    return values_of(s, layer, slot / PAGE, head) + slot % PAGE / 2 * 2 * s->head_dim + slot % 2;
}

#endif
