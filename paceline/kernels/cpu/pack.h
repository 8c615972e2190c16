/* Tiles of packed matrices; pack.c has the picture. */
#ifndef PACELINE_PACK_H
#define PACELINE_PACK_H

#include <stdint.h>

/* Pack one output: q [inputs]; scale and minimum fp16 [groups], or one float scale. */
void pack_channel(uint8_t *tile, int format, int lane, int inputs, const uint8_t *q, const void *scale,
                  const uint16_t *minimum);

#endif
