/* Sums over the shards of a model: first over those of this rank, then over all ranks, by one tree.

   A product whose inputs are split gives each shard a part of the sum. All ranks add all parts in the same order, so
   they hold the same bits, and no row depends on another:

       shards   0   1   2   3   4   5   6   7
       rank 0    \ /     \ /     \ /     \ /    rank 1 of 2
                   \     /         \     /
                      s               s          both ranks add the two

   Ranks are processes that map the same memory. Each has an area in it:

       published │ slot 0 │ slot 1      sums handed over so far; sum n is in slot n % 2

   A rank writes its sum to a slot and counts it, waits until the others have counted theirs, and reads them. Two slots
   are enough: a rank counts sum n + 1 after it has read all sums n, so when all have counted n + 1, slot n % 2 is free.
   Ranks run the same sums in the same order, whatever the model, so one count serves all programs.

   A wait ends with an error if a rank is gone, which closes its pipe, or silent for too long. The pass is then over. */
#define _GNU_SOURCE
#include <poll.h>
#include <sched.h>
#include <time.h>

#include "program.h"

#define HEAD_BYTES 4096 /* bytes of an area before its slots */
#define SLOT_BYTES ((RANK_BYTES - HEAD_BYTES) / 2)
#define SPINS 1000                  /* pauses before a waiting thread leaves its CPU to others: about 30 microseconds */
#define YIELD_NANOSECONDS 2000000   /* time in which it asks for its CPU back at once, before it sleeps in between */
#define NAP_NANOSECONDS 50000

_Static_assert(SLOT_BYTES % CACHE_LINE == 0, "slots lie on cache lines");
_Static_assert(sizeof(atomic_uint) == sizeof(unsigned), "processes share a count without a lock");

static int64_t nanoseconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* ---- areas ---- */

static atomic_uint *published_by(const segment *s, int rank) {
    return (atomic_uint *)(s->memory + (int64_t)rank * RANK_BYTES);
}

/* The slot of sum n of a rank. */
static float *slot_of(const segment *s, int rank, unsigned n) {
    return (float *)(s->memory + (int64_t)rank * RANK_BYTES + HEAD_BYTES + (int64_t)(n % 2) * SLOT_BYTES);
}

static int rows_of_a_slot(const program *p) { return (int)(SLOT_BYTES / sizeof(float)) / p->shape.hidden; }

/* ---- waiting ---- */

/* Whether a rank has closed its pipe. Rank 0 has a pipe to each other rank, and each of them one to rank 0. */
static int is_one_gone(const segment *s) {
    struct pollfd pipes[RANKS_MAX];
    for (int i = 0; i < s->pipe_count; i++) pipes[i] = (struct pollfd){.fd = s->pipes[i]};
    if (poll(pipes, (nfds_t)s->pipe_count, 0) <= 0) return 0;
    for (int i = 0; i < s->pipe_count; i++)
        if (pipes[i].revents & (POLLHUP | POLLERR)) return 1;
    return 0;
}

static void lose(program *p, int why) {
    int fine = FINE;
    atomic_compare_exchange_strong(&p->lost, &fine, why);
}

/* Leave the CPU to others for a moment, and look whether waiting makes sense. */
static void wait_a_moment(program *p, int64_t begun) {
    const struct timespec nap = {0, NAP_NANOSECONDS};
    const int64_t waited = nanoseconds() - begun;
    if (waited < YIELD_NANOSECONDS) {
        sched_yield();
        return;
    }
    if (is_one_gone(p->shape.segment)) lose(p, RANK_GONE);
    else if (waited > p->shape.segment->patience) lose(p, RANK_SILENT);
    else nanosleep(&nap, NULL);
}

/* Wait until a rank has counted n sums. False: the pass has lost a rank. */
static int await_sums(program *p, int rank, unsigned n) {
    const atomic_uint *published = published_by(p->shape.segment, rank);
    int64_t begun = 0;
    for (int spins = 0; (int)(atomic_load_explicit(published, memory_order_acquire) - n) < 0; spins++) {
        if (spins < SPINS) {
            pause_cpu();
            continue;
        }
        if (atomic_load(&p->lost) != FINE) return 0;
        if (!begun) begun = nanoseconds();
        wait_a_moment(p, begun);
    }
    return 1;
}

static int await_all(program *p, unsigned n) {
    int all = atomic_load(&p->lost) == FINE;
    for (int rank = 0; rank < p->shape.segment->size && all; rank++) all = await_sums(p, rank, n);
    return all;
}

/* ---- sums ---- */

/* Add LANES numbers of all parts: neighbours first; the last of an odd number goes up alone. */
static vf fold(const float *const *parts, int count, int at) {
    vf level[RANKS_MAX];
    for (int i = 0; i < count; i++) level[i] = vf_load(parts[i] + at);
    for (; count > 1; count = (count + 1) / 2) {
        for (int i = 0; i < count / 2; i++) level[i] = vf_add(level[2 * i], level[2 * i + 1]);
        if (count % 2) level[count / 2] = level[count - 1];
    }
    return level[0];
}

static void add_parts(float *out, const float *const *parts, int count, int hidden, int is_added) {
    for (int j = 0; j < hidden; j += LANES) {
        const vf sum = fold(parts, count, j);
        vf_store(out + j, is_added ? vf_add(vf_load(out + j), sum) : sum);
    }
}

/* Find the parts of this rank's shards, side by side in a row of the input. */
static void own_parts(const program *p, const operation *o, int row, const float **parts) {
    for (int i = 0; i < o->column; i++) parts[i] = row_of(p, o->input, row) + (int64_t)i * p->shape.hidden;
}

/* Write the sum of this rank's shards to its slot for rows [first, first + count), and count it once all rows are
   there. */
static void hand_over(member *self, program *p, const operation *o, int first, int count) {
    const segment *s = p->shape.segment;
    atomic_uint *published = published_by(s, s->rank);
    const float *parts[RANKS_MAX];
    work_begin(self, count);
    for (int row; (row = work_next(self)) >= 0;) {
        float *slot = slot_of(s, s->rank, atomic_load_explicit(published, memory_order_relaxed));
        own_parts(p, o, first + row, parts);
        add_parts(slot + (int64_t)row * p->shape.hidden, parts, o->column, p->shape.hidden, 0);
        if (atomic_fetch_add(&p->handed, 1) + 1 < count) continue;
        atomic_store(&p->handed, 0);
        atomic_fetch_add(published, 1);
    }
    work_end(self);
}

/* Add the sums of all ranks to the output, or store them there, for rows [first, first + count). */
static void take_over(member *self, program *p, const operation *o, int first, int count) {
    const segment *s = p->shape.segment;
    const int hidden = p->shape.hidden;
    const float *parts[RANKS_MAX];
    work_begin(self, count);
    for (int row; (row = work_next(self)) >= 0;) {
        const unsigned n = atomic_load(published_by(s, s->rank));
        if (!await_all(p, n)) continue;
        for (int rank = 0; rank < s->size; rank++) parts[rank] = slot_of(s, rank, n - 1) + (int64_t)row * hidden;
        add_parts(row_of(p, o->output, first + row), parts, s->size, hidden, o->epilogue == ADD);
    }
}

/* Add the sum of this rank's shards: there are no other ranks. */
static void add_alone(member *self, program *p, const operation *o) {
    const float *parts[RANKS_MAX];
    work_begin(self, p->batch->rows);
    for (int row; (row = work_next(self)) >= 0;) {
        own_parts(p, o, row, parts);
        add_parts(row_of(p, o->output, row), parts, o->column, p->shape.hidden, o->epilogue == ADD);
    }
}

void run_sum(member *self, program *p, const operation *o) {
    const int rows = p->batch->rows, most = rows_of_a_slot(p);
    if (!p->shape.segment) {
        add_alone(self, p, o);
        return;
    }
    for (int first = 0; first < rows; first += most) {
        const int count = rows - first < most ? rows - first : most;
        if (first) work_end(self);
        hand_over(self, p, o, first, count);
        take_over(self, p, o, first, count);
    }
}

int sum_works(const program *p) {
    const int most = rows_of_a_slot(p);
    return p->shape.segment ? 2 * ((p->batch->rows + most - 1) / most) : 1;
}

int has_lost_a_rank(member *self, const program *p, int works) {
    const int lost = atomic_load_explicit(&p->lost, memory_order_relaxed) != FINE;
    if (lost) self->work += (unsigned)works; /* as in work_cancelled */
    return lost;
}
