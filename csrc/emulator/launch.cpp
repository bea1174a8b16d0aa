#include "launch.h"

#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <utility>

#include "plan/launch.h"

namespace metalmm {
namespace {

using LibraryPointer = std::shared_ptr<const ShaderLibrary>;

std::mutex g_mutex;
std::map<std::string, LibraryPointer> g_kernels;
std::function<void(const std::string&)> g_load;

LibraryPointer loaded(const std::string& kernel) {
  std::lock_guard<std::mutex> lock(g_mutex);
  const auto found = g_kernels.find(kernel);
  return found == g_kernels.end() ? nullptr : found->second;
}

LibraryPointer find(const std::string& kernel) {
  LibraryPointer found = loaded(kernel);
  if (!found && g_load) {
    g_load(kernel);
    found = loaded(kernel);
  }
  if (found) return found;
  throw std::runtime_error("emulator: no library that is loaded has the kernel " + kernel);
}

// The Encoder of encode() in plan/launch.h: fills in a launch, and runs it when it is dispatched.
class Encoder {
 public:
  explicit Encoder(const EmulatorOptions& options) : in_(launch_with(options)) {}

  void set_pipeline(const Pass& pass) {
    library_ = find(pass.kernel);
    in_.kernel = pass.kernel.c_str();
    for (uint32_t i = 0; i < kConstantCount; ++i) {
      constants_[i] = {i, 4, {}};
      memcpy(constants_[i].value, &pass.constants[i], 4);
    }
    in_.n_constants = kConstantCount;
    in_.constants = constants_;
  }
  void set_buffer(uint32_t slot, const Buffer& b) {
    in_.buffers[slot] = {static_cast<char*>(b.base) + b.offset, b.bytes};
  }
  void set_bytes(uint32_t slot, const void* bytes, size_t count) {
    bytes_.assign(static_cast<const char*>(bytes), count);
    in_.buffers[slot] = {bytes_.data(), count};
  }
  void set_threadgroup_memory(uint32_t index, uint32_t bytes) {
    in_.threadgroup_bytes[index] = bytes;
  }
  void dispatch(const Size& grid, const Size& threads) {
    set_grid(in_, grid, threads);
    if (const auto fault = library_->launch(in_)) throw std::runtime_error(message(*fault));
  }

 private:
  LibraryPointer library_;
  MmLaunch in_;
  MmConstant constants_[kConstantCount];
  std::string bytes_;  // aligned as malloc does, which KernelArgs needs
};

}  // namespace

void load_emulated(const std::string& path) {
  const auto library = std::make_shared<const ShaderLibrary>(path);
  std::lock_guard<std::mutex> lock(g_mutex);
  for (const MmKernelEntry& kernel : library->kernels()) g_kernels[kernel.name] = library;
}

void set_load_kernel(std::function<void(const std::string&)> load) {
  std::lock_guard<std::mutex> lock(g_mutex);
  g_kernels.clear();
  g_load = std::move(load);
}

void launch_emulated(const BoundPlans& launches, const EmulatorOptions& options) {
  for (const BoundPlan& each : launches) {
    for (const Pass& pass : each.plan.passes) {
      Encoder encoder(options);
      encode(encoder, pass, each.buffers);
    }
  }
}

}  // namespace metalmm
