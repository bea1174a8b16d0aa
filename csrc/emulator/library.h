// A library of compiled shaders, which torch_metalmm.testing builds, and what its launches find.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "msl/host/abi.h"

namespace metalmm {

struct EmulatorOptions {
  bool descending = false;  // the last simdgroup and lane first
  bool allow_inactive = false;
  bool allow_uninitialized = false;
  bool flush_subnormals = false;  // f32 and bf16 alone
  uint32_t workers = 0;           // OS threads; 0: one per core
  uint32_t seconds = 300;         // after which a kernel is an endless loop; 0: never
};

// A launch of nothing yet.
MmLaunch launch_with(const EmulatorOptions& options);
// Threadgroups and threads of each, all of which are threads of the grid.
using Size = std::array<uint32_t, 3>;
void set_grid(MmLaunch& launch, const Size& grid, const Size& threads);

// A file and the number of a line; "library+0xaddress" and 0 where no line is known.
using SourceLine = std::pair<std::string, uint32_t>;

// The line of an address of a library: from its debug information, which Python reads.
using LineOf =
    std::function<std::optional<SourceLine>(const std::string& library, uint64_t address)>;
void set_line_of(LineOf line_of);

// A fault that the emulator found. The fields are those of EmulatorFault in Python.
struct Fault {
  std::string kind;  // the word of an MmFault
  std::string kernel;
  std::string text;  // the event, without kernel and place
  Size threadgroup{};
  uint32_t simdgroup = 0, lane = 0;
  std::string file;  // empty: at no place
  uint32_t line = 0;
  std::optional<SourceLine> other;  // e.g. of the write that races with a read
};
std::string message(const Fault& fault);

class ShaderLibrary {
 public:
  // Throws std::runtime_error: there is no such file, or it is no library of shaders. A library is
  // never unloaded: handlers of signals are in it.
  explicit ShaderLibrary(std::string path);

  const std::vector<MmKernelEntry>& kernels() const { return kernels_; }
  const std::vector<MmConstantEntry>& constants() const { return constants_; }

  // The earliest fault, if there is one.
  std::optional<Fault> launch(const MmLaunch& launch) const;

 private:
  std::string path_;
  std::vector<MmKernelEntry> kernels_;
  std::vector<MmConstantEntry> constants_;
  decltype(&mm_launch) launch_;
};

}  // namespace metalmm
