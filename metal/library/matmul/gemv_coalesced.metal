// gemv_coalesced of every format and dtype.
#include "../../kernels/gemv_coalesced.h"

#include "../../entry.h"
#include "../../formats/all.h"

#define MM_FORMAT(name, Struct) MM_EACH_DTYPE(MM_GEMV, gemv_coalesced, name, Struct, GemvSimdgroup)
#include "../../formats/each.h"
