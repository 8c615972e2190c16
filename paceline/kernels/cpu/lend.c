/* Threads held to CPUs, and suspended ones noticed by their CPU clocks; lend.h is the contract. */
#define _GNU_SOURCE
#include "lend.h"

#include <sched.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#define LENT_NANOSECONDS 500000 /* time after which a lender looks again: more than the units of a member take */

int make_seats(seating *all, int count, const int32_t *starts, const int32_t *cpus) {
    const size_t bytes = sizeof(seat) * (size_t)count, listed = starts ? sizeof *cpus * (size_t)starts[count] : 0;
    all->seats = aligned_alloc(CACHE_LINE, bytes);
    all->cpus = malloc(listed + 1);
    if (!all->seats || !all->cpus) return 0;
    memset(all->seats, 0, bytes);
    if (listed) memcpy(all->cpus, cpus, listed);
    all->count = count;
    for (int i = 0; starts && i < count; i++) {
        all->seats[i].cpus = all->cpus + starts[i];
        all->seats[i].cpu_count = starts[i + 1] - starts[i];
    }
    return 1;
}

void free_seats(seating *all) { free(all->seats), free(all->cpus); }

void reset_seats(seating *all) {
    atomic_flag_clear(&all->looking);
    for (int i = 0; i < all->count; i++) {
        atomic_store(&all->seats[i].borrows, 0);
        atomic_store(&all->seats[i].state, OUTSIDE);
    }
}

#ifdef __linux__

#include <sys/syscall.h>

/* Linux's own numbers: its headers are not installed with every C library. */
#define FUTEX_WAIT_IN_PROCESS 128
#define FUTEX_WAKE_IN_PROCESS 129

_Static_assert(sizeof(cpu_set_t) == sizeof((cpu_mask){0}.bits), "a mask has the size of the system's");

static int try_look(seating *all) { return !atomic_flag_test_and_set_explicit(&all->looking, memory_order_acquire); }

static void look_away(seating *all) { atomic_flag_clear_explicit(&all->looking, memory_order_release); }

static cpu_mask cpus_of(int thread) {
    cpu_mask mask;
    mask.known = sched_getaffinity(thread, sizeof mask.bits, (cpu_set_t *)mask.bits) == 0;
    return mask;
}

static int set_cpus(int thread, const cpu_mask *mask) {
    return mask->known && sched_setaffinity(thread, sizeof mask->bits, (const cpu_set_t *)mask->bits) == 0;
}

static int has_cpu(const cpu_mask *mask, int cpu) {
    return cpu >= 0 && cpu < CPU_SETSIZE && mask->bits[cpu / 64] >> cpu % 64 & 1;
}

static void add_cpu(cpu_mask *mask, int cpu) { mask->bits[cpu / 64] |= (uint64_t)1 << cpu % 64; }

/* ---- own CPUs ---- */

cpu_mask hold_to(const seat *s) {
    cpu_mask before = {.known = 0}, own = {.known = 0};
    if (s->cpu_count) before = cpus_of(0);
    for (int i = 0; before.known && i < s->cpu_count; i++)
        if (has_cpu(&before, s->cpus[i])) add_cpu(&own, s->cpus[i]), own.known = 1;
    before.known = set_cpus(0, &own);
    return before;
}

/* Whether a CPU was lent to this thread; from now on none is. */
static int ends_loan(seating *all, seat *s) {
    while (!try_look(all)) sched_yield();
    const int lent = atomic_exchange(&s->borrows, 0);
    look_away(all);
    return lent;
}

void release_to(seating *all, seat *s, const cpu_mask *before) {
    if (!before->known) return;
    ends_loan(all, s);
    set_cpus(0, before);
}

void sit(seating *all, seat *s) {
    if (ends_loan(all, s)) set_cpus(0, &s->own); /* lent when this thread had already left */
    s->own = cpus_of(0);
    atomic_store_explicit(&s->thread, (int)syscall(SYS_gettid), memory_order_relaxed);
    atomic_store(&s->state, INSIDE);
}

/* ---- lent CPUs ---- */

/* Wake the lender first: moving back may suspend this thread. */
static void give_back(seating *all, seat *s) {
    if (!ends_loan(all, s)) return;
    atomic_fetch_add(&s->turns, 1);
    syscall(SYS_futex, &s->turns, FUTEX_WAKE_IN_PROCESS, 1, NULL, NULL, 0);
    set_cpus(0, &s->own);
}

void let_go(seating *all, seat *s, int state) {
    atomic_store_explicit(&s->state, state, memory_order_relaxed);
    if (atomic_load_explicit(&s->borrows, memory_order_relaxed)) give_back(all, s);
}

/* Return the CPU time of a thread of this process in nanoseconds; -1: unknown. */
static int64_t time_of(int thread) {
    struct timespec t;
    const clockid_t clock = (clockid_t)(~(unsigned)thread << 3 | 6); /* the kernel's number of a thread's CPU clock */
    if (clock_gettime(clock, &t)) return -1;
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* Whether a thread has not run since the last look. */
static int stands_still(seat *s) {
    const int64_t before = s->ran;
    s->ran = time_of(atomic_load_explicit(&s->thread, memory_order_relaxed));
    return s->ran >= 0 && s->ran == before;
}

/* Move a suspended thread to this CPU; it moves back by itself. A thread that may run here anyway is left to the
   system. */
static int lend(seat *s) {
    const int cpu = sched_getcpu();
    cpu_mask here = {.known = 1};
    if (!s->own.known || cpu < 0 || cpu >= CPU_SETSIZE || has_cpu(&s->own, cpu)) return 0;
    add_cpu(&here, cpu);
    if (!set_cpus(atomic_load_explicit(&s->thread, memory_order_relaxed), &here)) return 0;
    atomic_store(&s->borrows, 1);
    return 1;
}

static void change_cpus(seat *one, seat *other) {
    const cpu_mask own = one->own;
    const int32_t *cpus = one->cpus;
    const int count = one->cpu_count;
    one->own = other->own, one->cpus = other->cpus, one->cpu_count = other->cpu_count;
    other->own = own, other->cpus = cpus, other->cpu_count = count;
}

/* Lend the CPU of `self` to a suspended member in `state` or beyond, and return its seat; NULL: there is none. The
   caller of the pool keeps it, in exchange for its own: all wait for the caller between runs, too. */
static seat *help(seating *all, seat *self, int state) {
    for (int i = 0; i < all->count; i++) {
        seat *s = &all->seats[i];
        if (atomic_load(&s->state) < state || !stands_still(s)) continue;
        if (!lend(s)) return NULL;
        if (i == 0) change_cpus(s, self);
        return s;
    }
    return NULL;
}

void look_at_members(seating *all) {
    if (!try_look(all)) return;
    for (int i = 0; i < all->count; i++)
        if (atomic_load(&all->seats[i].state) != OUTSIDE) stands_still(&all->seats[i]);
    look_away(all);
}

/* Sleep until the borrower has gone back. */
static void await_turn(seat *s, unsigned turns) {
    const struct timespec time = {0, LENT_NANOSECONDS};
    syscall(SYS_futex, &s->turns, FUTEX_WAIT_IN_PROCESS, turns, &time, NULL, 0);
}

int lend_to_members(seating *all, seat *self, int state) {
    if (!try_look(all)) return 0;
    seat *borrower = help(all, self, state);
    const unsigned turns = borrower ? atomic_load(&borrower->turns) : 0;
    look_away(all);
    if (!borrower) return 0;
    atomic_fetch_add(&all->lent, 1);
    if (borrower == all->seats) set_cpus(0, &self->own);
    await_turn(borrower, turns);
    return 1;
}

#else

cpu_mask hold_to(const seat *s) {
    (void)s;
    return (cpu_mask){.known = 0};
}

void release_to(seating *all, seat *s, const cpu_mask *before) { (void)all, (void)s, (void)before; }

void sit(seating *all, seat *s) { let_go(all, s, INSIDE); }

void let_go(seating *all, seat *s, int state) {
    (void)all;
    atomic_store_explicit(&s->state, state, memory_order_relaxed);
}

void look_at_members(seating *all) { (void)all; }

int lend_to_members(seating *all, seat *self, int state) {
    (void)all, (void)self, (void)state;
    return 0;
}

#endif
