/* What one forward pass works on. What Python hands over is in abi.h. */
#ifndef PACELINE_PROGRAM_H
#define PACELINE_PROGRAM_H

#include "abi.h"
#include "pool.h"
#include "simd.h"

#define BLOCK 8    /* rows whose quantised inputs lie interleaved */
#define STRIPE 32  /* rows a tile serves while it is in the nearest cache */
#define CHUNK 128  /* keys whose softmax is computed at once; chunks begin at multiples of it */
#define CHUNK_PAGES (CHUNK / PAGE)
#define BUFFERS FEATURES /* buffers of the program's own */
#define SLICES 16    /* of a head's outputs, each with a list of the best */
#define SHORTLIST 40 /* outputs on one list */

_Static_assert(TILE == LANES, "a tile of outputs is one vector");

/* Rows quantised to int8 with a scale for each group of 32. BLOCK rows (the last block: what is left) lie interleaved
   so that one pointer walks all of them: q [k / 4][rows of the block][4], and scale, shift (= scale * sum) and offset
   (= -128 * sum) [groups][rows of the block]. */
typedef struct {
    int8_t *q;
    float *scale, *shift;
    int32_t *offset;
    int32_t rows;
} quantised;

typedef struct {
    float value;
    int32_t index;
} best;

typedef struct { /* what a pass of a head is for, where only its best outputs are wanted: by row with logits */
    const float *inverse_temperature; /* 0: the best without noise */
    const uint32_t *keys;             /* [outs][2] of the noise */
    const int32_t *ids;               /* [outputs] the tokens that the noise speaks of */
} screening;

typedef struct { /* of a slice of a row's outputs, those that may be among the best */
    int32_t count;
    int32_t places[SHORTLIST];
    float logits[SHORTLIST];
} shortlist;

typedef struct { /* rows of one sequence that walk over the keys together */
    int32_t sequence, first, rows;
} query_block;

typedef struct { /* where trees find their nodes */
    int32_t *pages;  /* those of all tails of a sequence, each once, sequence after sequence */
    int32_t *starts; /* [sequences + 1] */
    int32_t *places; /* [rows][depth] which slot of the sequence's pages a tail names */
    int32_t widest;  /* most pages of a sequence */
    int32_t *memory; /* all of the above */
    int64_t capacity;
} tail_plan;

typedef struct { /* a member's own memory */
    quantised inputs;
    float *row;                                  /* one normalised row */
    narrow *queries;                             /* [QUERY_BLOCK][head_dim] */
    float *scores;                               /* [QUERY_BLOCK][CHUNK] */
    narrow *weights;                             /* [QUERY_BLOCK][CHUNK] what their softmax gives */
    uint16_t *gathered;                          /* [CHUNK / 2][head_dim][2] values of one row's own ancestors */
    float *sums, *state;                         /* [QUERY_BLOCK][head_dim + 2] of one chunk, and over chunks */
    float *tail_scores;                          /* [QUERY_BLOCK][tail_plan.widest * PAGE] of the nodes of a tree */
    int32_t tail_pages;                          /* for how many pages there is room */
    best *best;                                  /* [outs] */
    float *slice;                                /* rough outputs of one, where there are shortlists */
} scratch;

typedef struct { /* a head's pass that nobody has asked for yet: see follow.c */
    unsigned number;    /* of the run, 0: there is none */
    batch rows;
    screening noise;
    int32_t *tokens, *positions, *slots, *starts, *bases, *table, *logit_rows; /* of `rows`, to be written */
    float *warmths;     /* [sequences], as in `noise` */
    uint32_t *keys;     /* [sequences][2] */
    const int32_t *ids; /* [vocab] of the head's outputs */
    int32_t vocab;
    int32_t misses, left_out; /* passes in a row that were not asked for; those not begun since */
    int64_t hits;             /* passes that were there when they were asked for */
    char *memory; /* all of the above */
    size_t capacity;
} beginning;

struct program {
    pool *pool;
    shape shape;
    operation *operations;
    int32_t count, row_capacity, out_capacity, inputs_max;
    int32_t last_rows; /* of the pass before, whose residual stream is still there */
    float *buffer[BUFFERS + 1]; /* FEATURES are the caller's */
    int32_t stride[BUFFERS + 1];
    quantised shared;
    scratch *scratch; /* [threads] */
    query_block *blocks;
    int32_t block_count, splits; /* splits > 1: the chunks of a query block are shared out as well */
    float *partials;             /* [blocks][kv_heads][partial_chunks][QUERY_BLOCK][head_dim + 2] where splits > 1 */
    int32_t partial_chunks;
    int64_t partial_capacity;
    atomic_int *finished; /* [blocks][kv_heads] splits done */
    tail_plan tails;
    int32_t refines;            /* whether it can make shortlists */
    const screening *screening; /* the pass makes them, and no logits; else NULL */
    shortlist *shortlists;      /* [outs][SLICES] */
    program *follower;          /* a head that reads what this one has computed; or NULL */
    program *leader;            /* whom this one follows; or NULL */
    beginning begun;
    const batch *batch;
};

void run_linear(member *, program *, const operation *);
void run_linear_half(member *, program *, const operation *);
void run_embed(member *, program *, const operation *);
void run_add_norm(member *, program *, const operation *);
void run_keep(member *, program *, const operation *);
void run_pair(member *, program *, const operation *);
void run_refine(member *, program *, const operation *);
void score_tile(program *, int tile, int vocab, int first_row, int rows, const float *rough);
void run_rotate(member *, program *, const operation *);
void fetch_slots(const member *, const program *, const operation *);
void run_attend(member *, program *, const operation *);
int plan_attention(program *); /* non-zero: out of memory */
int reserve_rows(program *, int rows); /* zero: out of memory; what the last pass left is lost where memory grows */
int run_pass(program *, const batch *); /* FINE, or why nothing was computed */
/* The same in two parts: FINE, then `forward` by the team, then the end. */
int begin_pass(program *, const batch *);
void forward(member *, void *program);
void end_pass(const program *);
/* The row of a drafted token of sequence s after a row; -1: there is none. */
int row_after(const batch *, int s, int row, int32_t token);
/* After a pass of a target and the draws from it. */
void begin_to_follow(program *, const batch *, const draws *);
/* True: the pass was begun before it was asked for, and is over now. In any case nothing is under way after it. */
int was_begun(program *, const batch *, const screening *);
void end_following(program *); /* whatever was begun is over, and not asked for any more */
/* The best `count`, at most LANES, of logits * inverse temperature + noise, the best first, merged into `tops`. ids [vocab]:
   the tokens that the noise speaks of. */
void pick_several(const float *logits, float inverse_temperature, const uint32_t *keys, const int32_t *ids, int vocab,
                  best *tops, int count);
/* logits * inverse temperature + about the noise of LANES tokens. */
vf rough_noise(vf logits, float inverse_temperature, const uint32_t *keys, const int32_t *ids);
/* Of the noise of the token at a position: paceline.sampling.noise_keys of Stream.TOKEN, the first of four streams. */
void token_keys(uint32_t *keys, uint64_t seed, int position);
void clear_tops(best *tops, int count);
void insert_top(best *tops, int count, best one);

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

/* The numbers of one slot: pairs of its key 2 * PAGE apart, those of its value 2 apart. */
static inline uint16_t *key_at(const shape *s, int layer, int64_t slot, int head) {
    return keys_of(s, layer, slot / PAGE, head) + 2 * (slot % PAGE);
}

static inline uint16_t *value_at(const shape *s, int layer, int64_t slot, int head) {
    return values_of(s, layer, slot / PAGE, head) + slot % PAGE / 2 * 2 * s->head_dim + slot % 2;
}

#endif
