/* Modules and kernels. A module's image is not looked at; a kernel is found by its name, and run on
 * the stream's thread by the CPU twin that the test has registered under a part of that name; those
 * of nc10d itself are known.
 * The driver knows a kernel's parameters from the module; here the twin's registration says them. */
#include "emulator.h"

#define MOST_TWINS 64
#define MOST_PARAMETERS 48
#define NAME 512

struct twin {
  char part[NAME];
  twin_fn run;
  int count;
  unsigned sizes[MOST_PARAMETERS];
};

struct CUmod_st {
  int unused;
};

struct CUfunc_st {
  char name[NAME];
};

static struct twin twins[MOST_TWINS];
static int registered;

/* Not part of the driver: tests register a twin for kernels whose name has `part` in it. */
CUresult cuemuRegisterKernel(const char *part, twin_fn run, int count, const unsigned *sizes);

CUresult cuemuRegisterKernel(const char *part, twin_fn run, int count, const unsigned *sizes) {
  REQUIRE(registered < MOST_TWINS && count <= MOST_PARAMETERS && strlen(part) < NAME, CUDA_ERROR_INVALID_VALUE);
  struct twin *twin = &twins[registered];
  strcpy(twin->part, part);
  twin->run = run;
  twin->count = count;
  memcpy(twin->sizes, sizes, count * sizeof *sizes);
  registered++;
  return CUDA_SUCCESS;
}

/* The latest registration counts; without one a kernel may be one of nc10d's own. */
static struct twin *find(const char *name) {
  for (int i = registered - 1; i >= 0; i--)
    if (strstr(name, twins[i].part)) return &twins[i];
  int count;
  unsigned sizes[MOST_PARAMETERS];
  for (int i = 0; i < MOST_PARAMETERS; i++) sizes[i] = 8;
  twin_fn own = cuemu_packing(name, &count);
  return own && cuemuRegisterKernel(name, own, count, sizes) == CUDA_SUCCESS ? find(name) : NULL;
}

/* Whether an image is PTX of a later version than NC10D_EMULATED_PTX ("8.4"), if that is set. */
static int newer_ptx(const char *image) {
  const char *most = getenv("NC10D_EMULATED_PTX");
  if (!most || !strchr("/.\n", *image)) return 0; /* other images are binary */
  const char *found = strstr(image, ".version ");
  return found && atof(found + strlen(".version ")) > atof(most);
}

CUresult cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned count, CUjit_option *options, void **values) {
  (void)count, (void)options, (void)values;
  NEED_CONTEXT();
  REQUIRE(module && image, CUDA_ERROR_INVALID_IMAGE);
  REQUIRE(!newer_ptx(image), CUDA_ERROR_UNSUPPORTED_PTX_VERSION);
  *module = calloc(1, sizeof **module);
  return CUDA_SUCCESS;
}

CUresult cuModuleLoadData(CUmodule *module, const void *image) {
  return cuModuleLoadDataEx(module, image, 0, NULL, NULL);
}

CUresult cuModuleUnload(CUmodule module) {
  NEED_CONTEXT();
  REQUIRE(module, CUDA_ERROR_INVALID_HANDLE);
  free(module);
  return CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
  NEED_CONTEXT();
  REQUIRE(module && name && strlen(name) < NAME, CUDA_ERROR_INVALID_VALUE);
  *function = calloc(1, sizeof **function); /* stays: modules live as long as programs */
  strcpy((*function)->name, name);
  return CUDA_SUCCESS;
}

/* The newer names of the same things. */
CUresult cuLibraryLoadData(CUlibrary *library, const void *code, CUjit_option *jit, void **jit_values, unsigned jits,
                           CUlibraryOption *options, void **values, unsigned count) {
  (void)jit, (void)jit_values, (void)jits, (void)options, (void)values, (void)count;
  return cuModuleLoadData((CUmodule *)library, code);
}

CUresult cuLibraryUnload(CUlibrary library) { return cuModuleUnload((CUmodule)library); }

CUresult cuLibraryGetKernel(CUkernel *kernel, CUlibrary library, const char *name) {
  return cuModuleGetFunction((CUfunction *)kernel, (CUmodule)library, name);
}

CUresult cuLibraryGetModule(CUmodule *module, CUlibrary library) {
  NEED_CONTEXT();
  *module = (CUmodule)library;
  return CUDA_SUCCESS;
}

CUresult cuKernelGetFunction(CUfunction *function, CUkernel kernel) {
  NEED_CONTEXT();
  *function = (CUfunction)kernel;
  return CUDA_SUCCESS;
}

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
  NEED_CONTEXT();
  REQUIRE(function, CUDA_ERROR_INVALID_HANDLE);
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024
           : attribute == CU_FUNC_ATTRIBUTE_NUM_REGS            ? 32
                                                                : 0;
  return CUDA_SUCCESS;
}

CUresult cuKernelGetAttribute(int *value, CUfunction_attribute attribute, CUkernel kernel, CUdevice device) {
  (void)device;
  return cuFuncGetAttribute(value, attribute, (CUfunction)kernel);
}

CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
  NEED_CONTEXT();
  (void)attribute, (void)value;
  return function ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, CUfunction function, int threads, size_t shared) {
  NEED_CONTEXT();
  (void)shared;
  REQUIRE(function && threads > 0, CUDA_ERROR_INVALID_VALUE);
  *blocks = 2048 / threads;
  return CUDA_SUCCESS;
}

struct launch {
  struct twin *twin;
  unsigned grid[3], block[3];
  uint64_t values[MOST_PARAMETERS];
};

static void run_launch(void *args) {
  struct launch *launch = args;
  void *pointers[MOST_PARAMETERS];
  for (int i = 0; i < launch->twin->count; i++) pointers[i] = &launch->values[i];
  launch->twin->run(launch->grid, launch->block, pointers);
}

CUresult cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                        unsigned block_y, unsigned block_z, unsigned shared, CUstream stream, void **args,
                        void **extra) {
  NEED_CONTEXT();
  (void)shared;
  REQUIRE(function, CUDA_ERROR_INVALID_HANDLE);
  REQUIRE(grid_x && grid_y && grid_z && block_x && block_y && block_z, CUDA_ERROR_INVALID_VALUE);
  REQUIRE((size_t)block_x * block_y * block_z <= 1024, CUDA_ERROR_INVALID_VALUE);
  CUstream found = cuemu_stream(stream);
  REQUIRE(found && found->ctx == cuemu_context(), CUDA_ERROR_INVALID_HANDLE);
  struct twin *twin = find(function->name);
  REQUIRE(twin && !extra, CUDA_ERROR_NOT_SUPPORTED); /* nobody has said what this kernel does */
  struct launch launch = {twin, {grid_x, grid_y, grid_z}, {block_x, block_y, block_z}, {0}};
  for (int i = 0; i < twin->count; i++) {
    REQUIRE(twin->sizes[i] <= sizeof *launch.values, CUDA_ERROR_NOT_SUPPORTED);
    memcpy(&launch.values[i], args[i], twin->sizes[i]);
  }
  return cuemu_enqueue(stream, run_launch, &launch, sizeof launch);
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *c, CUfunction function, void **args, void **extra) {
  NEED_CONTEXT();
  REQUIRE(c, CUDA_ERROR_INVALID_VALUE);
  return cuLaunchKernel(function, c->gridDimX, c->gridDimY, c->gridDimZ, c->blockDimX, c->blockDimY, c->blockDimZ,
                        c->sharedMemBytes, c->hStream, args, extra);
}
