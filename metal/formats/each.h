// MM_FORMAT(name, Struct), defined by the file that includes this, for every row of formats.def; or
// for one row, of name MM_ONLY_FORMAT and struct MM_ONLY_STRUCT.
#if defined(MM_ONLY_FORMAT)
MM_FORMAT(MM_ONLY_FORMAT, MM_ONLY_STRUCT)
#else
#define MM_DENSE(name, Struct, bytes) MM_FORMAT(name, Struct)
#define MM_BLOCK(name, Struct, values, bytes, alignment) MM_FORMAT(name, Struct)
#define MM_AFFINE(name, Struct, bits) MM_FORMAT(name, Struct)
#include "../formats.def"
#endif
#undef MM_FORMAT
