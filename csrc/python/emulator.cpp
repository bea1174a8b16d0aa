// The emulator for torch_metalmm.testing, which builds the libraries of shaders.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstring>
#include <map>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "emulator/launch.h"

namespace py = pybind11;

namespace metalmm {
namespace {

using namespace py::literals;

#define WORD(name, word) word,
constexpr const char* kRoles[] = {EMULATOR_ROLES(WORD)};
constexpr const char* kConstantKinds[] = {EMULATOR_CONSTANT_KINDS(WORD)};
#undef WORD

py::dict roles() {
  py::dict out;
#define ENTRY(name, word) out[word] = #name;
  EMULATOR_ROLES(ENTRY)
#undef ENTRY
  return out;
}

py::dict kernels(const ShaderLibrary& library) {
  py::dict out;
  for (const MmKernelEntry& kernel : library.kernels()) {
    py::list arguments;
    for (uint32_t i = 0; i < kernel.n_arguments; ++i) {
      const MmArgument& a = kernel.arguments[i];
      arguments.append(py::make_tuple(kRoles[a.role], a.index));
    }
    out[kernel.name] = arguments;
  }
  return out;
}

py::dict constants(const ShaderLibrary& library) {
  py::dict out;
  for (const MmConstantEntry& c : library.constants()) {
    out[c.name] = py::make_tuple(c.index, kConstantKinds[c.kind], c.bytes, c.count);
  }
  return out;
}

py::dict to_dict(const Fault& fault) {
  // The emulator may have cut the text within a character.
  const auto size = static_cast<Py_ssize_t>(fault.text.size());
  PyObject* text = PyUnicode_DecodeUTF8(fault.text.data(), size, "replace");
  if (!text) throw py::error_already_set();
  return py::dict("kind"_a = fault.kind, "kernel"_a = fault.kernel,
                  "text"_a = py::reinterpret_steal<py::str>(text),
                  "threadgroup"_a = py::tuple(py::cast(fault.threadgroup)),
                  "simdgroup"_a = fault.simdgroup, "lane"_a = fault.lane, "file"_a = fault.file,
                  "line"_a = fault.line, "other"_a = fault.other);
}

uint32_t slot(const char* kind, int64_t index) {
  if (index < 0 || index >= kMmMaxSlots) {
    throw std::invalid_argument("[[" + std::string(kind) + "(" + std::to_string(index) +
                                ")]]: indices from 0 to " + std::to_string(kMmMaxSlots - 1) +
                                " are allowed");
  }
  return static_cast<uint32_t>(index);
}

using Constants = std::vector<std::pair<uint32_t, std::string>>;
std::vector<MmConstant> encoded(const Constants& constants) {
  std::vector<MmConstant> out;
  for (const auto& [index, bytes] : constants) {
    MmConstant c{index, static_cast<uint32_t>(bytes.size()), {}};
    if (bytes.size() > sizeof c.value) {
      throw std::invalid_argument("function constant " + std::to_string(index) + ": " +
                                  std::to_string(bytes.size()) + " bytes; at most " +
                                  std::to_string(sizeof c.value) + " are allowed");
    }
    memcpy(c.value, bytes.data(), bytes.size());
    out.push_back(c);
  }
  return out;
}

py::object launch(const ShaderLibrary& library, const std::string& kernel, const Size& grid,
                  const Size& tg_threads,
                  const std::map<int64_t, std::pair<uintptr_t, uint64_t>>& buffers,
                  const std::map<int64_t, uint32_t>& threadgroup_bytes, const Constants& constants,
                  const std::optional<Size>& threads, bool descending, bool allow_inactive,
                  bool allow_uninitialized, bool flush_subnormals, uint32_t workers,
                  uint32_t seconds) {
  MmLaunch in = launch_with(
      {descending, allow_inactive, allow_uninitialized, flush_subnormals, workers, seconds});
  in.kernel = kernel.c_str();
  set_grid(in, grid, tg_threads);
  for (int d = 0; threads && d < 3; ++d) in.threads[d] = (*threads)[d];
  const std::vector<MmConstant> values = encoded(constants);
  in.constants = values.data();
  in.n_constants = static_cast<uint32_t>(values.size());
  for (const auto& [i, memory] : buffers) {
    in.buffers[slot("buffer", i)] = {reinterpret_cast<void*>(memory.first), memory.second};
  }
  for (const auto& [i, bytes] : threadgroup_bytes) {
    in.threadgroup_bytes[slot("threadgroup", i)] = bytes;
  }
  std::optional<Fault> fault;
  {
    const py::gil_scoped_release released;
    fault = library.launch(in);
  }
  return fault ? py::object(to_dict(*fault)) : py::none();
}

std::string message_of(std::string kind, std::string kernel, std::string text,
                       const Size& threadgroup, uint32_t simdgroup, uint32_t lane, std::string file,
                       uint32_t line, std::optional<SourceLine> other) {
  return message({std::move(kind), std::move(kernel), std::move(text), threadgroup, simdgroup, lane,
                  std::move(file), line, std::move(other)});
}

void call_for_lines(py::function f) {
  // Never freed: a static would be, after the interpreter.
  static auto* line_of = new py::function;
  *line_of = std::move(f);
  set_line_of([](const std::string& library, uint64_t address) {
    const py::gil_scoped_acquire gil;
    return py::cast<std::optional<SourceLine>>((*line_of)(library, address));
  });
}

void call_for_kernels(py::function f) {
  static auto* load = new py::function;
  *load = std::move(f);
  set_load_kernel([](const std::string& kernel) {
    const py::gil_scoped_acquire gil;
    (*load)(kernel);
  });
}

void bind_library(py::module_& m) {
  m.attr("EMULATOR_ROLES") = roles();  // {attribute of a parameter: its MmRole}
  m.attr("EMULATOR_SECONDS") = EmulatorOptions{}.seconds;
  py::class_<ShaderLibrary>(m, "ShaderLibrary", "A file of compiled shaders.")
      .def(py::init<std::string>(), "path"_a)
      .def("kernels", kernels, "{kernel: (role, index) of each parameter}.")
      .def("constants", constants, "{function constant: (index, kind, bytes, count)}.")
      .def("launch", launch, "kernel"_a, "grid"_a, "group"_a, "buffers"_a, "threadgroup_bytes"_a,
           py::kw_only(), "constants"_a = Constants{}, "threads"_a = py::none(),
           "descending"_a = false, "allow_inactive"_a = false, "allow_uninitialized"_a = false,
           "flush_subnormals"_a = false, "workers"_a = 0, "seconds"_a = EmulatorOptions{}.seconds,
           "Runs a kernel without the interpreter's lock: buffers {i: (address, bytes)} as "
           "[[buffer(i)]], threadgroup_bytes {i: bytes} as [[threadgroup(i)]], constants (index, "
           "bytes). None, or the fields of the earliest fault. ValueError: no such slot.");
  m.def("fault_message", message_of, "kind"_a, "kernel"_a, "text"_a, "threadgroup"_a, "simdgroup"_a,
        "lane"_a, "file"_a, "line"_a, "other"_a, "What is said of a fault with these fields.");
  m.def("set_line_of", call_for_lines, "line_of"_a,
        "line_of(library, address) -> (file, line) or None: how faults of the emulator name their "
        "place.");
}

}  // namespace

void bind_emulator(py::module_& m) {
  bind_library(m);
  m.def("load_emulated", load_emulated, "path"_a,
        "Makes the kernels of a library that torch_metalmm.testing built launchable.");
  m.def("set_load_kernel", call_for_kernels, "load"_a,
        "load(kernel) is called for a kernel that no library has, to load_emulated() one. The "
        "libraries so far are forgotten.");
  m.def("install_emulator", install_emulator, "chip"_a = "m1", "descending"_a = false,
        "cores"_a = 0, "flush_subnormals"_a = false,
        "Puts the emulator in the place of the CPU's kernels: the chip it plans for (0 cores: the "
        "chip's own), the order of its threads, and whether f32 and bf16 lose their subnormals. "
        "Whether it keeps those of f16, by a product.");
  m.def("remove_emulator", remove_emulator, "The CPU's kernels again.");
}

}  // namespace metalmm
