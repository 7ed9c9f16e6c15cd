// Tables of the CUDA kernels of a library: images, instances, launches and buffers. `cuda_tables.py` writes them.
#pragma once
#include "expression.h"

namespace opsmith {

// As in opsmith_cuda.h: what a kernel takes, and how it lies in memory.
struct CudaParameter {
  int32_t type, optional, written, dtype, dim, layout;
  int32_t room;  // capacity of a list
  int32_t item;  // bytes of a number
  int32_t size, alignment;
};
constexpr int64_t max_view_dim = 8;  // of a view that has any number of dimensions

// A cubin, or PTX for later GPUs.
struct CudaImage {
  bool ptx;
  char suffix;     // `a`: for that GPU alone; `f`: for its family; 0
  int32_t target;  // 90 for sm_90 and compute_90
  int64_t at;      // offset among the images
  int32_t shared;  // bytes of static shared memory
};

struct CudaInstance {
  const char* name;  // in the images
  const CudaImage* images;  // the best first
  int32_t image_count;
  const CudaParameter* parameters;
  int32_t parameter_count;
};

struct CudaLaunch {
  const char* call;       // the kernel with what it gets, for messages
  const int32_t* passed;  // places of what it gets among the values of a call
  Rule grid, block, shared;
};

// Instances of the launches for one dtype, and for one value of each constant.
struct CudaVariant {
  const int64_t* constants;  // of the templates of all launches
  const CudaInstance* const* instances;  // of each launch
  Candidate candidate;           // takes no more than each launch does
  const CudaParameter* taken;    // the same for the arguments, with capacities
};

struct CudaBuffer {
  Rule sizes;        // of a scratch buffer; null for a result
  int32_t dtype;     // of a scratch buffer; -1 for that of another value
  int32_t dtype_at;  // place of that value
  Rule initial;      // the number that fills it; null if nothing does
};

struct CudaKernel {
  Rule constants;
  int32_t constant_count;
  const char* constant_names;  // for messages
  const CudaLaunch* launches;
  int32_t launch_count;
  const CudaVariant* variants;  // in the order in which they are tried
  int32_t variant_count;
  const CudaBuffer* buffers;  // results, then scratch buffers
  int32_t buffer_count;
  bool copies_back;
};

struct CudaOperator {
  const CudaKernel* kernels;  // in the order in which they are tried
  int32_t count;
};
}  // namespace opsmith

extern "C" const unsigned char opsmith_images[];
