// From a strategy to its dispatches: grid, threads, threadgroup bytes, constants, slots, arguments.
// All of it follows from metal/strategies.def, metal/geometry.h and the format; what is chosen, and
// why, is in plan.cpp.
#pragma once

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>

#include "plan.h"
#include "round.h"

namespace metalmm {

// Why a plan is what it is, in words, written where somebody asked for them: a call of plan() takes
// 0.14 us for a product of one row, where prose that nobody read made it 0.29 (AMD EPYC, g++ -O2).
class Reason {
 public:
  explicit Reason(std::string* to) : to_(to) {}

  // Strings and whole numbers, one behind the other.
  template <class... Words>
  void add(const Words&... words) const {
    if (to_) (append(words), ...);
  }

 private:
  void append(const std::string& word) const { *to_ += word; }
  void append(const char* word) const { *to_ += word; }
  void append(int64_t number) const { *to_ += std::to_string(number); }

  std::string* to_;  // null: nobody asked
};

// Throws std::invalid_argument of these words and whole numbers, one behind the other.
template <class... Words>
[[noreturn]] void reject(const Words&... words) {
  std::string what;
  Reason(&what).add(words...);
  throw std::invalid_argument(what);
}

// "name: given; must be allowed", where it is not.
template <class... Words>
void require(bool is_allowed, const char* name, int64_t given, const Words&... allowed) {
  if (!is_allowed) reject(name, ": ", given, "; must be ", allowed...);
}

// Torch: no kernel of its own, torch's matmul between passes of another row.
enum class Family { Matmul, Rows, Flat, Arrange, Groups, Single, Append, Attention, Torch };

// A row of strategies.def with the numbers of its Geometry; 0 where the family has none.
struct StrategyInfo {
  const char* name;
  const char* kernels;  // the beginning of their names: name, or that of the row whose they are
  bool is_alias;        // the row has no kernels of its own
  Family family;
  uint32_t slots;
  int n, m;    // Matmul: rows of W and of x per threadgroup
  int k;       // Matmul: values of K per step; a part of split-K is a whole number of steps
  int values;  // Rows, Flat: values per thread
  int threads;
  int threadgroup_bytes, threadgroup_bytes_f16;  // to bind, by the dtype of x
  bool rounds_to_half;                           // Matmul: W, where x is f16
  bool on_matrix_unit;                           // Matmul
  // Matmul: rows of x a threadgroup, of M rows, by whether x is f16 and the values of a piece; null
  // where there are always m.
  int64_t (*batch_of)(int64_t, bool, int);
  int bytes_per_row;  // Matmul: threadgroup memory of a row of x, where the rows decide it; else 0
};
const StrategyInfo& info_of(StrategyId strategy);

// Whether a Matmul strategy can normalise x.
inline bool takes_norm(StrategyId strategy) {
  return (info_of(strategy).slots & slot_bit(kSlotNorm)) != 0;
}

// Values of K that a lane takes at a step, and their weave (formats.def). Choices depend on them,
// no result.
struct Piece {
  int values, weave;
  bool is_wide;  // gemv_wide_n may take it
};

constexpr Piece kPieces[] = {
#define MM_DENSE(name, Struct, bytes, piece) {piece, piece, true},
#define MM_BLOCK(name, Struct, values, bytes, alignment, piece, weave, wide, ...) \
  {piece, weave, wide != 0},
#define MM_AFFINE(name, Struct, bits, piece) {piece, piece, true},
#include "metal/formats.def"
};
constexpr Piece piece_of(Codec codec) { return kPieces[static_cast<int>(codec)]; }

// The formats that a shader quantizes, as metal/formats/each_stored.h has them.
constexpr bool kStored[] = {
#define MM_DENSE(...) true,
#define MM_BLOCK(name, Struct, values, bytes, alignment, piece, weave, wide, packs, stored) \
  stored != 0,
#define MM_AFFINE(...) false,
#include "metal/formats.def"
};
constexpr bool is_stored(Codec codec) { return kStored[static_cast<int>(codec)]; }

// The types of the scales of affine formats, by the shaders' ScaleType.
constexpr DType kScaleTypes[] = {DType::kF16, DType::kBF16, DType::kF32};
static_assert(kScaleTypes[static_cast<int>(ScaleType::kBF16)] == DType::kBF16 &&
              kScaleTypes[static_cast<int>(ScaleType::kF32)] == DType::kF32);
constexpr ScaleType scale_type_of(DType type) {
  int i = 0;
  while (kScaleTypes[i] != type) ++i;
  return static_cast<ScaleType>(i);
}

// Heads of a row of x of rope, v included.
int64_t heads_of(const RopeSizes& rope);
uint32_t rope_bits(const Problem& problem);

// plan() of kRopeAppend, and what of it can be planned.
Plan plan_append(const Problem& problem, const Gpu& gpu, Reason reason);
void check_append(const Problem& problem);

// plan() of kRoute, and what of it can be planned.
Plan plan_route(const Problem& problem, Reason reason);
void check_route(const Problem& problem);

// plan() of kCausalConv, kGatedDelta and kSsmScan, and what of them can be planned.
Plan plan_recurrent(const Problem& problem, Reason reason);
void check_conv(const Problem& problem);
void check_delta(const Problem& problem);
void check_ssm(const Problem& problem);

// Rows of x per threadgroup.
int64_t rows_of_x(StrategyId strategy, const Problem& problem);

// Threadgroups of one part.
int64_t threadgroups_of(StrategyId strategy, const Problem& problem);

uint32_t threadgroup_bytes_of(StrategyId strategy, DType dtype);

// MM_KERNEL of entry.h declares [[threadgroup(0)]] for every kernel. Memory must be bound to it,
// and Metal takes multiples of 16 bytes.
constexpr int bound_bytes(int used) { return used ? (used + 15) / 16 * 16 : 16; }

// Throws std::invalid_argument: `argument` asks for more threadgroup memory than a GPU has.
void check_fits(const char* argument, StrategyId strategy, uint32_t bytes, const Gpu& gpu);

// The threadgroups that so many threads need; kernels number threads in 32 bits.
std::array<uint32_t, 3> flat_grid(int64_t threads, int of_group);

// A pass without its grid and its constants.
Pass bare_pass(StrategyId strategy, Codec codec, DType dtype, const KernelArgs& args);

// K cut into parts of k_per_part values, a whole number of blocks and of steps; the last may be
// shorter, none is empty.
struct Parts {
  int64_t count = 1;
  int64_t k_per_part = 0;
};
// At most so many parts.
Parts cut(StrategyId strategy, const Problem& problem, int64_t most);

// is_split: it leaves the sum of each part in the workspace, for reduce_pass. rows: of x a
// threadgroup, where the strategy multiplies.
Pass main_pass(StrategyId strategy, const Problem& problem, const Parts& parts, bool is_split,
               int64_t rows = 0);
Pass reduce_pass(Problem problem, const Parts& parts);

// Rows of x up to which gemv_batched was measured to be the faster: MM_BATCHED of tuning.def.
std::optional<int64_t> measured_batched_max_m(const Problem& problem, const Gpu& gpu);

// rows_of_x(), or fewer of gemv_batched where the GPU wants fewer.
int64_t choose_rows(StrategyId strategy, const Problem& problem, const Gpu& gpu, bool is_split);

// Whether a pass of the strategy takes x in an order that another pass writes; that pass, of which
// main is told what it has to know; the bytes of x that it writes.
bool takes_arranged(StrategyId strategy, const Problem& problem, const Gpu& gpu, bool is_split);
Pass arrange_pass(StrategyId strategy, const Problem& problem, Pass& main);
size_t arranged_bytes(const Pass& arrange);

// The loads that rows of weights, or slots of a cache, allow: BoundsBits.
uint32_t bounds_of_weights(const Problem& problem, const KernelArgs& args);
// Sets how `gpu` best reads packed rows in a pass of a vector kernel: without kBoundsLongBlocks
// where it gains nothing by it, with kBoundsSubnormals where it keeps them.
void choose_loads(StrategyId strategy, const Problem& problem, const Gpu& gpu, Pass& pass);

// The reason of a plan without passes.
constexpr const char* kNoOutput = "no output: no pass";

// Whether rows of the format are rows of values of the problem's dtype as they lie.
bool is_readable(const Problem& problem);

// Whether torch's matmul takes the problem, not a kernel (tuning.def).
bool dense_pays(const Problem& problem, const Gpu& gpu, Reason why);
// plan() of linear by torch's matmul.
Plan plan_dense(const Problem& problem, const Gpu& gpu, Reason reason);

// Checks that an op on experts can be planned; tells its kernels their arguments and bits.
void check_experts(const Problem& problem);
void set_experts(const Problem& problem, KernelArgs& args);
uint32_t expert_bits(const Problem& problem);

// plan() of kAttention, and what of it can be planned.
Plan plan_attention(const Problem& problem, const Gpu& gpu, std::optional<StrategyId> strategy,
                    Reason reason);
void check_attention(const Problem& problem);

// Whether torch's scaled_dot_product_attention takes kAttention, not a kernel (tuning.def).
bool sdpa_pays(const Problem& problem, const Gpu& gpu, Reason why = Reason(nullptr));
// Whether torch's op has all that is asked for: no soft cap, no sinks, no mask that is added.
bool has_sdpa(const Problem& problem);
// Throws std::invalid_argument: what it has not.
void check_sdpa(const Problem& problem);
// The panels that torch's op takes. The function asks is_readable() alone of the problem's format.
SdpaPanels sdpa_panels(const Problem& problem);

// Throws std::invalid_argument: v does not fit 32 bits.
uint32_t u32(int64_t v, const char* what);

// A stride, or that of rows that follow each other.
constexpr int64_t or_packed(int64_t stride, int64_t packed) {
  return stride == kPacked ? packed : stride;
}

// Throws std::invalid_argument where the product does not fit 64 bits.
int64_t product(int64_t a, int64_t b);

// Throws std::invalid_argument, which names the argument, what was given and what is allowed.
void check(const Problem& problem);

// Throws std::invalid_argument: a size that kernels, which count in 32 bits, cannot take.
void check_sizes(const Problem& problem);

}  // namespace metalmm
