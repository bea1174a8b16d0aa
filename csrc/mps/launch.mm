#include "launch.h"

#include <ATen/mps/MPSDevice.h>
#include <ATen/mps/MPSStream.h>

#include <thread>
#include <vector>

#include "decisions/commits.h"
#include "decisions/residency.h"
#include "decisions/settings.h"
#include "metal.h"
#include "plan/launch.h"
#include "profile.h"

namespace metalmm::mps {
namespace {

// Everything of the device. Never destroyed: at exit torch's device may go first.
struct Metal {
  Gpu gpu;
  Pipelines<MetalDevice> pipelines;
  Commits commits;
};

using Weights = Residency<MetalSet, WeakWeight>;

Metal* make_metal() {
  Gpu gpu = supported_gpu(facts());
  gpu.sdpa_queries = sdpa_from();
  const MetalDevice device(at::mps::MPSDevice::getInstance()->device());
  return new Metal{gpu, Pipelines<MetalDevice>(device), Commits(commit_every())};
}

Weights* make_weights() {
  auto* made = new Weights(MetalSet(at::mps::MPSDevice::getInstance()->device()));
  std::thread([made] {
    for (;;) {
      std::this_thread::sleep_for(kBeat);
      @autoreleasepool {
        made->beat();
      }
    }
  }).detach();
  return made;
}

Metal& metal() {
  static Metal* made = make_metal();
  return *made;
}

// Null on macOS before 15.
Weights* weights() {
  static Weights* made = MetalSet::is_there() ? make_weights() : nullptr;
  return made;
}

// The Encoder of encode() in plan/launch.h, for one pass. Only messages that torch's recording
// encoder knows.
class MetalEncoder {
 public:
  MetalEncoder(id<MTLComputeCommandEncoder> encoder, id<MTLComputePipelineState> pipeline)
      : encoder_(encoder), pipeline_(pipeline) {}

  void set_pipeline(const Pass&) { [encoder_ setComputePipelineState:pipeline_]; }
  void set_buffer(uint32_t slot, const Buffer& b) {
    [encoder_ setBuffer:(__bridge id<MTLBuffer>)b.base offset:b.offset atIndex:slot];
  }
  void set_bytes(uint32_t slot, const void* bytes, size_t count) {
    [encoder_ setBytes:bytes length:count atIndex:slot];
  }
  void set_threadgroup_memory(uint32_t index, uint32_t bytes) {
    [encoder_ setThreadgroupMemoryLength:bytes atIndex:index];
  }
  void dispatch(const std::array<uint32_t, 3>& grid, const std::array<uint32_t, 3>& threads) {
    [encoder_ dispatchThreadgroups:MTLSizeMake(grid[0], grid[1], grid[2])
             threadsPerThreadgroup:MTLSizeMake(threads[0], threads[1], threads[2])];
  }

 private:
  id<MTLComputeCommandEncoder> encoder_;
  id<MTLComputePipelineState> pipeline_;
};

// Pipelines live as long as the process.
void find_pipelines(const BoundPlan& launch) {
  const std::vector<Pass>& passes = launch.plan.passes;
  for (size_t i = launch.found.size(); i < passes.size(); ++i) {
    launch.found.push_back((__bridge const void*)metal().pipelines.of(passes[i]));
  }
}

void encode_passes(const BoundPlan& launch, at::mps::MPSStream* stream) {
  for (size_t i = 0; i < launch.found.size(); ++i) {
    const Pass& pass = launch.plan.passes[i];
    begin_profile(launch.found[i], pass.kernel, stream);
    MetalEncoder encoder(stream->commandEncoder(),
                         (__bridge id<MTLComputePipelineState>)launch.found[i]);
    encode(encoder, pass, launch.buffers);
    end_profile(launch.found[i], stream);
  }
}

}  // namespace

Facts facts() {
  if (!at::mps::is_available()) throw std::runtime_error("metalmm: torch has no MPS device here");
  at::mps::MPSDevice* device = at::mps::MPSDevice::getInstance();
  uint32_t cores = 0;
  try {
    cores = device->getCoreCount();  // property of the I/O registry's AGXAccelerator
  } catch (const std::exception&) {  // then the table of chips has it
  }
  return facts_of(device->device(), cores);
}

const Gpu& gpu() { return metal().gpu; }

void compile(const Pass& pass) {
  @autoreleasepool {
    metal().pipelines.of(pass);
  }
}

void keep_resident(const void* buffer, const std::function<WeakWeight()>& weight) {
  if (Weights* all = weights()) all->use(buffer, weight);
}

void launch(const BoundPlans& launches) {
  @autoreleasepool {
    Metal& m = metal();
    for (const BoundPlan& each : launches) find_pipelines(each);  // before the queue waits for us
    if (Weights* all = weights()) all->use();
    const BoundPlans* list = &launches;
    at::mps::MPSStream* stream = at::mps::getCurrentMPSStream();
    at::mps::dispatch_sync_with_rethrow(stream->queue(), ^{
      @autoreleasepool {
        for (const BoundPlan& each : *list) {
          encode_passes(each, stream);
          // Ends torch's encoder, commits, and goes on with another buffer; does not wait. torch
          // aborts where this happens outside the stream's queue.
          if (m.commits.is_due(stream, each.plan.passes.size())) {
            stream->synchronize(at::mps::SyncType::COMMIT);
          }
        }
      }
    });
  }
}

}  // namespace metalmm::mps
