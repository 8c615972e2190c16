#define _GNU_SOURCE
#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include "simd.h"

#define CACHE_LINE 64
#define COUNTER_SETS 3 /* one in use, one being left, one being cleared */
#define SPINS_BEFORE_YIELD 4096
#define SPIN_NANOSECONDS 150000

typedef struct {
    _Alignas(CACHE_LINE) atomic_int next;
} counter;

struct pool {
    _Alignas(CACHE_LINE) atomic_int arrived;
    _Alignas(CACHE_LINE) atomic_uint turn;      /* barriers passed */
    _Alignas(CACHE_LINE) atomic_uint generation; /* runs begun */
    _Alignas(CACHE_LINE) int threads;
    atomic_int sleepers, stopping;
    pid_t owner; /* a forked child has the memory but not the threads */
    team_function *function;
    void *argument;
    counter *counters; /* [COUNTER_SETS][threads] */
    pthread_t *helpers;
    pthread_mutex_t lock, running;
    pthread_cond_t wake;
};

typedef struct {
    pool *pool;
    int index;
} birth;

static int64_t nanoseconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

int pool_threads(const pool *p) { return p->threads; }

void barrier(member *self) {
    pool *p = self->pool;
    if (self->count == 1) return;
    const unsigned turn = atomic_load_explicit(&p->turn, memory_order_relaxed);
    if (atomic_fetch_add_explicit(&p->arrived, 1, memory_order_acq_rel) + 1 == self->count) {
        atomic_store_explicit(&p->arrived, 0, memory_order_relaxed);
        atomic_store_explicit(&p->turn, turn + 1, memory_order_release);
        return;
    }
    for (int spins = 0; atomic_load_explicit(&p->turn, memory_order_acquire) == turn; spins++) {
        if (spins < SPINS_BEFORE_YIELD) pause_cpu();
        else sched_yield();
    }
}

static counter *counter_of(const member *self, int phase, int index) {
    return &self->pool->counters[phase % COUNTER_SETS * self->count + index];
}

void work_begin(member *self, int units) {
    self->phase++;
    self->units = units;
    self->victim = self->index;
    /* Nobody is in the set of the next work any more (it was used two works ago), nobody is in it yet. */
    atomic_store_explicit(&counter_of(self, self->phase + 1, self->index)->next, 0, memory_order_relaxed);
}

int work_next(member *self) {
    for (int tried = 0; tried < self->count; tried++) {
        const int v = self->victim;
        const int first = (int)((int64_t)self->units * v / self->count);
        const int last = (int)((int64_t)self->units * (v + 1) / self->count);
        counter *c = counter_of(self, self->phase, v);
        if (first + atomic_load_explicit(&c->next, memory_order_relaxed) < last) {
            const int unit = first + atomic_fetch_add_explicit(&c->next, 1, memory_order_relaxed);
            if (unit < last) return unit;
        }
        self->victim = v + 1 == self->count ? 0 : v + 1;
    }
    return -1;
}

static void take_part(pool *p, int index) {
    member self = {p, index, p->threads, 0, 0, 0};
    p->function(&self, p->argument);
    barrier(&self);
}

/* Spin, then sleep, until there is a run after `seen`. */
static unsigned await_run(pool *p, unsigned seen) {
    const int64_t patience = nanoseconds() + SPIN_NANOSECONDS;
    for (int spins = 1; atomic_load(&p->generation) == seen && (spins & 255 || nanoseconds() < patience); spins++)
        pause_cpu();
    if (atomic_load(&p->generation) == seen) {
        pthread_mutex_lock(&p->lock);
        atomic_fetch_add(&p->sleepers, 1);
        while (atomic_load(&p->generation) == seen) pthread_cond_wait(&p->wake, &p->lock);
        atomic_fetch_sub(&p->sleepers, 1);
        pthread_mutex_unlock(&p->lock);
    }
    return seen + 1;
}

static void *helper(void *argument) {
    const birth b = *(birth *)argument;
    free(argument);
    for (unsigned seen = await_run(b.pool, 0); !atomic_load(&b.pool->stopping); seen = await_run(b.pool, seen))
        take_part(b.pool, b.index);
    return NULL;
}

static void begin_generation(pool *p) {
    atomic_fetch_add(&p->generation, 1);
    if (atomic_load(&p->sleepers)) {
        pthread_mutex_lock(&p->lock);
        pthread_cond_broadcast(&p->wake);
        pthread_mutex_unlock(&p->lock);
    }
}

void pool_run(pool *p, team_function *function, void *argument) {
    if (p->owner != getpid()) {
        p->owner = getpid();
        p->threads = 1;
    }
    pthread_mutex_lock(&p->running);
    p->function = function;
    p->argument = argument;
    for (int i = 0; i < COUNTER_SETS * p->threads; i++) atomic_store(&p->counters[i].next, 0);
    if (p->threads > 1) begin_generation(p);
    take_part(p, 0);
    pthread_mutex_unlock(&p->running);
}

static int start_helper(pool *p, int index) {
    birth *b = malloc(sizeof *b);
    if (!b) return -1;
    *b = (birth){p, index};
    if (pthread_create(&p->helpers[index], NULL, helper, b) == 0) return 0;
    free(b);
    return -1;
}

pool *paceline_pool_new(int threads) {
    pool *p = aligned_alloc(CACHE_LINE, (sizeof *p + CACHE_LINE - 1) / CACHE_LINE * CACHE_LINE);
    if (!p) return NULL;
    memset(p, 0, sizeof *p);
    p->owner = getpid();
    p->counters = aligned_alloc(CACHE_LINE, sizeof(counter) * COUNTER_SETS * (size_t)threads);
    p->helpers = calloc((size_t)threads, sizeof *p->helpers);
    pthread_mutex_init(&p->lock, NULL);
    pthread_mutex_init(&p->running, NULL);
    pthread_cond_init(&p->wake, NULL);
    p->threads = 1;
    /* A helper that cannot be started makes the team smaller; nobody has begun to run yet. */
    while (p->counters && p->helpers && p->threads < threads && start_helper(p, p->threads) == 0) p->threads++;
    if (p->counters && p->helpers) return p;
    paceline_pool_free(p);
    return NULL;
}

void paceline_pool_free(pool *p) {
    if (p->owner == getpid() && p->threads > 1) {
        atomic_store(&p->stopping, 1);
        begin_generation(p);
        for (int i = 1; i < p->threads; i++) pthread_join(p->helpers[i], NULL);
    }
    free(p->helpers);
    free(p->counters);
    free(p);
}
