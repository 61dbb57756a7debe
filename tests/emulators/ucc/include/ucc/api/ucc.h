/* The part of UCC's C API that nc10d and its tests use, for the emulator: names, values and layouts
   as UCC 1.8 has them. The table nc10d/backend/ucc/ucc_table.py is checked against this file
   and, where UCC's own header is installed, against that. */
#ifndef UCC_H_
#define UCC_H_
#include <stddef.h>
#include <stdint.h>

#define UCC_BIT(n) (1ul << (n))

typedef enum {
    UCC_OK = 0, UCC_INPROGRESS = 1, UCC_OPERATION_INITIALIZED = 2,
    UCC_ERR_NOT_SUPPORTED = -1, UCC_ERR_NOT_IMPLEMENTED = -2, UCC_ERR_INVALID_PARAM = -3,
    UCC_ERR_NO_MEMORY = -4, UCC_ERR_NO_RESOURCE = -5, UCC_ERR_NO_MESSAGE = -6,
    UCC_ERR_NOT_FOUND = -7, UCC_ERR_TIMED_OUT = -8, UCC_ERR_IO_ERROR = -9, UCC_ERR_LAST = -100
} ucc_status_t;

typedef enum {
    UCC_COLL_TYPE_ALLGATHER = UCC_BIT(0), UCC_COLL_TYPE_ALLGATHERV = UCC_BIT(1),
    UCC_COLL_TYPE_ALLREDUCE = UCC_BIT(2), UCC_COLL_TYPE_ALLTOALL = UCC_BIT(3),
    UCC_COLL_TYPE_ALLTOALLV = UCC_BIT(4), UCC_COLL_TYPE_BARRIER = UCC_BIT(5),
    UCC_COLL_TYPE_BCAST = UCC_BIT(6), UCC_COLL_TYPE_FANIN = UCC_BIT(7),
    UCC_COLL_TYPE_FANOUT = UCC_BIT(8), UCC_COLL_TYPE_GATHER = UCC_BIT(9),
    UCC_COLL_TYPE_GATHERV = UCC_BIT(10), UCC_COLL_TYPE_REDUCE = UCC_BIT(11),
    UCC_COLL_TYPE_REDUCE_SCATTER = UCC_BIT(12), UCC_COLL_TYPE_REDUCE_SCATTERV = UCC_BIT(13),
    UCC_COLL_TYPE_SCATTER = UCC_BIT(14), UCC_COLL_TYPE_SCATTERV = UCC_BIT(15)
} ucc_coll_type_t;

typedef enum { UCC_MEMORY_TYPE_HOST, UCC_MEMORY_TYPE_CUDA } ucc_memory_type_t;

typedef uint64_t ucc_datatype_t;
#define UCC_PREDEFINED_DT(n) ((ucc_datatype_t)(n) << 3)
#define UCC_DT_INT8 UCC_PREDEFINED_DT(0)
#define UCC_DT_INT16 UCC_PREDEFINED_DT(1)
#define UCC_DT_INT32 UCC_PREDEFINED_DT(2)
#define UCC_DT_INT64 UCC_PREDEFINED_DT(3)
#define UCC_DT_INT128 UCC_PREDEFINED_DT(4)
#define UCC_DT_UINT8 UCC_PREDEFINED_DT(5)
#define UCC_DT_UINT16 UCC_PREDEFINED_DT(6)
#define UCC_DT_UINT32 UCC_PREDEFINED_DT(7)
#define UCC_DT_UINT64 UCC_PREDEFINED_DT(8)
#define UCC_DT_UINT128 UCC_PREDEFINED_DT(9)
#define UCC_DT_FLOAT16 UCC_PREDEFINED_DT(10)
#define UCC_DT_FLOAT32 UCC_PREDEFINED_DT(11)
#define UCC_DT_FLOAT64 UCC_PREDEFINED_DT(12)
#define UCC_DT_BFLOAT16 UCC_PREDEFINED_DT(13)
#define UCC_DT_FLOAT128 UCC_PREDEFINED_DT(14)
#define UCC_DT_FLOAT32_COMPLEX UCC_PREDEFINED_DT(15)
#define UCC_DT_FLOAT64_COMPLEX UCC_PREDEFINED_DT(16)
#define UCC_DT_FLOAT128_COMPLEX UCC_PREDEFINED_DT(17)

typedef enum {
    UCC_OP_SUM, UCC_OP_PROD, UCC_OP_MAX, UCC_OP_MIN, UCC_OP_LAND, UCC_OP_LOR, UCC_OP_LXOR,
    UCC_OP_BAND, UCC_OP_BOR, UCC_OP_BXOR, UCC_OP_MAXLOC, UCC_OP_MINLOC, UCC_OP_AVG
} ucc_reduction_op_t;

typedef enum { UCC_THREAD_SINGLE, UCC_THREAD_FUNNELED, UCC_THREAD_MULTIPLE } ucc_thread_mode_t;
typedef enum { UCC_NO_SYNC_COLLECTIVES, UCC_SYNC_COLLECTIVES } ucc_coll_sync_type_t;
typedef enum { UCC_CONTEXT_EXCLUSIVE, UCC_CONTEXT_SHARED } ucc_context_type_t;
typedef enum { UCC_COLLECTIVE_POST_ORDERED } ucc_post_ordering_t;
typedef enum { UCC_COLLECTIVE_EP_RANGE_CONTIG, UCC_COLLECTIVE_EP_RANGE_NONCONTIG } ucc_ep_range_type_t;
typedef enum { UCC_EP_MAP_FULL = 1 } ucc_ep_map_type_t;
typedef enum { UCC_ERR_TYPE_LOCAL, UCC_ERR_TYPE_GLOBAL } ucc_error_type_t;

enum { UCC_LIB_PARAM_FIELD_THREAD_MODE = UCC_BIT(0) };
enum { UCC_CONTEXT_PARAM_FIELD_OOB = UCC_BIT(2) };
enum {
    UCC_TEAM_PARAM_FIELD_EP = UCC_BIT(2), UCC_TEAM_PARAM_FIELD_EP_RANGE = UCC_BIT(4),
    UCC_TEAM_PARAM_FIELD_TEAM_SIZE = UCC_BIT(5), UCC_TEAM_PARAM_FIELD_OOB = UCC_BIT(7)
};
enum { UCC_COLL_ARGS_FIELD_FLAGS = UCC_BIT(0) };
enum {
    UCC_COLL_ARGS_FLAG_IN_PLACE = UCC_BIT(0), UCC_COLL_ARGS_FLAG_COUNT_64BIT = UCC_BIT(2),
    UCC_COLL_ARGS_FLAG_DISPLACEMENTS_64BIT = UCC_BIT(3)
};

typedef struct ucc_lib_info *ucc_lib_h;
typedef struct ucc_lib_config *ucc_lib_config_h;
typedef struct ucc_context *ucc_context_h;
typedef struct ucc_context_config *ucc_context_config_h;
typedef struct ucc_team *ucc_team_h;
typedef struct ucc_coll_req { ucc_status_t status; } ucc_coll_req_t, *ucc_coll_req_h;

typedef struct {
    uint64_t mask;
    ucc_thread_mode_t thread_mode;
    uint64_t coll_types, reduction_types;
    ucc_coll_sync_type_t sync_type;
} ucc_lib_params_t;

typedef struct {
    ucc_status_t (*allgather)(void *src, void *dst, size_t size, void *info, void **request);
    ucc_status_t (*req_test)(void *request);
    ucc_status_t (*req_free)(void *request);
    void *coll_info;
    uint32_t n_oob_eps, oob_ep;
} ucc_oob_coll_t;

typedef struct { void *segments; uint64_t n_segments; } ucc_mem_map_params_t;

typedef struct {
    uint64_t mask;
    ucc_context_type_t type;
    ucc_coll_sync_type_t sync_type;
    ucc_oob_coll_t oob;
    uint64_t ctx_id;
    ucc_mem_map_params_t mem_params;
} ucc_context_params_t;

typedef struct {
    void *conn_info_lookup, *conn_info_release, *conn_ctx, *req_test, *req_free;
} ucc_team_p2p_conn_t;

typedef struct {
    ucc_ep_map_type_t type;
    uint64_t ep_num;
    union {
        struct { uint64_t start; int64_t stride; } strided;
        struct { void *map; size_t elem_size; } array;
    };
} ucc_ep_map_t;

typedef struct {
    uint64_t mask, flags;
    ucc_post_ordering_t ordering;
    uint64_t outstanding_colls, ep, *ep_list;
    ucc_ep_range_type_t ep_range;
    uint64_t team_size;
    ucc_coll_sync_type_t sync_type;
    ucc_oob_coll_t oob;
    ucc_team_p2p_conn_t p2p_conn;
    ucc_mem_map_params_t mem_params;
    ucc_ep_map_t ep_map;
    uint64_t id;
} ucc_team_params_t;

typedef struct {
    void *buffer;
    uint64_t count;
    ucc_datatype_t datatype;
    ucc_memory_type_t mem_type;
} ucc_coll_buffer_info_t;

typedef struct {
    void *buffer;
    uint64_t *counts, *displacements;
    ucc_datatype_t datatype;
    ucc_memory_type_t mem_type;
} ucc_coll_buffer_info_v_t;

typedef struct { void (*cb)(void *data, ucc_status_t status); void *data; } ucc_coll_callback_t;
typedef void *ucc_mem_map_mem_h;

typedef struct {
    uint64_t mask;
    ucc_coll_type_t coll_type;
    union { ucc_coll_buffer_info_t info; ucc_coll_buffer_info_v_t info_v; } src, dst;
    ucc_reduction_op_t op;
    uint64_t flags, root;
    ucc_error_type_t error_type;
    uint16_t tag;
    void *global_work_buffer;
    ucc_coll_callback_t cb;
    double timeout;
    struct { uint64_t start; int64_t stride; uint64_t size; } active_set;
    union { ucc_mem_map_mem_h local_memh; ucc_mem_map_mem_h *global_memh; } src_memh, dst_memh;
} ucc_coll_args_t;

void ucc_get_version(unsigned *major, unsigned *minor, unsigned *release);
const char *ucc_get_version_string(void);
const char *ucc_status_string(ucc_status_t status);
ucc_status_t ucc_lib_config_read(const char *prefix, const char *file, ucc_lib_config_h *config);
void ucc_lib_config_release(ucc_lib_config_h config);
ucc_status_t ucc_init_version(unsigned major, unsigned minor, const ucc_lib_params_t *params,
                              const ucc_lib_config_h config, ucc_lib_h *lib);
ucc_status_t ucc_finalize(ucc_lib_h lib);
ucc_status_t ucc_context_config_read(ucc_lib_h lib, const char *file, ucc_context_config_h *config);
void ucc_context_config_release(ucc_context_config_h config);
ucc_status_t ucc_context_create(ucc_lib_h lib, const ucc_context_params_t *params,
                                const ucc_context_config_h config, ucc_context_h *context);
ucc_status_t ucc_context_progress(ucc_context_h context);
ucc_status_t ucc_context_destroy(ucc_context_h context);
ucc_status_t ucc_team_create_post(ucc_context_h *contexts, uint32_t count,
                                  const ucc_team_params_t *params, ucc_team_h *team);
ucc_status_t ucc_team_create_test(ucc_team_h team);
ucc_status_t ucc_team_destroy(ucc_team_h team);
ucc_status_t ucc_collective_init(ucc_coll_args_t *args, ucc_coll_req_h *request, ucc_team_h team);
ucc_status_t ucc_collective_post(ucc_coll_req_h request);
ucc_status_t ucc_collective_finalize(ucc_coll_req_h request);
#endif
