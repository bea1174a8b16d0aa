// float4(…): clang's vectors lack the constructors that Metal's have, so the names are macros where
// "(" follows. In `float4 (&a)[2]` write `thread float4* a`, or a type alias.
#pragma once

#ifndef MM_TRANSLATED  // a text that testing.py translates has no macros: it calls construct() by
                       // itself

#define bool2(...) ::metal::construct<bool2>(__VA_ARGS__)
#define bool3(...) ::metal::construct<bool3>(__VA_ARGS__)
#define bool4(...) ::metal::construct<bool4>(__VA_ARGS__)
#define char2(...) ::metal::construct<char2>(__VA_ARGS__)
#define char3(...) ::metal::construct<char3>(__VA_ARGS__)
#define char4(...) ::metal::construct<char4>(__VA_ARGS__)
#define uchar2(...) ::metal::construct<uchar2>(__VA_ARGS__)
#define uchar3(...) ::metal::construct<uchar3>(__VA_ARGS__)
#define uchar4(...) ::metal::construct<uchar4>(__VA_ARGS__)
#define short2(...) ::metal::construct<short2>(__VA_ARGS__)
#define short3(...) ::metal::construct<short3>(__VA_ARGS__)
#define short4(...) ::metal::construct<short4>(__VA_ARGS__)
#define ushort2(...) ::metal::construct<ushort2>(__VA_ARGS__)
#define ushort3(...) ::metal::construct<ushort3>(__VA_ARGS__)
#define ushort4(...) ::metal::construct<ushort4>(__VA_ARGS__)
#define int2(...) ::metal::construct<int2>(__VA_ARGS__)
#define int3(...) ::metal::construct<int3>(__VA_ARGS__)
#define int4(...) ::metal::construct<int4>(__VA_ARGS__)
#define uint2(...) ::metal::construct<uint2>(__VA_ARGS__)
#define uint3(...) ::metal::construct<uint3>(__VA_ARGS__)
#define uint4(...) ::metal::construct<uint4>(__VA_ARGS__)
#define long2(...) ::metal::construct<long2>(__VA_ARGS__)
#define long3(...) ::metal::construct<long3>(__VA_ARGS__)
#define long4(...) ::metal::construct<long4>(__VA_ARGS__)
#define ulong2(...) ::metal::construct<ulong2>(__VA_ARGS__)
#define ulong3(...) ::metal::construct<ulong3>(__VA_ARGS__)
#define ulong4(...) ::metal::construct<ulong4>(__VA_ARGS__)
#define half2(...) ::metal::construct<half2>(__VA_ARGS__)
#define half3(...) ::metal::construct<half3>(__VA_ARGS__)
#define half4(...) ::metal::construct<half4>(__VA_ARGS__)
#define bfloat2(...) ::metal::construct<bfloat2>(__VA_ARGS__)
#define bfloat3(...) ::metal::construct<bfloat3>(__VA_ARGS__)
#define bfloat4(...) ::metal::construct<bfloat4>(__VA_ARGS__)
#define float2(...) ::metal::construct<float2>(__VA_ARGS__)
#define float3(...) ::metal::construct<float3>(__VA_ARGS__)
#define float4(...) ::metal::construct<float4>(__VA_ARGS__)

// Apple's compiler has no type of 64-bit floats; literals without a suffix are float there (and
// here, by -cl-single-precision-constant).
#pragma GCC poison double goto
#pragma GCC poison virtual dynamic_cast typeid throw catch try new delete

#endif  // MM_TRANSLATED
