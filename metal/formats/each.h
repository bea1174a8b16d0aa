// MM_FORMAT(name, Struct), defined by the file that includes this, for every row of formats.def.
#define MM_DENSE(name, Struct, bytes) MM_FORMAT(name, Struct)
#define MM_BLOCK(name, Struct, values, bytes, alignment) MM_FORMAT(name, Struct)
#define MM_AFFINE(name, Struct, bits) MM_FORMAT(name, Struct)
#include "../formats.def"
#undef MM_FORMAT
