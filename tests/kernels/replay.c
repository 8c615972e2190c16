/* Replay recorded calls of the kernels, and compare all results bit by bit: replay FILE THREADS [THREADS …]

   tests/kernels/recording.py writes the file: an image of memory, in which pointers are offsets of the file. The whole
   recording is replayed once for each number of threads. The first difference ends it with exit code 1. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "abi.h"

#define PROGRAMS_MAX 64
#define ARGUMENTS_MAX 7
#define ALIGNMENT 64 /* bytes; as memory of the kernels has */

/* The first bytes of a file: where its lists begin, and how long they are. */
typedef struct {
    int64_t links, link_count, calls, call_count;
} header;

/* A pointer in the image, and the place that it points to. */
typedef struct {
    int64_t at, to;
} link_entry;

/* Memory that a call must have written: `bytes` bytes at `at` are those at `wanted`. */
typedef struct {
    int64_t name, at, wanted, bytes;
} check_entry;

typedef struct {
    int64_t name, result, checks, check_count, argument[ARGUMENTS_MAX];
} call_entry;

static char *image;
static pool *threads_pool;
static program *programs[PROGRAMS_MAX];
static int program_count;

static void *place(int64_t offset) { return offset < 0 ? NULL : image + offset; }

static void fail(const char *what, const char *name) {
    fprintf(stderr, "%s: %s\n", what, name);
    exit(1);
}

/* ---- functions ---- */

static int64_t new_program(const int64_t *a) {
    if (program_count == PROGRAMS_MAX) fail("too many programs", "paceline_program_new");
    program *made = paceline_program_new(threads_pool, place(a[0]), place(a[1]), (int)a[2]);
    programs[program_count++] = made;
    return made != NULL;
}

static int64_t free_program(const int64_t *a) {
    paceline_program_free(programs[a[0]]);
    programs[a[0]] = NULL;
    return 0;
}

static int64_t run(const int64_t *a) { return paceline_program_run(programs[a[0]], place(a[1])); }

static int64_t run_and_draw(const int64_t *a) {
    return paceline_program_draw(programs[a[0]], place(a[1]), place(a[2]));
}

static int64_t run_draft(const int64_t *a) { return paceline_draft(programs[a[0]], place(a[1]), place(a[2])); }

static int64_t link_prefetch(const int64_t *a) {
    paceline_prefetch(programs[a[0]], programs[a[1]], place(a[2]), (int)a[3]);
    return 0;
}

static int64_t move_slots(const int64_t *a) {
    return paceline_kv_move(place(a[0]), place(a[1]), place(a[2]), (int)a[3]);
}

static int64_t read_slots(const int64_t *a) {
    paceline_kv_read(place(a[0]), place(a[1]), (int)a[2], place(a[3]), place(a[4]));
    return 0;
}

static int64_t pick_tokens(const int64_t *a) {
    return paceline_pick(threads_pool, place(a[0]), place(a[1]), place(a[2]), place(a[3]), (int)a[4], (int)a[5],
                         place(a[6]));
}

static int64_t unpack_rows(const int64_t *a) { return paceline_rows(place(a[0]), place(a[1]), (int)a[2], place(a[3])); }

static int64_t pack_stored(const int64_t *a) {
    return paceline_pack_stored(threads_pool, place(a[0]), a[1], (int)a[2], (int)a[3], place(a[4]));
}

static int64_t make_noise(const int64_t *a) {
    paceline_gumbel((uint32_t)a[0], (uint32_t)a[1], (int)a[2], place(a[3]));
    return 0;
}

static const struct {
    const char *name;
    int64_t (*run)(const int64_t *arguments);
} FUNCTIONS[] = {
    {"paceline_program_new", new_program},   {"paceline_program_free", free_program},
    {"paceline_program_run", run},           {"paceline_program_draw", run_and_draw},
    {"paceline_draft", run_draft},           {"paceline_prefetch", link_prefetch},
    {"paceline_kv_move", move_slots},        {"paceline_kv_read", read_slots},
    {"paceline_pick", pick_tokens},          {"paceline_rows", unpack_rows},
    {"paceline_pack_stored", pack_stored},   {"paceline_gumbel", make_noise},
};

/* ---- calls ---- */

static int64_t run_call(const call_entry *c) {
    for (size_t i = 0; i < sizeof FUNCTIONS / sizeof *FUNCTIONS; i++)
        if (!strcmp(FUNCTIONS[i].name, place(c->name))) return FUNCTIONS[i].run(c->argument);
    fail("a function that cannot be replayed", place(c->name));
    return 0;
}

/* Compare memory with its recorded state, and name the first 32 bits that differ. */
static void compare(const check_entry *k, const call_entry *c, int64_t number, int threads) {
    const char *found = place(k->at), *wanted = place(k->wanted);
    if (!memcmp(found, wanted, (size_t)k->bytes)) return;
    int64_t i = 0;
    while (!memcmp(found + i, wanted + i, k->bytes - i < 4 ? (size_t)(k->bytes - i) : 4)) i += 4;
    uint32_t mine = 0, theirs = 0;
    memcpy(&mine, found + i, k->bytes - i < 4 ? (size_t)(k->bytes - i) : 4);
    memcpy(&theirs, wanted + i, k->bytes - i < 4 ? (size_t)(k->bytes - i) : 4);
    fprintf(stderr, "%d threads, call %" PRId64 " (%s): %s differs at byte %" PRId64 ": %08x, recorded %08x\n", threads,
            number, (char *)place(c->name), (char *)place(k->name), i, mine, theirs);
    exit(1);
}

static void replay(const call_entry *c, int64_t number, int threads) {
    const int64_t result = run_call(c);
    if (result != c->result) {
        fprintf(stderr, "call %" PRId64 " (%s) returned %" PRId64 ", recorded %" PRId64 "\n", number,
                (char *)place(c->name), result, c->result);
        exit(1);
    }
    const check_entry *checks = place(c->checks);
    for (int64_t i = 0; i < c->check_count; i++) compare(&checks[i], c, number, threads);
}

/* ---- files ---- */

static void read_image(const char *path) {
    FILE *file = fopen(path, "rb");
    if (!file) fail("cannot be read", path);
    fseek(file, 0, SEEK_END);
    const size_t bytes = (size_t)ftell(file);
    rewind(file);
    image = aligned_alloc(ALIGNMENT, (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT);
    if (!image || fread(image, 1, bytes, file) != bytes) fail("cannot be read", path);
    fclose(file);
    const header *h = place(0);
    const link_entry *links = place(h->links);
    for (int64_t i = 0; i < h->link_count; i++) {
        const void *to = place(links[i].to);
        memcpy(place(links[i].at), &to, sizeof to);
    }
}

static void replay_all(const char *path, int threads) {
    read_image(path);
    threads_pool = paceline_pool_new(threads, NULL, NULL);
    if (!threads_pool) fail("no memory for threads", path);
    program_count = 0;
    const header *h = place(0);
    const call_entry *calls = place(h->calls);
    for (int64_t i = 0; i < h->call_count; i++) replay(&calls[i], i, threads);
    for (int i = 0; i < program_count; i++)
        if (programs[i]) paceline_program_free(programs[i]);
    printf("%d threads: %" PRId64 " calls, all bits as recorded\n", threads, h->call_count);
    free(image);
}

int main(int count, char **words) {
    if (count < 3) fail("usage", "replay FILE THREADS [THREADS ...]");
    for (int i = 2; i < count; i++) replay_all(words[1], atoi(words[i]));
    return 0;
}
