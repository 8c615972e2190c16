/* The arithmetic limit: multiply-adds a second that a thread does at best, in 8-bit products and in attention.

   The loops use the instructions of the kernels on operands that are in registers or in the first-level cache. */
#include <stdlib.h>
#include <time.h>

#include "pool.h"
#include "simd.h"

#define SUMS (SCORE_QUERIES * SCORE_PAGES) /* vectors of sums that registers hold beside operands */
#define ROWS ((SUMS + 3) / 4)              /* rows of 8-bit inputs that two vectors of weights serve */
#define TURNS 4096                         /* of a loop: long beside a reading of the clock */
#define REPEATS 200                        /* of a loop */
#define COUNTED 20                         /* repeats that are faster than the one that counts */

/* Let the compiler think that an array changes: otherwise it moves products out of the loop. */
#define CHANGE(array) __asm__ volatile("" : "+m"(array))

/* Each loop returns a number that depends on all of its sums. */
typedef float limit_loop(void);

static float multiply_bytes(void) {
    uint8_t weights[64];
    int8_t inputs[4 * ROWS];
    dot4 sum[2 * ROWS];
    memset(weights, 0x11, sizeof weights);
    memset(inputs, 1, sizeof inputs);
    CHANGE(weights);
    vw4 even, odd;
    weights4(weights, &even, &odd);
    UNROLL for (int i = 0; i < 2 * ROWS; i++) sum[i] = dot4_begin();
    for (int turn = 0; turn < TURNS; turn++) {
        CHANGE(inputs);
        UNROLL for (int row = 0; row < ROWS; row++) {
            sum[2 * row] = dot4_add(sum[2 * row], even, inputs + 4 * row);
            sum[2 * row + 1] = dot4_add(sum[2 * row + 1], odd, inputs + 4 * row);
        }
    }
    vi all = vi_zero();
    UNROLL for (int i = 0; i < 2 * ROWS; i++) all = vi_add(all, dot4_end(sum[i]));
    return (float)vi_sum(all);
}

static float multiply_floats(void) {
    uint16_t pairs[2 * LANES * SCORE_PAGES];
    narrow ones[2 * LANES];
    vf sum[SUMS], all = vf_set1(0.0f);
    vp fixed[SCORE_PAGES];
    for (int i = 0; i < 2 * LANES * SCORE_PAGES; i++) pairs[i] = 0x3f80; /* 1 in bf16 */
    for (int i = 0; i < 2 * LANES; i += LANES) vf_narrow(ones + i, vf_set1(1.0f));
    CHANGE(pairs);
    UNROLL for (int j = 0; j < SCORE_PAGES; j++) fixed[j] = vp_load(pairs + 2 * LANES * j, 0);
    UNROLL for (int i = 0; i < SCORE_QUERIES; i++)
        UNROLL for (int j = 0; j < SCORE_PAGES; j++) sum[i * SCORE_PAGES + j] = vf_set1(0.0f);
    for (int turn = 0; turn < TURNS; turn++) {
        CHANGE(ones);
        UNROLL for (int i = 0; i < SCORE_QUERIES; i++) {
            const vp one = vp_set1(ones + 2 * i, 0);
            vf *row = sum + i * SCORE_PAGES;
            UNROLL for (int j = 0; j < SCORE_PAGES; j++) row[j] = vf_dot(fixed[j], one, row[j]);
        }
    }
    UNROLL for (int i = 0; i < SCORE_QUERIES; i++)
        UNROLL for (int j = 0; j < SCORE_PAGES; j++) all = vf_add(all, sum[i * SCORE_PAGES + j]);
    return vf_sum(all);
}

/* Seconds that this thread has run. */
static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static int shorter(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Seconds of a loop that nothing disturbs: not the least of many, since clocks of virtual machines jump at times. */
static double undisturbed(limit_loop *loop) {
    double seconds[REPEATS];
    for (int i = 0; i < REPEATS; i++) {
        const double began = now();
        volatile float kept = loop();
        seconds[i] = now() - began;
        (void)kept;
    }
    qsort(seconds, REPEATS, sizeof *seconds, shorter);
    return seconds[COUNTED];
}

typedef struct {
    double *bytes, *floats; /* [threads] */
} limit_results;

static void measure(member *self, void *argument) {
    const limit_results *results = argument;
    work_begin(self, self->count);
    for (int unit; (unit = work_next(self)) >= 0;) {
        results->bytes[unit] = (double)TURNS * 2 * ROWS * LANES * 4 / undisturbed(multiply_bytes);
        results->floats[unit] = (double)TURNS * SUMS * LANES * 2 / PAIR_PARTS / undisturbed(multiply_floats);
    }
    work_end(self);
}

EXPORT void paceline_limits(pool *p, double *bytes, double *floats) {
    limit_results results = {bytes, floats};
    pool_run(p, measure, &results);
}
