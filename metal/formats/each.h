// MM_FORMAT(name, Struct), defined by the file that includes this, for every row of formats.def; or
// for one row, of name MM_ONLY_FORMAT and struct MM_ONLY_STRUCT.
#if defined(MM_ONLY_FORMAT)
MM_FORMAT(MM_ONLY_FORMAT, MM_ONLY_STRUCT)
#undef MM_FORMAT
#else
#include "../formats.def"
#endif
