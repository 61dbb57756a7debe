/* Each kind of collective as blocks: what a rank sends to each peer, what it takes, and what it
   does with all blocks at the end. A rank's block to itself takes the same way. */
#include <string.h>

#include "emulator.h"

#define V(kind) ((kind) & (UCC_COLL_TYPE_ALLGATHERV | UCC_COLL_TYPE_ALLTOALLV | UCC_COLL_TYPE_GATHERV | \
                           UCC_COLL_TYPE_SCATTERV | UCC_COLL_TYPE_REDUCE_SCATTERV))
#define REDUCES(kind) ((kind) & (UCC_COLL_TYPE_ALLREDUCE | UCC_COLL_TYPE_REDUCE | \
                                 UCC_COLL_TYPE_REDUCE_SCATTER | UCC_COLL_TYPE_REDUCE_SCATTERV))
#define TO_ROOT(kind) ((kind) & (UCC_COLL_TYPE_REDUCE | UCC_COLL_TYPE_GATHER | UCC_COLL_TYPE_GATHERV | \
                                 UCC_COLL_TYPE_FANIN))
#define FROM_ROOT(kind) ((kind) & (UCC_COLL_TYPE_BCAST | UCC_COLL_TYPE_SCATTER | UCC_COLL_TYPE_SCATTERV | \
                                   UCC_COLL_TYPE_FANOUT))
#define SIGNALS(kind) ((kind) & (UCC_COLL_TYPE_BARRIER | UCC_COLL_TYPE_FANIN | UCC_COLL_TYPE_FANOUT))

size_t element_size(ucc_datatype_t type) {
    static const size_t sizes[] = {1, 2, 4, 8, 16, 1, 2, 4, 8, 16, 2, 4, 8, 2, 16, 8, 16, 32};
    return type % 8 || type / 8 >= sizeof sizes / sizeof *sizes ? 0 : sizes[type / 8];
}

static bool in_place(const ucc_coll_args_t *args) {
    return args->mask & UCC_COLL_ARGS_FIELD_FLAGS && args->flags & UCC_COLL_ARGS_FLAG_IN_PLACE;
}

static block_t chunk(const ucc_coll_buffer_info_t *info, size_t place, size_t count) {
    size_t size = element_size(info->datatype);
    return (block_t){(char *)info->buffer + place * size, count * size};
}

static block_t chunk_v(const ucc_coll_buffer_info_v_t *info, unsigned peer) {
    size_t size = element_size(info->datatype);
    return (block_t){(char *)info->buffer + info->displacements[peer] * size,
                     info->counts[peer] * size};
}

/* The part of a whole that belongs to a rank; `whole` has chunks for all ranks. */
static block_t part(const ucc_coll_args_t *args, ucc_team_h team, bool dst, unsigned peer) {
    if (V(args->coll_type))
        return chunk_v(dst ? &args->dst.info_v : &args->src.info_v, peer);
    const ucc_coll_buffer_info_t *info = dst ? &args->dst.info : &args->src.info;
    size_t count = info->count / team->size;
    return chunk(info, peer * count, count);
}

static block_t all_of(const ucc_coll_buffer_info_t *info) { return chunk(info, 0, info->count); }

block_t sent_to(const ucc_coll_args_t *args, ucc_team_h team, unsigned peer) {
    static char signal;
    ucc_coll_type_t kind = args->coll_type;
    if (TO_ROOT(kind) && peer != args->root) return (block_t){0};
    if (FROM_ROOT(kind) && team->rank != args->root) return (block_t){0};
    if (SIGNALS(kind)) return (block_t){&signal, 1};
    switch (kind) {
    case UCC_COLL_TYPE_ALLREDUCE:
        return all_of(in_place(args) ? &args->dst.info : &args->src.info);
    case UCC_COLL_TYPE_REDUCE:
        return all_of(in_place(args) && team->rank == args->root ? &args->dst.info : &args->src.info);
    case UCC_COLL_TYPE_REDUCE_SCATTERV: {
        size_t place = 0;
        for (unsigned before = 0; before < peer; before++) place += args->dst.info_v.counts[before];
        return chunk(&args->src.info, place, args->dst.info_v.counts[peer]);
    }
    case UCC_COLL_TYPE_BCAST: return all_of(&args->src.info);
    case UCC_COLL_TYPE_ALLGATHER:
    case UCC_COLL_TYPE_ALLGATHERV:
    case UCC_COLL_TYPE_GATHER:
    case UCC_COLL_TYPE_GATHERV:
        if (in_place(args)) return part(args, team, true, team->rank);
        return all_of(&args->src.info);
    default: return part(args, team, false, peer); /* alltoall, scatter, reduce_scatter */
    }
}

static block_t own_result(const ucc_coll_args_t *args, ucc_team_h team) {
    if (args->coll_type == UCC_COLL_TYPE_REDUCE_SCATTERV)
        return (block_t){args->dst.info_v.buffer, chunk_v(&args->dst.info_v, team->rank).size};
    if (args->coll_type == UCC_COLL_TYPE_BCAST) return all_of(&args->src.info);
    if (FROM_ROOT(args->coll_type) && in_place(args) && team->rank == args->root)
        return part(args, team, false, team->rank);
    return all_of(&args->dst.info);
}

size_t taken_from(const ucc_coll_args_t *args, ucc_team_h team, unsigned peer) {
    ucc_coll_type_t kind = args->coll_type;
    if (TO_ROOT(kind) && team->rank != args->root) return 0;
    if (FROM_ROOT(kind) && peer != args->root) return 0;
    if (SIGNALS(kind)) return 1;
    if (REDUCES(kind) || FROM_ROOT(kind)) return own_result(args, team).size;
    return part(args, team, true, peer).size;
}

void finish(const ucc_coll_args_t *args, ucc_team_h team, char **blocks) {
    ucc_coll_type_t kind = args->coll_type;
    if (SIGNALS(kind) || (TO_ROOT(kind) && team->rank != args->root)) return;
    if (REDUCES(kind)) {
        block_t total = own_result(args, team);
        ucc_datatype_t type =
            V(kind) ? args->dst.info_v.datatype : args->dst.info.datatype;
        size_t count = total.size / element_size(type);
        for (unsigned peer = 0; peer < team->size && total.size; peer++) {
            if (peer == 0) memcpy(total.bytes, blocks[0], total.size);
            else reduce(total.bytes, blocks[peer], count, type, args->op);
        }
        if (args->op == UCC_OP_AVG) divide(total.bytes, count, type, team->size);
    } else if (FROM_ROOT(kind)) {
        block_t result = own_result(args, team);
        if (result.size) memcpy(result.bytes, blocks[args->root], result.size);
    } else {
        for (unsigned peer = 0; peer < team->size; peer++) {
            block_t place = part(args, team, true, peer);
            if (place.size) memcpy(place.bytes, blocks[peer], place.size);
        }
    }
}

static ucc_status_t check_type(ucc_datatype_t type, ucc_memory_type_t memory) {
    return element_size(type) && memory <= UCC_MEMORY_TYPE_CUDA ? UCC_OK : UCC_ERR_INVALID_PARAM;
}

ucc_status_t check_args(const ucc_coll_args_t *args, ucc_team_h team) {
    const uint64_t wide = UCC_COLL_ARGS_FLAG_COUNT_64BIT | UCC_COLL_ARGS_FLAG_DISPLACEMENTS_64BIT;
    ucc_coll_type_t kind = args->coll_type;
    bool root = team->rank == args->root, rooted = TO_ROOT(kind) || FROM_ROOT(kind);
    if (!kind || kind & (kind - 1) || (unsigned)kind > UCC_COLL_TYPE_SCATTERV)
        return UCC_ERR_NOT_SUPPORTED;
    if (rooted && args->root >= team->size) return UCC_ERR_INVALID_PARAM;
    if (V(kind) && (!rooted || root) &&
        (!(args->mask & UCC_COLL_ARGS_FIELD_FLAGS) || (args->flags & wide) != wide))
        return UCC_ERR_NOT_SUPPORTED; /* counts of 32 bits */
    if (SIGNALS(kind)) return UCC_OK;
    bool has_dst = kind != UCC_COLL_TYPE_BCAST && (!TO_ROOT(kind) || root) &&
                   !(kind & (UCC_COLL_TYPE_SCATTER | UCC_COLL_TYPE_SCATTERV) && root && in_place(args));
    if (!has_dst) return UCC_OK;
    bool dst_v = V(kind) && kind != UCC_COLL_TYPE_SCATTERV;
    ucc_datatype_t type = dst_v ? args->dst.info_v.datatype : args->dst.info.datatype;
    ucc_status_t status =
        check_type(type, dst_v ? args->dst.info_v.mem_type : args->dst.info.mem_type);
    if (status == UCC_OK && REDUCES(kind) && !reduce(NULL, NULL, 0, type, args->op))
        status = UCC_ERR_NOT_SUPPORTED;
    return status;
}
