#include "launch.h"

#include <dlfcn.h>

#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <utility>

#include "abi.h"
#include "plan/encode.h"

namespace metalmm {
namespace {

using LaunchFunction = int (*)(const MmLaunch*, MmReport*);
struct Loaded {
  LaunchFunction launch;
  std::string path;
};

std::mutex g_mutex;
std::map<std::string, Loaded> g_kernels;
LineOf g_line_of;

Loaded find(const std::string& kernel) {
  std::lock_guard<std::mutex> lock(g_mutex);
  const auto found = g_kernels.find(kernel);
  if (found == g_kernels.end()) {
    throw std::runtime_error("emulator: no library that is loaded has the kernel " + kernel);
  }
  return found->second;
}

std::string place(const char* file, uint32_t line, uint64_t pc, const std::string& path) {
  if (file) return std::string(file) + ":" + std::to_string(line);
  if (!pc) return "";
  const std::string found = g_line_of ? g_line_of(path, pc) : "";
  char address[24];
  snprintf(address, sizeof address, "+0x%llx", static_cast<unsigned long long>(pc));
  return found.empty() ? path + address : found;
}

std::string message(const MmLaunch& launch, const MmReport& r, const std::string& path) {
  if (r.fault == kMmUsage) return r.text;
  const std::string at = place(r.file, r.line, r.pc, path);
  const std::string other = place(r.other_file, r.other_line, r.other_pc, path);
  char who[160];
  snprintf(who, sizeof who, " [%s, threadgroup (%u, %u, %u), simdgroup %u, lane %u]", launch.kernel,
           r.threadgroup[0], r.threadgroup[1], r.threadgroup[2], r.simdgroup, r.lane);
  return at + ": " + r.text + (other.empty() ? "" : " (the other at " + other + ")") + who;
}

// The encoder of encode.h: fills in a launch, and runs it when it is dispatched.
class Encoder {
 public:
  explicit Encoder(const EmulatorOptions& options) {
    in_.workers = options.workers ? options.workers : std::thread::hardware_concurrency();
    in_.seconds = options.seconds;
    in_.flags = (options.descending ? kMmDescending : 0u) |
                (options.flush_subnormals ? kMmFlushSubnormals : 0u);
  }

  void set_pipeline(const Pass& pass) {
    loaded_ = find(pass.kernel);
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
  void dispatch(const std::array<uint32_t, 3>& grid, const std::array<uint32_t, 3>& group) {
    for (int d = 0; d < 3; ++d) {
      in_.grid[d] = grid[d];
      in_.group[d] = group[d];
      in_.threads[d] = grid[d] * group[d];
    }
    MmReport report;
    if (loaded_.launch(&in_, &report)) {
      throw std::runtime_error(message(in_, report, loaded_.path));
    }
  }

 private:
  Loaded loaded_;
  MmLaunch in_{};
  MmConstant constants_[kConstantCount];
  std::string bytes_;  // aligned as malloc does, which KernelArgs needs
};

}  // namespace

void set_line_of(LineOf line_of) { g_line_of = std::move(line_of); }

void load_emulated(const std::string& path) {
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!library) throw std::runtime_error(std::string("emulator: ") + dlerror());
  struct Entry {  // KernelEntry of msl/host/entry.h
    const char* name;
    void (*run)();
    uint32_t n_arguments;
    const void* arguments;
  };
  const auto entries = static_cast<const Entry*>(dlsym(library, "mm_kernels"));
  const auto count = static_cast<const uint32_t*>(dlsym(library, "mm_n_kernels"));
  const auto launch = reinterpret_cast<LaunchFunction>(dlsym(library, "mm_launch"));
  if (!entries || !count || !launch) {
    throw std::runtime_error("emulator: " + path + " is no library of shaders");
  }
  std::lock_guard<std::mutex> lock(g_mutex);
  for (uint32_t i = 0; i < *count; ++i) g_kernels[entries[i].name] = {launch, path};
}

void launch_emulated(const Plan& plan, const Buffers& buffers, const EmulatorOptions& options) {
  for (const Pass& pass : plan.passes) {
    Encoder encoder(options);
    encode(encoder, pass, buffers);
  }
}

}  // namespace metalmm
