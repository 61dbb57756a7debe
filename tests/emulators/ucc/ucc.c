/* An emulator of libucc for tests: contexts, teams and collectives between processes of a host.

   Ranks leave each other blocks as files in a folder (UCC_EMULATOR_FOLDER, else /dev/shm), whose
   name the first rank passes on by the out-of-band exchange. A block's name has the team, the number
   of the collective in it, sender and receiver. UCC_EMULATOR_FAULT="init 4 -5" has the collectives
   of kind 4 refused with status -5; other stages are "post", "end" (it fails after the post) and
   "never" (it does not end). */
#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "emulator.h"

struct request {
    ucc_coll_req_t super; /* first: its status is what ucc_collective_test reads */
    ucc_coll_args_t args;
    ucc_team_h team;
    unsigned number;
    bool sent;
    char **blocks;
    struct request *next;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int object; /* stands for handles that have no content */

static ucc_status_t fault(const char *stage, ucc_coll_type_t kind) {
    char wanted[16];
    int of_kind, status;
    const char *text = getenv("UCC_EMULATOR_FAULT");
    if (!text || sscanf(text, "%15s %d %d", wanted, &of_kind, &status) != 3) return UCC_OK;
    return strcmp(wanted, stage) || (int)kind != of_kind ? UCC_OK : (ucc_status_t)status;
}

void ucc_get_version(unsigned *major, unsigned *minor, unsigned *release) {
    *major = 1, *minor = 8, *release = 0;
}

const char *ucc_get_version_string(void) { return "1.8.0 (emulator)"; }

const char *ucc_status_string(ucc_status_t status) {
    switch (status) {
    case UCC_OK: return "Success";
    case UCC_ERR_NOT_SUPPORTED: return "Operation is not supported";
    case UCC_ERR_NO_RESOURCE: return "Resources are not available";
    default: return "Another status";
    }
}

ucc_status_t ucc_lib_config_read(const char *prefix, const char *file, ucc_lib_config_h *config) {
    (void)prefix, (void)file;
    *config = (ucc_lib_config_h)&object;
    return UCC_OK;
}

void ucc_lib_config_release(ucc_lib_config_h config) { (void)config; }

ucc_status_t ucc_init_version(unsigned major, unsigned minor, const ucc_lib_params_t *params,
                              const ucc_lib_config_h config, ucc_lib_h *lib) {
    (void)minor;
    bool safe = params->mask & UCC_LIB_PARAM_FIELD_THREAD_MODE && params->thread_mode == UCC_THREAD_MULTIPLE;
    if (major != 1 || !safe || !config) return UCC_ERR_INVALID_PARAM;
    *lib = (ucc_lib_h)&object;
    return UCC_OK;
}

ucc_status_t ucc_finalize(ucc_lib_h lib) { return lib ? UCC_OK : UCC_ERR_INVALID_PARAM; }

ucc_status_t ucc_context_config_read(ucc_lib_h lib, const char *file, ucc_context_config_h *config) {
    (void)file;
    *config = (ucc_context_config_h)&object;
    return lib ? UCC_OK : UCC_ERR_INVALID_PARAM;
}

void ucc_context_config_release(ucc_context_config_h config) { (void)config; }

/* Exchange `size` bytes with all ranks; blocks. */
static ucc_status_t exchange(ucc_oob_coll_t *oob, void *own, void *all, size_t size) {
    void *request;
    ucc_status_t status = oob->allgather(own, all, size, oob->coll_info, &request);
    if (status != UCC_OK) return status;
    while ((status = oob->req_test(request)) == UCC_INPROGRESS) usleep(200);
    oob->req_free(request);
    return status;
}

ucc_status_t ucc_context_create(ucc_lib_h lib, const ucc_context_params_t *params,
                                const ucc_context_config_h config, ucc_context_h *context) {
    if (!lib || !config || !(params->mask & UCC_CONTEXT_PARAM_FIELD_OOB)) return UCC_ERR_INVALID_PARAM;
    ucc_context_h made = calloc(1, sizeof *made);
    made->oob = params->oob;
    if (made->oob.oob_ep == 0) {
        const char *parent = getenv("UCC_EMULATOR_FOLDER");
        snprintf(made->folder, KEY_BYTES, "%s/uccXXXXXX", parent ? parent : "/dev/shm");
        if (!mkdtemp(made->folder)) return UCC_ERR_NO_RESOURCE;
    }
    char *all = calloc(made->oob.n_oob_eps, KEY_BYTES);
    ucc_status_t status = exchange(&made->oob, made->folder, all, KEY_BYTES);
    memcpy(made->folder, all, KEY_BYTES);
    free(all);
    if (status == UCC_OK) *context = made;
    else free(made);
    return status;
}

ucc_status_t ucc_context_destroy(ucc_context_h context) {
    char signal = 0, *all = calloc(1, context->oob.n_oob_eps);
    ucc_status_t status = exchange(&context->oob, &signal, all, 1);
    free(all);
    if (context->oob.oob_ep == 0) rmdir(context->folder);
    free(context);
    return status;
}

ucc_status_t ucc_team_create_post(ucc_context_h *contexts, uint32_t count,
                                  const ucc_team_params_t *params, ucc_team_h *team) {
    const uint64_t wanted = UCC_TEAM_PARAM_FIELD_EP | UCC_TEAM_PARAM_FIELD_TEAM_SIZE | UCC_TEAM_PARAM_FIELD_OOB;
    if (count != 1 || (params->mask & wanted) != wanted || params->ep != params->oob.oob_ep ||
        params->team_size != params->oob.n_oob_eps)
        return UCC_ERR_INVALID_PARAM;
    ucc_team_h made = calloc(1, sizeof *made);
    *made = (struct ucc_team){.context = contexts[0], .oob = params->oob,
                              .rank = params->oob.oob_ep, .size = params->oob.n_oob_eps};
    made->keys = calloc(made->size, KEY_BYTES);
    /* A thread may be a rank, so the process alone does not name it. */
    snprintf(made->own_key, KEY_BYTES, "%d-%p-%u", getpid(), (void *)contexts[0], contexts[0]->teams++);
    *team = made;
    return made->oob.allgather(made->own_key, made->keys, KEY_BYTES, made->oob.coll_info, &made->forming);
}

ucc_status_t ucc_team_create_test(ucc_team_h team) {
    if (team->active) return UCC_OK;
    ucc_status_t status = team->oob.req_test(team->forming);
    if (status != UCC_OK) return status;
    team->oob.req_free(team->forming);
    team->active = true;
    return UCC_OK;
}

ucc_status_t ucc_team_destroy(ucc_team_h team) {
    if (!team->active) return UCC_ERR_INVALID_PARAM;
    free(team->keys);
    free(team);
    return UCC_OK;
}

ucc_status_t ucc_collective_init(ucc_coll_args_t *args, ucc_coll_req_h *request, ucc_team_h team) {
    ucc_status_t status = fault("init", args->coll_type);
    if (status == UCC_OK) status = team->active ? check_args(args, team) : UCC_ERR_INVALID_PARAM;
    if (status != UCC_OK) return status;
    struct request *made = calloc(1, sizeof *made);
    made->super.status = UCC_OPERATION_INITIALIZED;
    made->args = *args;
    made->team = team;
    made->blocks = calloc(team->size, sizeof *made->blocks);
    *request = &made->super;
    return UCC_OK;
}

static void name_block(char *name, size_t size, const struct request *r, unsigned src, unsigned dst) {
    snprintf(name, size, "%s/%s.%u.%u.%u", r->team->context->folder, r->team->keys, r->number, src, dst);
}

static bool send_block(const struct request *r, unsigned peer, block_t block) {
    char name[3 * KEY_BYTES], hidden[4 * KEY_BYTES];
    name_block(name, sizeof name, r, r->team->rank, peer);
    snprintf(hidden, sizeof hidden, "%s.part", name);
    FILE *file = fopen(hidden, "w");
    if (!file) return false;
    bool written = fwrite(block.bytes, 1, block.size, file) == block.size;
    return fclose(file) == 0 && written && rename(hidden, name) == 0;
}

static bool take_block(struct request *r, unsigned peer, size_t size, ucc_status_t *status) {
    char name[3 * KEY_BYTES];
    name_block(name, sizeof name, r, peer, r->team->rank);
    struct stat found;
    if (stat(name, &found)) return false;
    FILE *file = fopen(name, "r");
    r->blocks[peer] = malloc(size + 1);
    /* As in UCC, other sizes than the sender's are the caller's mistake; here it is noticed. */
    bool read = file && (size_t)found.st_size == size && fread(r->blocks[peer], 1, size, file) == size;
    if (!read) *status = UCC_ERR_IO_ERROR;
    if (file) fclose(file);
    unlink(name);
    return true;
}

ucc_status_t ucc_collective_post(ucc_coll_req_h request) {
    struct request *r = (struct request *)request;
    ucc_status_t status = fault("post", r->args.coll_type);
    if (status != UCC_OK) return r->super.status = status;
    pthread_mutex_lock(&lock);
    r->number = r->team->posted++;
    r->super.status = UCC_INPROGRESS;
    r->next = r->team->context->in_flight;
    r->team->context->in_flight = r;
    pthread_mutex_unlock(&lock);
    return UCC_OK;
}

/* Only now: UCC too may read the caller's memory at any time until the end. */
static ucc_status_t send_blocks(struct request *r) {
    for (unsigned peer = 0; peer < r->team->size; peer++) {
        block_t block = sent_to(&r->args, r->team, peer);
        if (!block.size) continue;
        if (peer == r->team->rank) {
            r->blocks[peer] = memcpy(malloc(block.size), block.bytes, block.size);
        } else if (!send_block(r, peer, block)) {
            return UCC_ERR_IO_ERROR;
        }
    }
    r->sent = true;
    return UCC_OK;
}

static void advance(struct request *r) {
    ucc_status_t status = fault("end", r->args.coll_type);
    bool all_there = !fault("never", r->args.coll_type);
    if (status == UCC_OK && !r->sent) status = send_blocks(r);
    for (unsigned peer = 0; peer < r->team->size; peer++) {
        size_t size = taken_from(&r->args, r->team, peer);
        if (size && !r->blocks[peer]) all_there &= take_block(r, peer, size, &status);
    }
    if (status != UCC_OK) {
        r->super.status = status;
    } else if (all_there) {
        finish(&r->args, r->team, r->blocks);
        r->super.status = UCC_OK;
    }
}

ucc_status_t ucc_context_progress(ucc_context_h context) {
    pthread_mutex_lock(&lock);
    for (struct request **at = &context->in_flight; *at;) {
        struct request *r = *at;
        if (r->super.status == UCC_INPROGRESS) advance(r);
        if (r->super.status == UCC_INPROGRESS) at = &r->next;
        else *at = r->next;
    }
    pthread_mutex_unlock(&lock);
    return UCC_OK;
}

ucc_status_t ucc_collective_finalize(ucc_coll_req_h request) {
    struct request *r = (struct request *)request;
    if (r->super.status == UCC_INPROGRESS) return UCC_ERR_INVALID_PARAM;
    for (unsigned peer = 0; peer < r->team->size; peer++) free(r->blocks[peer]);
    free(r->blocks);
    free(r);
    return UCC_OK;
}
