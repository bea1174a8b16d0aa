// The arguments of every op, checked once for all engines and for fake tensors, whose sizes may be
// symbols (shapes.cpp). A check runs before any work; its error names the argument, what was given
// and what is allowed, and is a ValueError in Python (IndexError for ids). Tensors on different
// devices are an error that names one of them and both devices.
#pragma once

#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "args.h"
#include "plan/format.h"
#include "plan/names.h"
#include "plan/plan.h"

namespace metalmm {

// A checked weight: n rows of k values.
struct WeightShape {
  const Format& format;
  c10::SymInt n, k;
};

// A checked weight as an engine takes it: uint8 [N, row_bytes(k)] with dense rows, of experts [E,
// N, row_bytes(k)]. A dense format is given as that, or as [N, k] of its dtype.
struct PackedWeight {
  const Format& format;
  at::Tensor rows;
  int64_t k;
};
PackedWeight packed(const at::Tensor& weight, const WeightShape& checked);

// check(): the arguments of an op, and what engines need to know of them.

// x f32 / f16 / bf16 [..., K]; bias f32 / f16 / bf16 [N] or nothing, residual [..., N] or nothing.
WeightShape check(const args::linear& a);

// The arguments of linear and of rms_norm.
WeightShape check(const args::norm_linear& a);

// weight f32 / f16 / bf16 [K] or nothing, eps >= 0, and no offset without a weight; residual and
// gate of the shape of x.
void check(const args::rms_norm& a);
void check(const args::add_rms_norm& a);

// The sizes of rope: batch, positions, values of a head, of which `rotated` are rotated; and
// whether the weights of its norms are of all heads.
struct RopeShape {
  c10::SymInt batch, positions, dim, rotated;
  bool has_whole_norms;
};
RopeShape check(const args::rope& a);

// x f32 / f16 / bf16 [..., D], D a multiple of kHadamardValues.
void check(const args::hadamard& a);

// grad [..., N]
WeightShape check(const args::linear_input_grad& a);

// gate has as many rows as up, each in its own format; a norm where eps is given.
struct GateUpShape {
  WeightShape gate, up;
  Activation activation;
};
GateUpShape check(const args::swiglu& a);

// gate and up [..., K] of the same shape, residual [..., N] or nothing.
struct DownShape {
  WeightShape weight;
  Activation activation;
};
DownShape check(const args::swiglu_linear& a);

// c is of the shape of the result, and there if beta is not 0.
WeightShape check(const args::gemv& a);
WeightShape check(const args::gemm& a);

// in_features, where not given, is the one K whose rows have as many bytes. The padding of an
// affine row can leave several such K: then in_features must be given.
WeightShape check(const args::dequantize& a);

// ids int32 or int64 of any shape; of a table without rows, none.
WeightShape check(const args::embedding& a);

// w f32 / f16 / bf16 [N, K], K a multiple of the block.
const Format& check(const args::quantize& a);

// Returns the sizes of cos, [B, S, R].
Shape check(const args::rope_tables& a);

// x and x2 f32 / f16 / bf16, of the same shape and dtype. Returns the problem that op names.
Op check(const args::probe& a);

// Whether each id is in range: for ids on the CPU only, elsewhere it would wait for the device.
// `what` and `in`, the things counted and their place, are for the message.
void check_ids(const at::Tensor& ids, int64_t count, const char* in = "the table",
               const char* what = "rows", const char* name = "ids");

// The dtype of decoded values: f32 unless given; f32, f16 or bf16.
at::ScalarType check_dtype(std::optional<at::ScalarType> dtype);

// The parts of a check. `name` is the argument, x a tensor whose device is that of the call.
const Format& check_format(std::string_view name);

// ValueError for a format that `quantize` does not make; name: the argument's.
void check_packs(const char* name, const Format& f);
void check_activation_dtype(const char* name, const at::Tensor& t);
// x, f32 / f16 / bf16 with at least one dimension. Returns its last size, K.
c10::SymInt check_rows(const char* name, const at::Tensor& x);
// Whether the last dimension holds k values of the format, packed or as they are.
void check_row(const char* name, const at::Tensor& rows, const Format& format,
               const c10::SymInt& k);
// A weight for rows of k values on the device of x; of experts with one more dimension, the first.
WeightShape check_weight(const char* name, const at::Tensor& weight, std::string_view format,
                         const c10::SymInt& k, const at::Tensor& x, bool of_experts = false);
// A floating tensor of exactly this shape on the device of x, or nothing.
void check_addend(const char* name, const OptionalTensor& t, c10::SymIntArrayRef shape,
                  const at::Tensor& x);
// The numbers of a call are doubles, which engines take as f32.
void check_f32(const char* name, double number);
void check_softcap(double softcap);
void check_k(const char* name, const Format& f, const c10::SymInt& k);
void check_device(const char* name, const at::Tensor& t, const at::Tensor& x);
// Whether rows of values of this type are rows of the format as they are.
bool is_dense(const Format& f, at::ScalarType t);

// find(), whose std::invalid_argument (of code that knows no torch) becomes a ValueError.
template <class Find>
decltype(auto) or_value_error(Find find) {
  try {
    return find();
  } catch (const std::invalid_argument& e) {
    TORCH_CHECK_VALUE(false, e.what());
  }
}

// The index of `given` among the words that an argument may be.
template <size_t kCount>
int check_word(const char* argument, std::string_view given, const char* const (&words)[kCount]) {
  return or_value_error(
      [&] { return find_name(argument, given, kCount, [&](int i) { return words[i]; }); });
}

// The index of `given` among the names of `allowed`, which to_string() has: what `argument` may be
// on this type of device.
template <class Named>
int check_name(std::string_view argument, std::string_view given, const std::vector<Named>& allowed,
               const std::string& device_type) {
  return or_value_error([&] {
    return find_name(
        argument, given, static_cast<int>(allowed.size()),
        [&](int i) { return std::string_view(to_string(allowed[i])); }, " on " + device_type);
  });
}

}  // namespace metalmm
