/* The threads of a pool and their counters; pool.h is the contract. */
#define _GNU_SOURCE
#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include "lend.h"
#include "simd.h"

#define COUNTER_SETS 4            /* sets of counters; successive works use them in turn */
#define TAKEN_DIVISOR 4           /* a member takes 1/4 of the units left in a share at once */
#define UNITS_TAKEN_MAX 16        /* most units that a member takes at once */
#define WORKS_PER_RUN_MAX (1u << 20) /* more works than any run has */
#define SPINS_BETWEEN_LOOKS 1024  /* pauses of a thread that waits, before and after it looks at the others */
#define YIELDS_BEFORE_NAP 64
#define NAP_NANOSECONDS 20000
#define SPIN_NANOSECONDS 150000   /* time that a helper spins after a run before it sleeps */

/* A counter of units: the number of a work in the upper half, a count of its units in the lower. A counter is never
   cleared: the number of a newer work makes the count zero. */
typedef struct {
    _Alignas(CACHE_LINE) _Atomic uint64_t value;
} counter;

struct pool {
    _Alignas(CACHE_LINE) atomic_uint generation; /* runs so far */
    _Alignas(CACHE_LINE) atomic_int inside;      /* helpers that take part in the run */
    atomic_int open;                             /* whether helpers may still enter the run */
    _Alignas(CACHE_LINE) int threads;
    unsigned works;       /* works of all runs before this one */
    unsigned started;     /* number of the last run of pool_start */
    unsigned finished;    /* number of the last run of pool_start that was finished or cancelled */
    atomic_int cancelled; /* whether members leave the run of pool_start */
    atomic_int sleepers;
    atomic_int stopping;
    pid_t owner; /* process of the threads: a forked child has only the memory */
    pool_function *function;
    void *argument;
    seating seating;
    counter *counters; /* [COUNTER_SETS][threads + 1]: units taken from each member's share, then units finished */
    pthread_t *helpers;
    pthread_mutex_t lock;    /* guards the sleep of helpers */
    pthread_mutex_t running; /* held by the thread that runs something */
    pthread_cond_t wake;
    pool *alone; /* a pool of one thread, for functions beside a run of pool_start; NULL: this is one */
};

/* Arguments of a new helper. */
typedef struct {
    pool *pool;
    int index;
} helper_start;

static int64_t nanoseconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

int pool_threads(const pool *p) { return p->threads; }

int pool_lent(const pool *p) { return atomic_load(&p->seating.lent); }

/* Wait for members in `state` or beyond: on this thread's CPU, then by leaving it to those that need it. */
static void wait_a_little(pool *p, seat *self, int state, int *spins) {
    const struct timespec nap = {0, NAP_NANOSECONDS};
    const int n = (*spins)++, looks = n - 2 * SPINS_BETWEEN_LOOKS;
    if (n == SPINS_BETWEEN_LOOKS) look_at_members(&p->seating);
    else if (looks < 0) pause_cpu();
    else if (lend_to_members(&p->seating, self, state)) return;
    else if (looks < YIELDS_BEFORE_NAP) sched_yield();
    else nanosleep(&nap, NULL);
}

static seat *seat_of(const member *self) { return &self->pool->seating.seats[self->index]; }

static counter *counter_of(const member *self, int share) {
    return &self->pool->counters[self->work % COUNTER_SETS * (unsigned)(self->count + 1) + (unsigned)share];
}

/* Read the count of this work from a counter's value; -1: a later work uses the counter, and this one is over. */
static int64_t count_in(const member *self, uint64_t value) {
    const int32_t later = (int32_t)((uint32_t)(value >> 32) - self->work);
    return later > 0 ? -1 : later < 0 ? 0 : (int64_t)(uint32_t)value;
}

static uint64_t counted(const member *self, int64_t count) { return (uint64_t)self->work << 32 | (uint64_t)count; }

void work_begin(member *self, int units) {
    self->work++;
    self->units = units;
    self->victim = self->index;
    self->next = self->last = 0;
    self->done = 0;
}

/* Take some units of one share, fewer near its end. False: none is left. An atomic operation makes the CPU wait for all
   loads in flight, so a member that reads a matrix should take units rarely. */
static int take(member *self, int share) {
    const int first = (int)((int64_t)self->units * share / self->count);
    const int last = (int)((int64_t)self->units * (share + 1) / self->count);
    counter *c = counter_of(self, share);
    uint64_t value = atomic_load_explicit(&c->value, memory_order_relaxed);
    for (;;) {
        const int64_t taken = count_in(self, value);
        if (taken < 0 || first + taken >= last) return 0;
        int64_t some = (last - first - taken) / TAKEN_DIVISOR;
        some = some < 1 ? 1 : some > UNITS_TAKEN_MAX ? UNITS_TAKEN_MAX : some;
        hold(seat_of(self));
        if (!atomic_compare_exchange_weak_explicit(&c->value, &value, counted(self, taken + some), memory_order_relaxed,
                                                   memory_order_relaxed))
            continue;
        self->next = first + (int)taken;
        self->last = self->next + (int)some;
        return 1;
    }
}

int work_next(member *self) {
    for (int tried = 0; self->next == self->last && tried < self->count; tried++) {
        if (take(self, self->victim)) break;
        self->victim = self->victim + 1 == self->count ? 0 : self->victim + 1;
    }
    if (self->next == self->last) return -1;
    self->done++;
    return self->next++;
}

int work_over(const member *self) {
    const uint64_t value = atomic_load_explicit(&counter_of(self, self->count)->value, memory_order_acquire);
    const int64_t done = count_in(self, value);
    return done < 0 || done >= self->units;
}

void work_end(member *self) {
    counter *c = counter_of(self, self->count);
    uint64_t value = atomic_load_explicit(&c->value, memory_order_relaxed);
    while (self->done && !atomic_compare_exchange_weak_explicit(
                             &c->value, &value, counted(self, count_in(self, value) + self->done),
                             memory_order_acq_rel, memory_order_relaxed)) {
    }
    let_go(&self->pool->seating, seat_of(self), INSIDE);
    for (int spins = 0; !work_over(self);) wait_a_little(self->pool, seat_of(self), HOLDING, &spins);
}

int work_await(member *self, atomic_int *flag) {
    const int64_t patience = nanoseconds() + SPIN_NANOSECONDS;
    for (int spins = 1; !atomic_load(flag) && !atomic_load(&self->pool->cancelled); spins++) {
        if (!(spins & 255) && nanoseconds() > patience) break;
        pause_cpu();
    }
    return atomic_load(flag);
}

int work_cancelled(member *self, int works) {
    const int cancelled = atomic_load_explicit(&self->pool->cancelled, memory_order_relaxed);
    if (cancelled) self->work += (unsigned)works; /* others may be ahead: a later run must not use their numbers */
    return cancelled;
}

static unsigned take_part(pool *p, int index) {
    member self = {.pool = p, .index = index, .count = p->threads, .work = p->works};
    sit(&p->seating, seat_of(&self));
    p->function(&self, p->argument);
    return self.work;
}

/* Take part in the run if it is still open. A run is not over before all helpers that entered have left. */
static void join_run(pool *p, int index) {
    atomic_fetch_add(&p->inside, 1);
    if (atomic_load(&p->open)) take_part(p, index);
    atomic_fetch_sub(&p->inside, 1);
    let_go(&p->seating, &p->seating.seats[index], OUTSIDE); /* last, since it may suspend this thread */
}

/* Spin, then sleep, until there is a run after `seen`, and return the number of the latest. */
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
    return atomic_load(&p->generation);
}

static void *helper(void *argument) {
    const helper_start b = *(helper_start *)argument;
    free(argument);
    hold_to(&b.pool->seating.seats[b.index]);
    for (unsigned seen = await_run(b.pool, 0); !atomic_load(&b.pool->stopping); seen = await_run(b.pool, seen))
        join_run(b.pool, b.index);
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

static void open_run(pool *p, pool_function *function, void *argument) {
    p->function = function;
    p->argument = argument;
    if (p->threads > 1) {
        atomic_store(&p->open, 1);
        begin_generation(p);
    }
}

/* Take part in the run, and wait for the helpers. */
static void close_run(pool *p) {
    const cpu_mask before = p->threads > 1 ? hold_to(p->seating.seats) : (cpu_mask){.known = 0};
    const unsigned works = take_part(p, 0);
    let_go(&p->seating, p->seating.seats, OUTSIDE);
    atomic_store(&p->open, 0);
    for (int spins = 0; p->threads > 1 && atomic_load(&p->inside);) wait_a_little(p, p->seating.seats, INSIDE, &spins);
    release_to(&p->seating, p->seating.seats, &before);
    p->works = works; /* no helper reads it any more */
}

/* Lock the pool for the caller, and end a run of pool_start that has not ended: finish the one that is wanted, cancel
   any other. True: the wanted one is done. */
static int enter(pool *p, unsigned wanted) {
    pthread_mutex_lock(&p->running);
    if (p->owner != getpid()) {
        p->owner = getpid();
        p->threads = 1;
        reset_seats(&p->seating);
        p->started = p->finished;
        p->works += WORKS_PER_RUN_MAX; /* no later work has a number that lost helpers have counted under */
    }
    if (p->started == p->finished) return 0;
    atomic_store(&p->cancelled, p->started != wanted);
    close_run(p);
    atomic_store(&p->cancelled, 0);
    p->finished = p->started;
    return p->finished == wanted;
}

void pool_run(pool *p, pool_function *function, void *argument) {
    enter(p, 0);
    open_run(p, function, argument);
    close_run(p);
    pthread_mutex_unlock(&p->running);
}

unsigned pool_start(pool *p, pool_function *function, void *argument) {
    unsigned number = 0;
    enter(p, 0);
    if (p->threads > 1) {
        number = p->started += p->started + 1 ? 1 : 2; /* never 0 */
        open_run(p, function, argument);
    }
    pthread_mutex_unlock(&p->running);
    return number;
}

int pool_finish(pool *p, unsigned number) {
    const int done = enter(p, number);
    pthread_mutex_unlock(&p->running);
    return done;
}

void pool_cancel(pool *p) {
    enter(p, 0);
    pthread_mutex_unlock(&p->running);
}

void pool_run_beside(pool *p, pool_function *function, void *argument) {
    pthread_mutex_lock(&p->running);
    const int busy = p->started != p->finished && p->owner == getpid();
    pthread_mutex_unlock(&p->running);
    pool_run(busy ? p->alone : p, function, argument);
}

static int start_helper(pool *p, int index) {
    helper_start *b = malloc(sizeof *b);
    if (!b) return -1;
    *b = (helper_start){p, index};
    if (pthread_create(&p->helpers[index], NULL, helper, b) == 0) return 0;
    free(b);
    return -1;
}

static void free_pool(pool *p) {
    if (p->owner == getpid() && p->threads > 1) {
        atomic_store(&p->stopping, 1);
        begin_generation(p);
        for (int i = 1; i < p->threads; i++) pthread_join(p->helpers[i], NULL);
    }
    if (p->alone) free_pool(p->alone);
    free(p->helpers);
    free(p->counters);
    free_seats(&p->seating);
    free(p);
}

/* Allocate zeroed memory on cache lines of its own, as structures of whole cache lines need it. */
static void *lines(size_t bytes) {
    const size_t whole = (bytes + CACHE_LINE - 1) / CACHE_LINE * CACHE_LINE;
    void *memory = aligned_alloc(CACHE_LINE, whole);
    return memory ? memset(memory, 0, whole) : NULL;
}

EXPORT pool *paceline_pool_new(int threads, const int32_t *starts, const int32_t *cpus) {
    pool *p = lines(sizeof *p);
    if (!p) return NULL;
    p->owner = getpid();
    p->counters = lines(sizeof(counter) * COUNTER_SETS * (size_t)(threads + 1));
    p->helpers = lines(sizeof *p->helpers * (size_t)threads);
    pthread_mutex_init(&p->lock, NULL);
    pthread_mutex_init(&p->running, NULL);
    pthread_cond_init(&p->wake, NULL);
    p->threads = 1;
    const int fine = p->counters && p->helpers && make_seats(&p->seating, threads, starts, cpus);
    /* If a helper cannot be started, the pool is smaller; nothing runs yet. */
    while (fine && p->threads < threads && start_helper(p, p->threads) == 0) p->threads++;
    if (p->threads > 1) p->alone = paceline_pool_new(1, NULL, NULL);
    if (fine && (p->threads == 1 || p->alone)) return p;
    free_pool(p);
    return NULL;
}
