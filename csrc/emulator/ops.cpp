// The emulator as an engine of CPU tensors: while it is installed, torch.ops.metalmm is computed by
// the shaders. torch_metalmm.testing builds them and installs it.
#include <c10/util/Exception.h>
#include <pybind11/pybind11.h>

#include <optional>

#include "gpu/register.h"
#include "launch.h"

namespace metalmm {
namespace {

Gpu g_gpu;
EmulatorOptions g_options;
std::optional<torch::Library> g_installed;

const gpu::Engine& engine() {
  static const gpu::Engine e{[](c10::Device) { return g_gpu; },
                             [](const Plan& plan, const Buffers& buffers, c10::Device) {
                               launch_emulated(plan, buffers, g_options);
                             }};
  return e;
}

void install(const std::string& chip, bool descending, uint32_t cores, bool flush_subnormals) {
  TORCH_CHECK(!g_installed, "emulator: it is installed; emulated() does not nest");
  g_gpu = gpu_by_name(chip);
  if (cores) g_gpu.cores = cores;
  g_options.descending = descending;
  g_options.flush_subnormals = flush_subnormals;
  g_installed.emplace(gpu::in_place_of_cpu<engine>());
}

}  // namespace

bool emulator_is_installed() { return g_installed.has_value(); }

void bind_emulator(pybind11::module_& m) {
  namespace py = pybind11;
  m.def("load_emulated", load_emulated, py::arg("path"),
        "Makes the kernels of a library that torch_metalmm.testing built launchable.");
  m.def(
      "set_line_of",
      [](py::function f) {
        // Never freed: a static would be, after the interpreter.
        static auto* line_of = new py::function;
        *line_of = std::move(f);
        set_line_of([](const std::string& library, uint64_t address) {
          const py::gil_scoped_acquire gil;
          return py::cast<std::string>((*line_of)(library, address));
        });
      },
      py::arg("line_of"),
      "line_of(library, address) -> 'file:line' or '': how faults of the emulator name their "
      "place.");
  m.def("install_emulator", install, py::arg("chip") = "m1", py::arg("descending") = false,
        py::arg("cores") = 0, py::arg("flush_subnormals") = false,
        "Puts the emulator in the place of the CPU's kernels: the chip it plans for (0 cores: the "
        "chip's own), the order of its threads, and whether f32 and bf16 lose their subnormals.");
  m.def("remove_emulator", [] { g_installed.reset(); }, "The CPU's kernels again.");
}

}  // namespace metalmm
