// Strategies, dtypes, ops and kernels by name.
#include "names.h"
#include "passes.h"
#include "plan.h"

namespace metalmm {
namespace {

constexpr const char* kOps[] = {
#define MM_SEVERAL(op, name) #name,
#include "problems.def"
};
static_assert(sizeof kOps / sizeof *kOps == static_cast<size_t>(Op::kCount));

constexpr const char* kCodecs[] = {
#define MM_FORMAT(name, Struct) #name,
#include "metal/formats.def"
};

bool is_of_caches(Family family) { return family == Family::Append || family == Family::Attention; }
bool has_format(Family family) {
  return family == Family::Matmul || family == Family::Rows || is_of_caches(family);
}

}  // namespace

const char* to_string(StrategyId s) { return info_of(s).name; }
const char* to_string(Op op) { return kOps[static_cast<int>(op)]; }

StrategyId strategy_by_name(std::string_view name) {
  return static_cast<StrategyId>(find_name("strategy", name, kNumStrategies, [](int i) {
    return to_string(static_cast<StrategyId>(i));
  }));
}

DType dtype_by_name(std::string_view name) {
  return static_cast<DType>(
      find_name("dtype", name, kNumDTypes, [](int i) { return to_string(static_cast<DType>(i)); }));
}

Op op_by_name(std::string_view name) {
  return static_cast<Op>(
      find_name("op", name, static_cast<int>(Op::kCount), [](int i) { return kOps[i]; }));
}

Activation activation_by_name(std::string_view name) {
  constexpr int count = sizeof kActivations / sizeof *kActivations;
  return static_cast<Activation>(
      find_name("activation", name, count, [](int i) { return kActivations[i]; }));
}

// The slots that a kernel binds tell what it computes.
std::vector<StrategyId> strategies_of(Op op) {
  using S = StrategyId;
  std::vector<S> out;
  const auto binds = [&](auto... slots) {
    for (int i = 0; i < kNumStrategies; ++i) {
      const uint32_t of = info_of(static_cast<S>(i)).slots;
      if (((of == slots) || ...)) out.push_back(static_cast<S>(i));
    }
  };
  switch (op) {
#define MM_SINGLE(op, name, strategy, why) \
  case Op::op:                             \
    return {S::strategy};
#define MM_PLANNED(op, name, strategy) MM_SINGLE(op, name, strategy, )
#include "problems.def"
    case Op::kLinear:
      binds(kBindGemv, kBindGemvArranged);
      binds(kBindArranged);
      binds(kBindMatmul);
      out.push_back(S::dense);
      out.push_back(S::split_reduce);
      break;
    case Op::kSwigluDown:
      return {S::swiglu_down, S::split_reduce};
    case Op::kExpertTiles:
      return {S::expert_gemm};
    case Op::kAttention:
      return {S::attention_split, S::attention_tile, S::sdpa};
    case Op::kCount:
      break;
  }
  return out;
}

std::string kernel_name(StrategyId strategy, Codec codec, DType dtype) {
  std::string out = info_of(strategy).kernels;
  if (has_format(info_of(strategy).family)) {
    out += std::string("_") + kCodecs[static_cast<int>(codec)];
  }
  return out + "_" + to_string(dtype);
}

std::vector<std::string> all_kernel_names() {
  std::vector<std::string> out;
  for (int s = 0; s < kNumStrategies; ++s) {
    const auto strategy = static_cast<StrategyId>(s);
    if (info_of(strategy).is_alias) continue;
    const int codecs = has_format(info_of(strategy).family) ? kNumCodecs : 1;
    for (int c = 0; c < codecs; ++c) {
      const bool is_needed = is_stored(static_cast<Codec>(c));
      if (is_of_caches(info_of(strategy).family) && !is_needed) continue;
      for (int d = 0; d < kNumDTypes; ++d) {
        const bool is_arranged = static_cast<DType>(d) != DType::kBF16;
        if (info_of(strategy).family == Family::Arrange && !is_arranged) continue;
        out.push_back(kernel_name(strategy, static_cast<Codec>(c), static_cast<DType>(d)));
      }
    }
  }
  return out;
}

}  // namespace metalmm
