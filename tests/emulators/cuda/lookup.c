/* How programs find the driver's functions, and what errors are called. What is not in this table
 * does not exist here: cuGetProcAddress says so, as an older driver would. */
#include "emulator.h"

/* The name is that of the documentation; the address that of the version which the header means. */
#define ENTRY(name) {#name, (void *)name}
static const struct { const char *name; void *address; } functions[] = {
  ENTRY(cuInit), ENTRY(cuDriverGetVersion), ENTRY(cuGetProcAddress), ENTRY(cuGetErrorName), ENTRY(cuGetErrorString),
  ENTRY(cuDeviceGetCount), ENTRY(cuDeviceGet), ENTRY(cuDeviceGetName), ENTRY(cuDeviceGetUuid),
  ENTRY(cuDeviceGetPCIBusId), ENTRY(cuDeviceTotalMem), ENTRY(cuDeviceGetAttribute), ENTRY(cuDeviceCanAccessPeer),
  ENTRY(cuDevicePrimaryCtxRetain), ENTRY(cuDevicePrimaryCtxRelease), ENTRY(cuDevicePrimaryCtxGetState),
  ENTRY(cuDevicePrimaryCtxSetFlags), ENTRY(cuDevicePrimaryCtxReset), ENTRY(cuCtxSetCurrent), ENTRY(cuCtxGetCurrent),
  ENTRY(cuCtxPushCurrent), ENTRY(cuCtxPopCurrent), ENTRY(cuCtxGetDevice), ENTRY(cuCtxGetApiVersion),
  ENTRY(cuCtxGetStreamPriorityRange), ENTRY(cuCtxGetLimit), ENTRY(cuCtxSynchronize),
  ENTRY(cuMemAlloc), ENTRY(cuMemFree), ENTRY(cuMemAllocAsync), ENTRY(cuMemFreeAsync), ENTRY(cuMemHostAlloc),
  ENTRY(cuMemAllocHost), ENTRY(cuMemFreeHost), ENTRY(cuMemHostRegister), ENTRY(cuMemHostUnregister),
  ENTRY(cuMemHostGetDevicePointer), ENTRY(cuMemGetInfo), ENTRY(cuMemGetAddressRange), ENTRY(cuPointerGetAttribute),
  ENTRY(cuMemcpyHtoDAsync), ENTRY(cuMemcpyDtoHAsync), ENTRY(cuMemcpyDtoDAsync), ENTRY(cuMemcpyAsync),
  ENTRY(cuMemcpyHtoD), ENTRY(cuMemcpyDtoH), ENTRY(cuMemcpyDtoD), ENTRY(cuMemcpy), ENTRY(cuMemcpy2D),
  ENTRY(cuMemcpy2DUnaligned), ENTRY(cuMemcpy2DAsync), ENTRY(cuMemsetD8), ENTRY(cuMemsetD16), ENTRY(cuMemsetD32),
  ENTRY(cuMemsetD8Async), ENTRY(cuMemsetD16Async), ENTRY(cuMemsetD32Async),
  ENTRY(cuStreamWaitValue32), ENTRY(cuStreamWaitValue64), ENTRY(cuStreamWriteValue32), ENTRY(cuStreamWriteValue64),
  ENTRY(cuStreamCreate), ENTRY(cuStreamCreateWithPriority), ENTRY(cuStreamDestroy), ENTRY(cuStreamSynchronize),
  ENTRY(cuStreamQuery), ENTRY(cuStreamWaitEvent), ENTRY(cuStreamGetPriority), ENTRY(cuStreamGetFlags),
  ENTRY(cuStreamGetCtx), ENTRY(cuLaunchHostFunc), ENTRY(cuEventCreate), ENTRY(cuEventDestroy), ENTRY(cuEventRecord),
  ENTRY(cuEventRecordWithFlags), ENTRY(cuEventQuery), ENTRY(cuEventSynchronize), ENTRY(cuEventElapsedTime),
  ENTRY(cuThreadExchangeStreamCaptureMode), ENTRY(cuStreamBeginCapture), ENTRY(cuStreamEndCapture),
  ENTRY(cuStreamIsCapturing), ENTRY(cuStreamGetCaptureInfo), ENTRY(cuUserObjectCreate), ENTRY(cuUserObjectRetain),
  ENTRY(cuUserObjectRelease), ENTRY(cuGraphRetainUserObject), ENTRY(cuGraphInstantiate), ENTRY(cuGraphInstantiateWithFlags), ENTRY(cuGraphLaunch), ENTRY(cuGraphGetNodes),
  ENTRY(cuGraphDestroy), ENTRY(cuGraphExecDestroy),
  ENTRY(cuModuleLoadData), ENTRY(cuModuleLoadDataEx), ENTRY(cuModuleUnload), ENTRY(cuModuleGetFunction),
  ENTRY(cuLibraryLoadData), ENTRY(cuLibraryUnload), ENTRY(cuLibraryGetKernel), ENTRY(cuLibraryGetModule),
  ENTRY(cuKernelGetFunction), ENTRY(cuFuncGetAttribute), ENTRY(cuKernelGetAttribute), ENTRY(cuFuncSetAttribute),
  ENTRY(cuOccupancyMaxActiveBlocksPerMultiprocessor), ENTRY(cuLaunchKernel), ENTRY(cuLaunchKernelEx),
};

CUresult cuGetProcAddress(const char *name, void **address, int version, cuuint64_t flags,
                          CUdriverProcAddressQueryResult *status) {
  (void)version, (void)flags;
  REQUIRE(name && address, CUDA_ERROR_INVALID_VALUE);
  *address = NULL;
  for (size_t i = 0; i < sizeof functions / sizeof *functions && !*address; i++)
    if (!strcmp(functions[i].name, name)) *address = functions[i].address;
  if (status) *status = *address ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  return *address ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

#define ERROR(name, text) {name, #name, text}
static const struct { CUresult code; const char *name, *text; } errors[] = {
  ERROR(CUDA_SUCCESS, "no error"),
  ERROR(CUDA_ERROR_INVALID_VALUE, "invalid argument"),
  ERROR(CUDA_ERROR_OUT_OF_MEMORY, "out of memory"),
  ERROR(CUDA_ERROR_NOT_INITIALIZED, "initialization error"),
  ERROR(CUDA_ERROR_NO_DEVICE, "no CUDA-capable device is detected"),
  ERROR(CUDA_ERROR_INVALID_DEVICE, "invalid device ordinal"),
  ERROR(CUDA_ERROR_INVALID_IMAGE, "device kernel image is invalid"),
  ERROR(CUDA_ERROR_INVALID_CONTEXT, "invalid device context"),
  ERROR(CUDA_ERROR_INVALID_HANDLE, "invalid resource handle"),
  ERROR(CUDA_ERROR_ILLEGAL_STATE, "the operation cannot be performed in the present state"),
  ERROR(CUDA_ERROR_NOT_FOUND, "named symbol not found"),
  ERROR(CUDA_ERROR_NOT_READY, "device not ready"),
  ERROR(CUDA_ERROR_ILLEGAL_ADDRESS, "an illegal memory access was encountered"),
  ERROR(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, "part or all of the requested memory range is already mapped"),
  ERROR(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, "pointer does not correspond to a registered memory region"),
  ERROR(CUDA_ERROR_NOT_SUPPORTED, "operation not supported"),
  ERROR(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "operation not permitted when stream is capturing"),
  ERROR(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, "operation failed due to a previous error during capture"),
  ERROR(CUDA_ERROR_STREAM_CAPTURE_MERGE, "operation would result in a merge of separate capture sequences"),
  ERROR(CUDA_ERROR_STREAM_CAPTURE_UNMATCHED, "capture was not ended in the same stream as it began"),
  ERROR(CUDA_ERROR_STREAM_CAPTURE_UNJOINED, "capturing stream has unjoined work"),
  ERROR(CUDA_ERROR_STREAM_CAPTURE_ISOLATION, "dependency created on uncaptured work in another stream"),
  ERROR(CUDA_ERROR_CAPTURED_EVENT, "operation not permitted on an event last recorded in a capturing stream"),
  ERROR(CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD, "attempt to terminate a thread-local capture sequence from another thread"),
  ERROR(CUDA_ERROR_UNKNOWN, "unknown error"),
};

static CUresult say(CUresult code, const char **text, bool name) {
  for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
    if (errors[i].code == code) {
      *text = name ? errors[i].name : errors[i].text;
      return CUDA_SUCCESS;
    }
  *text = NULL;
  return CUDA_ERROR_INVALID_VALUE;
}

CUresult cuGetErrorName(CUresult code, const char **text) { return say(code, text, true); }

CUresult cuGetErrorString(CUresult code, const char **text) { return say(code, text, false); }
