// The words of the Metal Shading Language that C++ lacks. No header of the host may be included
// after this one.
#pragma once

// Address spaces are types, as in Apple's front end: a pointer into one does not convert to
// another. These four are numbered 0 in x86-64 and aarch64 code, so that every check that clang can
// emit covers them too; on NVPTX they are global, generic, shared and generic; in SPIR-V they have
// the numbers of OpenCL's __global, __private, __local and __constant. __global_host is
// clang's name for a space of its own here: unlike
// __constant it admits declarations without a value, which function constants are.
#ifdef __SPIRV__
#define device __attribute__((address_space(1)))
#define threadgroup __attribute__((address_space(3)))
#else
#define device __attribute__((opencl_global_device))
#define threadgroup __attribute__((opencl_local))
#endif
#define thread
#if defined(__SPIRV__)
#define constant const __attribute__((address_space(2)))
#define kernel static inline __attribute__((always_inline))
#elif defined( \
    __NVPTX__)  // arguments are the entry's parameters, and a kernel is inlined into its entry
#define constant const __attribute__((opencl_generic))
#define kernel static inline __attribute__((always_inline))
#else
#define constant const __attribute__((opencl_global_host))
#define kernel
#endif
#define coherent(scope)  // memory of one host always is
#define METAL_FUNC inline __attribute__((always_inline))
#define METAL_CONST constant
#define MTL_CONST constant

// [[threadgroup(n)]] cannot stand where the word is a macro: a file that is compiled as it is
// leaves it out if this is defined. (testing.py reads the attributes, this one too, from text in
// which no word is a macro.)
#define MM_STAND_IN 1
#define __METAL__ 1
#ifndef __METAL_VERSION__
#define __METAL_VERSION__ 310
#endif
#define __METAL_MACOS__ 1
#define __HAVE_BFLOAT__ 1
#define __HAVE_SIMDGROUP_MATRIX__ 1
#define __HAVE_SIMDGROUP_REDUCTION__ 1

// A function constant has no value when its file is compiled. The constant's storage is a variable
// that the launcher sets: mm_fc_<the text between the parentheses>, defined before the file is
// included (torch_metalmm/testing.py). In PTX and SPIR-V it is a symbol of that name, which
// torch_metalmm/msl/ptx.py and spirv.py remove.
#if defined(__NVPTX__) || defined(__SPIRV__)
#define function_constant(index) clang::loader_uninitialized, gnu::weakref("mm_fc_" #index)
#else
#define function_constant(index) clang::loader_uninitialized, gnu::alias("mm_fc_" #index)
#endif

#pragma clang diagnostic ignored "-Wunknown-attributes"
#pragma clang diagnostic ignored "-Wignored-attributes"
#pragma clang diagnostic ignored "-Wunknown-pragmas"
#pragma clang diagnostic ignored "-Wuser-defined-literals"
#pragma clang diagnostic ignored "-Wduplicate-decl-specifier"
#pragma clang diagnostic ignored "-Wreserved-user-defined-literal"
#pragma clang diagnostic ignored "-Wpsabi"
