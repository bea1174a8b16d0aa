#include "launch.h"

#include <algorithm>
#include <cstring>
#include <fstream>
#include <map>
#include <mutex>
#include <sstream>
#include <stdexcept>
#include <tuple>

#include "../../beside.h"
#include "../../encode.h"
#include "../include/msl/nvptx/operands.h"
#include "driver.h"

namespace metalmm::cuda {
namespace {

constexpr uint32_t kMaxGridYZ = 65535;

using Operands = metalmm::Operands<const void*>;
static_assert(sizeof(Operands) == 80 && sizeof(KernelArgs) == 64);

// What is compiled into a kernel: function constants, then 1 for a grid of one row.
using Constants = std::array<uint32_t, kConstantCount + 1>;

struct Key {
  std::string kernel;
  Constants constants;
  uint32_t threads;
  int device;
  bool operator<(const Key& o) const {
    return std::tie(kernel, constants, threads, device) <
           std::tie(o.kernel, o.constants, o.threads, o.device);
  }
};

std::mutex g_mutex;
std::map<Key, Function> g_functions;

std::string read_ptx(const std::string& kernel) {
  const std::string path = beside_module("ptx/" + kernel + ".ptx");
  std::ifstream file(path);
  if (!file) {
    throw std::runtime_error("no PTX for " + kernel + " (" + path +
                             "): run python -m torch_metalmm.ptx");
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

Function compile(const Key& key, std::string text, uint32_t registers) {
  replace_all(text, "MM_REGISTERS", registers);
  char log[2048] = "";
  JitOption options[] = {kJitErrorLogBuffer, kJitErrorLogBufferBytes};
  void* values[] = {log, reinterpret_cast<void*>(sizeof log)};
  Module module = nullptr;
  const Result result = driver().module_load(&module, text.c_str(), 2, options, values);
  check(result, key.kernel + ": compiling PTX " + log);
  Function function = nullptr;  // modules are never unloaded: their number is that of the kernels
  check(driver().module_get_function(&function, module, key.kernel.c_str()), key.kernel);
  return function;
}

// Registers of a thread: as many as an Apple GPU has, or, of a threadgroup that leaves them, as
// three threadgroups may have, where those do not do without spills. (More warps are worth more
// than what 168 gain: q4_k, 128256 x 4096, 115 us with 168, 106 with 128.)
constexpr uint32_t kRegisters = 128, kMoreRegisters = 168, kSmallGroup = 128;

Function compile(const Key& key) {
  std::string text = read_ptx(key.kernel);
  replace_all(text, "MM_THREADS", key.threads);
  for (size_t i = 0; i < key.constants.size(); ++i) {
    replace_all(text, "MM_CONSTANT_" + std::to_string(i), key.constants[i]);
  }
  const Function function = compile(key, text, kRegisters);
  int spilled = 0;
  check(driver().function_get_attribute(&spilled, kLocalBytes, function), key.kernel);
  if (spilled == 0 || key.threads > kSmallGroup) return function;
  return compile(key, text, kMoreRegisters);
}

Function find(const Key& key) {
  std::lock_guard<std::mutex> lock(g_mutex);
  const auto found = g_functions.find(key);
  if (found != g_functions.end()) return found->second;
  return g_functions[key] = compile(key);
}

// The encoder of encode.h: gathers the parameters, and launches when it is dispatched.
class Encoder {
 public:
  Encoder(int device, Stream stream) : device_(device), stream_(stream) {}

  void set_pipeline(const Pass& pass) {
    key_ = {pass.kernel, {}, pass.group[0], device_};
    std::copy(pass.constants.begin(), pass.constants.end(), key_.constants.begin());
  }
  void set_buffer(uint32_t slot, const Buffer& b) {
    operands_.slots[slot] = static_cast<const char*>(b.base) + b.offset;
  }
  void set_bytes(uint32_t, const void* bytes, size_t count) { memcpy(&args_, bytes, count); }
  void set_threadgroup_memory(uint32_t, uint32_t bytes) { shared_bytes_ = bytes; }
  void dispatch(std::array<uint32_t, 3> grid, const std::array<uint32_t, 3>& group) {
    operands_.width = grid[0];
    operands_.height = grid[1];
    if (grid[1] > kMaxGridYZ || grid[2] > kMaxGridYZ) {
      const uint64_t all = uint64_t{grid[0]} * grid[1] * grid[2];
      if (all > INT32_MAX) throw std::runtime_error(key_.kernel + ": too many threadgroups");
      key_.constants[kConstantCount] = 1;
      grid = {static_cast<uint32_t>(all), 1, 1};
    }
    void* parameters[] = {&operands_, &args_};
    check(driver().launch(find(key_), grid[0], grid[1], grid[2], group[0], group[1], group[2],
                          shared_bytes_, stream_, parameters, nullptr),
          key_.kernel);
  }

 private:
  const int device_;
  const Stream stream_;
  Key key_{};
  Operands operands_{};
  KernelArgs args_{};
  uint32_t shared_bytes_ = 0;
};

}  // namespace

void launch(const Plan& plan, const Buffers& buffers, int device) {
  require_context(device);
  const Stream stream = current_stream(device);
  for (const Pass& pass : plan.passes) {
    Encoder encoder(device, stream);
    encode(encoder, pass, buffers);
  }
}

}  // namespace metalmm::cuda
