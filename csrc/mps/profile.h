// A pass as torch's MPS profiler sees it. Objective-C++ only.
#pragma once

#include <ATen/mps/MPSProfiler.h>
#include <ATen/mps/MPSStream.h>
#include <torch/version.h>

#include <string>

namespace metalmm::mps {

// From torch 2.15 on a thread may have a stream of its own. The profiler then ends the passes of
// the stream it is told; of none, it asks the thread that runs the block on the stream's queue.
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 15
#define MM_OF_STREAM(stream) , stream
#else
#define MM_OF_STREAM(stream)
#endif

// `handle` tells passes apart.
inline void begin_profile(const void* handle, const std::string& name,
                          [[maybe_unused]] at::mps::MPSStream* stream) {
  at::mps::getMPSProfiler().beginProfileKernel(handle, name, false MM_OF_STREAM(stream));
}

inline void end_profile(const void* handle, [[maybe_unused]] at::mps::MPSStream* stream) {
  at::mps::getMPSProfiler().endProfileKernel(handle MM_OF_STREAM(stream));
}

#undef MM_OF_STREAM

}  // namespace metalmm::mps
