// The messages that the Metal engine would send to its encoder, as Python values: an engine of CPU
// tensors that computes nothing. For tests on machines without Metal.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>

#include "hooks/hooks.h"
#include "mps/decisions/collect.h"
#include "mps/decisions/commits.h"
#include "mps/decisions/settings.h"
#include "mps/source.h"
#include "plan/launch.h"

namespace py = pybind11;

namespace metalmm::mps {
namespace {

// Appends a tuple (name of the call, its arguments) per call.
class Recorder {
 public:
  explicit Recorder(py::list calls) : calls_(std::move(calls)) {}

  void set_pipeline(const Pass& pass) {
    calls_.append(py::make_tuple("set_pipeline", pass.kernel, pass.constants));
  }
  void set_buffer(uint32_t slot, const Buffer& b) {
    const auto base = reinterpret_cast<uintptr_t>(b.base);
    calls_.append(py::make_tuple("set_buffer", slot, base, b.offset, b.bytes));
  }
  void set_bytes(uint32_t slot, const void* data, size_t count) {
    const py::bytes bytes(static_cast<const char*>(data), count);
    calls_.append(py::make_tuple("set_bytes", slot, bytes));
  }
  void set_threadgroup_memory(uint32_t index, uint32_t bytes) {
    calls_.append(py::make_tuple("set_threadgroup_memory", index, bytes));
  }
  void dispatch(const std::array<uint32_t, 3>& grid, const std::array<uint32_t, 3>& threads) {
    calls_.append(py::make_tuple("dispatch", grid, threads));
  }
  void commit() { calls_.append(py::make_tuple("commit")); }

 private:
  py::list calls_;
};

constexpr const char* kName = "recorder";
py::list* g_calls;  // calls of the last installation, as is the count of passes
std::unique_ptr<Commits> g_commits;
constexpr auto kBetweenPasses = std::chrono::microseconds(30);
size_t g_blocks = 0;
Commits::Clock::time_point g_now;  // each pass takes kBetweenPasses

void record(const BoundPlans& launches) {
  if (collector().takes(launches)) return;
  const py::gil_scoped_acquire gil;
  Recorder recorder(*g_calls);
  ++g_blocks;
  for (const BoundPlan& each : launches) {
    const std::vector<Pass>& passes = each.plan.passes;
    for (const Pass& pass : passes) encode(recorder, pass, each.buffers);
    g_now += kBetweenPasses * passes.size();
    if (g_commits->is_due(nullptr, passes.size(), g_now)) recorder.commit();
  }
}

void install(const std::string& chip, uint32_t cores) {
  Gpu gpu = gpu_by_name(chip);
  if (cores) gpu.cores = cores;
  gpu.sdpa_queries = sdpa_from();
  auto commits = std::make_unique<Commits>(commit_every());
  stand_in(kName, gpu, record);
  g_commits = std::move(commits);
  g_blocks = 0;
  delete g_calls;
  g_calls = new py::list;
}

std::vector<Pass> g_collected;

std::vector<std::string> collected() {
  g_collected = collector().end();
  std::vector<std::string> out;
  for (const Pass& pass : g_collected) out.push_back(pass.kernel);
  return out;
}

void compile(size_t i) {
  const Pass pass = g_collected.at(i);
  if (loaded_hooks().mps_compile) {
    const py::gil_scoped_release nobody;
    loaded_hooks().mps_compile(pass);
  } else if (g_calls) {
    g_calls->append(py::make_tuple("compile", pass.kernel, pass.constants));
  }
}

py::list remove() {
  step_back(kName);
  return *g_calls;
}

}  // namespace

void bind_recorder(py::module_& m) {
  m.def("install_recorder", install, py::arg("chip") = "m1", py::arg("cores") = 0,
        "Puts the recorder in the place of the CPU's kernels: what is launched is recorded as the "
        "Metal engine would encode it, not computed. `chip` and `cores` as of install_emulator.");
  m.def(
      "remove_recorder", remove,
      "The CPU's kernels again. Returns the calls, in order: (\"set_pipeline\", kernel, "
      "constants), "
      "(\"set_buffer\", slot, base, offset, bytes), (\"set_bytes\", slot, bytes), "
      "(\"set_threadgroup_memory\", index, bytes), (\"dispatch\", grid, threads), (\"commit\",).");
  m.def(
      "recorder_blocks", [] { return g_blocks; },
      "How many blocks the recorder would have given to torch's queue, each with all passes of a "
      "call of the engine.");
  m.def(
      "recorder_waits", [](int64_t us) { g_now += std::chrono::microseconds(us); }, py::arg("us"),
      "Lets so many microseconds pass on the recorder's clock, by which every pass takes 30.");
  m.def(
      "collect_kernels", [] { collector().begin(); },
      "From here on this thread's ops launch nothing on MPS, or on what the recorder stands for: "
      "the kernels of their plans are collected, and their results are not computed.");
  m.def("collected_kernels", collected,
        "Until here. The kernels by name, one for each set of function constants.");
  m.def("compile_kernel", compile, py::arg("i"),
        "Compiles a kernel of collected_kernels(), unless it is compiled; the recorder records "
        "(\"compile\", kernel, constants). From any thread. RuntimeError: it does not compile.");
  m.def("metal_source", source_of, py::arg("kernel"),
        "The text that Metal compiles for a kernel. ValueError: no such kernel.");
}

}  // namespace metalmm::mps
