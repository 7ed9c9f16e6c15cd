// Stands in for libcuda.so.1 where there is no GPU: it holds callers to the driver's contract, writes down each
// launch, and runs the kernel on the CPU where a test has given it one.
#include <dlfcn.h>
#include <stddef.h>
#include <string.h>

enum { OK = 0, INVALID_VALUE = 1, NOT_INITIALIZED = 3, INVALID_DEVICE = 101, INVALID_IMAGE = 200,
       INVALID_CONTEXT = 201, INVALID_HANDLE = 400, NOT_FOUND = 500, ILLEGAL_ADDRESS = 700, OUT_OF_RESOURCES = 701,
       LAUNCH_FAILED = 719, NOT_SUPPORTED = 801 };
enum { DEVICES = 2, MODULES = 4096, DEPTH = 16, MOST_SHARED = 227 * 1024 };

typedef int (*Run)(void** parameters, const unsigned* grid, const unsigned* block, unsigned shared);
typedef struct { char name[256]; const char* image; int device; } Module;
typedef struct { Module* module; int shared; Run run; } Function;

static int dry = 1, initialized, fail_next, modules, depth;
static int stack[DEPTH];
static Module module_of[MODULES];
static Function function_of[MODULES];
static void* emulation;

// What the last launch was, for tests.
typedef struct {
  int launches, loads, device, allowed, depth;
  unsigned grid[3], block[3], shared;
  void* stream;
  char name[256];
} Record;
static Record last;

#define EXPORT __attribute__((visibility("default")))

EXPORT Record* fake_record(void) { last.depth = depth; return &last; }
// Forget what was; `is_dry`: launches are written down, and whether anything runs is no matter.
EXPORT void fake_reset(int is_dry) { memset(&last, 0, sizeof last); fail_next = 0; dry = is_dry; }
EXPORT void fake_fail(int status) { fail_next = status; }
EXPORT int fake_emulate(const char* path) { emulation = dlopen(path, RTLD_NOW); return emulation != 0; }

EXPORT int cuInit(unsigned flags) { initialized = 1; return flags ? INVALID_VALUE : OK; }

EXPORT int cuGetErrorName(int status, const char** text) {
  *text = status == OUT_OF_RESOURCES ? "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES"
        : status == INVALID_VALUE ? "CUDA_ERROR_INVALID_VALUE"
        : status == INVALID_IMAGE ? "CUDA_ERROR_INVALID_IMAGE"
        : status == NOT_FOUND ? "CUDA_ERROR_NOT_FOUND"
        : status == ILLEGAL_ADDRESS ? "CUDA_ERROR_ILLEGAL_ADDRESS"
        : status == LAUNCH_FAILED ? "CUDA_ERROR_LAUNCH_FAILED" : NULL;
  return *text ? OK : INVALID_VALUE;
}
EXPORT int cuGetErrorString(int status, const char** text) {
  *text = status == OUT_OF_RESOURCES ? "too many resources requested for launch"
        : status == INVALID_VALUE ? "invalid argument" : NULL;
  return *text ? OK : INVALID_VALUE;
}

EXPORT int cuDeviceGet(int* device, int ordinal) {
  if (!initialized) return NOT_INITIALIZED;
  *device = ordinal;
  return ordinal < DEVICES ? OK : INVALID_DEVICE;
}
EXPORT int cuDevicePrimaryCtxRetain(void** context, int device) {
  *context = (void*)(size_t)(0x100 + device);
  return initialized ? OK : NOT_INITIALIZED;
}
EXPORT int cuCtxPushCurrent_v2(void* context) {
  if (depth == DEPTH) return INVALID_VALUE;
  stack[depth++] = (int)((size_t)context - 0x100);
  return OK;
}
EXPORT int cuCtxPopCurrent_v2(void** context) {
  if (!depth) return INVALID_CONTEXT;
  *context = (void*)(size_t)(0x100 + stack[--depth]);
  return OK;
}

EXPORT int cuModuleLoadData(void** module, const void* image) {
  const unsigned char* bytes = image;
  if (!depth) return INVALID_CONTEXT;
  if (memcmp(bytes, "\x7f" "ELF", 4) || bytes[18] != 190) return INVALID_IMAGE;  // EM_CUDA
  Module* loaded = &module_of[modules++];
  loaded->image = image;
  loaded->device = stack[depth - 1];
  last.loads++;
  *module = loaded;
  return OK;
}

// The sections of an ELF file hold each kernel's code in `.text.NAME`.
static int holds(const char* image, const char* name) {
  size_t sections, named;
  unsigned short width, count, names;
  memcpy(&sections, image + 40, 8);
  memcpy(&width, image + 58, 2), memcpy(&count, image + 60, 2), memcpy(&names, image + 62, 2);
  memcpy(&named, image + sections + (size_t)names * width + 24, 8);
  for (unsigned at = 0; at < count; at++) {
    unsigned where;
    memcpy(&where, image + sections + (size_t)at * width, 4);
    const char* text = image + named + where;
    if (!strncmp(text, ".text.", 6) && !strcmp(text + 6, name)) return 1;
  }
  return 0;
}

EXPORT int cuModuleGetFunction(void** function, void* module, const char* name) {
  Module* loaded = module;
  if (!holds(loaded->image, name)) return NOT_FOUND;
  strncpy(loaded->name, name, sizeof loaded->name - 1);
  Function* found = &function_of[loaded - module_of];
  found->module = loaded;
  found->shared = 48 * 1024;
  found->run = NULL;
  if (emulation) {
    Run (*emulated)(const char*) = (Run(*)(const char*))dlsym(emulation, "emulated");
    found->run = emulated(name);
  }
  *function = found;
  return OK;
}

EXPORT int cuFuncSetAttribute(void* function, int attribute, int value) {
  if (attribute != 8 || value > MOST_SHARED) return INVALID_VALUE;
  last.allowed = ((Function*)function)->shared = value;
  return OK;
}

EXPORT int cuLaunchKernel(void* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                          unsigned bz, unsigned shared, void* stream, void** parameters, void** extra) {
  Function* launched = function;
  if (fail_next) {
    int status = fail_next;
    fail_next = 0;
    return status;
  }
  if (!depth || stack[depth - 1] != launched->module->device) return INVALID_HANDLE;
  if (!gx || !gy || !gz || !bx || !by || !bz || bx * by * bz > 1024 || extra) return INVALID_VALUE;
  if ((int)shared > launched->shared) return INVALID_VALUE;
  if (!dry && !launched->run) return NOT_SUPPORTED;
  last.launches++;
  last.device = launched->module->device;
  last.grid[0] = gx, last.grid[1] = gy, last.grid[2] = gz;
  last.block[0] = bx, last.block[1] = by, last.block[2] = bz;
  last.shared = shared;
  last.stream = stream;
  strcpy(last.name, launched->module->name);
  // A GPU tells what a kernel did wrong later; here it is told at once.
  return launched->run ? launched->run(parameters, last.grid, last.block, shared) : OK;
}
