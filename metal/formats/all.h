// Every format of formats.def, checked against its row; not in the text of one kernel, which has
// its own format alone.
#pragma once

#include "affine.h"
#include "block32.h"
#include "codebook.h"
#include "dense.h"
#include "grids/iq1.h"
#include "grids/iq2.h"
#include "grids/iq3.h"
#include "kquants_2_3_6.h"
#include "kquants_4_5.h"
#include "microscaling.h"
#include "ternary.h"

#if !defined(MM_ONLY_FORMAT)
namespace metalmm {

// Pieces have the values of their row. They fill units, units fill blocks and chunks; both are
// reached with 32 lanes.
template <class Format, int piece, int weave>
struct FormatCheck {
  using Pieces = typename Format::Pieces;
  using Terms = typename Format::Terms;
  MM_CONST int kUnit = Pieces::kLanes * Pieces::kValues, kBlock = Format::Storage::kBlockValues;
  static_assert(Pieces::kValues == piece, "");
  static_assert(Pieces::kRunStride * piece == Pieces::kRun * weave, "");
  static_assert(weave == piece || Pieces::kRunStride == piece, "");
  static_assert(kSimdWidth % Pieces::kLanes == 0, "");
  static_assert(kBlock % kUnit == 0 || kUnit % kBlock == 0, "");
  static_assert(Pieces::kRun % 4 == 0 && Pieces::kValues % Pieces::kRun == 0, "");
  static_assert(Terms::kScales == 1 || Terms::kScales == Pieces::kValues / Pieces::kRun, "");
  static_assert(Pieces::kValues % (Terms::kScales * Terms::kChains) == 0, "");
  MM_CONST bool kOk = true;
};

#define MM_DENSE(name, Struct, bytes, piece)                                                 \
  static_assert(Struct::Storage::kBlockValues == 1 && Struct::Storage::kBlockBytes == bytes, \
                #name);                                                                      \
  static_assert(FormatCheck<Struct, piece, piece>::kOk, #name);
#define MM_BLOCK(name, Struct, values, bytes, alignment, piece, weave, ...)                       \
  static_assert(Struct::Storage::kBlockValues == values && Struct::Storage::kBlockBytes == bytes, \
                #name);                                                                           \
  static_assert(Struct::Storage::kHasWidths == (alignment == 2), #name);                          \
  static_assert(FormatCheck<Struct, piece, weave>::kOk, #name);
#define MM_AFFINE(name, Struct, bits, piece)                                                      \
  static_assert(Struct::Storage::kBlockBytes * 8 == Struct::Storage::kBlockValues * bits, #name); \
  static_assert(FormatCheck<Struct, piece, piece>::kOk, #name);
#include "../formats.def"

}  // namespace metalmm
#endif
