/* The ABI of the C kernels: every declaration that Python mirrors, and no other. The mirror is abi.py.

   abi.c lists every constant, size and offset of this file. Python compares that list with its mirror when it loads the
   library: a field that is added, moved or swapped on one side only is an error there, and never corrupts memory. */
#ifndef PACELINE_ABI_H
#define PACELINE_ABI_H

#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))

/* ---- constants ---- */

#define PAGE 16          /* KV slots of a page: PAGE_SIZE of paceline.kernels.base */
#define GROUP 32         /* inputs that share a scale: GROUP of paceline.kernels.quant */
#define TILE 16          /* outputs of a weight tile, and numbers of a vector */
#define QUERY_BLOCK 48   /* queries (rows × heads of a KV head) that share one walk over the keys */
#define HEAD_DIM_MAX 512 /* numbers of an attention head */
#define MAX_PARTS 3      /* matrices of a linear operation */
#define BEAM 4           /* nodes of a draft tree that one pass reads for a sequence, at most */
#define WIDTH_MAX 8      /* children of a node of a draft tree */
#define SOURCES_MAX 8    /* suffix automata that a draft is made from */
#define SUFFIX_DEPTH 32  /* tokens of the longest context that suffix automata count and match */
#define SUFFIX_NODES_MAX 64 /* tokens of a draft from suffix automata */
#define RANKS_MAX 64        /* ranks of a split model, and shards of a rank */
#define RANK_BYTES 2097152  /* memory of each rank in a segment */

/* Results of a call: FINE, or why it did nothing. */
enum { FINE, OUT_OF_MEMORY, BAD_TOKEN, BAD_POSITION, BAD_SLOT, BAD_PAGE, BAD_ROWS, NOT_FINITE, RANK_GONE, RANK_SILENT };

/* matrix.format */
enum { CHANNEL8, GROUP8, GROUP4, HALF };

/* stored_rows.kind: floats, and quantisations of GGUF files by their names there */
enum { F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K };

/* operation.kind */
enum { EMBED, LINEAR, ROTATE, ATTEND, ADD_NORM, KEEP, PAIR, REFINE, NORM, SUM, CONVOLVE };

/* operation.epilogue */
enum { STORE, ADD, SILU_GATE, GELU_GATE, LOGITS, ADD_SILU, ROUGH };

/* operation.input and operation.output. FEATURES and STATES are memory of the caller, the others of the program. */
enum { RESIDUAL, PROJECTED, ATTENDED, GATED, BRANCH, PAIRED, SKETCHED, NORMED, CONVOLVED, DELTAS, FEATURES, STATES };

/* ---- structures ---- */

/* A packed matrix in tiles (see pack.c). For REFINE: rows of signed bytes, whose scales are in `bias`. */
typedef struct {
    const uint8_t *data;
    const float *bias; /* [outputs], or NULL */
    int64_t stride;    /* bytes from tile to tile: more than a tile where two matrices are interleaved */
    int32_t format;
    int32_t outputs;
    int32_t inputs;
    int32_t column; /* first column of its outputs in the output buffer */
} matrix;

/* Rows of a matrix as a file stores them, to be packed. */
typedef struct {
    const uint8_t *data;   /* the first row */
    const int32_t *places; /* output of each row; NULL: `first` and those after it */
    int64_t row_bytes;
    int32_t kind;
    int32_t keep;  /* keep the file's integers if they fit; otherwise rows are quantised from floats */
    int32_t first; /* output of the first row */
    int32_t count; /* rows */
    int32_t width; /* inputs of a row in the file */
    int32_t left;  /* inputs of a row before the first that is packed; a multiple of GROUP */
} stored_rows;

/* One step of a program. Each kind reads the fields that it needs. */
typedef struct {
    int32_t kind;
    int32_t epilogue;
    int32_t input;
    int32_t output;
    int32_t layer;
    int32_t window; /* ATTEND: positions that a row sees; 0: all */
    int32_t parts;  /* matrices in `part` */
    int32_t column; /* KEEP: first column in the output; LINEAR: first column in the input; NORM: columns of each norm;
                       EMBED: token of the first row of the table; ATTEND: 1 where a row sees no later one, whatever
                       `batch.lasts` says; SUM: parts side by side in the input; CONVOLVE: first column in DELTAS */
    int32_t taps;   /* CONVOLVE: rows that a row is made of */
    int32_t group;  /* CONVOLVE: adjacent columns with the same delta */
    int32_t few;    /* REFINE: least number of outputs on a slice's shortlist, as far as scores allow (screen.c) */
    float epsilon;  /* epsilon of the norms */
    float scale;    /* EMBED: factor of the embedding; ROTATE: factor of the queries */
    const float *norm;     /* weights of the norm, or NULL; ROTATE: weights of the queries' norm;
                              CONVOLVE: kernels [taps][hidden] */
    const float *key_norm; /* ROTATE: weights of the keys' norm, or NULL; PAIR: those of the hidden state's norm, or NULL */
    const float *cosine;   /* [positions][head_dim / 2] */
    const float *sine;     /* [positions][head_dim / 2] */
    matrix part[MAX_PARTS];
} operation;

/* The memory in which the ranks of a split model add partial sums (exchange.c). */
typedef struct {
    uint8_t *memory;      /* [size][RANK_BYTES], mapped by all ranks; zeros before the first sum */
    const int32_t *pipes; /* [pipe_count] sockets that other ranks close when they end */
    int64_t patience;     /* nanoseconds that another rank may take to hand over a sum */
    int32_t rank;
    int32_t size; /* ranks */
    int32_t pipe_count;
} segment;

/* Sizes of a model and its KV memory. Of a model that is split over ranks, all but `vocab` are those of this rank. */
typedef struct {
    int32_t hidden;
    int32_t intermediate;
    int32_t heads;
    int32_t kv_heads;
    int32_t head_dim;
    int32_t vocab; /* tokens */
    int32_t layers;
    int32_t pages;
    int32_t positions; /* positions of the longest context */
    int32_t threads;
    int32_t features; /* numbers of a row of hidden states, all taps together */
    uint16_t *kv; /* bf16 [layers][pages][kv_heads] of {keys [head_dim / 2][PAGE][2], values [PAGE / 2][head_dim][2]} */
    const segment *segment; /* NULL: no other rank has a part of the model */
} shape;

/* The rows of a pass (paceline.kernels.base.Batch) and the memory for its results.

   features [rows][shape.features]: a target writes them (KEEP), a head reads them. A head without features continues
   from its own last pass: row r from that pass's row carry[r]. */
typedef struct {
    const int32_t *tokens;     /* [rows] */
    const int32_t *positions;  /* [rows] */
    const int32_t *slots;      /* [rows] */
    const int32_t *row_starts; /* [sequences + 1] */
    const int32_t *bases;      /* [sequences] */
    const int32_t *page_table; /* [sequences][table_width] */
    const int32_t *logit_rows; /* [outs] */
    const int32_t *tails;      /* [rows][depth], or NULL */
    const int32_t *carry;      /* [rows], or NULL */
    const int32_t *lasts;      /* [rows] last position that each row attends to, or NULL: its own; never beside tails */
    float *logits;             /* out [outs][vocab] */
    float *features;           /* [rows][shape.features], or NULL */
    float *states;             /* out [rows][hidden]: states after the last norm, or NULL */
    int32_t *argmax;           /* out [outs] */
    int32_t rows;
    int32_t sequences;
    int32_t table_width;
    int32_t outs; /* rows with logits */
    int32_t depth;
    int32_t adds; /* 1: add to what `logits` holds */
} batch;

/* Parameters and results of the draws after a pass. */
typedef struct {
    const float *inverse_temperature; /* [sequences]; 0: the best token without noise; NULL: 0 for all */
    const uint64_t *seeds;            /* [sequences] */
    const int32_t *roots;             /* [sequences] rows after which drafts begin; NULL: there are no drafts */
    int32_t *tokens;                  /* out [outs] */
} draws;

/* Parameters and results of drafts. A node's confidence is the probability that it and all its ancestors are
   accepted. */
typedef struct {
    const int32_t *ids;                /* [vocab] target token of each output */
    const int32_t *limits;             /* [sequences] most nodes of a draft, at least 1 */
    const uint64_t *seeds;             /* [sequences] */
    const float *inverse_temperature;  /* [sequences]; 0: the best tokens without noise */
    const float *min_confidence;       /* [sequences] nodes below it are left out */
    const float *level_prices;         /* [sequences] gain that a level must be expected to add, or it is not read */
    const float *row_prices;           /* [sequences][longest] confidence at which the first, second … node of a draft
                                          pays for its row */
    const float *min_p;                /* [sequences]; 0: off */
    const float *top_p;                /* [sequences]; 1: off */
    const int32_t *top_k;              /* [sequences]; 0: off */
    int32_t *tokens;                   /* out [sequences][longest], the most likely first */
    int32_t *parents;                  /* out [sequences][longest]; -1: the root */
    float *confidence;                 /* out [sequences][longest] */
    int32_t *counts;                   /* out [sequences] nodes of each draft */
    int32_t *passes;                   /* out [sequences] passes that a draft took part in */
    int32_t longest;
    int32_t vocab; /* outputs */
    int32_t width; /* most children of a node; 1: drafts are chains */
    int32_t beam;  /* most nodes that a pass reads for a sequence, up to BEAM */
    int32_t ahead; /* positions from a row to the token that it reads: 1 for a head, 0 for a model */
    int32_t lookahead; /* levels that are weighed together when the next one is chosen, at least 1 */
    float odds_slope;  /* log odds that the best token is accepted without noise: odds_slope * its own + odds_offset */
    float odds_offset;
    float child_acceptance; /* usual probability that the best child of a likely node is accepted */
} order;

typedef struct suffixes suffixes;

/* A draft to be made from suffix automata, for one sequence. */
typedef struct {
    suffixes *const *sources; /* automata; the first one holds the sequence itself */
    const float *prices;      /* [price_count] confidence at which the first, second … token pays; later ones: the last */
    int32_t *tokens;          /* out [longest], the most likely first */
    int32_t *parents;         /* out [longest]; -1: the last committed token */
    float *confidence;        /* out [longest] probability of the path to each token */
    int32_t source_count;     /* at most SOURCES_MAX */
    int32_t price_count;      /* at least 1 */
    int32_t longest;          /* most tokens of the draft, at most SUFFIX_NODES_MAX */
    int32_t width;            /* most children of a node, at most WIDTH_MAX; 1: a chain */
    float trust;              /* factor of all probabilities, by past drafts of the sequence */
    float min_confidence;     /* the draft ends before a token with less */
} suffix_order;

/* One line of the list that Python compares: the value of a constant, the size of a structure, or the offset and size
   of a field. `size` is 0 for all but fields. */
typedef struct {
    const char *name; /* "BEAM", "batch" or "batch.rows"; NULL ends the list */
    int64_t value;
    int64_t size;
} abi_entry;

/* ---- functions ---- */

typedef struct pool pool;
typedef struct program program;

EXPORT const abi_entry *paceline_abi(void);

/* Make a pool of `threads` threads, the caller among them; NULL: out of memory. It exists until the process ends. Thread
   i is held to cpus[starts[i] … starts[i + 1] - 1] during runs; starts NULL: all run anywhere. */
EXPORT pool *paceline_pool_new(int threads, const int32_t *starts, const int32_t *cpus);

/* Bytes of one tile of a matrix. */
EXPORT int64_t paceline_tile_bytes(int format, int inputs);

/* Pack a matrix q [outputs][inputs] into zeroed memory, one tile every `stride` bytes.
   scale: fp16 [outputs][groups], or float [outputs] for CHANNEL8. minimum: fp16 [outputs][groups], for GROUP4 only. */
EXPORT void paceline_pack(uint8_t *data, int64_t stride, int format, int outputs, int inputs, const uint8_t *q,
                          const void *scale, const void *minimum);

/* Pack rows into the tiles of a matrix, on all threads: FINE, OUT_OF_MEMORY, or NOT_FINITE for NaN or infinite weights. */
EXPORT int paceline_pack_stored(pool *, uint8_t *tiles, int64_t stride, int format, int inputs, const stored_rows *);

/* Sum up `bytes` bytes, on all threads: FINE or OUT_OF_MEMORY. */
EXPORT int paceline_checksum(pool *, const uint8_t *data, int64_t bytes, uint64_t *sum);

/* Unpack rows of a matrix: out float [count][inputs]. Non-zero: a row that the matrix does not have. */
EXPORT int paceline_rows(const matrix *, const int32_t *rows, int count, float *out);

/* Make a program; NULL: out of memory. The matrices, tables and KV memory that operations point to must outlive it. */
EXPORT program *paceline_program_new(pool *, const shape *, const operation *, int count);
EXPORT void paceline_program_free(program *);

/* Run a pass. */
EXPORT int paceline_program_run(program *, const batch *);

/* Run a pass, then draw the token after each row with logits: the best token, or with noise that depends on the
   sequence's seed and the position. The result of a row whose own drafted token was not drawn is arbitrary. If every
   sequence had one row, the helpers start the pass over the drawn tokens, up to its logits. */
EXPORT int paceline_program_draw(program *, const batch *, const draws *);

/* Draft with a head or a model: the pass over `first`, which has one logit row a sequence, then one pass for each level of the
   tree. logits and argmax of `first` have room for BEAM rows a sequence. After an error the drafts hold
   the nodes that were found before it. */
EXPORT int paceline_draft(program *, const batch *first, const order *);

/* From now on, start the first pass of the head's next draft as soon as the target has drawn its tokens.
   ids [vocab]: target token of each of the head's outputs. Both programs may be freed in any order. */
EXPORT void paceline_prefetch(program *target, program *head, const int32_t *ids, int vocab);

/* Copy KV slots `source` onto slots `target` in every layer; all are read before any is written. They must not belong
   to sequences whose last pass had no draft: their next one may already be on its way. Non-zero: out of memory. */
EXPORT int paceline_kv_move(const shape *, const int32_t *source, const int32_t *target, int count);

/* Read KV slots: keys and values bf16 [layers][count][kv_heads][head_dim]. */
EXPORT void paceline_kv_read(const shape *, const int32_t *slots, int count, uint16_t *keys, uint16_t *values);

/* tokens[row] = argmax(logits[row] * inverse_temperature[row] + noise of keys[row]); 0 where all is NaN. logits: a
   pointer for each row. keys [rows][2]. ids [vocab]: token of each output, which keys the noise; NULL: outputs are
   tokens. Non-zero: out of memory. */
EXPORT int paceline_pick(pool *, const float *const *logits, const float *inverse_temperature, const uint32_t *keys,
                         const int32_t *ids, int rows, int vocab, int32_t *tokens);

/* The softmax of logits [count] at `place`. Logits far below the best count as nothing. */
EXPORT float paceline_probability(const float *logits, int count, int place);

/* Make a suffix automaton; NULL: out of memory. */
EXPORT suffixes *paceline_suffix_new(void);
EXPORT void paceline_suffix_free(suffixes *);

/* Append tokens to the automaton's text: FINE, or OUT_OF_MEMORY, after which the automaton can only be freed. */
EXPORT int paceline_suffix_extend(suffixes *, const int32_t *tokens, int64_t count);

/* End the automaton's text: the next token begins another one. */
EXPORT void paceline_suffix_end(suffixes *);

/* Bytes that the automaton has reserved. */
EXPORT int64_t paceline_suffix_bytes(const suffixes *);

/* Draft after `recent`, the last tokens of a sequence, of which the last `unread` are first appended to its own
   automaton. Return the number of drafted tokens; -1: out of memory, as for paceline_suffix_extend. */
EXPORT int paceline_suffix_draft(const suffix_order *, const int32_t *recent, int count, int unread);

/* Measure the multiply-adds a second that each thread does at best while all work, in 8-bit products and in
   attention: bytes and floats [threads]. */
EXPORT void paceline_limits(pool *, double *bytes, double *floats);

/* ---- functions for tests only: see testing.c ---- */

EXPORT void paceline_gumbel(uint32_t k0, uint32_t k1, int vocab, float *out);
EXPORT int64_t paceline_prefetched(const program *);
EXPORT int paceline_lent(const pool *p);

#endif
