#include "metal.h"

#include "gpu/beside.h"

namespace metalmm::mps {
namespace {

NSString* text(const std::string& s) { return [NSString stringWithUTF8String:s.c_str()]; }

void report(NSError* error, std::string* log) {
  if (error) *log = error.localizedDescription.UTF8String;
}

}  // namespace

std::string archive_path() { return beside_module("metalmm.metallib"); }

id<MTLLibrary> MetalDevice::archive() {
  return [device_ newLibraryWithURL:[NSURL fileURLWithPath:text(archive_path())] error:nil];
}

id<MTLLibrary> MetalDevice::compile(const std::string& source, std::string* log) {
  MTLCompileOptions* options = [MTLCompileOptions new];
  options.languageVersion = MTLLanguageVersion3_1;
  // NO means mathMode safe with precise functions on every system; setting the newer properties, of
  // macOS 15, would say the same in a second way.
#pragma clang diagnostic push
#pragma clang diagnostic ignored "-Wdeprecated-declarations"
  options.fastMathEnabled = NO;
#pragma clang diagnostic pop
  NSError* error = nil;
  id<MTLLibrary> out = [device_ newLibraryWithSource:text(source) options:options error:&error];
  if (!out) report(error, log);
  return out;
}

id<MTLFunction> MetalDevice::function(Library library, const Pass& pass, std::string* log) {
  MTLFunctionConstantValues* values = [MTLFunctionConstantValues new];
  for (uint32_t i = 0; i < kConstantCount; ++i) {
    [values setConstantValue:&pass.constants[i] type:MTLDataTypeUInt atIndex:i];
  }
  NSError* error = nil;
  id<MTLFunction> out = [library newFunctionWithName:text(pass.kernel)
                                      constantValues:values
                                               error:&error];
  if (!out) report(error, log);
  return out;
}

id<MTLComputePipelineState> MetalDevice::pipeline(Function function, std::string* log) {
  NSError* error = nil;
  id<MTLComputePipelineState> out = [device_ newComputePipelineStateWithFunction:function
                                                                           error:&error];
  if (!out) report(error, log);
  return out;
}

// An SDK before macOS 15's has no such set.
#if __has_include(<Metal/MTLResidencySet.h>)
#define MM_SET(...)                         \
  if (@available(macOS 15.0, *)) {          \
    auto set = (id<MTLResidencySet>)(set_); \
    __VA_ARGS__;                            \
  }
bool MetalSet::is_there() {
  if (@available(macOS 15.0, *)) return true;
  return false;
}
MetalSet::MetalSet(id<MTLDevice> device) {
  if (@available(macOS 15.0, *)) {
    MTLResidencySetDescriptor* wanted = [MTLResidencySetDescriptor new];
    set_ = [device newResidencySetWithDescriptor:wanted error:nil];
  }
}
#else
#define MM_SET(...)
bool MetalSet::is_there() { return false; }
MetalSet::MetalSet(id<MTLDevice>) {}
#endif

MetalSet::Handle MetalSet::of(const void* buffer) {
  id<MTLBuffer> b = (__bridge id<MTLBuffer>)buffer;
  id<NSObject> heap = b.heap;
  return heap ? heap : b;
}
void MetalSet::add([[maybe_unused]] Handle handle) {
  MM_SET([set addAllocation:(id<MTLAllocation>)handle])
}
void MetalSet::remove([[maybe_unused]] Handle handle) {
  MM_SET([set removeAllocation:(id<MTLAllocation>)handle])
}
void MetalSet::commit() { MM_SET([set commit]) }
void MetalSet::request() { MM_SET([set requestResidency]) }
void MetalSet::end(){MM_SET([set endResidency])}
#undef MM_SET

Facts facts_of(id<MTLDevice> device, uint32_t cores) {
  Facts out;
  out.name = device.name.UTF8String;
  for (int family = kLastFamily; family >= kFirstFamily && !out.family; --family) {
    // Families newer than the SDK have no name in it; the numbers are 1000 + n.
    if ([device supportsFamily:static_cast<MTLGPUFamily>(1000 + family)]) out.family = family;
  }
  out.cores = cores;
  out.max_threadgroup_memory = static_cast<uint32_t>(device.maxThreadgroupMemoryLength);
  out.max_threads = static_cast<uint32_t>(device.maxThreadsPerThreadgroup.width);
  out.macos = static_cast<int>(NSProcessInfo.processInfo.operatingSystemVersion.majorVersion);
  return out;
}

}  // namespace metalmm::mps
