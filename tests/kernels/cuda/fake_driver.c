// Stands in for libcuda.so.1 where there is no GPU: it holds callers to the driver's contract, and writes down each
// launch. What a kernel takes of a GPU it reads from the cubin, as the driver does.
#include <stddef.h>
#include <string.h>

enum { OK = 0, INVALID_VALUE = 1, NOT_INITIALIZED = 3, INVALID_DEVICE = 101, INVALID_IMAGE = 200,
       INVALID_CONTEXT = 201, NO_BINARY_FOR_GPU = 209, UNSUPPORTED_PTX_VERSION = 222, INVALID_HANDLE = 400, NOT_FOUND = 500, OUT_OF_RESOURCES = 701 };
enum { DEVICES = 2, MODULES = 4096, DEPTH = 16 };
// Of sm_90: bytes of shared memory that a block has by default, and at most; threads of a block; registers of a block.
enum { USUAL_SHARED = 48 * 1024, MOST_SHARED = 227 * 1024, MOST_THREADS = 1024, MOST_REGISTERS = 64 * 1024 };

// Bytes that the system takes of each block; the section of a kernel's shared memory counts them, too.
enum { RESERVED_SHARED = 1024 };
// Numbers of attributes of kernels in cubins: most threads of a block in three numbers; registers of a symbol.
enum { MAX_THREADS = 5, REGISTERS = 0x2f };

typedef struct { char name[256]; const char* image; int device; } Module;
// `shared`: bytes of static shared memory; `dynamic`: as many bytes of dynamic shared memory may be launched with.
typedef struct { Module* module; unsigned shared, dynamic, threads, registers; } Function;

static int initialized, fail_next, modules, lost, refused, refusals;
static __thread int depth, stack[DEPTH];  // each thread has contexts of its own
static Module module_of[MODULES];
static Function function_of[MODULES];

// What the last launch was, for tests.
typedef struct {
  int launches, loads, device, allowed, prefers_shared, depth;
  unsigned grid[3], block[3], shared;
  void* stream;
  char name[256];
} Record;
static Record last;

#define EXPORT __attribute__((visibility("default")))

// Called for each launch: handle and name of the kernel, grid and block and bytes of shared memory, addresses of the
// parameters. Returns the status of the launch.
static int (*on_launch)(void*, const char*, const unsigned*, void**);
static int capturing;

EXPORT void fake_on_launch(int (*called)(void*, const char*, const unsigned*, void**)) { on_launch = called; }
EXPORT void fake_capture(int captures) { capturing = captures; }

EXPORT Record* fake_record(void) { last.depth = depth; return &last; }
EXPORT void fake_reset(void) { memset(&last, 0, sizeof last); fail_next = refusals = 0; }
EXPORT void fake_fail(int status) { fail_next = status; }
// Refuses the next images with a status.
EXPORT void fake_refuse(int status, int images) { refused = status, refusals = images; }
// Lets no context be made current, as in a forked process.
EXPORT void fake_lose(int loses) { lost = loses; }

EXPORT int cuInit(unsigned flags) { initialized = 1; return flags ? INVALID_VALUE : OK; }

EXPORT int cuGetErrorName(int status, const char** text) {
  *text = status == OUT_OF_RESOURCES ? "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES"
        : status == INVALID_VALUE ? "CUDA_ERROR_INVALID_VALUE"
        : status == INVALID_IMAGE ? "CUDA_ERROR_INVALID_IMAGE"
        : status == NO_BINARY_FOR_GPU ? "CUDA_ERROR_NO_BINARY_FOR_GPU"
        : status == UNSUPPORTED_PTX_VERSION ? "CUDA_ERROR_UNSUPPORTED_PTX_VERSION"
        : status == NOT_FOUND ? "CUDA_ERROR_NOT_FOUND" : NULL;
  return *text ? OK : INVALID_VALUE;
}
EXPORT int cuGetErrorString(int status, const char** text) {
  *text = status == OUT_OF_RESOURCES ? "too many resources requested for launch"
        : status == INVALID_VALUE ? "invalid argument" : NULL;
  return *text ? OK : INVALID_VALUE;
}

EXPORT int cuDriverGetVersion(int* version) { return *version = 12040, OK; }
EXPORT int cuDeviceGet(int* device, int ordinal) {
  if (!initialized) return NOT_INITIALIZED;
  *device = ordinal;
  return ordinal < DEVICES ? OK : INVALID_DEVICE;
}
EXPORT int cuDeviceGetAttribute(int* value, int attribute, int device) {
  *value = attribute == 75 ? 9 : 0;  // the compute capability, major and minor
  return device < DEVICES && (attribute == 75 || attribute == 76) ? OK : INVALID_VALUE;
}
EXPORT int cuStreamIsCapturing(void* stream, int* status) {
  *status = capturing;
  return stream ? OK : INVALID_VALUE;
}
// Torch's current stream, as its part for CUDA has it.
EXPORT int aoti_torch_get_current_cuda_stream(int device, void** stream) {
  *stream = (void*)(size_t)(0x5eed + device);
  return 0;
}
EXPORT int cuDevicePrimaryCtxRetain(void** context, int device) {
  *context = (void*)(size_t)(0x100 + device);
  return initialized ? OK : NOT_INITIALIZED;
}
EXPORT int cuCtxPushCurrent_v2(void* context) {
  if (lost) return NOT_INITIALIZED;
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
  if (refusals > 0) return refusals--, refused;
  if (memcmp(bytes, "\x7f" "ELF", 4) || bytes[18] != 190) return INVALID_IMAGE;  // EM_CUDA
  Module* loaded = &module_of[modules++];
  loaded->image = image;
  loaded->device = stack[depth - 1];
  last.loads++;
  *module = loaded;
  return OK;
}

// Header of a section of an ELF file of 64 bits; NULL if there is none of this name.
typedef struct { unsigned name, type; size_t flags, address, offset, size; unsigned link, info; } Section;
static const Section* section_of(const char* image, const char* prefix, const char* name) {
  size_t sections;
  unsigned short width, count, names;
  memcpy(&sections, image + 40, 8);
  memcpy(&width, image + 58, 2), memcpy(&count, image + 60, 2), memcpy(&names, image + 62, 2);
  const Section* of_names = (const Section*)(image + sections + (size_t)names * width);
  for (unsigned at = 0; at < count; at++) {
    const Section* found = (const Section*)(image + sections + (size_t)at * width);
    const char* text = image + of_names->offset + found->name;
    if (!strncmp(text, prefix, strlen(prefix)) && !strcmp(text + strlen(prefix), name)) return found;
  }
  return NULL;
}

// Finds an attribute in a section `.nv.info`, and copies its bytes. An attribute is its form, 4 for one with a size, its
// number, and the size or the value. `symbol`: of which symbol it is, where it says that first; -1 for any.
static int attribute_of(const char* image, const Section* info, int number, int symbol, void* bytes, size_t count) {
  const char* at = info ? image + info->offset : NULL;
  for (const char* end = info ? at + info->size : NULL; at < end;) {
    unsigned short size = 0;
    int of = symbol;
    if (at[0] == 4) memcpy(&size, at + 2, 2);
    if (symbol >= 0 && size >= 4) memcpy(&of, at + 4, 4);
    if (at[0] == 4 && at[1] == number && of == symbol) return memcpy(bytes, at + 4, count) != NULL;
    at += 4 + size;
  }
  return 0;
}

static int symbol_of(const char* image, const char* name) {
  const Section *symbols = section_of(image, ".symtab", ""), *names = section_of(image, ".strtab", "");
  for (int at = 0; (size_t)at * 24 < symbols->size; at++) {
    unsigned text;
    memcpy(&text, image + symbols->offset + at * 24, 4);
    if (!strcmp(image + names->offset + text, name)) return at;
  }
  return -2;
}

EXPORT int cuModuleGetFunction(void** function, void* module, const char* name) {
  Module* loaded = module;
  const char* image = loaded->image;
  if (!section_of(image, ".text.", name)) return NOT_FOUND;
  const Section* shared = section_of(image, ".nv.shared.", name);
  const unsigned reserved = section_of(image, ".nv.shared.reserved.0", "") ? RESERVED_SHARED : 0;
  unsigned bounds[3] = {MOST_THREADS, 1, 1}, registers[2];
  attribute_of(image, section_of(image, ".nv.info.", name), MAX_THREADS, -1, bounds, sizeof bounds);
  if (!attribute_of(image, section_of(image, ".nv.info", ""), REGISTERS, symbol_of(image, name), registers, 8))
    return INVALID_IMAGE;
  strncpy(loaded->name, name, sizeof loaded->name - 1);
  Function* found = &function_of[loaded - module_of];
  found->module = loaded;
  found->shared = shared ? (unsigned)shared->size - reserved : 0;
  found->dynamic = USUAL_SHARED - found->shared;
  found->threads = bounds[0] * bounds[1] * bounds[2];
  found->registers = registers[1];
  *function = found;
  return OK;
}

// Registers of a block: a warp has them in pieces of 256, and four warps stand together.
static unsigned registers_of(const Function* function, unsigned threads) {
  const unsigned warps = (threads + 31) / 32, of_warp = (function->registers * 32 + 255) / 256 * 256;
  return (warps + 3) / 4 * 4 * of_warp;
}

EXPORT int cuFuncSetAttribute(void* function, int attribute, int value) {
  Function* changed = function;
  if (attribute != 8 || value < 0 || changed->shared + value > MOST_SHARED) return INVALID_VALUE;
  last.allowed = changed->dynamic = value;
  return OK;
}

EXPORT int cuFuncSetCacheConfig(void* function, int config) {
  if (!function || config != 1) return INVALID_VALUE;
  last.prefers_shared = 1;
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
  const unsigned threads = bx * by * bz;
  if (!gx || !gy || !gz || !threads || threads > launched->threads || extra) return INVALID_VALUE;
  if (shared > launched->dynamic) return INVALID_VALUE;
  if (registers_of(launched, threads) > MOST_REGISTERS) return OUT_OF_RESOURCES;
  __atomic_add_fetch(&last.launches, 1, __ATOMIC_RELAXED);
  last.device = launched->module->device;
  last.grid[0] = gx, last.grid[1] = gy, last.grid[2] = gz;
  last.block[0] = bx, last.block[1] = by, last.block[2] = bz;
  last.shared = shared;
  last.stream = stream;
  strcpy(last.name, launched->module->name);
  const unsigned numbers[] = {gx, gy, gz, bx, by, bz, shared};
  return on_launch ? on_launch(function, last.name, numbers, parameters) : OK;
}
