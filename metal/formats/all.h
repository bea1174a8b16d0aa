// Every format of formats.def, checked against its row.
#pragma once

#include "affine.h"
#include "block32.h"
#include "codebook.h"
#include "dense.h"
#include "kquants_2_3_6.h"
#include "kquants_4_5.h"

namespace metalmm {

// Pieces fill units, units fill blocks and chunks; both are reached with 32 lanes.
template <class Format>
struct FormatCheck {
  MM_CONST int kUnit = Format::kLanes * Format::kValues;
  static_assert(kSimdWidth % Format::kLanes == 0, "");
  static_assert(Format::kBlockValues % kUnit == 0 || kUnit % Format::kBlockValues == 0, "");
  static_assert(Format::kRun % 4 == 0 && Format::kValues % Format::kRun == 0, "");
  static_assert(Format::kValues % (Format::kSegments * Format::kChains) == 0, "");
  MM_CONST bool kOk = true;
};

#define MM_DENSE(name, Struct, bytes)                                              \
  static_assert(Struct::kBlockValues == 1 && Struct::kBlockBytes == bytes, #name); \
  static_assert(FormatCheck<Struct>::kOk, #name);
#define MM_BLOCK(name, Struct, values, bytes, alignment)                                \
  static_assert(Struct::kBlockValues == values && Struct::kBlockBytes == bytes, #name); \
  static_assert(Struct::kHasUnits == (alignment == 2), #name);                          \
  static_assert(FormatCheck<Struct>::kOk, #name);
#define MM_AFFINE(name, Struct, bits)                                           \
  static_assert(Struct::kBlockBytes * 8 == Struct::kBlockValues * bits, #name); \
  static_assert(FormatCheck<Struct>::kOk, #name);
#include "../formats.def"
#define MM_PIECE(name, Struct, values, short_values, wide) \
  static_assert(Struct::kValues == values, #name);         \
  static_assert(ShortPiece<Struct>::type::kValues == short_values, #name);
#include "../pieces.def"

}  // namespace metalmm
