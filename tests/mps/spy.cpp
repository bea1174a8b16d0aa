// A library of shaders that runs nothing: what the emulator is given is kept, as a line of JSON per
// launch. test_mps_encode.py compiles it with KERNELS, the names of all kernels, and loads it.
#include <cstdio>
#include <cstring>
#include <string>

#include "metal/abi.h"
#include "msl/host/abi.h"
#include "plan/subnormals.h"

namespace {

constexpr uint32_t kArgs = metalmm::kSlotArgs;  // the slot whose bytes are gone after the launch
std::string g_log;

void triple(const char* name, const uint32_t* v) {
  char text[99];
  snprintf(text, sizeof text, ", \"%s\": [%u, %u, %u]", name, v[0], v[1], v[2]);
  g_log += text;
}

}  // namespace

extern "C" {

const MmKernelEntry mm_kernels[] = {
#define KERNEL(name) {#name, nullptr, 0, nullptr},
#include KERNELS
};
const uint32_t mm_n_kernels = sizeof mm_kernels / sizeof *mm_kernels;
const MmConstantEntry mm_constants[] = {{}};
const uint32_t mm_n_constants = 0;

int mm_launch(const MmLaunch* in, MmReport* report) {
  memset(report, 0, sizeof *report);
  // As a GPU that keeps subnormals answers when the emulator is installed.
  const auto& y = in->buffers[metalmm::kSlotY];
  if (y.bytes == sizeof metalmm::kKeptProduct) memcpy(y.data, &metalmm::kKeptProduct, y.bytes);
  g_log += std::string("{\"kernel\": \"") + in->kernel + "\"";
  triple("grid", in->grid);
  triple("group", in->tg_threads);
  triple("threads", in->threads);
  g_log += ", \"constants\": {\"\": 0";
  for (uint32_t i = 0; i < in->n_constants; ++i) {
    uint32_t value;
    memcpy(&value, in->constants[i].value, sizeof value);
    g_log += ", \"" + std::to_string(in->constants[i].index) + "\": " + std::to_string(value);
  }
  g_log += "}, \"buffers\": {\"\": []";
  for (uint32_t i = 0; i < kMmMaxSlots; ++i) {
    if (!in->buffers[i].data) continue;
    const auto at = reinterpret_cast<uintptr_t>(in->buffers[i].data);
    g_log += ", \"" + std::to_string(i) + "\": [" + std::to_string(at) + ", " +
             std::to_string(in->buffers[i].bytes) + "]";
  }
  g_log += "}, \"threadgroup\": {\"\": 0";
  for (uint32_t i = 0; i < kMmMaxSlots; ++i) {
    if (!in->threadgroup_bytes[i]) continue;
    g_log += ", \"" + std::to_string(i) + "\": " + std::to_string(in->threadgroup_bytes[i]);
  }
  g_log += "}, \"args\": \"";
  const auto* args = static_cast<const unsigned char*>(in->buffers[kArgs].data);
  for (uint64_t i = 0; i < in->buffers[kArgs].bytes; ++i) {
    char hex[3];
    snprintf(hex, sizeof hex, "%02x", args[i]);
    g_log += hex;
  }
  g_log += "\"}\n";
  return 0;
}

// The log so far; it begins anew.
const char* spy_take() {
  static std::string taken;
  taken.swap(g_log);
  g_log.clear();
  return taken.c_str();
}
}
