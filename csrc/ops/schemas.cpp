// The schemas of torch.ops.metalmm, and of _<op>_shape: the arguments of the op, the sizes of its
// result. torch_metalmm/ops.py makes the fake implementations of these. Engines register their
// kernels.
#include <torch/library.h>

#include <string>

#include "shapes.h"

namespace metalmm {
namespace {

std::string argument(const char* kind, const char* name, const char* value = nullptr) {
  return std::string(kind) + " " + name + (value ? std::string("=") + value : "") + ", ";
}

// `name`(arguments) of arguments that end with a comma.
std::string signature(const std::string& name, std::string arguments) {
  arguments.resize(arguments.size() - 2);
  return name + "(" + arguments + ") -> ";
}

template <class Result>
struct Text {
  static std::string of(const char*) { return "()"; }
};
template <>
struct Text<Tensor> {
  static std::string of(const char* each) { return each; }
};
template <class... Result>
struct Text<std::tuple<Result...>> {
  static std::string of(const char* each) {
    std::string out;
    for (size_t i = 0; i < sizeof...(Result); ++i) out += std::string(i ? ", " : "(") + each;
    return out + ")";
  }
};

}  // namespace

TORCH_LIBRARY(metalmm, m) {
#define MM_OP(name, results, arguments)                                                       \
  {                                                                                           \
    using Results = Text<result::results::Type>;                                              \
    const std::string given = std::string() arguments;                                        \
    const std::string op = signature(#name, given) + Results::of("Tensor");                   \
    m.def(op.c_str());                                                                        \
    const std::string shape = signature("_" #name "_shape", given) + Results::of("SymInt[]"); \
    m.def(shape.c_str(), Kernel<args::name, &shapes::name>::run);                             \
  }
#define MM_ARG(type, field) +argument(kind::type::kText, #field)
#define MM_OPT(type, field, value) +argument(kind::type::kText, #field, #value)
#define MM_KEYWORDS +std::string("*, ")
#include "ops.def"
}

}  // namespace metalmm
