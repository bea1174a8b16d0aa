#include "source.h"

#include <stdexcept>

#include "plan/plan.h"

namespace metalmm::mps {
namespace {

struct FormatRow {
  const char *name, *struct_name;
};

constexpr FormatRow kFormats[] = {
#define MM_FORMAT(name, Struct) {#name, #Struct},
#include "metal/formats.def"
};
static_assert(sizeof kFormats / sizeof *kFormats <= 64, "bits of Shader::Snippet::formats");

// The shader that makes a kernel: the longest name that the kernel's begins with.
const Shader& shader_of(const std::string& kernel) {
  const Shader* found = nullptr;
  size_t longest = 0;
  for (const Shader& s : shaders()) {
    const std::string prefix = std::string(s.name) + "_";
    if (prefix.size() > longest && kernel.rfind(prefix, 0) == 0) {
      found = &s;
      longest = prefix.size();
    }
  }
  if (!found) throw std::logic_error("metal/: no shader makes " + kernel);
  return *found;
}

std::string text_of(const std::string& kernel, Codec codec, DType dtype) {
  const FormatRow& f = kFormats[static_cast<int>(codec)];
  std::string out = std::string("#define MM_ONLY_DTYPE ") + to_string(dtype) +
                    "\n#define MM_ONLY_FORMAT " + f.name + "\n#define MM_ONLY_STRUCT " +
                    f.struct_name + "\n";
  for (const Shader::Snippet& snippet : shader_of(kernel).snippets) {
    if (snippet.formats >> static_cast<int>(codec) & 1) out += kSnippets[snippet.text];
  }
  return out;
}

}  // namespace

std::string source_of(const std::string& kernel) {
  for (int s = 0; s < kNumStrategies; ++s) {
    for (int c = 0; c < kNumCodecs; ++c) {
      for (int d = 0; d < kNumDTypes; ++d) {
        const auto codec = static_cast<Codec>(c);
        const auto dtype = static_cast<DType>(d);
        if (kernel_name(static_cast<StrategyId>(s), codec, dtype) == kernel) {
          return text_of(kernel, codec, dtype);
        }
      }
    }
  }
  throw std::invalid_argument("kernel: no strategy, format and dtype make '" + kernel + "'");
}

}  // namespace metalmm::mps
