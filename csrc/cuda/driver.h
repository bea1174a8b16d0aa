// The CUDA driver API that the launcher needs, loaded from libcuda.so.1 when it is first used: no
// toolkit is needed to build or to run. Declared here as in NVIDIA's documentation of the API.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace metalmm::cuda {

using Result = int;  // CUresult; 0 is success
using Module = struct CUmod_st*;
using Function = struct CUfunc_st*;
using Stream = struct CUstream_st*;
using Context = struct CUctx_st*;
using Device = int;

enum JitOption : int { kJitErrorLogBuffer = 5, kJitErrorLogBufferBytes = 6 };
enum DeviceAttribute : int { kMultiprocessorCount = 16 };
// Resources of a thread: bytes of arrays in memory and of spills; registers.
enum FunctionAttribute : int { kLocalBytes = 3, kRegisterCount = 4 };

struct Driver {
  Result (*module_load)(Module*, const void* image, unsigned n_options, JitOption* options,
                        void** values);
  Result (*module_unload)(Module);
  Result (*module_get_function)(Function*, Module, const char* name);
  Result (*function_get_attribute)(int* value, FunctionAttribute, Function);
  // Threadgroups that a multiprocessor of the current context takes at once.
  Result (*threadgroups_at_once)(int* threadgroups, Function, int threads, size_t shared_bytes);
  Result (*launch)(Function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned group_x,
                   unsigned group_y, unsigned group_z, unsigned shared_bytes, Stream,
                   void** parameters, void** extra);
  Result (*error_name)(Result, const char** name);
  Result (*device_get)(Device*, int ordinal);
  Result (*device_get_attribute)(int* value, DeviceAttribute, Device);
  Result (*context_get_current)(Context*);
  Result (*context_set_current)(Context);
  Result (*primary_context_retain)(Context*, Device);
};

// Throws std::runtime_error where there is no driver.
const Driver& driver();

// Throws std::runtime_error that names `what` and the error, unless it is success.
void check(Result result, const std::string& what);

int multiprocessors(int device);

// Makes the context that torch uses the calling thread's, if the thread has none.
void require_context(int device);

// The stream that torch uses for the device. Throws std::runtime_error in a torch without CUDA.
Stream current_stream(int device);

}  // namespace metalmm::cuda
