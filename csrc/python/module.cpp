// The Python module: what the ops cannot say. It needs the core alone, not torch.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>

#include "cpu/int8/kernels.h"
#include "cpu/kernels.h"
#include "hooks/hooks.h"
#include "plan/format.h"

namespace py = pybind11;

namespace metalmm {
void bind_plan(py::module_& m);      // plan.cpp
void bind_emulator(py::module_& m);  // emulator.cpp
void bind_guard(py::module_& m);     // guard.cpp
namespace mps {
void bind_recorder(py::module_& m);  // recorder.cpp
void bind_mps(py::module_& m);       // mps.cpp, on macOS
}  // namespace mps

}  // namespace metalmm

PYBIND11_MODULE(_C, m) {
  metalmm::bind_plan(m);
  metalmm::bind_emulator(m);
  metalmm::bind_guard(m);
  metalmm::mps::bind_recorder(m);
#if defined(__APPLE__)
  metalmm::mps::bind_mps(m);
#endif
  py::dict ops;  // name to kind of result
#define MM_OP(name, results, arguments) ops[#name] = #results;
#include "ops/ops.def"
  m.attr("TORCH_OPS") = ops;
  py::dict dtypes;
#define MM_DTYPE(name, Enumerator, bytes, Scalar, torch_name) dtypes[#name] = #torch_name;
#include "plan/dtypes.def"
  m.attr("DTYPES") = dtypes;
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
          row["packs"] = f.packs;
          out.append(row);
        }
        return out;
      },
      "The format table, one dict per format: name, layout, block_values, block_bytes, packs.");
  m.def(
      "cpu_isas",
      [] {
        py::list out;
        for (int i = 0; const char* name = metalmm::cpu::isa_name(i); ++i) out.append(name);
        return out;
      },
      "Instruction sets of the CPU engine that this machine runs, best first.");
  m.def(
      "cpu_isa", [] { return std::string(metalmm::cpu::current_isa().name); },
      "The instruction set in use: the best, or the one METALMM_CPU_ISA names.");
  m.def(
      "cpu_strategy",
      [](int64_t rows, const std::string& dtype) {
        return metalmm::loaded_hooks().cpu_strategy(rows, metalmm::dtype_by_name(dtype));
      },
      py::arg("m"), py::arg("dtype"),
      "What linear on the CPU takes for m rows of x of this dtype on this machine.");
  m.def(
      "has_integer_codes",
      [](const std::string& format) {
        return metalmm::cpu::int8::has_codes(metalmm::format_by_name(format));
      },
      py::arg("format"),
      "Whether the format has integer codes: activations= of an op rounds x where W has it.");
}
