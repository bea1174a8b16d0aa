// <metal_type_traits> and <metal_limits>.
#pragma once

#include "types.h"

namespace metal {

template <class T, T V>
struct integral_constant {
  static constexpr T value = V;
  using value_type = T;
  using type = integral_constant;
  constexpr operator T() const { return V; }
  constexpr T operator()() const { return V; }
};
template <bool V>
using bool_constant = integral_constant<bool, V>;
using true_type = bool_constant<true>;
using false_type = bool_constant<false>;

template <class A, class B>
struct is_same : bool_constant<__is_same(A, B)> {};
template <class A, class B>
constexpr constant bool is_same_v = __is_same(A, B);
template <class A, class B>
struct is_convertible : bool_constant<__is_convertible(A, B)> {};
template <class A, class B>
constexpr constant bool is_convertible_v = __is_convertible(A, B);
template <class A, class B>
struct is_base_of : bool_constant<__is_base_of(A, B)> {};

// A type made of a type: name_t<T>, and name<T>::type.
#define MM_TRANSFORM(name, ...) \
  template <class T>            \
  struct name {                 \
    using type = __VA_ARGS__;   \
  };                            \
  template <class T>            \
  using name##_t = typename name<T>::type;
MM_TRANSFORM(remove_cv, __remove_cv(T))
MM_TRANSFORM(remove_const, __remove_const(T))
MM_TRANSFORM(remove_reference, __remove_reference_t(T))
MM_TRANSFORM(remove_pointer, __remove_pointer(T))
MM_TRANSFORM(decay, __decay(T))
MM_TRANSFORM(make_unsigned, __make_unsigned(T))
MM_TRANSFORM(make_signed, __make_signed(T))
MM_TRANSFORM(type_identity, T)
MM_TRANSFORM(make_scalar, element_t<__remove_cv(T)>)
#undef MM_TRANSFORM
template <class T>
struct remove_addrspace {
  using type = T;
};
#define MM_SPACE(space)                    \
  template <class T>                       \
  struct remove_addrspace<space T> {       \
    using type = T;                        \
  };                                       \
  template <class T>                       \
  struct remove_addrspace<const space T> { \
    using type = const T;                  \
  };
MM_SPACE(device)
MM_SPACE(threadgroup)
#undef MM_SPACE
template <class T>
struct remove_addrspace<constant T> {
  using type = const T;
};
template <class T>
using remove_addrspace_t = typename remove_addrspace<T>::type;
template <class T>
T&& declval();
template <bool, class T = void>
struct enable_if {};
template <class T>
struct enable_if<true, T> {
  using type = T;
};
template <bool C, class T = void>
using enable_if_t = typename enable_if<C, T>::type;
template <bool, class A, class>
struct conditional {
  using type = A;
};
template <class A, class B>
struct conditional<false, A, B> {
  using type = B;
};
template <bool C, class A, class B>
using conditional_t = typename conditional<C, A, B>::type;
namespace emulator {

// The address space of a type: 0 is the thread's.
template <class T>
struct space_of : integral_constant<int, 0> {};
template <class T>
struct space_of<device T> : integral_constant<int, 1> {};
template <class T>
struct space_of<threadgroup T> : integral_constant<int, 2> {};
template <class T>
struct space_of<constant T> : integral_constant<int, 3> {};

}  // namespace emulator

template <class... B>
struct conjunction : bool_constant<(B::value && ...)> {};
template <class... B>
struct disjunction : bool_constant<(B::value || ...)> {};
template <class... B>
using _disjunction = disjunction<B...>;  // Apple's own name, which MLX takes
template <class B>
struct negation : bool_constant<!B::value> {};

#define MM_TRAIT(name, ...)                      \
  template <class T>                             \
  struct name : bool_constant<(__VA_ARGS__)> {}; \
  template <class T>                             \
  constexpr constant bool name##_v = (__VA_ARGS__);
MM_TRAIT(is_floating_point, __is_same(__remove_cv(T), float) || __is_same(__remove_cv(T), half) ||
                                __is_same(__remove_cv(T), bfloat))
MM_TRAIT(is_integral, __is_integral(T))
MM_TRAIT(is_arithmetic, __is_integral(T) || is_floating_point<T>::value)
MM_TRAIT(is_signed, __is_integral(T) ? __is_signed(T) : is_floating_point<T>::value)
MM_TRAIT(is_unsigned, __is_unsigned(T))
MM_TRAIT(is_scalar, __is_scalar(T))
MM_TRAIT(is_vector, vector_of<__remove_cv(T)>::size > 1)
MM_TRAIT(is_pointer, __is_pointer(T))
MM_TRAIT(is_reference, __is_reference(T))
MM_TRAIT(is_const, __is_const(T))
MM_TRAIT(is_void, __is_void(T))
MM_TRAIT(is_enum, __is_enum(T))
MM_TRAIT(is_class, __is_class(T))
MM_TRAIT(is_trivially_copyable, __is_trivially_copyable(T))
#undef MM_TRAIT

template <class T>
struct numeric_limits;

template <class T>
struct integer_limits {
  static constexpr bool is_specialized = true, is_integer = true, is_exact = true;
  static constexpr bool is_signed = __is_signed(T), has_infinity = false, has_quiet_NaN = false;
  static constexpr int digits = sizeof(T) * 8 - is_signed;
  static constexpr T max() {
    return is_signed ? static_cast<T>((1ul << (sizeof(T) * 8 - 1)) - 1) : static_cast<T>(~0ul);
  }
  static constexpr T min() { return static_cast<T>(~max()); }
  static constexpr T lowest() { return min(); }
  static constexpr T infinity() { return 0; }
};
template <class T, class Bits, int Digits, Bits Max, Bits Min, Bits Inf, Bits Nan, Bits Eps>
struct float_limits {
  static constexpr bool is_specialized = true, is_integer = false, is_exact = false;
  static constexpr bool is_signed = true, has_infinity = true, has_quiet_NaN = true;
  static constexpr int digits = Digits;
  static constexpr T max() { return __builtin_bit_cast(T, Max); }
  static constexpr T lowest() { return -max(); }
  static constexpr T min() { return __builtin_bit_cast(T, Min); }
  static constexpr T infinity() { return __builtin_bit_cast(T, Inf); }
  static constexpr T quiet_NaN() { return __builtin_bit_cast(T, Nan); }
  static constexpr T signaling_NaN() { return __builtin_bit_cast(T, Nan); }
  static constexpr T epsilon() { return __builtin_bit_cast(T, Eps); }
};
template <>
struct numeric_limits<float>
    : float_limits<float, uint, 24, 0x7F7FFFFF, 0x00800000, 0x7F800000, 0x7FC00000, 0x34000000> {};
template <>
struct numeric_limits<half>
    : float_limits<half, ushort, 11, 0x7BFF, 0x0400, 0x7C00, 0x7E00, 0x1400> {};
template <>
struct numeric_limits<bfloat>
    : float_limits<bfloat, ushort, 8, 0x7F7F, 0x0080, 0x7F80, 0x7FC0, 0x3C00> {};
#define MM_LIMITS(T) \
  template <>        \
  struct numeric_limits<T> : integer_limits<T> {};
MM_LIMITS(char)
MM_LIMITS(int8_t)
MM_LIMITS(uchar)
MM_LIMITS(short)
MM_LIMITS(ushort)
MM_LIMITS(int)
MM_LIMITS(uint)
MM_LIMITS(long)
MM_LIMITS(ulong)
#undef MM_LIMITS

}  // namespace metal

#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define HUGE_VALF __builtin_inff()
#define MAXFLOAT 0x1.fffffep+127f
#define FLT_MAX 0x1.fffffep+127f
#define FLT_MIN 0x1.0p-126f
#define FLT_EPSILON 0x1.0p-23f
#define HALF_MAX static_cast<half>(65504.0f)
#define MAXHALF static_cast<half>(65504.0f)
#define HALF_MIN static_cast<half>(0x1.0p-14f)
#define INT_MAX 0x7FFFFFFF
#define INT_MIN (-INT_MAX - 1)
#define UINT_MAX 0xFFFFFFFFu
#define SHRT_MAX 32767
#define USHRT_MAX 65535
#define CHAR_BIT 8
#define M_PI_F 3.14159274101257324219f
#define M_PI_2_F 1.57079637050628662109f
#define M_PI_4_F 0.78539818525314331055f
#define M_1_PI_F 0.31830987334251403809f
#define M_2_PI_F 0.63661974668502807617f
#define M_2_SQRTPI_F 1.12837922573089599609f
#define M_E_F 2.71828174591064453125f
#define M_LOG2E_F 1.44269502162933349609f
#define M_LOG10E_F 0.43429449200630187988f
#define M_LN2_F 0.69314718246459960938f
#define M_LN10_F 2.30258512496948242188f
#define M_SQRT2_F 1.41421353816986083984f
#define M_SQRT1_2_F 0.70710676908493041992f
#define M_PI_H static_cast<half>(3.140625f)
