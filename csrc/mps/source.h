// The Metal source of a kernel, as embedded by flatten.py. No torch, no Metal.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace metalmm::mps {

// A .metal file of metal/library without its includes: the snippets that make it up, in order.
struct Shader {
  struct Snippet {
    int text;          // in kSnippets
    uint64_t formats;  // bit c: a kernel of the format of row c of formats.def, a Codec, needs it
  };
  const char* name;  // name of the file, without .metal
  std::vector<Snippet> snippets;
};
extern const char* const kSnippets[];
const std::vector<Shader>& shaders();  // flatten.py writes kSnippets and shaders()

// The text that Metal compiles for a kernel of all_kernel_names(): all that its shader and format
// need, told to make this kernel alone. Throws std::invalid_argument: no kernel has the name.
//
// One kernel at a time, because the first forward waits for the compiler, and of all kernels a
// model uses a dozen. Clang -O2 to LLVM IR on the stand-in's headers, one core of a Zen 4 server:
// 0.10 s for gemv_q4_k_f16, 2.0 s for the 66 kernels of gemv.metal, 2.8 s for those of gemm.metal.
// The text with all formats would be 105 KB for gemv_q4_0_f16, which has 31, and 98 KB for
// embedding_affine4_f32, which has 24.
std::string source_of(const std::string& kernel);

}  // namespace metalmm::mps
