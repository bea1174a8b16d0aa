// MM_STORED_FORMAT(name, Struct), defined by the file that includes this, for the rows of
// formats.def that a shader quantizes. Or for one row, as each.h.
#if defined(MM_ONLY_FORMAT)
MM_STORED_FORMAT(MM_ONLY_FORMAT, MM_ONLY_STRUCT)
#else
#define MM_STORED_0(name, Struct)
#define MM_STORED_1(name, Struct) MM_STORED_FORMAT(name, Struct)
#define MM_DENSE(name, Struct, ...) MM_STORED_FORMAT(name, Struct)
#define MM_BLOCK(name, Struct, values, bytes, alignment, piece, weave, wide, packs, stored) \
  MM_STORED_##stored(name, Struct)
#include "../formats.def"
#undef MM_STORED_0
#undef MM_STORED_1
#endif
#undef MM_STORED_FORMAT
