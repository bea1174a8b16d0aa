#include "hooks.h"

#include <stdexcept>
#include <utility>

namespace metalmm {
namespace {

std::string g_who;  // stands in

}  // namespace

Hooks& hooks() {
  static Hooks h;
  return h;
}

const Hooks& loaded_hooks() {
  const Hooks& h = hooks();
  if (!h.cpu_strategy) {
    throw std::runtime_error("torch_metalmm: the ops are not loaded; import torch first");
  }
  return h;
}

void stand_in(const char* who, const Gpu& gpu, HostLaunch launch) {
  if (!g_who.empty()) {
    throw std::runtime_error(std::string(who) + ": " + (g_who == who ? "it" : "the " + g_who) +
                             " is installed; one engine at a time computes in the CPU's place");
  }
  loaded_hooks().replace_cpu(gpu, std::move(launch));
  g_who = who;
}

void step_back(const char* who) {
  if (g_who != who) throw std::runtime_error(std::string(who) + ": it is not installed");
  loaded_hooks().restore_cpu();
  g_who.clear();
}

}  // namespace metalmm
