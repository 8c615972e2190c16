/* The list that Python compares with its mirror: every constant, structure and field of abi.h. */
#include "abi.h"

#include <stddef.h>

#define CONSTANT(name) {#name, name, 0}
#define STRUCT(type) {#type, (int64_t)sizeof(type), 0}
#define FIELD(type, field) {#type "." #field, (int64_t)offsetof(type, field), (int64_t)sizeof(((type *)0)->field)}

static const abi_entry entries[] = {
    CONSTANT(PAGE), CONSTANT(GROUP), CONSTANT(TILE), CONSTANT(QUERY_BLOCK), CONSTANT(HEAD_DIM_MAX),
    CONSTANT(MAX_PARTS), CONSTANT(BEAM), CONSTANT(WIDTH_MAX), CONSTANT(SOURCES_MAX), CONSTANT(SUFFIX_DEPTH),
    CONSTANT(SUFFIX_NODES_MAX), CONSTANT(RANKS_MAX), CONSTANT(RANK_BYTES),

    CONSTANT(FINE), CONSTANT(OUT_OF_MEMORY), CONSTANT(BAD_TOKEN), CONSTANT(BAD_POSITION), CONSTANT(BAD_SLOT),
    CONSTANT(BAD_PAGE), CONSTANT(BAD_ROWS), CONSTANT(NOT_FINITE), CONSTANT(RANK_GONE), CONSTANT(RANK_SILENT),

    CONSTANT(CHANNEL8), CONSTANT(GROUP8), CONSTANT(GROUP4), CONSTANT(HALF),

    CONSTANT(F32), CONSTANT(F16), CONSTANT(BF16), CONSTANT(Q4_0), CONSTANT(Q4_1), CONSTANT(Q5_0), CONSTANT(Q5_1),
    CONSTANT(Q8_0), CONSTANT(Q4_K), CONSTANT(Q5_K), CONSTANT(Q6_K),

    CONSTANT(EMBED), CONSTANT(LINEAR), CONSTANT(ROTATE), CONSTANT(ATTEND), CONSTANT(ADD_NORM), CONSTANT(KEEP),
    CONSTANT(PAIR), CONSTANT(REFINE), CONSTANT(NORM), CONSTANT(SUM), CONSTANT(CONVOLVE),

    CONSTANT(STORE), CONSTANT(ADD), CONSTANT(SILU_GATE), CONSTANT(GELU_GATE), CONSTANT(LOGITS), CONSTANT(ADD_SILU),
    CONSTANT(ROUGH),

    CONSTANT(RESIDUAL), CONSTANT(PROJECTED), CONSTANT(ATTENDED), CONSTANT(GATED), CONSTANT(BRANCH), CONSTANT(PAIRED),
    CONSTANT(SKETCHED), CONSTANT(NORMED), CONSTANT(CONVOLVED), CONSTANT(DELTAS),
    CONSTANT(FEATURES), CONSTANT(STATES),

    FIELD(matrix, data), FIELD(matrix, bias), FIELD(matrix, stride), FIELD(matrix, format), FIELD(matrix, outputs),
    FIELD(matrix, inputs), FIELD(matrix, column), STRUCT(matrix),

    FIELD(stored_rows, data), FIELD(stored_rows, places), FIELD(stored_rows, row_bytes), FIELD(stored_rows, kind),
    FIELD(stored_rows, keep), FIELD(stored_rows, first), FIELD(stored_rows, count), FIELD(stored_rows, width),
    FIELD(stored_rows, left), STRUCT(stored_rows),

    FIELD(operation, kind), FIELD(operation, epilogue), FIELD(operation, input), FIELD(operation, output),
    FIELD(operation, layer), FIELD(operation, window), FIELD(operation, parts), FIELD(operation, column),
    FIELD(operation, taps), FIELD(operation, group), FIELD(operation, few), FIELD(operation, epsilon),
    FIELD(operation, scale), FIELD(operation, norm), FIELD(operation, key_norm), FIELD(operation, cosine), FIELD(operation, sine), FIELD(operation, part),
    STRUCT(operation),

    FIELD(shape, hidden), FIELD(shape, intermediate), FIELD(shape, heads), FIELD(shape, kv_heads),
    FIELD(shape, head_dim), FIELD(shape, vocab), FIELD(shape, layers), FIELD(shape, pages), FIELD(shape, positions),
    FIELD(shape, threads), FIELD(shape, features), FIELD(shape, kv), FIELD(shape, segment),
    STRUCT(shape),

    FIELD(segment, memory), FIELD(segment, pipes), FIELD(segment, patience), FIELD(segment, rank),
    FIELD(segment, size), FIELD(segment, pipe_count), STRUCT(segment),

    FIELD(batch, tokens), FIELD(batch, positions), FIELD(batch, slots), FIELD(batch, row_starts), FIELD(batch, bases),
    FIELD(batch, page_table), FIELD(batch, logit_rows), FIELD(batch, tails), FIELD(batch, carry), FIELD(batch, lasts),
    FIELD(batch, logits),
    FIELD(batch, features), FIELD(batch, states), FIELD(batch, argmax), FIELD(batch, rows), FIELD(batch, sequences),
    FIELD(batch, table_width), FIELD(batch, outs), FIELD(batch, depth), FIELD(batch, adds),
    STRUCT(batch),

    FIELD(draws, inverse_temperature), FIELD(draws, seeds), FIELD(draws, roots), FIELD(draws, tokens), STRUCT(draws),

    FIELD(order, ids), FIELD(order, limits), FIELD(order, seeds), FIELD(order, inverse_temperature),
    FIELD(order, min_confidence), FIELD(order, level_prices), FIELD(order, row_prices), FIELD(order, min_p),
    FIELD(order, top_p), FIELD(order, top_k), FIELD(order, tokens), FIELD(order, parents),
    FIELD(order, confidence), FIELD(order, counts), FIELD(order, passes), FIELD(order, longest), FIELD(order, vocab),
    FIELD(order, width), FIELD(order, beam), FIELD(order, ahead), FIELD(order, lookahead), FIELD(order, odds_slope),
    FIELD(order, odds_offset), FIELD(order, child_acceptance), STRUCT(order),

    FIELD(suffix_order, sources), FIELD(suffix_order, prices), FIELD(suffix_order, tokens),
    FIELD(suffix_order, parents), FIELD(suffix_order, confidence), FIELD(suffix_order, source_count),
    FIELD(suffix_order, price_count), FIELD(suffix_order, longest), FIELD(suffix_order, width),
    FIELD(suffix_order, trust), FIELD(suffix_order, min_confidence), STRUCT(suffix_order),

    {NULL, 0, 0},
};

EXPORT const abi_entry *paceline_abi(void) { return entries; }
