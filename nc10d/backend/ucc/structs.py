"""The structs of the header table as ctypes structures, and the table's letters as ctypes types."""

from __future__ import annotations

import ctypes
from typing import Any

from nc10d.backend.ucc.ucc_table import OOB_CALLBACKS, STRUCTS

CTYPES: dict[str, Any] = {
    "": None,
    "p": ctypes.c_void_p,
    "s": ctypes.c_char_p,
    "i": ctypes.c_int,
    "u": ctypes.c_uint32,
    "q": ctypes.c_uint64,
    "j": ctypes.c_int64,
    "h": ctypes.c_uint16,
    "d": ctypes.c_double,
}


def field_name(name: str) -> str:
    """Return the name in Python of a field: src for src.info_v, active_set_size for its own."""
    return name.removesuffix(".info_v").removesuffix(".local_memh").replace(".", "_")


def _make(name: str, fields: tuple[str, ...]) -> type[ctypes.Structure]:
    typed = []
    for field in fields:
        kind, _, field_in_c = field.partition(" ")
        typed.append((field_name(field_in_c), CTYPES.get(kind) or STRUCT_TYPES[kind]))
    return type(name, (ctypes.Structure,), {"_fields_": typed})


STRUCT_TYPES: dict[str, Any] = {}
for _name, _fields in STRUCTS.items():
    STRUCT_TYPES[_name] = _make(_name, _fields)

LibParams = STRUCT_TYPES["ucc_lib_params_t"]
OobColl = STRUCT_TYPES["ucc_oob_coll_t"]
ContextParams = STRUCT_TYPES["ucc_context_params_t"]
TeamParams = STRUCT_TYPES["ucc_team_params_t"]
BufferInfo = STRUCT_TYPES["ucc_coll_buffer_info_t"]
BufferInfoV = STRUCT_TYPES["ucc_coll_buffer_info_v_t"]
CollArgs = STRUCT_TYPES["ucc_coll_args_t"]

CALLBACK_TYPES: dict[str, Any] = {
    name: ctypes.CFUNCTYPE(ctypes.c_int, *[CTYPES[letter] for letter in arguments])
    for name, arguments in OOB_CALLBACKS.items()
}
