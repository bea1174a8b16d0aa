// The emulator for torch_metalmm.testing, which builds the libraries of shaders.
#include "emulator/launch.h"

#include <pybind11/pybind11.h>

namespace py = pybind11;

namespace metalmm {

void bind_emulator(py::module_& m) {
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
  m.def("install_emulator", install_emulator, py::arg("chip") = "m1", py::arg("descending") = false,
        py::arg("cores") = 0, py::arg("flush_subnormals") = false,
        "Puts the emulator in the place of the CPU's kernels: the chip it plans for (0 cores: the "
        "chip's own), the order of its threads, and whether f32 and bf16 lose their subnormals.");
  m.def("remove_emulator", remove_emulator, "The CPU's kernels again.");
}

}  // namespace metalmm
