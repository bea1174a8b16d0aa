#include "gpu.h"

#include <algorithm>
#include <cctype>
#include <stdexcept>

#include "names.h"

namespace metalmm {
namespace {

constexpr auto M1 = Generation::kM1;
constexpr auto M2 = Generation::kM2;
constexpr auto M3 = Generation::kM3;
constexpr auto M4 = Generation::kM4;
constexpr auto M5 = Generation::kM5;
constexpr auto kBase = ChipClass::kBase;
constexpr auto kPro = ChipClass::kPro;
constexpr auto kMax = ChipClass::kMax;
constexpr auto kUltra = ChipClass::kUltra;

// Cores and bandwidth: Apple's technical specifications of the Macs that carry the chip, largest
// configuration. Clocks: the highest that powermetrics lists, as its users published it; where none
// did, that of the nearest sibling. docs/chip-model.md names the source of each. Family: Metal
// feature set tables. Threadgroup memory is 32 KB in all. There is no M4 Ultra.
std::vector<Gpu> make_gpus() {
  std::vector<Gpu> out = {
      // name, generation, class, family, cores, GB/s, MHz
      {"m1", M1, kBase, 7, 8, 68, 1278},           // LPDDR4X-4266, 128 bit
      {"m1-pro", M1, kPro, 7, 16, 200, 1296},      // LPDDR5-6400, 256 bit
      {"m1-max", M1, kMax, 7, 32, 400, 1296},      // 512 bit
      {"m1-ultra", M1, kUltra, 7, 64, 800, 1296},  // two M1 Max
      {"m2", M2, kBase, 8, 10, 100, 1398},         // LPDDR5-6400, 128 bit
      {"m2-pro", M2, kPro, 8, 19, 200, 1398},
      {"m2-max", M2, kMax, 8, 38, 400, 1398},
      {"m2-ultra", M2, kUltra, 8, 76, 800, 1398},
      {"m3", M3, kBase, 9, 10, 100, 1338},
      {"m3-pro", M3, kPro, 9, 18, 150, 1380},  // 192 bit: fewer bytes than an M2 Pro
      {"m3-max", M3, kMax, 9, 40, 400, 1380},  // 300 GB/s with 30 cores
      {"m3-ultra", M3, kUltra, 9, 80, 819, 1380},
      {"m4", M4, kBase, 9, 10, 120, 1470},     // LPDDR5X-7500
      {"m4-pro", M4, kPro, 9, 20, 273, 1578},  // LPDDR5X-8533, 256 bit
      {"m4-max", M4, kMax, 9, 40, 546, 1578},  // 410 GB/s with 32 cores
      {"m5", M5, kBase, 10, 10, 153, 1578},    // LPDDR5X-9600
      {"m5-pro", M5, kPro, 10, 20, 307, 1620},
      {"m5-max", M5, kMax, 10, 40, 614, 1620},       // 460 GB/s with 32 cores
      {"m5-ultra", M5, kUltra, 10, 80, 1228, 1620},  // "1.2 TB/s": two M5 Max
  };
  for (Gpu& gpu : out) {
    gpu.row = gpu.name;
    if (gpu.generation == M5) gpu.accelerator = Accelerator::kNeural;
  }
  return out;
}

// H200, time of norm_linear over that of rms_norm and linear, packed formats, M = 1, f16: 0.87
// to 1.04 (q4_0, the others up to 0.99) at 191,000 weights a core (6144 x 4096), 1.02 to 1.26 at
// 890,000 (28672 x 4096); `python -m bench norm` of ef46a445, 2026-11-22.
constexpr int64_t kCudaNormWeightsPerCore = 1 << 18;

Gpu cuda_gpu() {
  Gpu gpu = gpu_by_name("m4-max");
  gpu.name = kCuda;
  gpu.norm_weights_per_core = kCudaNormWeightsPerCore;
  gpu.accelerator = Accelerator::kTensorCores;
  gpu.reads_long_blocks = true;
  gpu.keeps_subnormals = false;
  return gpu;
}

// Lower case, dashes for spaces, without the maker: "Apple M4 Max" -> "m4-max".
std::string normal(std::string_view name) {
  std::string out;
  for (unsigned char c : name) {
    out += c == ' ' || c == '_' ? '-' : static_cast<char>(std::tolower(c));
  }
  constexpr std::string_view kMaker = "apple-";
  return out.rfind(kMaker, 0) == 0 ? out.substr(kMaker.size()) : out;
}

const Gpu* find(std::string_view name) {
  const std::string wanted = normal(name);
  for (const Gpu& gpu : all_gpus()) {
    if (gpu.name == wanted) return &gpu;
  }
  return nullptr;
}

// The newest row of a class whose family is not newer than this one, if there is one.
const Gpu* newest(ChipClass chip_class, int family) {
  const Gpu* found = nullptr;
  for (const Gpu& gpu : all_gpus()) {
    if (gpu.chip_class == chip_class && gpu.family <= family) found = &gpu;
  }
  return found;
}

bool ends_with(const std::string& s, std::string_view end) {
  return s.size() >= end.size() && s.compare(s.size() - end.size(), end.size(), end) == 0;
}

// The row for a chip that the table does not have: of the class that the name ends in, of the
// newest generation that its family has. A chip of iPhones is of no class: "a18-pro" has 6 cores.
Gpu nearest(const std::string& name, int family) {
  ChipClass chip_class = kBase;
  const bool is_mac = !name.empty() && name[0] == 'm';
  if (is_mac && ends_with(name, "-pro")) chip_class = kPro;
  if (is_mac && ends_with(name, "-max")) chip_class = kMax;
  if (is_mac && ends_with(name, "-ultra")) chip_class = kUltra;
  const Gpu* row = newest(chip_class, family);
  Gpu out = row ? *row : all_gpus().front();
  out.name = name;
  return out;
}

// The family of a chip that only its name tells: of "m6-max", "m4-ultra" or "a18-pro", or 0 where
// it is no name of a chip from M1 or A14 on. Metal feature set tables.
int family_of_name(const std::string& name) {
  size_t end = 1;
  while (end < name.size() && std::isdigit(static_cast<unsigned char>(name[end]))) ++end;
  if (end < 2 || end > 4 || name[1] == '0') return 0;
  const int number = std::stoi(name.substr(1, end - 1));
  const std::string rest = name.substr(end);
  const bool is_pro = rest.empty() || rest == "-pro";
  if (name[0] == 'm' && (is_pro || rest == "-max" || rest == "-ultra")) {
    const auto generation = static_cast<Generation>(std::min(number, static_cast<int>(M5)));
    for (const Gpu& gpu : all_gpus()) {
      if (gpu.generation == generation) return gpu.family;
    }
  }
  if (name[0] != 'a' || !is_pro || number < 14) return 0;
  return number == 14 ? 7 : number <= 16 ? 8 : number <= 18 ? 9 : 10;
}

}  // namespace

const std::vector<Gpu>& all_gpus() {
  static const auto* gpus = new std::vector<Gpu>(make_gpus());
  return *gpus;
}

Gpu gpu_by_name(std::string_view name) {
  if (const Gpu* gpu = find(name)) return *gpu;
  const std::string wanted = normal(name);
  if (wanted == kCuda) return cuda_gpu();
  if (const int family = family_of_name(wanted)) return nearest(wanted, family);
  throw std::invalid_argument(
      unknown_name("chip", name, static_cast<int>(all_gpus().size()),
                   [](int i) { return all_gpus()[i].name; }) +
      "; a chip from M1 or A14 on that is not among them (m6-pro) takes the nearest");
}

Gpu gpu_of_device(std::string_view device_name, int family, uint32_t cores,
                  uint32_t max_threadgroup_memory) {
  const std::string name = normal(device_name);
  const Gpu* known = find(name);
  Gpu gpu = known ? *known : nearest(name, family);
  if (family) gpu.family = family;
  if (cores) gpu.cores = cores;
  if (max_threadgroup_memory) gpu.max_threadgroup_memory = max_threadgroup_memory;
  return gpu;
}

const char* to_string(ChipClass c) {
  constexpr const char* names[] = {"base", "Pro", "Max", "Ultra"};
  return names[static_cast<int>(c)];
}

}  // namespace metalmm
