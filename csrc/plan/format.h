// The formats of metal/formats.def as values. No torch, no Metal: every engine includes this. Not
// metal/abi.h either, a change of which would compile the kernels of every instruction set again.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "dtype.h"

namespace metalmm {

// One enumerator per row of the table: what a kernel is compiled for.
enum class Codec : int {
#define MM_FORMAT(name, Struct) Struct,
#include "metal/formats.def"
  kCount
};

constexpr int kNumCodecs = static_cast<int>(Codec::kCount);

// The largest K of any weight: what is computed from a K up to this fits 64 bits.
constexpr int64_t kMaxK = int64_t{1} << 48;

enum class Layout { kDense, kBlock, kAffine };

// A format is a codec plus, for affine, the group size and the type of scales and biases.
struct Format {
  std::string name;
  Codec codec;
  Layout layout;
  int64_t block_values;  // K must be a multiple of this; for affine, the group size
  int64_t block_bytes;   // bytes of block_values values; for affine, without the padding of the row
  // Bytes of which the address of every row must be a multiple, for the shaders; an affine row is
  // padded to a multiple of them.
  int64_t alignment;
  bool packs = true;               // whether `quantize` makes it
  int64_t bits = 0;                // affine only
  DType scale_type = DType::kF16;  // affine only: of scales and biases

  // Bytes of a row of k values. k must be a multiple of block_values, and at most kMaxK. Int is
  // int64_t, or a type of torch that may be a symbol.
  template <class Int>
  Int row_bytes(const Int& k) const {
    const Int bytes = k / block_values * block_bytes;
    if (layout != Layout::kAffine) return bytes;
    return (bytes + (alignment - 1)) / alignment * alignment;
  }
  // Offset in a row of k values of the scales plane and of the biases plane (affine only).
  int64_t scales_offset(int64_t k) const { return k * bits / 8; }
  int64_t biases_offset(int64_t k) const {
    return scales_offset(k) + k / block_values * dtype_bytes(scale_type);
  }
};

// Format by name, in any case. Throws std::invalid_argument that lists the allowed names.
const Format& format_by_name(std::string_view name);

// Every format, in the order of the table.
const std::vector<Format>& all_formats();

}  // namespace metalmm
