#include "driver.h"

#include <dlfcn.h>

#include <stdexcept>
#include <string>

namespace metalmm::cuda {
namespace {

template <class F>
void find(void* library, const char* name, F& function) {
  function = reinterpret_cast<F>(dlsym(library, name));
  if (!function) throw std::runtime_error(std::string("libcuda.so.1 has no ") + name);
}

Driver load() {
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (!library) throw std::runtime_error(std::string("CUDA driver: ") + dlerror());
  Driver d{};
  find(library, "cuModuleLoadDataEx", d.module_load);
  find(library, "cuModuleUnload", d.module_unload);
  find(library, "cuModuleGetFunction", d.module_get_function);
  find(library, "cuFuncGetAttribute", d.function_get_attribute);
  find(library, "cuOccupancyMaxActiveBlocksPerMultiprocessor", d.threadgroups_at_once);
  find(library, "cuLaunchKernel", d.launch);
  find(library, "cuGetErrorName", d.error_name);
  find(library, "cuDeviceGet", d.device_get);
  find(library, "cuDeviceGetAttribute", d.device_get_attribute);
  find(library, "cuCtxGetCurrent", d.context_get_current);
  find(library, "cuCtxSetCurrent", d.context_set_current);
  find(library, "cuDevicePrimaryCtxRetain", d.primary_context_retain);
  return d;
}

// torch's stable C interface. A torch without CUDA has no such library, so it is not linked.
using CurrentStream = int (*)(int32_t device, void** stream);

CurrentStream find_current_stream() {
  void* torch = dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_NOLOAD);
  void* found = torch ? dlsym(torch, "aoti_torch_get_current_cuda_stream") : nullptr;
  if (!found) {
    throw std::runtime_error("this torch has no libtorch_cuda.so with a stable C interface");
  }
  return reinterpret_cast<CurrentStream>(found);
}

}  // namespace

const Driver& driver() {
  static const Driver d = load();
  return d;
}

void check(Result result, const std::string& what) {
  if (result == 0) return;
  const char* name = nullptr;
  driver().error_name(result, &name);
  throw std::runtime_error(what + ": " + (name ? name : "unknown CUDA error"));
}

int multiprocessors(int device) {
  Device d = 0;
  int count = 0;
  check(driver().device_get(&d, device), "cuDeviceGet");
  check(driver().device_get_attribute(&count, kMultiprocessorCount, d), "cuDeviceGetAttribute");
  return count;
}

void require_context(int device) {
  Context context = nullptr;
  check(driver().context_get_current(&context), "cuCtxGetCurrent");
  if (context) return;
  Device d = 0;
  check(driver().device_get(&d, device), "cuDeviceGet");
  check(driver().primary_context_retain(&context, d), "cuDevicePrimaryCtxRetain");
  check(driver().context_set_current(context), "cuCtxSetCurrent");
}

Stream current_stream(int device) {
  static const CurrentStream current = find_current_stream();
  void* stream = nullptr;
  if (current(device, &stream)) throw std::runtime_error("torch gave no CUDA stream");
  return static_cast<Stream>(stream);
}

}  // namespace metalmm::cuda
