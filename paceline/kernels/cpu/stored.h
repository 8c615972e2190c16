/* Rows of weights as files store them: floats, or blocks of GGUF's quantisations. */
#ifndef PACELINE_STORED_H
#define PACELINE_STORED_H

#include <stdint.h>

/* Convert a row to floats. Every number has the bits that the gguf package gives it. */
void stored_floats(int kind, const uint8_t *row, int inputs, float *out);

/* Whether the integers of this kind can be kept: its groups are those of a packed format. */
int stored_in_groups(int kind);

/* Convert a row of such a kind to q [inputs] and, for each group, scale and minimum. */
void stored_groups(int kind, const uint8_t *row, int inputs, uint8_t *q, float *scale, float *minimum);

float half_value(const void *at);
float half_bits_value(uint16_t bits);
uint16_t half_bits(float x);

#endif
