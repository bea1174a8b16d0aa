// The machine as a value: what plan() needs to know about a GPU. No torch, no Metal.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace metalmm {

// Generation and class pick the row of tuning.def; the numbers are read from the device where there
// is one, and from the table of chips where there is none (tests, `metalmm explain`).
enum class Generation : int { kM1 = 1, kM2, kM3, kM4, kM5 };
enum class ChipClass : int { kBase, kPro, kMax, kUltra };

constexpr uint32_t kLanesPerCore = 128;  // instructions issued per core and cycle, M1 to M5

// Matrix units that torch's matmul reaches and no kernel here: the neural accelerators of M5, which
// only Metal 4's tensors do, and the tensor cores of NVIDIA at their full rate. simdgroup_matrix
// reaches all that M1 to M4 have.
enum class Accelerator : int { kNone, kNeural, kTensorCores };
// Multiply-adds of f16 and bf16 that the neural accelerators of a core do in a cycle
// (tzakharko.github.io/apple-neural-accelerators-benchmark): of the chip model, not of the choice.
constexpr uint32_t kNeuralLanesPerCore = 512;

struct Gpu {
  std::string name;  // "m4-max"
  Generation generation = Generation::kM1;
  ChipClass chip_class = ChipClass::kBase;
  int family = 7;  // MTLGPUFamilyApple7 ... Apple10
  uint32_t cores = 8;
  uint32_t bandwidth_gb_s = 68;  // nominal, decimal: of the chip model, not of the choice
  uint32_t clock_mhz = 1278;     // highest: of the chip model, not of the choice
  uint32_t max_threadgroup_memory = 32768;
  uint32_t max_threads = 1024;  // per threadgroup
  // Most weights a core for which a vector kernel normalises x; 0: any number. A limit is for
  // machines whose vector kernels wait for instructions. Macs' wait for memory: 2.5 to 4 issue
  // cycles a weight of the 8 to 10 that memory leaves them.
  int64_t norm_weights_per_core = 0;
  std::string row{};  // row of the table that has the numbers: "m4-max"
  Accelerator accelerator = Accelerator::kNone;
  // Queries from which torch's attention takes kAttention, whatever tuning.def says; 0: as that
  // says.
  int64_t sdpa_queries = 0;
  // Whether vector kernels read blocks of 2-byte fields 8 bytes at a time where rows allow it.
  // Loads of 2 bytes fill the L1 of an NVIDIA GPU. An Apple GPU reads four of 2 bytes at an even
  // address in one load: the longer words save none, and their selects cost gemv, instructions a
  // weight of f16 x, q8_0 1.00 of 5.56, q6_k 1.03 of 7.05, q3_k 0.70 of 6.95 (bench agx,
  // 2026-11-24).
  bool reads_long_blocks = false;
  // Whether products take halves as they are, those below 2^-14 included: vector kernels then read
  // codes as such halves (metal/formats/piece.h). Said of all Macs, and tested on a device
  // (subnormals.h). PTX converts halves first, an instruction for each.
  bool keeps_subnormals = true;
};

// plan() knows Macs: an NVIDIA GPU is planned for as an M4 Max, a large one whose matrix units work
// beside the others, with tensor cores. gpu_by_name() has it by this name; the caller sets the
// cores, its multiprocessors.
constexpr const char* kCuda = "cuda";

// M1 ... M5, base to Ultra, each in its largest configuration.
const std::vector<Gpu>& all_gpus();

// Chip by name, in any case, spaces for dashes allowed ("m4-max", "Apple M4 Max"). One that the
// table does not have ("m6-max", "m4-ultra", "a18-pro") has its own name and the numbers of the
// nearest row. kCuda is no chip, and has a row's. Throws std::invalid_argument that lists the
// table: no name of a chip.
Gpu gpu_by_name(std::string_view name);

// The row for what a device reports; a number that is 0 keeps the table's. A name outside the table
// takes the row of the class its name ends in and the newest generation of its family, so that an
// unknown machine still gets a plan.
Gpu gpu_of_device(std::string_view device_name, int family, uint32_t cores,
                  uint32_t max_threadgroup_memory);

const char* to_string(ChipClass c);

}  // namespace metalmm
