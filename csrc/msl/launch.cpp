#include "launch.h"

#include <dlfcn.h>

#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <stdexcept>
#include <thread>

#include "emulator.h"

namespace metalmm {
namespace {

using LaunchFunction = int (*)(const MmLaunch*, MmReport*);
struct Loaded {
  LaunchFunction launch;
  std::string path;
};

std::mutex g_mutex;
std::map<std::string, Loaded> g_kernels;

Loaded find(const std::string& kernel) {
  std::lock_guard<std::mutex> lock(g_mutex);
  const auto found = g_kernels.find(kernel);
  if (found == g_kernels.end()) {
    throw std::runtime_error("emulator: no library that is loaded has the kernel " + kernel);
  }
  return found->second;
}

std::string message(const MmLaunch& launch, const MmReport& r, const std::string& path) {
  char place[600], who[160];
  if (r.file) {
    snprintf(place, sizeof place, "%s:%u: ", r.file, r.line);
  } else {
    snprintf(place, sizeof place, "%s+0x%llx: ", path.c_str(),
             static_cast<unsigned long long>(r.pc));
  }
  snprintf(who, sizeof who, " [%s, threadgroup (%u, %u, %u), simdgroup %u, lane %u]", launch.kernel,
           r.threadgroup[0], r.threadgroup[1], r.threadgroup[2], r.simdgroup, r.lane);
  return r.fault == kMmUsage ? std::string(r.text) : place + std::string(r.text) + who;
}

void run(const Pass& pass, const Buffers& buffers, const EmulatorOptions& options) {
  const Loaded loaded = find(pass.kernel);
  MmLaunch in{};
  in.kernel = pass.kernel.c_str();
  for (int d = 0; d < 3; ++d) {
    in.grid[d] = pass.grid[d];
    in.group[d] = pass.group[d];
    in.threads[d] = pass.grid[d] * pass.group[d];
  }
  in.workers = options.workers ? options.workers : std::thread::hardware_concurrency();
  in.flags = options.descending ? static_cast<uint32_t>(kMmDescending) : 0u;
  MmConstant constants[kConstantCount];
  for (uint32_t i = 0; i < kConstantCount; ++i) {
    constants[i] = {i, 4, {}};
    memcpy(constants[i].value, &pass.constants[i], 4);
  }
  in.n_constants = kConstantCount;
  in.constants = constants;
  for (uint32_t i = 0; i < kSlotArgs; ++i) {
    if (pass.slots >> i & 1) {
      const Buffer b = bound(pass, buffers, i);
      in.buffers[i] = {static_cast<char*>(b.base) + b.offset, b.bytes};
    }
  }
  KernelArgs args = pass.args;
  in.buffers[kSlotArgs] = {&args, sizeof args};
  in.threadgroup_bytes[0] = pass.threadgroup_bytes;
  MmReport report;
  if (loaded.launch(&in, &report)) throw std::runtime_error(message(in, report, loaded.path));
}

}  // namespace

void load_emulated(const std::string& path) {
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!library) throw std::runtime_error(std::string("emulator: ") + dlerror());
  struct Entry {  // KernelEntry of include/msl/entry.h
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
  for (const Pass& pass : plan.passes) run(pass, buffers, options);
}

}  // namespace metalmm
