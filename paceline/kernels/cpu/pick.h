/* Choose tokens: the best logits, with or without Gumbel noise. */
#ifndef PACELINE_PICK_H
#define PACELINE_PICK_H

#include "abi.h"
#include "simd.h"

#define NOTHING INT32_MAX /* index of a `best` that has not been found */

typedef struct {
    float value;
    int32_t index;
} best;

/* The noise for drawing the tokens after some rows. */
typedef struct {
    const float *inverse_temperature; /* [outs]; 0: no noise */
    const uint32_t *keys;             /* [outs][2] */
    const int32_t *ids;               /* [outputs] target token of each output: the noise is keyed by it */
} row_noise;

/* Rows to pick one token for each. */
typedef struct {
    const float *const *logits;       /* [rows] */
    const float *inverse_temperature; /* [rows] */
    const uint32_t *keys;             /* [rows][2] */
    const int32_t *ids;               /* [vocab] tokens that the noise is keyed by; NULL: the outputs themselves */
    const float *bound;               /* [rows] noisy value that some output has; NULL: to be found */
    int rows;
    int vocab;
    int units;  /* units of work per row */
    best *best; /* [rows][units] */
} pick;

/* tokens[row] = argmax(logits * inverse temperature + noise), the lowest index among equals, 0 where all is NaN.
   Non-zero: out of memory. */
int pick_rows(pool *, pick *, int32_t *tokens);

/* Compute logit * inverse temperature + noise of one token. */
float noisy_value(float logit, float inverse_temperature, const uint32_t *keys, int token);

/* Compute the noise keys of the token at a position: paceline.sampling.noise_keys of Stream.TOKEN. */
void token_keys(uint32_t *keys, uint64_t seed, int position);

/* Merge the `count` best of logits * inverse temperature + noise into `tops`, the best first. count <= LANES.
   ids [vocab]: tokens that the noise is keyed by. */
void pick_several(const float *logits, float inverse_temperature, const uint32_t *keys, const int32_t *ids, int vocab,
                  best *tops, int count);

/* Compute logits * inverse temperature + an approximation of the noise, for LANES tokens. */
vf add_rough_noise(vf logits, float inverse_temperature, const uint32_t *keys, const int32_t *ids);

void clear_tops(best *tops, int count);

/* Insert `one` into the `count` best so far, which are sorted, after its equals. */
void insert_top(best *tops, int count, best one);

#endif
