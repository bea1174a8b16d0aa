#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <cstdlib>

#include "half.h"
#include "kernels.h"
#include "plan/names.h"

namespace metalmm::cpu {

// MM_FOR_EACH_ISA(X): X(name, whether this machine runs it), best first. The build says what it
// holds.
#if defined(__x86_64__)
#define MM_HAS_AVX512                                                             \
  __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&      \
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && \
      __builtin_cpu_supports("fma")
#define MM_HAS_AVX2 \
  __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")
#if defined(MM_AVX_VNNI)  // the compiler has it
#define MM_AVX2VNNI(X) X(avx2vnni, MM_HAS_AVX2&& has_avx_vnni())
#else
#define MM_AVX2VNNI(X)
#endif
#define MM_FOR_EACH_ISA(X)                                            \
  X(avx512vbmi, MM_HAS_AVX512&& __builtin_cpu_supports("avx512vbmi")) \
  X(avx512, MM_HAS_AVX512)                                            \
  MM_AVX2VNNI(X)                                                      \
  X(avx2, MM_HAS_AVX2)                                                \
  X(scalar, true)
#elif defined(__aarch64__)
#define MM_FOR_EACH_ISA(X) \
  X(neon, true)            \
  X(scalar, true)
#else
#define MM_FOR_EACH_ISA(X) X(scalar, true)
#endif

#define MM_DECLARE(isa, runs)       \
  namespace isa {                   \
  extern const IsaKernels kKernels; \
  }
MM_FOR_EACH_ISA(MM_DECLARE)

#if defined(__x86_64__)
#if defined(MM_AVX_VNNI)
// Intel's from Alder Lake on, AMD's from Zen 5 on. By the instruction: __builtin_cpu_supports knows
// the name in newer compilers alone, and links what not every runtime library has.
static bool has_avx_vnni() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 4 & 1);
}

// avx2 with int8 kernels of its own (int8/select.cpp).
namespace avx2vnni {
const IsaKernels kKernels = [] {
  IsaKernels k = avx2::kKernels;
  k.name = "avx2vnni";
  return k;
}();
}  // namespace avx2vnni
#endif

// avx512 with affine kernels that permute bytes: 5 and 6 bits at M = 1 take 1.47 of the time
// without (Zen 5, one thread, W in the cache), at M = 4 1.05; the other 11 of 13 formats 0.93 to
// 1.05. Formats of grids were not timed.
namespace avx512vbmi {
extern const IsaPart kPart3;
const IsaKernels kKernels = [] {
  IsaKernels k = avx512::kKernels;
  k.name = "avx512vbmi";
  for (int i = kIsaParts; i > 0; --i) k.parts[i] = k.parts[i - 1];
  k.parts[0] = &kPart3;
  return k;
}();
}  // namespace avx512vbmi
#endif

const float* const half_table = [] {
  auto* table = new float[1 << 16];
  for (uint32_t h = 0; h < 1 << 16; ++h) table[h] = half_bits_to_float(h);
  return table;
}();

const IsaKernels* const* available_isas(int* count) {
  static const IsaKernels* isas[5];
  static const int n = [] {
    int found = 0;
#define MM_COLLECT(isa, runs) \
  if (runs) isas[found++] = &isa::kKernels;
    MM_FOR_EACH_ISA(MM_COLLECT)
    return found;
  }();
  *count = n;
  return isas;
}

const IsaKernels& current_isa() {
  static const IsaKernels* chosen = [] {
    int count;
    const IsaKernels* const* isas = available_isas(&count);
    const char* wanted = std::getenv("METALMM_CPU_ISA");
    if (wanted == nullptr || *wanted == '\0') return isas[0];
    for (int i = 0; i < count; ++i) {
      if (std::string_view(wanted) == isas[i]->name) return isas[i];
    }
    throw std::invalid_argument(unknown_name(
        "METALMM_CPU_ISA", wanted, count, [isas](int i) { return isas[i]->name; },
        " on this machine"));
  }();
  return *chosen;
}

}  // namespace metalmm::cpu
