// The Metal device as Pipelines needs one. Objective-C++ only.
#pragma once

#import <Foundation/Foundation.h>
#import <Metal/Metal.h>

#include <string>

#include "facts.h"
#include "pipelines.h"

namespace metalmm::mps {

class MetalDevice {
 public:
  using Library = id<MTLLibrary>;
  using Function = id<MTLFunction>;
  using Pipeline = id<MTLComputePipelineState>;

  explicit MetalDevice(id<MTLDevice> device) : device_(device) {}

  Library archive();
  Library compile(const std::string& source, std::string* log);
  Function function(Library library, const Pass& pass, std::string* log);
  Pipeline pipeline(Function function, std::string* log);
  uint32_t max_threads(Pipeline p) {
    return static_cast<uint32_t>(p.maxTotalThreadsPerThreadgroup);
  }
  uint32_t simd_width(Pipeline p) { return static_cast<uint32_t>(p.threadExecutionWidth); }

 private:
  id<MTLDevice> device_;
};

// The set of residency.h, which macOS 15 brought. Handles are MTLBuffers and MTLHeaps.
class MetalSet {
 public:
  using Handle = id<NSObject>;

  static bool is_there();
  explicit MetalSet(id<MTLDevice> device);

  Handle of(const void* buffer);
  void add(Handle handle);
  void remove(Handle handle);
  void commit();
  void request();
  void end();

 private:
  id<NSObject> set_;
};

// The path of the library built ahead of time: beside this module, whether it is there or not.
std::string archive_path();

Facts facts_of(id<MTLDevice> device, uint32_t cores);

}  // namespace metalmm::mps
