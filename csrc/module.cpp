// The Python module: what the ops cannot say. Importing it registers torch.ops.metalmm.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <iterator>
#include <string>
#include <vector>

#include "cpu/kernels.h"
#include "cpu/matmul.h"
#include "format.h"
#include "plan.h"

namespace py = pybind11;

namespace metalmm {
void bind_plan(py::module_& m);      // plan_bindings.cpp
void bind_emulator(py::module_& m);  // msl/ops.cpp
bool emulator_is_installed();
namespace mps {
void bind_recorder(py::module_& m);  // mps/recorder.cpp
void bind_mps(py::module_& m);       // mps/ops.cpp, on macOS
}  // namespace mps

namespace {

// What `strategy` may be for tensors of this type of device; nothing where no engine computes.
std::vector<std::string> strategies_on(const std::string& device_type) {
  if (device_type == "cpu" && !emulator_is_installed()) {
    return {std::begin(cpu::kStrategyNames), std::end(cpu::kStrategyNames)};
  }
  std::vector<std::string> out;
  if (device_type != "cpu" && device_type != "mps" && device_type != "cuda") return out;
  for (StrategyId s : strategies_of(Op::kLinear)) out.push_back(to_string(s));
  return out;
}

}  // namespace

}  // namespace metalmm

PYBIND11_MODULE(_C, m) {
  metalmm::bind_plan(m);
  metalmm::bind_emulator(m);
  metalmm::mps::bind_recorder(m);
#if defined(__APPLE__)
  metalmm::mps::bind_mps(m);
#endif
  m.def(
      "formats",
      [] {
        py::list out;
        for (const metalmm::Format& f : metalmm::all_formats()) {
          const char* layouts[] = {"dense", "block", "affine"};
          py::dict row;
          row["name"] = f.name;
          row["layout"] = layouts[static_cast<int>(f.layout)];
          row["block_values"] = f.block_values;
          row["block_bytes"] = f.block_bytes;
          out.append(row);
        }
        return out;
      },
      "The format table, one dict per format: name, layout, block_values, block_bytes.");
  m.def("strategies_on", metalmm::strategies_on, py::arg("device_type"),
        "What `strategy` may be for tensors on cpu, mps or cuda; empty for other devices.");
  m.def(
      "cpu_isas",
      [] {
        int count;
        const auto* isas = metalmm::cpu::available_isas(&count);
        py::list out;
        for (int i = 0; i < count; ++i) out.append(isas[i]->name);
        return out;
      },
      "Instruction sets of the CPU engine that this machine runs, best first.");
  m.def(
      "cpu_isa", [] { return std::string(metalmm::cpu::current_isa().name); },
      "The instruction set in use: the best, or the one METALMM_CPU_ISA names.");
}
