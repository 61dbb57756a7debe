"""UCC's C API as data: enums, structs and prototypes, from ucc.h, ucc_def.h and ucc_status.h.

The facts are those of UCC 1.8's headers (github.com/openucx/ucc, src/ucc/api). Later fields of a
struct only follow earlier ones, so an older release reads a prefix. Letters stand for C types:
p any pointer, s const char*, i int or an enum, u unsigned int or uint32_t, q uint64_t or size_t,
j int64_t, h uint16_t, d double; other words are structs of this table. tests/backend/ucc has
a C compiler check it.
"""

from __future__ import annotations

from typing import NamedTuple


class Prototype(NamedTuple):
    """A function: result and arguments in letters ("" is void), and the C prototype."""

    result: str
    arguments: str
    prototype: str


ENUMS: dict[str, dict[str, int]] = {
    "ucc_status_t": {
        "UCC_OK": 0,
        "UCC_INPROGRESS": 1,
        "UCC_OPERATION_INITIALIZED": 2,
        "UCC_ERR_NOT_SUPPORTED": -1,
        "UCC_ERR_NOT_IMPLEMENTED": -2,
        "UCC_ERR_INVALID_PARAM": -3,
        "UCC_ERR_NO_MEMORY": -4,
        "UCC_ERR_NO_RESOURCE": -5,
        "UCC_ERR_NO_MESSAGE": -6,
        "UCC_ERR_NOT_FOUND": -7,
        "UCC_ERR_TIMED_OUT": -8,
        "UCC_ERR_IO_ERROR": -9,
        "UCC_ERR_LAST": -100,
    },
    "ucc_coll_type_t": {
        "UCC_COLL_TYPE_ALLGATHER": 1 << 0,
        "UCC_COLL_TYPE_ALLGATHERV": 1 << 1,
        "UCC_COLL_TYPE_ALLREDUCE": 1 << 2,
        "UCC_COLL_TYPE_ALLTOALL": 1 << 3,
        "UCC_COLL_TYPE_ALLTOALLV": 1 << 4,
        "UCC_COLL_TYPE_BARRIER": 1 << 5,
        "UCC_COLL_TYPE_BCAST": 1 << 6,
        "UCC_COLL_TYPE_FANIN": 1 << 7,
        "UCC_COLL_TYPE_FANOUT": 1 << 8,
        "UCC_COLL_TYPE_GATHER": 1 << 9,
        "UCC_COLL_TYPE_GATHERV": 1 << 10,
        "UCC_COLL_TYPE_REDUCE": 1 << 11,
        "UCC_COLL_TYPE_REDUCE_SCATTER": 1 << 12,
        "UCC_COLL_TYPE_REDUCE_SCATTERV": 1 << 13,
        "UCC_COLL_TYPE_SCATTER": 1 << 14,
        "UCC_COLL_TYPE_SCATTERV": 1 << 15,
    },
    "ucc_memory_type_t": {"UCC_MEMORY_TYPE_HOST": 0, "UCC_MEMORY_TYPE_CUDA": 1},
    "ucc_datatype_t": {
        "UCC_DT_INT8": 0 << 3,
        "UCC_DT_INT16": 1 << 3,
        "UCC_DT_INT32": 2 << 3,
        "UCC_DT_INT64": 3 << 3,
        "UCC_DT_INT128": 4 << 3,
        "UCC_DT_UINT8": 5 << 3,
        "UCC_DT_UINT16": 6 << 3,
        "UCC_DT_UINT32": 7 << 3,
        "UCC_DT_UINT64": 8 << 3,
        "UCC_DT_UINT128": 9 << 3,
        "UCC_DT_FLOAT16": 10 << 3,
        "UCC_DT_FLOAT32": 11 << 3,
        "UCC_DT_FLOAT64": 12 << 3,
        "UCC_DT_BFLOAT16": 13 << 3,
        "UCC_DT_FLOAT128": 14 << 3,
        "UCC_DT_FLOAT32_COMPLEX": 15 << 3,
        "UCC_DT_FLOAT64_COMPLEX": 16 << 3,
        "UCC_DT_FLOAT128_COMPLEX": 17 << 3,
    },
    "ucc_reduction_op_t": {
        "UCC_OP_SUM": 0,
        "UCC_OP_PROD": 1,
        "UCC_OP_MAX": 2,
        "UCC_OP_MIN": 3,
        "UCC_OP_LAND": 4,
        "UCC_OP_LOR": 5,
        "UCC_OP_LXOR": 6,
        "UCC_OP_BAND": 7,
        "UCC_OP_BOR": 8,
        "UCC_OP_BXOR": 9,
        "UCC_OP_MAXLOC": 10,
        "UCC_OP_MINLOC": 11,
        "UCC_OP_AVG": 12,
    },
    "ucc_thread_mode_t": {"UCC_THREAD_MULTIPLE": 2},
    "masks": {
        "UCC_LIB_PARAM_FIELD_THREAD_MODE": 1 << 0,
        "UCC_CONTEXT_PARAM_FIELD_OOB": 1 << 2,
        "UCC_TEAM_PARAM_FIELD_EP": 1 << 2,
        "UCC_TEAM_PARAM_FIELD_EP_RANGE": 1 << 4,
        "UCC_TEAM_PARAM_FIELD_TEAM_SIZE": 1 << 5,
        "UCC_TEAM_PARAM_FIELD_OOB": 1 << 7,
        "UCC_COLL_ARGS_FIELD_FLAGS": 1 << 0,
        "UCC_COLL_ARGS_FLAG_IN_PLACE": 1 << 0,
        "UCC_COLL_ARGS_FLAG_COUNT_64BIT": 1 << 2,
        "UCC_COLL_ARGS_FLAG_DISPLACEMENTS_64BIT": 1 << 3,
        "UCC_COLLECTIVE_EP_RANGE_CONTIG": 0,
    },
}

# A line for each field: the type and the name in C; "a.b" is a field of an anonymous struct.
STRUCTS: dict[str, tuple[str, ...]] = {
    "ucc_lib_params_t": (
        *("q mask", "i thread_mode", "q coll_types", "q reduction_types", "i sync_type"),
    ),
    "ucc_oob_coll_t": (
        *("p allgather", "p req_test", "p req_free", "p coll_info", "u n_oob_eps", "u oob_ep"),
    ),
    "ucc_mem_map_params_t": ("p segments", "q n_segments"),
    "ucc_context_params_t": (
        *("q mask", "i type", "i sync_type", "ucc_oob_coll_t oob", "q ctx_id"),
        "ucc_mem_map_params_t mem_params",
    ),
    "ucc_team_p2p_conn_t": (
        *("p conn_info_lookup", "p conn_info_release", "p conn_ctx", "p req_test", "p req_free"),
    ),
    # Of its union, the longest members: two words.
    "ucc_ep_map_t": ("i type", "q ep_num", "p array.map", "q array.elem_size"),
    "ucc_team_params_t": (
        *("q mask", "q flags", "i ordering", "q outstanding_colls", "q ep", "p ep_list"),
        *("i ep_range", "q team_size", "i sync_type", "ucc_oob_coll_t oob"),
        *("ucc_team_p2p_conn_t p2p_conn", "ucc_mem_map_params_t mem_params"),
        *("ucc_ep_map_t ep_map", "q id"),
    ),
    # The v form, with displacements, is the longer one in a buffer's union. In the other form the
    # second word is a count, and `datatype` and `mem_type` follow it.
    "ucc_coll_buffer_info_t": ("p buffer", "q count", "q datatype", "i mem_type"),
    "ucc_coll_buffer_info_v_t": (
        *("p buffer", "p counts", "p displacements", "q datatype", "i mem_type"),
    ),
    "ucc_coll_callback_t": ("p cb", "p data"),
    "ucc_coll_args_t": (
        *("q mask", "i coll_type", "ucc_coll_buffer_info_v_t src.info_v"),
        *("ucc_coll_buffer_info_v_t dst.info_v", "i op", "q flags", "q root", "i error_type"),
        *("h tag", "p global_work_buffer", "ucc_coll_callback_t cb", "d timeout"),
        *("q active_set.start", "j active_set.stride", "q active_set.size"),
        *("p src_memh.local_memh", "p dst_memh.local_memh"),
    ),
}

OOB_CALLBACKS: dict[str, str] = {"allgather": "ppqpp", "req_test": "p", "req_free": "p"}
"""The arguments of the functions of ucc_oob_coll_t, which return a ucc_status_t."""


def _status(arguments: str, prototype: str) -> Prototype:
    return Prototype("i", arguments, f"ucc_status_t {prototype}")


FUNCTIONS: dict[str, Prototype] = {
    "ucc_get_version": Prototype(
        "", "ppp", "void ucc_get_version(unsigned *major, unsigned *minor, unsigned *release)"
    ),
    "ucc_get_version_string": Prototype("s", "", "const char *ucc_get_version_string(void)"),
    "ucc_status_string": Prototype("s", "i", "const char *ucc_status_string(ucc_status_t status)"),
    "ucc_lib_config_read": _status(
        "ssp",
        "ucc_lib_config_read(const char *env_prefix, const char *filename, "
        "ucc_lib_config_h *config)",
    ),
    "ucc_lib_config_release": Prototype(
        "", "p", "void ucc_lib_config_release(ucc_lib_config_h config)"
    ),
    "ucc_init_version": _status(
        "uuppp",
        "ucc_init_version(unsigned major, unsigned minor, const ucc_lib_params_t *params, "
        "const ucc_lib_config_h config, ucc_lib_h *lib)",
    ),
    "ucc_finalize": _status("p", "ucc_finalize(ucc_lib_h lib)"),
    "ucc_context_config_read": _status(
        "psp",
        "ucc_context_config_read(ucc_lib_h lib, const char *filename, "
        "ucc_context_config_h *config)",
    ),
    "ucc_context_config_release": Prototype(
        "", "p", "void ucc_context_config_release(ucc_context_config_h config)"
    ),
    "ucc_context_create": _status(
        "pppp",
        "ucc_context_create(ucc_lib_h lib, const ucc_context_params_t *params, "
        "const ucc_context_config_h config, ucc_context_h *context)",
    ),
    "ucc_context_progress": _status("p", "ucc_context_progress(ucc_context_h context)"),
    "ucc_context_destroy": _status("p", "ucc_context_destroy(ucc_context_h context)"),
    "ucc_team_create_post": _status(
        "pupp",
        "ucc_team_create_post(ucc_context_h *contexts, uint32_t count, "
        "const ucc_team_params_t *params, ucc_team_h *team)",
    ),
    "ucc_team_create_test": _status("p", "ucc_team_create_test(ucc_team_h team)"),
    "ucc_team_destroy": _status("p", "ucc_team_destroy(ucc_team_h team)"),
    "ucc_collective_init": _status(
        "ppp",
        "ucc_collective_init(ucc_coll_args_t *args, ucc_coll_req_h *request, ucc_team_h team)",
    ),
    "ucc_collective_post": _status("p", "ucc_collective_post(ucc_coll_req_h request)"),
    "ucc_collective_finalize": _status("p", "ucc_collective_finalize(ucc_coll_req_h request)"),
}
