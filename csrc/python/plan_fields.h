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

// read_rope(dict) and so on.
#define MM_SIZES(Struct, name, fields)                 \
  inline Struct read_##name(const py::dict& given) {   \
    using S = Struct;                                  \
    static const std::vector<Field<S>> all = {fields}; \
    S out;                                             \
    set_fields(#name, given, all, out);                \
    return out;                                        \
  }
#define MM_FIELD(type, name, value) {#name, &S::name},
#include "plan/sizes.def"

// The problem that plan() is asked, of an op and a dict of fields.
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
      {"bias_multiplies", &P::bias_multiplies},
      {"softcap", &P::softcap},
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
      {"scale", &P::has_scale},
      {"float_scale", &P::float_scale},
      {"row_scales", &P::row_scales},
#define MM_SIZES(Struct, name, fields) {#name, &P::name, &read_##name},
#include "plan/sizes.def"
  };
  Problem out;
  out.op = op_by_name(op);
  out.format = &format_by_name("f32");
  set_fields("plan", given, fields, out);
  return out;
}

// The product that torch's matmul computes; None where it computes none.
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

// The panels that torch's attention is given; None where it computes nothing.
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
