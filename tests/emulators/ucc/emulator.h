/* The parts of the emulator of libucc. */
#pragma once
#include <stdbool.h>

#include <ucc/api/ucc.h>

#define KEY_BYTES 256

struct request;

struct ucc_context {
    ucc_oob_coll_t oob;
    char folder[KEY_BYTES]; /* where ranks leave each other blocks, as files */
    struct request *in_flight;
    unsigned teams;
};

struct ucc_team {
    ucc_context_h context;
    ucc_oob_coll_t oob;
    void *forming;
    char own_key[KEY_BYTES];
    char *keys; /* of all ranks; the first rank's names the team's files */
    unsigned rank, size, posted;
    bool active;
};

/* A block of memory that a rank sends, or takes. */
typedef struct {
    char *bytes;
    size_t size;
} block_t;

/* What a collective sends, takes and does with it at its end; see plan.c. */
size_t element_size(ucc_datatype_t type);
ucc_status_t check_args(const ucc_coll_args_t *args, ucc_team_h team);
block_t sent_to(const ucc_coll_args_t *args, ucc_team_h team, unsigned peer);
size_t taken_from(const ucc_coll_args_t *args, ucc_team_h team, unsigned peer);
void finish(const ucc_coll_args_t *args, ucc_team_h team, char **blocks);

/* total := total op next; false if there is no such reduction; see reduce.c. */
bool reduce(void *total, const void *next, size_t count, ucc_datatype_t type,
            ucc_reduction_op_t op);
void divide(void *total, size_t count, ucc_datatype_t type, unsigned by);
