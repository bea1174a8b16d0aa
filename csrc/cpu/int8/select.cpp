// The choice of int8 kernels for each instruction set of the exact kernels.
#include <string_view>

#include "kernels.h"

namespace metalmm::cpu {

// MM_FOR_EACH_INT8(X): X(namespace of the kernels, instruction set in use, whether this machine
// runs them), best first.
#if defined(__x86_64__)
#if defined(MM_AVX_VNNI)
#define MM_AVX2VNNI(X) X(avx2vnni, "avx2vnni", true)
#else
#define MM_AVX2VNNI(X)
#endif
#define MM_FOR_EACH_INT8(X)                                                                  \
  X(avx512vnni, "avx512vbmi", __builtin_cpu_supports("avx512vnni"))                          \
  X(avx512vnni, "avx512", __builtin_cpu_supports("avx512vnni"))                              \
  X(avx2, "avx512vbmi", true)                                                                \
  X(avx2, "avx512", true) /* without VNNI the longer vectors bring nothing that is tested */ \
  MM_AVX2VNNI(X)                                                                             \
  X(avx2, "avx2", true)                                                                      \
  X(scalar, "scalar", true)
namespace avx512vnni {
extern const int8::Kernels kInt8Kernels;
}
namespace avx2vnni {  // referred to where the compiler has it
extern const int8::Kernels kInt8Kernels;
}
namespace avx2 {
extern const int8::Kernels kInt8Kernels;
}
#elif defined(__aarch64__)
#if defined(__APPLE__)  // every Apple CPU of a Mac
#define MM_HAS_DOT true
#else
}  // namespace metalmm::cpu
#include <sys/auxv.h>
namespace metalmm::cpu {
#define MM_HAS_DOT (getauxval(AT_HWCAP) & (1ul << 20)) != 0 /* HWCAP_ASIMDDP */
#endif
#define MM_FOR_EACH_INT8(X)       \
  X(neon_dot, "neon", MM_HAS_DOT) \
  X(neon, "neon", true)           \
  X(scalar, "scalar", true)
namespace neon_dot {
extern const int8::Kernels kInt8Kernels;
}
namespace neon {
extern const int8::Kernels kInt8Kernels;
}
#else
#define MM_FOR_EACH_INT8(X) X(scalar, "scalar", true)
#endif
namespace scalar {
extern const int8::Kernels kInt8Kernels;
}

namespace int8 {

const Kernels& current_kernels() {
  static const Kernels* chosen = [] {
    const std::string_view isa = current_isa().name;
#define MM_CHOOSE(kernels, name, runs) \
  if (isa == name && runs) return &kernels::kInt8Kernels;
    MM_FOR_EACH_INT8(MM_CHOOSE)
    return &scalar::kInt8Kernels;
  }();
  return *chosen;
}

bool has_codes(const Format& format) {
  return current_kernels().codec[static_cast<int>(format.codec)].gemv[0][0] != nullptr;
}

}  // namespace int8
}  // namespace metalmm::cpu
