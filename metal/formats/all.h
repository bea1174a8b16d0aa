// Every format of formats.def, checked against its row.
#pragma once

#include "block32.h"
#include "kquants_4_5.h"

namespace metalmm {

#define MM_BLOCK(name, Struct, values, bytes, alignment)                                    \
  static_assert(Struct::kBlockValues == values && Struct::kBlockBytes == bytes, #name); \
  static_assert(values % (Struct::kLanes * Struct::kValues) == 0, #name);

}  // namespace metalmm
