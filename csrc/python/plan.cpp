// Plans as Python values: dicts and lists, for `metalmm explain`, the tests and the golden file.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <iterator>
#include <optional>
#include <string>
#include <vector>

#include "metal/geometry.h"
#include "plan/names.h"
#include "plan/passes.h"
#include "plan/plan.h"
#include "plan_fields.h"

namespace py = pybind11;

namespace metalmm {
namespace {

#define MM_SLOT(name) name,
constexpr const char* kSlotNames[] = {
#include <abi_names.def>
};
#define MM_CONSTANT(name) name,
constexpr const char* kConstantNames[] = {
#include <abi_names.def>
};

// visit(name, field) for every field of KernelArgs, in order.
template <class Visit>
constexpr void each_arg(const KernelArgs& a, Visit visit) {
#define MM_FIELD(name) visit(#name, a.name);
#include <abi_names.def>
}

constexpr size_t visited_bytes() {
  size_t out = 0;
  each_arg({}, [&](const char*, auto value) { out += sizeof value; });
  return out;
}
static_assert(visited_bytes() == sizeof(KernelArgs), "each_arg: a field is missing");

// The codes of Python's struct module.
constexpr char code_of(int64_t) { return 'q'; }
constexpr char code_of(uint32_t) { return 'I'; }
constexpr char code_of(float) { return 'f'; }

py::dict to_dict(const Gpu& gpu) {
  py::dict out;
  out["name"] = gpu.name;
  out["row"] = gpu.row;
  out["generation"] = static_cast<int>(gpu.generation);
  out["class"] = to_string(gpu.chip_class);
  out["family"] = gpu.family;
  out["cores"] = gpu.cores;
  out["bandwidth_gb_s"] = gpu.bandwidth_gb_s;
  out["clock_mhz"] = gpu.clock_mhz;
  out["lanes_per_core"] = kLanesPerCore;
  // Multiply-adds of halves a core and cycle of torch's matmul.
  out["matmul_lanes_per_core"] =
      gpu.accelerator == Accelerator::kNeural ? kNeuralLanesPerCore : kLanesPerCore;
  out["max_threadgroup_memory"] = gpu.max_threadgroup_memory;
  out["max_threads"] = gpu.max_threads;
  return out;
}

py::dict to_dict(const KernelArgs& a) {
  py::dict out;
  each_arg(a, [&](const char* name, auto value) { out[name] = value; });
  return out;
}

py::dict to_dict(const Pass& pass) {
  py::dict out, constants;
  py::list slots;
  for (uint32_t i = 0; i < kConstantCount; ++i) constants[kConstantNames[i]] = pass.constants[i];
  for (uint32_t i = 0; i < kSlotCount; ++i) {
    if (pass.slots >> i & 1) slots.append(kSlotNames[i]);
  }
  out["kernel"] = pass.kernel;
  out["grid"] = pass.grid;
  out["group"] = pass.threads;
  out["threadgroup_bytes"] = pass.threadgroup_bytes;
  out["constants"] = constants;
  out["slots"] = slots;
  out["args"] = to_dict(pass.args);
  return out;
}

// The row of a chip, with the fields that a caller may set.
Gpu read_gpu(const std::string& chip, const py::dict& changes) {
  static const std::vector<Field<Gpu>> fields = {
      {"cores", &Gpu::cores},
      {"max_threadgroup_memory", &Gpu::max_threadgroup_memory},
      {"max_threads", &Gpu::max_threads},
      {"keeps_subnormals", &Gpu::keeps_subnormals}};
  Gpu gpu = gpu_by_name(chip);
  set_fields("gpu", changes, fields, gpu);
  return gpu;
}

py::dict plan_of(const std::string& op, const std::string& chip,
                 const std::optional<std::string>& strategy, const py::dict& gpu,
                 const py::kwargs& problem) {
  const Problem p = read_problem(op, problem);
  std::optional<StrategyId> forced;
  if (strategy) forced = strategy_by_name(*strategy);
  const Gpu planned_for = read_gpu(chip, gpu);
  std::string reason;
  const Plan made = plan(p, planned_for, forced, &reason);
  py::dict out;
  out["chip"] = planned_for.row;
  py::list passes;
  for (const Pass& pass : made.passes) passes.append(to_dict(pass));
  out["passes"] = passes;
  out["main"] = made.main;
  out["arranged_bytes"] = made.arranged_bytes;
  out["dense"] = product_of(made, p);
  out["sdpa"] = panels_of(made.sdpa);
  out["workspace_bytes"] = made.workspace_bytes;
  out["reason"] = reason;
  return out;
}

using namespace py::literals;

void bind_chips(py::module_& m) {
  m.attr("CUDA") = kCuda;
  m.def(
      "activations",
      [] { return std::vector<std::string>(std::begin(kActivations), std::end(kActivations)); },
      "Names of what may stand between the products of a gated MLP, in the order of Activation.");
  m.def(
      "gpus",
      [] {
        py::list out;
        for (const Gpu& gpu : all_gpus()) out.append(to_dict(gpu));
        return out;
      },
      "The table of chips, one dict per chip.");
  m.def(
      "gpu", [](const std::string& chip) { return to_dict(gpu_by_name(chip)); }, "chip"_a,
      "The row of a chip, or the nearest one: `row` is its name; of CUDA, what an NVIDIA GPU is "
      "planned for as. ValueError: no name of a chip.");
  m.def(
      "gpu_of_device",
      [](const std::string& name, int family, uint32_t cores, uint32_t max_threadgroup_memory) {
        return to_dict(gpu_of_device(name, family, cores, max_threadgroup_memory));
      },
      "name"_a, "family"_a, "cores"_a = 0, "max_threadgroup_memory"_a = 0,
      "The row of the table for what a device reports; 0 keeps the table's number.");
}

// The interface of host and shaders, metal/abi.h, by the names that plans have.
void bind_abi(py::module_& m) {
  const auto names = [](const auto& all) {
    py::list out;
    for (const char* name : all) out.append(name);
    return py::tuple(out);
  };
  m.attr("SIMD_WIDTH") = kSimdWidth;
  m.attr("KEPT_ROWS") = kKeptRows;
  m.attr("SLOTS") = names(kSlotNames);
  m.attr("CONSTANTS") = names(kConstantNames);
  std::vector<const char*> scales;
  for (DType type : kScaleTypes) scales.push_back(to_string(type));
  m.attr("SCALE_TYPES") = names(scales);
#define MM_BITS(name, bits)  \
  {                          \
    py::dict all;            \
    bits m.attr(name) = all; \
  }
#define MM_BIT(name, bit) all[name] = bit;
#include <abi_names.def>
#undef MM_BIT
  std::string layout = "<";  // little-endian, without padding
  each_arg({}, [&](const char*, auto value) { layout += code_of(value); });
  m.attr("ARGS_LAYOUT") = layout;  // KernelArgs, for struct.pack
}

}  // namespace

void bind_plan(py::module_& m) {
  bind_chips(m);
  bind_abi(m);
  m.def(
      "plan", plan_of, "op"_a = "linear", py::kw_only(), "chip"_a, "strategy"_a = py::none(),
      "gpu"_a = py::dict(),
      "The passes of a problem on a chip, as a dict: passes, main (the one that computes), "
      "arranged_bytes (of x), workspace_bytes, reason, chip, the "
      "row of the table that was planned for (the nearest one of a chip that it does not have), "
      "dense: None, or, where torch's matmul multiplies, m, n, k, format, dtype, the panels "
      "that the first passes decode and the rows of each; without panels W lies as it is read; "
      "and sdpa: None, or of how many sequences, heads of keys and queries torch's attention is "
      "called at a time, and whether with is_causal or a mask. `gpu` changes cores, "
      "max_threadgroup_memory, max_threads or keeps_subnormals of the chip. The other arguments "
      "are the fields of a Problem of plan.h; format is f32 unless given. ValueError: what plan.h "
      "says.");
  m.def("kernel_names", &all_kernel_names,
        "Every function of the shader library: strategies, formats and dtypes multiplied out.");
  m.def(
      "strategies",
      [](const std::string& op) {
        std::vector<std::string> out;
        for (StrategyId s : strategies_of(op_by_name(op))) out.push_back(to_string(s));
        return out;
      },
      "op"_a = "linear", "The strategies that can be forced for an op.");
  m.def(
      "strategy",
      [](const std::string& name) {
        const StrategyInfo& s = info_of(strategy_by_name(name));
        constexpr const char* families[] = {"matmul", "rows",   "flat",      "arrange", "groups",
                                            "single", "append", "attention", "torch"};
        static_assert(std::size(families) == static_cast<size_t>(Family::Torch) + 1);
        py::dict out;
        out["family"] = families[static_cast<int>(s.family)];
        out["n"] = s.n;
        out["m"] = s.m;
        out["k"] = s.k;
        out["values"] = s.values;
        out["threads"] = s.threads;
        out["kernels"] = s.kernels;
        out["takes_norm"] = s.family == Family::Matmul && takes_norm(strategy_by_name(name));
        out["takes_batch"] = s.batch_of != nullptr;
        out["rounds_to_half"] = s.rounds_to_half;
        out["on_matrix_unit"] = s.on_matrix_unit;
        return out;
      },
      "name"_a,
      "A row of strategies.def with its geometry: rows of W (n), rows of x (m) and values of K (k) "
      "of a threadgroup, values per thread, threads; 0 where the family has none. kernels: the "
      "strategy that names its kernels, itself but for an alias. takes_norm: x may be normalised. "
      "takes_batch: m is the most rows "
      "of x. rounds_to_half: f16 x meets W rounded to f16. on_matrix_unit: 8 x 8 matrices.");
  m.def(
      "is_fused", [](const std::string& op, int64_t m_) { return is_fused(op_by_name(op), m_); },
      "op"_a, "m"_a, "Whether the fused half of SwiGLU pays at m rows of x.");
  m.def("experts_are_tiled", &experts_are_tiled, "choices"_a, "experts"_a,
        "Whether rows by expert, in tiles, pay for so many choices of so many experts.");
  m.def("expert_tile_rows", &expert_tile_rows, "choices"_a, "experts"_a, "Rows of such a tile.");
  m.def(
      "norm_is_fused",
      [](const std::string& op, const std::string& chip, int64_t weights_per_core,
         const py::kwargs& problem) {
        Gpu gpu = gpu_by_name(chip);
        gpu.norm_weights_per_core = weights_per_core;
        return norm_is_fused(read_problem(op, problem), gpu);
      },
      "op"_a = "linear", py::kw_only(), "chip"_a, "weights_per_core"_a = 0,
      "Whether linear (or swiglu_up) normalises m rows of x as it multiplies them; if not, "
      "rms_norm is a pass before it. weights_per_core: the most that pay, 0 for any number.");
  m.def(
      "ops",
      [] {
        std::vector<std::string> out;
        for (int i = 0; i < static_cast<int>(Op::kCount); ++i) {
          out.push_back(to_string(static_cast<Op>(i)));
        }
        return out;
      },
      "What can be planned.");
}

}  // namespace metalmm
