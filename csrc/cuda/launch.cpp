#include "launch.h"

#include <algorithm>
#include <cstring>
#include <fstream>
#include <map>
#include <memory>
#include <mutex>
#include <sstream>
#include <stdexcept>
#include <tuple>
#include <type_traits>

#include "driver.h"
#include "gpu/beside.h"
#include "msl/nvptx/operands.h"
#include "plan/launch.h"
#include "plan/round.h"

namespace metalmm::cuda {
namespace {

constexpr uint32_t kMaxGridYZ = 65535;

using Operands = metalmm::Operands<const void*>;
static_assert(sizeof(Operands) == 128 && sizeof(KernelArgs) == 168);

// Values compiled into a kernel: its function constants, then 1 for a grid of one row.
using Constants = std::array<uint32_t, kConstantCount + 1>;

struct Key {
  std::string kernel;
  Constants constants;
  uint32_t threads, shared_bytes;
  int device;
  bool operator<(const Key& o) const {
    return std::tie(kernel, constants, threads, shared_bytes, device) <
           std::tie(o.kernel, o.constants, o.threads, o.shared_bytes, o.device);
  }
};

struct Unload {
  void operator()(Module module) const { driver().module_unload(module); }
};
struct Compiled {
  std::unique_ptr<std::remove_pointer_t<Module>, Unload> module;
  Function function = nullptr;
  int registers = 0, spilled_bytes = 0;
  int64_t at_once = 0;  // threadgroups that the GPU takes
};
// A kernel as it is best by itself, and with fewer registers: compiled when a grid is larger than
// the GPU takes at once.
struct Kernel {
  Compiled plain, dense;
  bool tried_dense = false;
};

std::mutex g_mutex;
auto& g_kernels = *new std::map<Key, Kernel>;  // never destroyed: the driver may be gone by then

std::string read_ptx(const std::string& kernel) {
  const std::string path = beside_module("ptx/" + kernel + ".ptx");
  std::ifstream file(path);
  if (!file) {
    throw std::runtime_error("no PTX for " + kernel + " (" + path +
                             "): run python -m torch_metalmm.msl.ptx");
  }
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

void replace_all(std::string& text, const std::string& token, uint32_t value) {
  const std::string number = std::to_string(value);
  for (size_t at = 0; (at = text.find(token, at)) != std::string::npos; at += number.size()) {
    text.replace(at, token.size(), number);
  }
}

Compiled compile(const Key& key, std::string text, int most_registers) {
  replace_all(text, "MM_REGISTERS", most_registers);
  char log[2048] = "";
  JitOption options[] = {kJitErrorLogBuffer, kJitErrorLogBufferBytes};
  void* values[] = {log, reinterpret_cast<void*>(sizeof log)};
  Compiled out;
  Module module = nullptr;
  const Driver& d = driver();
  const Result result = d.module_load(&module, text.c_str(), 2, options, values);
  check(result, key.kernel + ": compiling PTX " + log);
  out.module.reset(module);
  check(d.module_get_function(&out.function, module, key.kernel.c_str()), key.kernel);
  check(d.function_get_attribute(&out.spilled_bytes, kLocalBytes, out.function), key.kernel);
  check(d.function_get_attribute(&out.registers, kRegisterCount, out.function), key.kernel);
  int threadgroups = 0;
  check(d.threadgroups_at_once(&threadgroups, out.function, static_cast<int>(key.threads),
                               key.shared_bytes),
        key.kernel);
  out.at_once = static_cast<int64_t>(std::max(1, threadgroups)) * multiprocessors(key.device);
  return out;
}

std::string text_of(const Key& key) {
  std::string text = read_ptx(key.kernel);
  replace_all(text, "MM_THREADS", key.threads);
  for (size_t i = 0; i < key.constants.size(); ++i) {
    replace_all(text, "MM_CONSTANT_" + std::to_string(i), key.constants[i]);
  }
  return text;
}

// Registers of a thread: as many as an Apple GPU has, or, of a threadgroup that leaves them, as
// three threadgroups may have, where those do not do without spills. (More warps are worth more
// than what 168 gain: q4_k, 128256 x 4096, 115 us with 168, 106 with 128.)
constexpr int kRegisters = 128, kMoreRegisters = 168, kSmallGroup = 128;

Compiled compile(const Key& key) {
  const std::string text = text_of(key);
  Compiled out = compile(key, text, kRegisters);
  if (out.spilled_bytes == 0 || key.threads > kSmallGroup) return out;
  return compile(key, text, kMoreRegisters);
}

// With the fewest registers that more threadgroups find a place with, if next to nothing spills;
// else without a function. (H200, us: gemm_small q4_k, M = 8, 14336 x 4096, from 79 to 72: 34.5 to
// 30.2. gemv_wide_n affine4, 128256 x 4096, from 109 to 80: 91 to 88. Refused: gemv q2_k, of whose
// 123 none can be spared, 98 to 110.)
constexpr int kFewerRegisters[] = {72, 80, 96}, kSpilledBytes = 8;

Compiled compile_dense(const Key& key, const Compiled& plain) {
  const std::string text = text_of(key);
  for (const int registers : kFewerRegisters) {
    if (registers >= plain.registers) break;
    Compiled dense = compile(key, text, registers);
    if (dense.spilled_bytes <= kSpilledBytes && dense.at_once > plain.at_once) return dense;
  }
  return {};
}

// The kernel that takes `threadgroups` threadgroups in the fewest rounds.
Function find(const Key& key, int64_t threadgroups) {
  const auto rounds = [=](const Compiled& c) { return ceil_div(threadgroups, c.at_once); };
  std::lock_guard<std::mutex> lock(g_mutex);
  auto found = g_kernels.find(key);
  if (found == g_kernels.end()) found = g_kernels.emplace(key, Kernel{compile(key), {}}).first;
  Kernel& kernel = found->second;
  if (rounds(kernel.plain) > 1 && !kernel.tried_dense) {
    kernel.tried_dense = true;
    try {
      kernel.dense = compile_dense(key, kernel.plain);
    } catch (const std::runtime_error&) {  // the plain one does the same, slower
    }
  }
  const bool is_dense = kernel.dense.function && rounds(kernel.dense) < rounds(kernel.plain);
  return is_dense ? kernel.dense.function : kernel.plain.function;
}

// The Encoder of encode() in plan/launch.h: gathers the parameters, and launches when it is
// dispatched. `function` is the one of an earlier launch, or null until this launch finds it.
class Encoder {
 public:
  Encoder(int device, Stream stream, const void** function)
      : device_(device), stream_(stream), function_(function) {}

  void set_pipeline(const Pass& pass) { pass_ = &pass; }
  void set_buffer(uint32_t slot, const Buffer& b) {
    operands_.slots[slot] = static_cast<const char*>(b.base) + b.offset;
  }
  void set_bytes(uint32_t, const void* bytes, size_t count) { memcpy(&args_, bytes, count); }
  void set_threadgroup_memory(uint32_t, uint32_t bytes) { shared_bytes_ = bytes; }
  void dispatch(std::array<uint32_t, 3> grid, const std::array<uint32_t, 3>& threads) {
    operands_.width = grid[0];
    operands_.height = grid[1];
    const uint64_t all = uint64_t{grid[0]} * grid[1] * grid[2];
    const bool is_one_row = grid[1] > kMaxGridYZ || grid[2] > kMaxGridYZ;
    if (is_one_row) {
      if (all > INT32_MAX) throw std::runtime_error(pass_->kernel + ": too many threadgroups");
      grid = {static_cast<uint32_t>(all), 1, 1};
    }
    if (!*function_) *function_ = find(key(threads[0], is_one_row), all);
    void* parameters[] = {&operands_, &args_};
    const auto function = static_cast<Function>(const_cast<void*>(*function_));
    check(driver().launch(function, grid[0], grid[1], grid[2], threads[0], threads[1], threads[2],
                          shared_bytes_, stream_, parameters, nullptr),
          pass_->kernel);
  }

 private:
  Key key(uint32_t threads, bool is_one_row) const {
    Key k{pass_->kernel, {}, threads, shared_bytes_, device_};
    std::copy(pass_->constants.begin(), pass_->constants.end(), k.constants.begin());
    k.constants[kConstantCount] = is_one_row;
    return k;
  }

  const int device_;
  const Stream stream_;
  const void** function_;
  const Pass* pass_ = nullptr;
  uint32_t shared_bytes_ = 0;
  Operands operands_{};
  KernelArgs args_{};
};

}  // namespace

void launch(const BoundPlans& launches, int device) {
  require_context(device);
  const Stream stream = current_stream(device);
  for (const BoundPlan& each : launches) {
    const std::vector<Pass>& passes = each.plan.passes;
    each.found.resize(passes.size());
    for (size_t i = 0; i < passes.size(); ++i) {
      Encoder encoder(device, stream, &each.found[i]);
      encode(encoder, passes[i], each.buffers);
    }
  }
}

}  // namespace metalmm::cuda
