// The NEON kernels against the scalar ones, both built for aarch64: `make neon`, under qemu on
// another machine.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "cpu/int8/kernels.h"
#include "cpu/kernels.h"
#include "cpu/quantize/quantize.h"

namespace metalmm::cpu {
namespace neon {
extern const IsaKernels kKernels;
extern const int8::Kernels kInt8Kernels;
}  // namespace neon
namespace neon_dot {
extern const int8::Kernels kInt8Kernels;
}
namespace scalar {
extern const IsaKernels kKernels;
extern const int8::Kernels kInt8Kernels;
}  // namespace scalar

namespace {

constexpr int64_t kK = 512, kRows = 13, kColumns = 64;
std::mt19937 generator(1);

std::vector<float> random_values(int64_t n) {
  std::uniform_real_distribution<float> draw(-0.5f, 0.5f);
  std::vector<float> out(n);
  for (float& v : out) v = draw(generator);
  return out;
}

// Sums of n terms of magnitude below 0.5 in two orders: each is within n * 2^-24 of the sum of
// magnitudes.
bool near(const std::vector<float>& a, const std::vector<float>& b, int64_t n) {
  const float bound = 2 * n * 0x1p-24f * (n * 0.25f);
  return std::equal(a.begin(), a.end(), b.begin(),
                    [&](float x, float y) { return std::fabs(x - y) <= bound; });
}

// Random rows of W; `packed` holds them.
Weight random_weight(const Format& f, std::vector<uint8_t>& packed) {
  const int64_t row_bytes = f.row_bytes(kK);
  packed.resize(kRows * row_bytes);
  for (int64_t r = 0; r < kRows; ++r) {
    quantize_row(f, random_values(kK).data(), kK, packed.data() + r * row_bytes);
  }
  return make_weight(packed.data(), row_bytes, f, kK);
}

int check_format(const Format& f) {
  std::vector<uint8_t> packed;
  const Weight w = random_weight(f, packed);
  const CodecKernels& fast = neon::kKernels.of(f.codec);
  const CodecKernels& slow = scalar::kKernels.of(f.codec);
  int failures = 0;
  std::vector<float> a(kK), b(kK);
  for (int64_t r = 0; r < kRows; ++r) {
    fast.decode(w, r, 0, kK, a.data());
    slow.decode(w, r, 0, kK, b.data());
    failures += std::memcmp(a.data(), b.data(), kK * sizeof(float)) != 0;
  }
  for (int i = 0; i < kNumDotKernels; ++i) {
    const std::vector<float> x = random_values(kDotRows[i] * kK);
    std::vector<float> ya(kDotRows[i] * kRows), yb(ya.size());
    fast.dot[i]({w, 0, kRows, x.data(), ya.data(), kRows});
    slow.dot[i]({w, 0, kRows, x.data(), yb.data(), kRows});
    failures += !near(ya, yb, kK);
  }
  const StepKernels& steps = fast.steps;
  for (int i = 0; i < kNumStepKernels && steps.values > 0; ++i) {
    const int64_t m = kDotRows[i];
    const std::vector<float> x = random_values(m * kK);
    std::vector<float> arranged(m * kK / steps.values * steps.step_floats), interleaved(m * kK);
    for (int64_t r = 0; r < m; ++r) {
      for (int64_t k = 0; k < kK; ++k) interleaved[(k / 4 * m + r) * 4 + k % 4] = x[r * kK + k];
    }
    steps.arrange({x.data(), kK, m, kK, m, arranged.data()});
    std::vector<float> ya(m * kRows), yb(ya.size());
    steps.dot[i]({w, 0, kRows, arranged.data(), ya.data(), kRows});
    slow.dot[i]({w, 0, kRows, interleaved.data(), yb.data(), kRows});
    failures += !near(ya, yb, kK);
  }
  if (failures) std::printf("%s: %d differences\n", f.name.c_str(), failures);
  return failures;
}

// Rows of x, of so many parts, that fill a panel, packed.
std::vector<uint8_t> panel_of(int8::Layout layout, const int8::ByParts<int8::PackKernel>& pack,
                              int parts, const int8::Kind& kind, const std::vector<float>& x) {
  std::vector<uint8_t> out(kK / kChunkValues * layout.chunk_bytes(kind.sub));
  pack[parts - 1](
      {x.data(), kK, layout.rows() / parts, 0, kK / kChunkValues, kind.offset, out.data()});
  return out;
}

// The first kTileRows rows of W, decoded, times one panel of x.
std::vector<float> tile_of(const int8::CodecKernels& codec, const int8::Tile& tile, const Weight& w,
                           const std::vector<uint8_t>& x) {
  constexpr int64_t kTileRows = 4;
  std::vector<uint8_t> codes(kTileRows * int8::kCodeStride);
  std::vector<float> scale(kTileRows * int8::kScaleStride), min(scale.size());
  const int8::Decoded decoded{codes.data(), scale.data(), min.data()};
  for (int64_t r = 0; r < kTileRows; ++r) codec.decode(w, r, 0, kK, decoded.row(r));
  std::vector<float> c(kTileRows * kColumns);
  for (int64_t r = 0; r < kTileRows; r += tile.rows) {
    tile.run(
        {decoded.row(r), x.data(), 0, kK / kChunkValues, c.data() + r * kColumns, kColumns, false});
  }
  return c;
}

// int8 kernels: what is rounded is equal byte for byte, sums differ as those of f32 may.
int check_int8(const Format& f, const int8::Kernels& fast, int parts, const char* name) {
  const int8::Kernels& slow = scalar::kInt8Kernels;
  const int8::CodecKernels &a = fast.codec[static_cast<int>(f.codec)],
                           &b = slow.codec[static_cast<int>(f.codec)];
  if (!b.gemv[0][0]) return a.gemv[0][0] != nullptr;
  std::vector<uint8_t> packed;
  const Weight w = random_weight(f, packed);
  const std::vector<float> x = random_values(kColumns * kK);
  const int8::KindKernels &ka = fast.kind[a.kind.index()], &kb = slow.kind[b.kind.index()];
  const int most = int8::kMaxGemvCodes / parts;
  const int64_t row_bytes = int8::RoundedRow::bytes(kK, parts);
  std::vector<uint8_t> memory_a(most * row_bytes), memory_b(memory_a.size());
  std::vector<int8::RoundedRow> xa, xb;
  for (int m = 0; m < most; ++m) {
    xa.push_back(int8::RoundedRow::in(memory_a.data() + m * row_bytes, kK, parts));
    xb.push_back(int8::RoundedRow::in(memory_b.data() + m * row_bytes, kK, parts));
    ka.round[parts - 1](x.data() + m * kK, 0, kK / kChunkValues, a.kind.offset, xa[m]);
    kb.round[parts - 1](x.data() + m * kK, 0, kK / kChunkValues, b.kind.offset, xb[m]);
  }
  int failures = memory_a != memory_b;
  std::vector<float> alone(most * kRows);  // each row by itself: the bits that it has beside others
  for (int m = 0; m < most; ++m) {
    a.gemv[parts - 1][0]({w, 0, kRows, &xa[m], alone.data() + m * kRows, kRows});
  }
  for (int m = 1; m <= most; ++m) {
    std::vector<float> ya(m * kRows), yb(ya.size());
    a.gemv[parts - 1][m - 1]({w, 0, kRows, xa.data(), ya.data(), kRows});
    b.gemv[parts - 1][m - 1]({w, 0, kRows, xb.data(), yb.data(), kRows});
    failures += !near(ya, yb, kK);
    failures += std::memcmp(ya.data(), alone.data(), ya.size() * sizeof(float)) != 0;
  }
  using Pack = int8::ByParts<int8::PackKernel>;
  const auto compare = [&](int8::Layout layout, const Pack& pa, const Pack& pb,
                           const int8::Tile& ta, const int8::Tile& tb) {
    const std::vector<uint8_t> xa = panel_of(layout, pa, parts, a.kind, x),
                               xb = panel_of(layout, pb, parts, b.kind, x);
    failures += xa != xb;
    failures += !near(tile_of(a, ta, w, xa), tile_of(b, tb, w, xb), kK);
  };
  compare(fast.narrow, ka.pack_narrow, kb.pack_narrow, ka.narrow, kb.narrow);
  compare(fast.batched, ka.pack_batched, kb.pack_batched, ka.batched[0], kb.batched[0]);
  compare(fast.gemm, ka.pack_gemm, kb.pack_gemm, ka.gemm[0], kb.gemm[0]);
  if (failures) {
    std::printf("int8 %s %s, %d parts: %d differences\n", name, f.name.c_str(), parts, failures);
  }
  return failures;
}

int check_tiles() {
  const int width = neon::kKernels.width;
  const std::vector<float> w = random_values(neon::kKernels.tile_rows * kDecodeStride);
  const std::vector<float> x = random_values(kMaxPanels * width * kK);
  int failures = 0;
  for (int p = 0; p < neon::kKernels.panels; ++p) {
    std::vector<float> a(neon::kKernels.tile_rows * kColumns), b(a.size());
    neon::kKernels.tile[p]({w.data(), x.data(), width * kK, kK, a.data(), kColumns, false});
    scalar::kKernels.tile[p]({w.data(), x.data(), width * kK, kK, b.data(), kColumns, false});
    failures += !near(a, b, kK);
  }
  if (failures) std::printf("tiles: %d differences\n", failures);
  return failures;
}

// Scores of n slots: some -inf, and from one below which a weight is 0.
std::vector<float> random_scores(int64_t n) {
  std::uniform_real_distribution<float> draw(-100.f, 3.f);
  std::vector<float> out(n);
  for (float& s : out) s = draw(generator);
  for (int64_t i = 2; i < n; i += 5) out[i] = -INFINITY;
  return out;
}

// exp is within 1 ulp, so weights are 4 u apart at most, and sums by as many terms more.
int check_softmax() {
  const AttentionKernels &fast = neon::kKernels.attention, &slow = scalar::kKernels.attention;
  int failures = 0;
  for (int64_t n = 0; n < 40; ++n) {
    std::vector<float> a = random_scores(n);
    if (n == 7) std::fill(a.begin(), a.end(), -INFINITY);
    if (n == 9) a[8] = NAN;
    std::vector<float> b = a;
    const float top = fast.top(a.data(), n);
    failures += top != slow.top(b.data(), n);
    const float sum = fast.exp(a.data(), n, top), other = slow.exp(b.data(), n, top);
    const auto near = [=](float x, float y) {
      return (std::isnan(x) && std::isnan(y)) || std::fabs(x - y) <= (4 + 2 * n) * 0x1p-24f * y;
    };
    failures += !near(sum, other) || !std::equal(a.begin(), a.end(), b.begin(), near);
  }
  if (failures) std::printf("softmax: %d differences\n", failures);
  return failures;
}

int check_weighing() {
  int failures = 0;
  for (int i = 0; i < kNumWeighKernels; ++i) {
    const std::vector<float> p = random_values((int64_t{1} << i) * kRows);
    const std::vector<float> rows = random_values(kRows * kK);
    std::vector<float> a = random_values((int64_t{1} << i) * kK), b = a;
    for (int64_t dim : {int64_t{kChunkValues}, kK}) {
      neon::kKernels.attention.weigh[i](
          {p.data(), kRows, rows.data(), kK, kRows, dim, a.data(), kK});
      scalar::kKernels.attention.weigh[i](
          {p.data(), kRows, rows.data(), kK, kRows, dim, b.data(), kK});
      failures += !near(a, b, kRows + 2);
    }
  }
  if (failures) std::printf("weighing: %d differences\n", failures);
  return failures;
}

}  // namespace
}  // namespace metalmm::cpu

int main() {
  int failures = metalmm::cpu::check_tiles(), with_steps = 0;
  failures += metalmm::cpu::check_softmax() + metalmm::cpu::check_weighing();
  for (const metalmm::Format& f : metalmm::all_formats()) {
    failures += metalmm::cpu::check_format(f);
    with_steps += metalmm::cpu::neon::kKernels.of(f.codec).steps.values > 0;
    for (int parts = 1; parts <= metalmm::cpu::int8::kMaxParts; ++parts) {
      failures += metalmm::cpu::check_int8(f, metalmm::cpu::neon::kInt8Kernels, parts, "neon");
      failures +=
          metalmm::cpu::check_int8(f, metalmm::cpu::neon_dot::kInt8Kernels, parts, "neon_dot");
    }
  }
  std::printf("%zu formats, %d with kernels of steps, %d differences\n",
              metalmm::all_formats().size(), with_steps, failures);
  return failures != 0 || with_steps == 0;
}
