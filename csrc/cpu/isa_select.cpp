// The instruction sets that this build holds, and which of them this machine runs.
#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && !defined(__APPLE__)
#include <sys/auxv.h>
#endif

#include <cstdlib>
#include <vector>

#include "half.h"
#include "int8/kernels.h"
#include "plan/names.h"

namespace metalmm::cpu {

#define MM_SET(isa)                            \
  namespace isa {                              \
  extern const IsaKernels kKernels;            \
  extern const int8::Kernels kInt8Kernels;     \
  extern const IsaPart kPart3; /* of planes */ \
  }
MM_SET(scalar)
#if defined(__x86_64__)
MM_SET(avx512vbmi)
MM_SET(avx512vnni)
MM_SET(avx512)
MM_SET(avx2vnni)
MM_SET(avx2)

// avx512 with affine kernels that permute bytes: 5 and 6 bits at M = 1 take 1.47 of the time
// without (Zen 5, one thread, W in the cache), at M = 4 1.05; the other 11 of 13 formats 0.93 to
// 1.05. Formats of grids were not timed.
const IsaKernels avx512vbmi::kKernels = [] {
  IsaKernels k = avx512::kKernels;
  k.name = "avx512vbmi";
  for (int i = kIsaParts; i > 0; --i) k.parts[i] = k.parts[i - 1];
  k.parts[0] = &kPart3;
  return k;
}();

// avx2 with int8 kernels of its own.
const IsaKernels avx2vnni::kKernels = [] {
  IsaKernels k = avx2::kKernels;
  k.name = "avx2vnni";
  return k;
}();
#elif defined(__aarch64__)
MM_SET(neon_dot)
MM_SET(neon)
#endif

namespace {

// The exact kernels, and those of integer codes beside them.
struct Set {
  const IsaKernels* exact;
  const int8::Kernels* codes;
};

#if defined(__x86_64__) && defined(MM_AVX_VNNI)  // the compiler has it
// Intel's from Alder Lake on, AMD's from Zen 5 on. By the instruction: __builtin_cpu_supports knows
// the name in newer compilers alone, and links what not every runtime library has.
bool has_avx_vnni() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 4 & 1);
}
#endif

std::vector<Set> find_sets() {
  std::vector<Set> out;
#if defined(__x86_64__)
#define MM_RUNS(name) (__builtin_cpu_supports(name) != 0)
  const bool avx512 = MM_RUNS("avx512f") && MM_RUNS("avx512bw") && MM_RUNS("avx512dq") &&
                      MM_RUNS("avx512vl") && MM_RUNS("fma");
  const bool avx2 = MM_RUNS("avx2") && MM_RUNS("fma") && MM_RUNS("f16c");
  // Without VNNI the longer vectors bring nothing that is tested.
  const auto* codes = MM_RUNS("avx512vnni") ? &avx512vnni::kInt8Kernels : &avx2::kInt8Kernels;
  if (avx512 && MM_RUNS("avx512vbmi")) out.push_back({&avx512vbmi::kKernels, codes});
  if (avx512) out.push_back({&avx512::kKernels, codes});
#if defined(MM_AVX_VNNI)
  if (avx2 && has_avx_vnni()) out.push_back({&avx2vnni::kKernels, &avx2vnni::kInt8Kernels});
#endif
  if (avx2) out.push_back({&avx2::kKernels, &avx2::kInt8Kernels});
#elif defined(__aarch64__)
#if defined(__APPLE__)  // every Apple CPU of a Mac
  const bool has_dot = true;
#else
  const bool has_dot = (getauxval(AT_HWCAP) & (1ul << 20)) != 0;  // HWCAP_ASIMDDP
#endif
  out.push_back({&neon::kKernels, has_dot ? &neon_dot::kInt8Kernels : &neon::kInt8Kernels});
#endif
  out.push_back({&scalar::kKernels, &scalar::kInt8Kernels});
  return out;
}

const std::vector<Set>& sets() {
  static const std::vector<Set> found = find_sets();
  return found;
}

const Set& current() {
  static const Set& chosen = [&]() -> const Set& {
    const char* wanted = std::getenv("METALMM_CPU_ISA");
    if (wanted == nullptr || *wanted == '\0') return sets().front();
    return sets()[find_name("METALMM_CPU_ISA", wanted, static_cast<int>(sets().size()), isa_name,
                            " on this machine")];
  }();
  return chosen;
}

}  // namespace

const float* const half_table = [] {
  auto* table = new float[1 << 16];
  for (uint32_t h = 0; h < 1 << 16; ++h) table[h] = half_bits_to_float(h);
  return table;
}();

const char* isa_name(int i) {
  return i < static_cast<int>(sets().size()) ? sets()[i].exact->name : nullptr;
}

const IsaKernels& current_isa() { return *current().exact; }

namespace int8 {

const Kernels& current_kernels() { return *current().codes; }

bool has_codes(const Format& format) {
  return current_kernels().codec[static_cast<int>(format.codec)].gemv[0][0] != nullptr;
}

}  // namespace int8
}  // namespace metalmm::cpu
