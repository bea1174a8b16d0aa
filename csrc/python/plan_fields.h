// Parts of a Problem from dicts of Python, and of a Plan to one.
#pragma once

#include <pybind11/pybind11.h>

#include <functional>
#include <string>
#include <type_traits>
#include <vector>

#include "plan/names.h"
#include "plan/plan.h"

namespace metalmm {

namespace py = pybind11;

// A field of a struct by its name.
template <class Struct>
struct Field {
  template <class Value>
  Field(const char* field, Value Struct::* member)
      : Field(field, member, +[](const Value& v) { return v; }) {}
  // Read as what `convert` takes.
  template <class Value, class Given>
  Field(const char* field, Value Struct::* member, Value (*convert)(Given))
      : name(field), set([=](Struct& to, py::handle v) {
          to.*member = convert(py::cast<std::decay_t<Given>>(v));
        }) {}

  const char* name;
  std::function<void(Struct&, py::handle)> set;
};

// Sets what is given; ValueError that lists the fields: `what` has none of that name.
template <class Struct>
void set_fields(const char* what, const py::dict& given, const std::vector<Field<Struct>>& fields,
                Struct& to) {
  for (auto [key, value] : given) {
    const int i = find_name(what, py::cast<std::string>(key), static_cast<int>(fields.size()),
                            [&](int f) { return fields[f].name; });
    fields[i].set(to, value);
  }
}

inline RopeSizes read_rope(const py::dict& given) {
  static const std::vector<Field<RopeSizes>> fields = {{"heads", &RopeSizes::heads},
                                                       {"kv_heads", &RopeSizes::kv_heads},
                                                       {"rotated", &RopeSizes::rotated},
                                                       {"positions", &RopeSizes::positions},
                                                       {"angle_rows", &RopeSizes::angle_rows},
                                                       {"q_norm", &RopeSizes::q_norm},
                                                       {"k_norm", &RopeSizes::k_norm},
                                                       {"interleaved", &RopeSizes::interleaved},
                                                       {"v_apart", &RopeSizes::v_apart},
                                                       {"float_angles", &RopeSizes::float_angles},
                                                       {"whole_norms", &RopeSizes::whole_norms},
                                                       {"v_norm", &RopeSizes::v_norm}};
  RopeSizes out;
  set_fields("rope", given, fields, out);
  return out;
}

inline ConvSizes read_conv(const py::dict& given) {
  using C = ConvSizes;
  static const std::vector<Field<C>> fields = {{"positions", &C::positions},
                                               {"width", &C::width},
                                               {"bias", &C::bias},
                                               {"silu", &C::silu},
                                               {"float_weight", &C::float_weight}};
  C out;
  set_fields("conv", given, fields, out);
  return out;
}

inline DeltaSizes read_delta(const py::dict& given) {
  static const std::vector<Field<DeltaSizes>> fields = {{"heads", &DeltaSizes::heads},
                                                        {"key_heads", &DeltaSizes::key_heads},
                                                        {"positions", &DeltaSizes::positions},
                                                        {"float_heads", &DeltaSizes::float_heads}};
  DeltaSizes out;
  set_fields("delta", given, fields, out);
  return out;
}

inline SsmSizes read_ssm(const py::dict& given) {
  using S = SsmSizes;
  static const std::vector<Field<S>> fields = {
      {"heads", &S::heads},   {"groups", &S::groups}, {"positions", &S::positions},
      {"dt_min", &S::dt_min}, {"dt_max", &S::dt_max}, {"float_heads", &S::float_heads}};
  S out;
  set_fields("ssm", given, fields, out);
  return out;
}

inline TableSizes read_tables(const py::dict& given) {
  using T = TableSizes;
  static const std::vector<Field<T>> fields = {{"rows", &T::rows},
                                               {"twice", &T::twice},
                                               {"interleaved", &T::interleaved},
                                               {"axes", &T::axes}};
  T out;
  set_fields("tables", given, fields, out);
  return out;
}

inline RouteSizes read_route(const py::dict& given) {
  using R = RouteSizes;
  static const std::vector<Field<R>> fields = {
      {"groups", &R::groups},           {"kept_groups", &R::kept_groups},
      {"group_best", &R::group_best},   {"sigmoid", &R::sigmoid},
      {"renormalise", &R::renormalise}, {"bias", &R::bias},
      {"choice_bias", &R::choice_bias}, {"shared", &R::shared}};
  R out;
  set_fields("route", given, fields, out);
  return out;
}

inline AppendSizes read_append(const py::dict& given) {
  using A = AppendSizes;
  static const std::vector<Field<A>> fields = {
      {"half_keys", &A::half_keys},           {"pages", &A::pages},
      {"rotated_keys", &A::rotated_keys},     {"rotated_values", &A::rotated_values},
      {"head_stride", &A::head_stride},       {"sequence_stride", &A::sequence_stride},
      {"head2_stride", &A::head2_stride},     {"sequence2_stride", &A::sequence2_stride},
      {"x_head_stride", &A::x_head_stride},   {"x_sequence_stride", &A::x_sequence_stride},
      {"x2_head_stride", &A::x2_head_stride}, {"x2_sequence_stride", &A::x2_sequence_stride}};
  A out;
  set_fields("append", given, fields, out);
  return out;
}

inline AttentionSizes read_attention(const py::dict& given) {
  using A = AttentionSizes;
  static const std::vector<Field<A>> fields = {{"batch", &A::batch},
                                               {"heads", &A::heads},
                                               {"kv_heads", &A::kv_heads},
                                               {"queries", &A::queries},
                                               {"head_stride", &A::head_stride},
                                               {"sequence_stride", &A::sequence_stride},
                                               {"head2_stride", &A::head2_stride},
                                               {"sequence2_stride", &A::sequence2_stride},
                                               {"half_keys", &A::half_keys},
                                               {"mask_stride", &A::mask_stride},
                                               {"mask_head_stride", &A::mask_head_stride},
                                               {"mask_sequence_stride", &A::mask_sequence_stride},
                                               {"window", &A::window},
                                               {"scale", &A::scale},
                                               {"softcap", &A::softcap},
                                               {"causal", &A::causal},
                                               {"bool_mask", &A::bool_mask},
                                               {"float_mask", &A::float_mask},
                                               {"sinks", &A::sinks},
                                               {"float_sinks", &A::float_sinks},
                                               {"filled", &A::filled},
                                               {"pages", &A::pages}};
  A out;
  set_fields("attention", given, fields, out);
  return out;
}

inline ExpertSizes read_experts(const py::dict& given) {
  using E = ExpertSizes;
  static const std::vector<Field<E>> fields = {
      {"experts", &E::experts},       {"choices", &E::choices}, {"sharing", &E::sharing},
      {"tile_rows", &E::tile_rows},   {"stride", &E::stride},   {"stride2", &E::stride2},
      {"alternates", &E::alternates}, {"is_oai", &E::is_oai},   {"float_scores", &E::float_scores},
      {"limit", &E::limit},           {"alpha", &E::alpha}};
  E out;
  set_fields("experts", given, fields, out);
  return out;
}

// What plan() is asked.
inline Problem read_problem(const std::string& op, const py::dict& given) {
  using P = Problem;
  static const std::vector<Field<P>> fields = {
      {"m", &P::m},
      {"n", &P::n},
      {"k", &P::k},
      {"format", &P::format, +[](const std::string& name) { return &format_by_name(name); }},
      {"dtype", &P::dtype, +[](const std::string& name) { return dtype_by_name(name); }},
      {"bias", &P::has_bias},
      {"c", &P::has_c},
      {"alpha", &P::alpha},
      {"beta", &P::beta},
      {"x_stride", &P::x_stride},
      {"x2_stride", &P::x2_stride},
      {"y_stride", &P::y_stride},
      {"w_stride", &P::w_stride},
      {"w2_stride", &P::w2_stride},
      {"x_alignment", &P::x_alignment},
      {"w_alignment", &P::w_alignment},
      {"y_f32", &P::y_f32},
      {"rounded", &P::rounded},
      {"norm", &P::has_norm},
      {"gate", &P::has_gate},
      {"exact_rows", &P::exact_rows},
      {"norm_weight", &P::has_norm_weight},
      {"norm_rows", &P::norm_rows},
      {"eps", &P::eps},
      {"offset", &P::offset},
      {"activation", &P::activation,
       +[](const std::string& name) { return activation_by_name(name); }},
      {"rope", &P::rope, &read_rope},
      {"append", &P::append, &read_append},
      {"tables", &P::tables, &read_tables},
      {"scale", &P::has_scale},
      {"float_scale", &P::float_scale},
      {"conv", &P::conv, &read_conv},
      {"delta", &P::delta, &read_delta},
      {"ssm", &P::ssm, &read_ssm},
      {"route", &P::route, &read_route},
      {"attention", &P::attention, &read_attention},
      {"experts", &P::experts, &read_experts}};
  Problem out;
  out.op = op_by_name(op);
  out.format = &format_by_name("f32");
  set_fields("plan", given, fields, out);
  return out;
}

// What torch's matmul multiplies; None where it does not.
inline py::object product_of(const Plan& made, const Problem& p) {
  if (made.panel_rows == 0) return py::none();
  py::dict out;
  out["rows"] = made.panel_rows;
  out["panels"] = made.panels;
  out["x_rows"] = made.x_rows;
  out["m"] = p.m;
  out["n"] = p.n;
  out["k"] = p.k;
  out["format"] = p.format->name;
  out["dtype"] = to_string(p.dtype);
  return out;
}

// What torch's attention is given at a time; None where it computes nothing.
inline py::object panels_of(const SdpaPanels& s) {
  if (s.queries == 0) return py::none();
  py::dict out;
  out["sequences"] = s.sequences;
  out["heads"] = s.heads;
  out["queries"] = s.queries;
  out["is_causal"] = s.is_causal;
  out["is_masked"] = s.is_masked;
  return out;
}

}  // namespace metalmm
