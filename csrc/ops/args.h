// The ops of ops.def as C++: args::linear is what linear is given, with the names and the defaults
// of its schema, call() passes that to the dispatcher, and implement() a kernel.
#pragma once

#include <optional>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <vector>

#include "aten.h"

namespace torch {
class Library;
}

namespace metalmm {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
using OptionalSize = std::optional<c10::SymInt>;
using Name = std::string_view;
using OptionalName = std::optional<std::string_view>;
using Heads = std::tuple<Tensor, Tensor, Tensor>;  // q, k, v

// Kinds of arguments. Given: as kernels take it; of a tensor, a reference to the caller's. kText:
// as in a schema.
namespace kind {

#define MM_KIND(name, given, text)        \
  struct name {                           \
    using Given = given;                  \
    static constexpr char kText[] = text; \
  };
MM_KIND(Tensor, const at::Tensor&, "Tensor")
MM_KIND(MaybeTensor, const OptionalTensor&, "Tensor?")
MM_KIND(Str, Name, "str")
MM_KIND(MaybeStr, OptionalName, "str?")
MM_KIND(Int, int64_t, "int")
MM_KIND(Size, c10::SymInt, "SymInt")
MM_KIND(MaybeSize, OptionalSize, "SymInt?")
MM_KIND(Float, double, "float")
MM_KIND(MaybeFloat, std::optional<double>, "float?")
MM_KIND(Bool, bool, "bool")
MM_KIND(MaybeDType, std::optional<at::ScalarType>, "ScalarType?")
#undef MM_KIND
struct Rows : Tensor {};    // rows of a product: under autocast in its dtype
struct Weight : Tensor {};  // packed: without a gradient
struct WrittenA : Tensor {
  static constexpr char kText[] = "Tensor(a!)";
};
struct WrittenB : Tensor {
  static constexpr char kText[] = "Tensor(b!)";
};
struct MaybeWeight : MaybeTensor {};

}  // namespace kind

template <class Kind>
constexpr bool is_weight =
    std::is_same_v<Kind, kind::Weight> || std::is_same_v<Kind, kind::MaybeWeight>;
template <class Kind>
constexpr bool is_tensor =
    std::is_base_of_v<kind::Tensor, Kind> || std::is_base_of_v<kind::MaybeTensor, Kind>;
template <class Kind>
constexpr bool is_written =
    std::is_same_v<Kind, kind::WrittenA> || std::is_same_v<Kind, kind::WrittenB>;

// Kinds of results, whose dtypes torch_metalmm/ops.py knows by these names: that of the first
// argument unless another is named.
namespace result {

struct Nothing {
  using Type = void;
};
struct Tensor {
  using Type = at::Tensor;
};
struct Decoded : Tensor {};  // in the argument dtype, or f32
struct Bytes : Tensor {};    // uint8
struct Two {
  using Type = std::tuple<at::Tensor, at::Tensor>;
};
struct Routed : Two {};  // f32, and int64
struct Tables : Two {};  // as Decoded
struct Heads {
  using Type = metalmm::Heads;
};

}  // namespace result

namespace args {

// The defaults of ops.def.
constexpr bool False = false, True = true;
inline const OptionalTensor kNoTensor;
struct NoneType {
  operator const OptionalTensor&() const { return kNoTensor; }
  template <class T>
  operator std::optional<T>() const {
    return std::nullopt;
  }
};
constexpr NoneType None;

// Tensors are references: the struct does not outlive what it is made of.
#define MM_OP(name, results, arguments) \
  struct name {                         \
    arguments                           \
  };
#define MM_ARG(type, field) kind::type::Given field;
#define MM_OPT(type, field, value) kind::type::Given field = value;
#include "ops.def"

}  // namespace args

// An argument of a call, for what goes through all of them.
template <class Kind>
struct Field {
  const char* name;
  typename Kind::Given value;
};

// f(a field for each argument).
#define MM_OP(op, results, arguments)                         \
  template <class F>                                          \
  decltype(auto) with_fields(const args::op& a, const F& f) { \
    return f(a arguments);                                    \
  }
#define MM_ARG(type, field) \
  , Field<kind::type> { #field, a.field }
#include "ops.def"

template <class... Kind>
struct Kinds {};

template <class R, class... Kind>
struct OpInfo {
  using Result = typename R::Type;
  using Arguments = Kinds<Kind...>;
  using Signature = Result(typename Kind::Given...);
};

// The row of ops.def that a struct of args is of.
template <class Args>
struct OpOf;
#define MM_OP(name, results, arguments)                         \
  template <>                                                   \
  struct OpOf<args::name> : OpInfo<result::results arguments> { \
    static constexpr char kName[] = #name;                      \
    static constexpr char kQualified[] = "metalmm::" #name;     \
  };
#define MM_ARG(type, field) , kind::type
#include "ops.def"

// The op, by torch's dispatcher.
template <class Args>
typename OpOf<Args>::Result call(const Args& a);

// A kernel of the op for the dispatch key of the library.
template <class Args>
void implement(torch::Library& m, typename OpOf<Args>::Signature* kernel);

// A kernel as the dispatcher calls it, of one that takes the struct.
template <class Args, auto kBody, class Arguments = typename OpOf<Args>::Arguments>
struct Kernel;
template <class Args, auto kBody, class... Kind>
struct Kernel<Args, kBody, Kinds<Kind...>> {
  static auto run(typename Kind::Given... given) { return kBody(Args{given...}); }
};

// The sizes of a result, which the fake of an op returns.
using Shape = std::vector<c10::SymInt>;

template <class Result>
struct ShapeOf {
  using Type = Result;  // void
};
template <>
struct ShapeOf<Tensor> {
  using Type = Shape;
};
template <class... Result>
struct ShapeOf<std::tuple<Result...>> {
  using Type = std::tuple<typename ShapeOf<Result>::Type...>;
};

}  // namespace metalmm
