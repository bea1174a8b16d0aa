#include "dense.h"

#include <ATen/Context.h>

#include <algorithm>
#include <string_view>

#include "matmul.h"
#include "ops/checks.h"
#include "ops/tensors.h"
#include "parallel.h"

namespace metalmm::cpu {
namespace {

// Bytes of W that are decoded at a time, for the panel to stay in a last-level cache. Products of
// panels of 4 MB (512 rows) take 1.02 of the time of one product at M = 512, K = 4096 (Zen 4).
constexpr int64_t kPanelBytes = int64_t{4} << 20;
// At least so many rows, for the columns of a product to fill the tiles of torch's matmul.
constexpr int64_t kMinPanelRows = 256;

// Whether torch multiplies bf16 by instructions for it: oneDNN does on AVX512-BF16, and on AMX,
// which no CPU has without. (torch takes oneDNN on AVX-512 of any kind, where it converts to f32.)
// Asked of the compiler's run time, as isa_select.cpp does: the names of ATen/cpu/Utils.h differ
// between torch 2.10 and 2.13.
bool multiplies_bf16() {
#if defined(__x86_64__)
  static const bool has = __builtin_cpu_supports("avx512bf16");
  // METALMM_CPU_ISA rules torch out, too.
  return has && at::globalContext().userEnabledMkldnn() && at::hasMKLDNN() &&
         std::string_view(current_isa().name).substr(0, 6) == "avx512";
#else
  return false;
#endif
}

// Rows [first, first + rows) of W, in the dtype of the panel.
void decode_panel(const Weight& w, const CodecKernels& codec, int64_t first, at::Tensor panel) {
  const int64_t rows = panel.size(0), k = w.k, grain = std::max<int64_t>(1, (1 << 16) / k);
  const auto each_row = [&](const auto& decode) {
    parallel_for(0, rows, grain, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) decode(r);
    });
  };
  if (panel.scalar_type() == at::kBFloat16) {
    auto* to = static_cast<uint16_t*>(panel.mutable_data_ptr());
    each_row([&](int64_t r) { codec.decode_bf16(w, first + r, 0, k, to + r * k); });
    return;
  }
  const at::Tensor f32 = panel.scalar_type() == at::kFloat
                             ? panel
                             : at::empty(panel.sizes(), panel.options().dtype(at::kFloat));
  auto* to = f32.mutable_data_ptr<float>();
  each_row([&](int64_t r) { codec.decode(w, first + r, 0, k, to + r * k); });
  if (!f32.is_same(panel)) panel.copy_(f32);
}

}  // namespace

bool dense_is_faster(at::ScalarType dtype) { return dtype == at::kBFloat16 && multiplies_bf16(); }

at::Tensor dense(const at::Tensor& x, const at::Tensor& w, const Format& format) {
  const int64_t m = x.size(0), n = w.size(0), k = x.size(1);
  at::Tensor y = at::empty({m, n}, x.options());
  if (y.numel() == 0) return y;
  if (k == 0) return y.zero_();
  const int64_t most = std::max(kMinPanelRows, kPanelBytes / (k * x.element_size()));
  const Weight weight = make_weight(w, format, k);
  const CodecKernels& codec = kernels_of(format);
  const at::Tensor panel = at::empty({std::min(n, most), k}, x.options());
  for (int64_t first = 0; first < n; first += most) {
    const int64_t rows = std::min(most, n - first);
    const at::Tensor decoded = panel.narrow(0, 0, rows);
    decode_panel(weight, codec, first, decoded);
    at::Tensor part = y.narrow(1, first, rows);
    at::mm_out(part, x, decoded.t());
  }
  return y;
}

}  // namespace metalmm::cpu
