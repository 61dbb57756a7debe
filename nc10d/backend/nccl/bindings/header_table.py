"""NCCL's C API as data. Made by tools/gen_nccl.py from nccl.h 2.32.3; do not edit.

Letters stand for C types: p any pointer, s const char*, z size_t, i int or an enum, u unsigned int,
D ncclUniqueId by value. A version is (major, minor, patch).
"""

# ruff: noqa: E501
from __future__ import annotations

from typing import NamedTuple

Version = tuple[int, int, int]


class Function(NamedTuple):
    """A function: result and arguments in letters, the release that brought it, the C prototype."""

    result: str
    arguments: str
    since: Version
    prototype: str


class Field(NamedTuple):
    """A field of ncclConfig_t: the type in letters, and the release that brought the field."""

    name: str
    kind: str
    since: Version


def _since(version: Version, *fields: str) -> tuple[Field, ...]:
    """Return the fields that came with a release, each given as letter and name."""
    return tuple(Field(name, kind, version) for kind, name in map(str.split, fields))



HEADER_VERSION: Version = (2, 32, 3)

CONSTANTS = {
    "NCCL_UNIQUE_ID_BYTES": 128,
    "NCCL_API_MAGIC": 3405692655,
    "NCCL_SUSPEND_MEM": 1,
    "NCCL_WIN_COLL_SYMMETRIC": 1,
    "NCCL_WIN_REQUIRED_ALIGNMENT": 4096,
}

ENUMS = {
    "ncclResult_t": {"ncclSuccess": 0, "ncclUnhandledCudaError": 1, "ncclSystemError": 2, "ncclInternalError": 3, "ncclInvalidArgument": 4, "ncclInvalidUsage": 5, "ncclRemoteError": 6, "ncclInProgress": 7, "ncclTimeout": 8, "ncclNumResults": 9},
    "ncclRedOp_t": {"ncclSum": 0, "ncclProd": 1, "ncclMax": 2, "ncclMin": 3, "ncclAvg": 4, "ncclNumOps": 5},
    "ncclDataType_t": {"ncclInt8": 0, "ncclChar": 0, "ncclUint8": 1, "ncclInt32": 2, "ncclInt": 2, "ncclUint32": 3, "ncclInt64": 4, "ncclUint64": 5, "ncclFloat16": 6, "ncclHalf": 6, "ncclFloat32": 7, "ncclFloat": 7, "ncclFloat64": 8, "ncclDouble": 8, "ncclBfloat16": 9, "ncclFloat8e4m3": 10, "ncclFloat8e5m2": 11, "ncclNumTypes": 12},
    "ncclCommMemStat_t": {"ncclStatGpuMemSuspend": 0, "ncclStatGpuMemSuspended": 1, "ncclStatGpuMemPersist": 2, "ncclStatGpuMemTotal": 3},
}

CONFIG = (
    *_since((2, 18, 0), "z size", "u magic", "u version", "i blocking", "i cgaClusterSize", "i minCTAs", "i maxCTAs", "s netName", "i splitShare"),
    *_since((2, 26, 0), "i trafficClass"),
    *_since((2, 27, 0), "s commName", "i collnetEnable", "i CTAPolicy", "i shrinkShare", "i nvlsCTAs"),
    *_since((2, 28, 3), "i nChannelsPerNetPeer", "i nvlinkCentricSched"),
    *_since((2, 29, 2), "i graphUsageMode", "i numRmaCtx"),
    *_since((2, 30, 3), "i maxP2pPeers"),
    *_since((2, 30, 5), "i graphStreamOrdering"),
    *_since((2, 32, 0), "i launchOrderImplicit", "i numRmaSig", "i rmaEagerInit", "i hostCftMode", "i nvlsHostMode"),
)

FUNCTIONS = {
    "ncclMemAlloc": Function("i", "pz", (2, 19, 0), "ncclResult_t ncclMemAlloc(void** ptr, size_t size)"),
    "ncclMemFree": Function("i", "p", (2, 19, 0), "ncclResult_t ncclMemFree(void *ptr)"),
    "ncclGetVersion": Function("i", "p", (2, 18, 0), "ncclResult_t ncclGetVersion(int *version)"),
    "ncclGetUniqueId": Function("i", "p", (2, 18, 0), "ncclResult_t ncclGetUniqueId(ncclUniqueId* uniqueId)"),
    "ncclCommInitRankConfig": Function("i", "piDip", (2, 18, 0), "ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int nranks, ncclUniqueId commId, int rank, ncclConfig_t* config)"),
    "ncclCommDestroy": Function("i", "p", (2, 18, 0), "ncclResult_t ncclCommDestroy(ncclComm_t comm)"),
    "ncclCommAbort": Function("i", "p", (2, 18, 0), "ncclResult_t ncclCommAbort(ncclComm_t comm)"),
    "ncclCommSplit": Function("i", "piipp", (2, 18, 0), "ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t *newcomm, ncclConfig_t* config)"),
    "ncclCommGetUniqueId": Function("i", "pp", (2, 29, 2), "ncclResult_t ncclCommGetUniqueId(ncclComm_t comm, ncclUniqueId* uniqueId)"),
    "ncclCommGrow": Function("i", "pipipp", (2, 29, 2), "ncclResult_t ncclCommGrow(ncclComm_t comm, int nRanks, const ncclUniqueId* uniqueId, int rank, ncclComm_t* newcomm, ncclConfig_t* config)"),
    "ncclGetErrorString": Function("s", "i", (2, 18, 0), "const char* ncclGetErrorString(ncclResult_t result)"),
    "ncclGetLastError": Function("s", "p", (2, 18, 0), "const char* ncclGetLastError(ncclComm_t comm)"),
    "ncclCommGetAsyncError": Function("i", "pp", (2, 18, 0), "ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *asyncError)"),
    "ncclCommRegister": Function("i", "ppzp", (2, 19, 0), "ncclResult_t ncclCommRegister(const ncclComm_t comm, void* buff, size_t size, void** handle)"),
    "ncclCommDeregister": Function("i", "pp", (2, 19, 0), "ncclResult_t ncclCommDeregister(const ncclComm_t comm, void* handle)"),
    "ncclCommSuspend": Function("i", "pi", (2, 29, 7), "ncclResult_t ncclCommSuspend(ncclComm_t comm, int flags)"),
    "ncclCommResume": Function("i", "p", (2, 29, 7), "ncclResult_t ncclCommResume(ncclComm_t comm)"),
    "ncclCommMemStats": Function("i", "pip", (2, 29, 7), "ncclResult_t ncclCommMemStats(ncclComm_t comm, ncclCommMemStat_t stat, uint64_t* value)"),
    "ncclCommWindowRegister": Function("i", "ppzpi", (2, 27, 0), "ncclResult_t ncclCommWindowRegister(ncclComm_t comm, void* buff, size_t size, ncclWindow_t* win, int winFlags)"),
    "ncclCommWindowDeregister": Function("i", "pp", (2, 27, 0), "ncclResult_t ncclCommWindowDeregister(ncclComm_t comm, ncclWindow_t win)"),
    "ncclRedOpCreatePreMulSum": Function("i", "ppiip", (2, 18, 0), "ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t *op, void *scalar, ncclDataType_t datatype, ncclScalarResidence_t residence, ncclComm_t comm)"),
    "ncclRedOpDestroy": Function("i", "ip", (2, 18, 0), "ncclResult_t ncclRedOpDestroy(ncclRedOp_t op, ncclComm_t comm)"),
    "ncclReduce": Function("i", "ppziiipp", (2, 18, 0), "ncclResult_t ncclReduce(const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype, ncclRedOp_t op, int root, ncclComm_t comm, cudaStream_t stream)"),
    "ncclBroadcast": Function("i", "ppziipp", (2, 18, 0), "ncclResult_t ncclBroadcast(const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype, int root, ncclComm_t comm, cudaStream_t stream)"),
    "ncclAllReduce": Function("i", "ppziipp", (2, 18, 0), "ncclResult_t ncclAllReduce(const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype, ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream)"),
    "ncclReduceScatter": Function("i", "ppziipp", (2, 18, 0), "ncclResult_t ncclReduceScatter(const void* sendbuff, void* recvbuff, size_t recvcount, ncclDataType_t datatype, ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream)"),
    "ncclAllGather": Function("i", "ppzipp", (2, 18, 0), "ncclResult_t ncclAllGather(const void* sendbuff, void* recvbuff, size_t sendcount, ncclDataType_t datatype, ncclComm_t comm, cudaStream_t stream)"),
    "ncclAlltoAll": Function("i", "ppzipp", (2, 28, 3), "ncclResult_t ncclAlltoAll(const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype, ncclComm_t comm, cudaStream_t stream)"),
    "ncclGather": Function("i", "ppziipp", (2, 28, 3), "ncclResult_t ncclGather(const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype, int root, ncclComm_t comm, cudaStream_t stream)"),
    "ncclScatter": Function("i", "ppziipp", (2, 28, 3), "ncclResult_t ncclScatter(const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype, int root, ncclComm_t comm, cudaStream_t stream)"),
    "ncclSend": Function("i", "pziipp", (2, 18, 0), "ncclResult_t ncclSend(const void* sendbuff, size_t count, ncclDataType_t datatype, int peer, ncclComm_t comm, cudaStream_t stream)"),
    "ncclRecv": Function("i", "pziipp", (2, 18, 0), "ncclResult_t ncclRecv(void* recvbuff, size_t count, ncclDataType_t datatype, int peer, ncclComm_t comm, cudaStream_t stream)"),
    "ncclPutSignal": Function("i", "pziipziiupp", (2, 29, 2), "ncclResult_t ncclPutSignal(const void* localbuff, size_t count, ncclDataType_t datatype, int peer, ncclWindow_t peerWin, size_t peerWinOffset, int sigIdx, int ctx, unsigned int flags, ncclComm_t comm, cudaStream_t stream)"),
    "ncclSignal": Function("i", "iiiupp", (2, 29, 2), "ncclResult_t ncclSignal(int peer, int sigIdx, int ctx, unsigned int flags, ncclComm_t comm, cudaStream_t stream)"),
    "ncclWaitSignal": Function("i", "ippp", (2, 29, 2), "ncclResult_t ncclWaitSignal(int nDesc, ncclWaitSignalDesc_t* signalDescs, ncclComm_t comm, cudaStream_t stream)"),
    "ncclGroupStart": Function("i", "", (2, 18, 0), "ncclResult_t ncclGroupStart()"),
    "ncclGroupEnd": Function("i", "", (2, 18, 0), "ncclResult_t ncclGroupEnd()"),
    "ncclGroupSimulateEnd": Function("i", "p", (2, 22, 0), "ncclResult_t ncclGroupSimulateEnd(ncclSimInfo_t* simInfo)"),
}
