// The Metal engine's facts of this machine. Only macOS builds this file.
#include <pybind11/pybind11.h>

#include <filesystem>
#include <string>

#include "hooks/hooks.h"
#include "mps/launch.h"

namespace metalmm::mps {

void bind_mps(pybind11::module_& m) {
  m.def(
      "mps_facts",
      [] {
        Facts f;
        loaded_hooks().mps_facts(&f);
        const std::string archive = archive_path();
        pybind11::dict out;
        out["name"] = f.name;
        out["family"] = f.family;
        out["cores"] = f.cores;
        out["max_threadgroup_memory"] = f.max_threadgroup_memory;
        out["max_threads"] = f.max_threads;
        out["macos"] = f.macos;
        out["archive"] = std::filesystem::exists(archive) ? archive : std::string();
        out["plans_for"] = supported_gpu(f).row;
        return out;
      },
      "What the Metal device reports, the row of the table of chips that is planned for, and the "
      "path of the metallib beside this module, empty if there is none. RuntimeError: no device, "
      "or not one that the engine runs on.");
}

}  // namespace metalmm::mps
