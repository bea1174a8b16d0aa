// The places of the blocks of a row, and loads of blocks whose widest field has 2 bytes.
#pragma once

#include "format.h"

namespace metalmm {

// `bytes` bytes of a row at an even offset, read `width` bytes at a time, 2, 4 or 8, from multiples
// of the width; selects put the words into place, without a shift. q4_0 is nine, five or three
// loads. Rows must begin and end at multiples of the width (kBoundsWordBlocks). A width of 8 takes
// bytes / 8 + 1 loads: a window that ends a row ends with the last load only if the window has
// 8n + 2 bytes. A window of 8n bytes must lie inside its block, 8 bytes before the end.
template <int bytes>
struct Window {
  MM_CONST int kWords = bytes / 4 + 1;
  uint words[kWords];
  bool late;  // the bytes begin 2 behind words[0]

  // From `inner`, a multiple of 8, of the block at `block`, even.
  template <int width>
  static METAL_FUNC Window load(device const uchar* row, uint block, uint inner = 0) {
    Window out;
    const uint skip = block % width;
    device const uchar* p = row + (block - skip) + inner;
    out.late = (skip & 2) != 0;
    if constexpr (width == 8) {
      static_assert(bytes % 8 == 0 || bytes % 8 == 2, "reads beyond a row that the block ends");
      uint raw[kWords / 2 * 2 + 2];
      MM_UNROLL
      for (int i = 0; i <= kWords; i += 2) {
        const uint2 two = load_as<uint2>(p + 4 * i);
        raw[i] = two.x;
        raw[i + 1] = two.y;
      }
      MM_UNROLL
      for (int i = 0; i < kWords; ++i) out.words[i] = select(raw[i], raw[i + 1], (skip & 4) != 0);
    } else {
      MM_UNROLL
      for (int i = 0; i < kWords; ++i) out.words[i] = load_some<width>(p + 4 * i, bytes - 4 * i);
    }
    return out;
  }
  // For vector kernels: 8 bytes at a time, or 2. A load of 4 bytes and two loads of 2 are one load
  // to LLVM, of the lesser alignment.
  static METAL_FUNC Window fetch(device const uchar* row, uint block, uint inner) {
    return has_long_blocks() ? load<8>(row, block, inner) : load<2>(row, block, inner);
  }
  // The window of a part of LaneBlocks.
  template <class Storage>
  static METAL_FUNC Window fetch_part(typename Storage::Cursor c, int part, uint piece) {
    return has_long_blocks() ? load<8>(c.row, c.block, Storage::Lane::at(part, piece))
                             : load<2>(Storage::part(c, part, piece), 0);
  }
  // The half that the window begins with.
  static METAL_FUNC half first(thread const Window& w) {
    return as_type<half>(w.late ? half_word(w.words[0], 1) : half_word(w.words[0], 0));
  }
  // 4 bytes at an even offset of the window, and 16.
  template <int offset>
  static METAL_FUNC uint word(thread const Window& w) {
    constexpr int i = offset / 4;
    const uint cut = as_type<uint>(ushort2(half_word(w.words[i], 1), half_word(w.words[i + 1], 0)));
    if constexpr (offset % 4 == 0) return w.late ? cut : w.words[i];
    return w.late ? w.words[i + 1] : cut;
  }
  template <int offset>
  static METAL_FUNC uint4 four(thread const Window& w) {
    return uint4(word<offset>(w), word<offset + 4>(w), word<offset + 8>(w), word<offset + 12>(w));
  }
  // The words from `offset` on.
  template <int offset = 0>
  static METAL_FUNC void all(thread const Window& w, thread uint (&to)[bytes / 4]) {
    if constexpr (offset < bytes) {
      to[offset / 4] = word<offset>(w);
      all<offset + 4>(w, to);
    }
  }

 private:
  template <int width>
  static METAL_FUNC uint load_some(device const uchar* p, int left) {
    if constexpr (width == 4) return load_as<uint>(p);
    return left >= 4 ? load_4<2>(p) : left >= 2 ? load_as<ushort>(p) : 0;
  }
};
// 16 bytes of the inside of a block.
template <int width>
METAL_FUNC uint4 load_inner16(device const uchar* row, uint block, uint inner) {
  const Window<16> bytes = Window<16>::load<width>(row, block, inner);
  return bytes.four<0>(bytes);
}

// Blocks of `bytes` bytes, found by their address.
template <int values, int bytes>
struct Blocks {
  MM_CONST int kBlockValues = values, kBlockBytes = bytes;
  MM_CONST bool kHasWidths = bytes % 4 == 2;
  static METAL_FUNC uint row_bytes() { return fc_k / uint(values) * uint(bytes); }
  static METAL_FUNC device const uchar* block(Row row, uint index) {
    return row + index * uint(bytes);
  }
  using Cursor = device const uchar*;
  static METAL_FUNC Cursor start(Row row, uint unit, uint) { return block(row, unit); }
  static METAL_FUNC Cursor next(Cursor b, uint units) { return b + units * uint(bytes); }
  static METAL_FUNC Cursor moved(Cursor b, long distance) { return b + distance; }
};

// Blocks of which a lane of gemv reads parts, part i from byte PartsOf::at(i, piece) on. Each has
// an address that moves along the row and that rows of W are constants from: a load adds a
// constant, an addition of 64 bits takes an Apple GPU four cycles. `windows`: parts are read as
// Windows, of 8 bytes by the offset of the block. MM_ONE_ADDRESS, a target of the stand-in: the
// parts share one address, that of windows. On an H100 several take q4_k 1.18 of the time at M = 2,
// q2_k 1.05 (0.96 at M = 1), others 0.98 to 1.03.
template <int values, int bytes, class PartsOf, bool windows = false>
struct LaneBlocks {
  MM_CONST int kBlockValues = values, kBlockBytes = bytes;
  MM_CONST bool kHasWidths = bytes % 4 == 2;
#if defined(MM_ONE_ADDRESS)
  MM_CONST int kAddresses = 1;
#else
  MM_CONST int kAddresses = PartsOf::kParts;
#endif
  using Lane = PartsOf;
  static METAL_FUNC uint row_bytes() { return Blocks<values, bytes>::row_bytes(); }
  static METAL_FUNC device const uchar* block(Row row, uint index) {
    return Blocks<values, bytes>::block(row, index);
  }
  struct Cursor {
    Row row;
    uint block;
    Row at[kAddresses];
  };
  static METAL_FUNC Cursor start(Row row, uint unit, uint piece) {
    Cursor c;
    c.row = row;
    c.block = unit * uint(bytes);
    MM_UNROLL
    for (int i = 0; i < kAddresses; ++i) {
      c.at[i] = row + c.block + (kAddresses == Lane::kParts ? Lane::at(i, piece) : 0);
    }
    return c;
  }
  static METAL_FUNC Cursor next(Cursor c, uint units) {
    c.block += units * uint(bytes);
    MM_UNROLL
    for (int i = 0; i < kAddresses; ++i) c.at[i] += units * uint(bytes);
    return c;
  }
  static METAL_FUNC Cursor moved(Cursor c, long distance) {
    c.row += distance;
    MM_UNROLL
    for (int i = 0; i < kAddresses; ++i) c.at[i] += distance;
    return c;
  }
  static METAL_FUNC Row part(Cursor c, int i, uint piece) {
    if constexpr (kAddresses == Lane::kParts) return c.at[i];
    return (windows ? c.row + c.block : c.at[0]) + Lane::at(i, piece);
  }
};

// The block, and codes from byte `first` on, `step` bytes a piece.
template <int first, int step>
struct LaneOfCodes {
  MM_CONST int kParts = 2;
  static METAL_FUNC uint at(int part, uint piece) { return part == 0 ? 0 : first + step * piece; }
};

}  // namespace metalmm
