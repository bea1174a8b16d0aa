#include "launch.h"

#include <dlfcn.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <mutex>
#include <sstream>
#include <stdexcept>
#include <tuple>

#include "driver.h"

namespace metalmm::cuda {
namespace {

constexpr uint32_t kMaxGridYZ = 65535;

// As in include/msl/nvptx/entry.h.
struct Operands {
  const void* slots[kSlotArgs];
  uint32_t width, height;
};
static_assert(sizeof(Operands) == 80 && sizeof(KernelArgs) == 72);

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

// ptx/ beside this library.
std::string folder() {
  Dl_info self{};
  dladdr(reinterpret_cast<const void*>(&folder), &self);
  const std::string path = self.dli_fname ? self.dli_fname : "";
  return path.substr(0, path.rfind('/') + 1) + "ptx/";
}

std::string read_ptx(const std::string& kernel) {
  const std::string path = folder() + kernel + ".ptx";
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

Function compile(const Key& key) {
  std::string text = read_ptx(key.kernel);
  replace_all(text, "MM_THREADS", key.threads);
  for (size_t i = 0; i < key.constants.size(); ++i) {
    replace_all(text, "MM_CONSTANT_" + std::to_string(i), key.constants[i]);
  }
  char log[2048] = "";
  JitOption options[] = {kJitErrorLogBuffer, kJitErrorLogBufferBytes};
  void* values[] = {log, reinterpret_cast<void*>(sizeof log)};
  Module module = nullptr;
  const Result result = driver().module_load(&module, text.c_str(), 2, options, values);
  check(result, (key.kernel + ": compiling PTX " + log).c_str());
  Function function = nullptr;  // modules are never unloaded: their number is that of the kernels
  check(driver().module_get_function(&function, module, key.kernel.c_str()), key.kernel.c_str());
  return function;
}

Function find(const Key& key) {
  std::lock_guard<std::mutex> lock(g_mutex);
  const auto found = g_functions.find(key);
  if (found != g_functions.end()) return found->second;
  return g_functions[key] = compile(key);
}

void run(const Pass& pass, const Buffers& buffers, int device, Stream stream) {
  auto grid = pass.grid;
  Operands operands{};
  operands.width = grid[0];
  operands.height = grid[1];
  for (uint32_t slot = 0; slot < kSlotArgs; ++slot) {
    if (pass.slots >> slot & 1) {
      const Buffer b = bound(pass, buffers, slot);
      operands.slots[slot] = static_cast<const char*>(b.base) + b.offset;
    }
  }
  Key key{pass.kernel, {}, pass.group[0], device};
  std::copy(pass.constants.begin(), pass.constants.end(), key.constants.begin());
  if (grid[1] > kMaxGridYZ || grid[2] > kMaxGridYZ) {
    const uint64_t all = uint64_t{grid[0]} * grid[1] * grid[2];
    if (all > INT32_MAX) throw std::runtime_error(pass.kernel + ": too many threadgroups");
    key.constants[kConstantCount] = 1;
    grid = {static_cast<uint32_t>(all), 1, 1};
  }
  KernelArgs args = pass.args;
  void* parameters[] = {&operands, &args};
  check(driver().launch(find(key), grid[0], grid[1], grid[2], pass.group[0], 1, 1,
                        pass.threadgroup_bytes, stream, parameters, nullptr),
        pass.kernel.c_str());
}

}  // namespace

void launch(const Plan& plan, const Buffers& buffers, int device) {
  require_context(device);
  const Stream stream = current_stream(device);
  for (const Pass& pass : plan.passes) run(pass, buffers, device, stream);
}

}  // namespace metalmm::cuda
