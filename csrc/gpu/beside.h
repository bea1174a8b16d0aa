// Files that are installed with the native module.
#pragma once

#include <dlfcn.h>

#include <string>

namespace metalmm {

// The path of `name` in the folder of the library that includes this; of the working directory
// where the loader does not say. Static: of two libraries, each finds its own.
static inline std::string beside_module(const std::string& name) {
  Dl_info self{};
  dladdr(reinterpret_cast<const void*>(&beside_module), &self);
  const std::string path = self.dli_fname ? self.dli_fname : "";
  return path.substr(0, path.rfind('/') + 1) + name;
}

}  // namespace metalmm
