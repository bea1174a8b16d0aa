#include "library.h"

#include <dlfcn.h>

#include <cstdio>
#include <stdexcept>
#include <thread>

namespace metalmm {
namespace {

LineOf g_line_of;

#define WORD(name, word) word,
constexpr const char* kFaults[] = {EMULATOR_FAULTS(WORD)};
#undef WORD

std::optional<SourceLine> place(const char* file, uint32_t line, uint64_t pc,
                                const std::string& library) {
  if (file) return SourceLine{file, line};
  if (!pc) return std::nullopt;
  if (auto found = g_line_of ? g_line_of(library, pc) : std::nullopt) return found;
  char address[24];
  snprintf(address, sizeof address, "+0x%llx", static_cast<unsigned long long>(pc));
  return SourceLine{library + address, 0};
}

std::string to_string(const SourceLine& at) {
  return at.second ? at.first + ":" + std::to_string(at.second) : at.first;
}

Fault fault_of(const MmReport& r, const char* kernel, const std::string& library) {
  Fault out;
  out.kind = kFaults[r.fault];
  out.kernel = kernel;
  out.text = r.text;
  for (int d = 0; d < 3; ++d) out.threadgroup[d] = r.threadgroup[d];
  out.simdgroup = r.simdgroup;
  out.lane = r.lane;
  if (const auto at = place(r.file, r.line, r.pc, library)) {
    out.file = at->first;
    out.line = at->second;
  }
  out.other = place(r.other_file, r.other_line, r.other_pc, library);
  return out;
}

// `symbol` of a library; nothing may be null.
template <class T>
T* find(void* library, const char* symbol, const std::string& path) {
  void* found = dlsym(library, symbol);
  if (!found) throw std::runtime_error("emulator: " + path + " is no library of shaders");
  return reinterpret_cast<T*>(found);
}

template <class Entry>
std::vector<Entry> table(void* library, const char* name, const std::string& path) {
  const auto* entries = find<const Entry>(library, ("mm_" + std::string(name)).c_str(), path);
  const auto* count = find<const uint32_t>(library, ("mm_n_" + std::string(name)).c_str(), path);
  return {entries, entries + *count};
}

}  // namespace

void set_line_of(LineOf line_of) { g_line_of = std::move(line_of); }

MmLaunch launch_with(const EmulatorOptions& options) {
  MmLaunch out{};
  out.workers = options.workers ? options.workers : std::thread::hardware_concurrency();
  out.seconds = options.seconds;
  out.flags = (options.descending ? kMmDescending : 0u) |
              (options.allow_inactive ? kMmAllowInactive : 0u) |
              (options.allow_uninitialized ? kMmAllowUninitialized : 0u) |
              (options.flush_subnormals ? kMmFlushSubnormals : 0u);
  return out;
}

void set_grid(MmLaunch& launch, const Size& grid, const Size& threads) {
  for (int d = 0; d < 3; ++d) {
    launch.grid[d] = grid[d];
    launch.tg_threads[d] = threads[d];
    launch.threads[d] = grid[d] * threads[d];
  }
}

std::string message(const Fault& fault) {
  if (fault.kind == kFaults[kMmUsage]) return fault.text;
  const auto& [x, y, z] = fault.threadgroup;
  char who[96];
  snprintf(who, sizeof who, ", threadgroup (%u, %u, %u)", x, y, z);
  std::string out, thread;
  if (!fault.file.empty()) {
    out = to_string({fault.file, fault.line}) + ": ";
    thread =
        ", simdgroup " + std::to_string(fault.simdgroup) + ", lane " + std::to_string(fault.lane);
  }
  out += fault.text;
  if (fault.other) out += " (the other at " + to_string(*fault.other) + ")";
  return out + " [" + fault.kernel + who + thread + "]";
}

ShaderLibrary::ShaderLibrary(std::string path) : path_(std::move(path)) {
  void* library = dlopen(path_.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!library) throw std::runtime_error(std::string("emulator: ") + dlerror());
  kernels_ = table<MmKernelEntry>(library, "kernels", path_);
  constants_ = table<MmConstantEntry>(library, "constants", path_);
  launch_ = find<decltype(mm_launch)>(library, "mm_launch", path_);
}

std::optional<Fault> ShaderLibrary::launch(const MmLaunch& launch) const {
  MmReport report;
  if (!launch_(&launch, &report)) return std::nullopt;
  return fault_of(report, launch.kernel, path_);
}

}  // namespace metalmm
