// gemv_large_k of every format and dtype.
#include "../../kernels/gemv.h"

#include "../../entry.h"
#include "../../formats/all.h"

#define MM_FORMAT(name, Struct) MM_EACH_DTYPE(MM_GEMV, gemv_large_k, name, Struct, GemvLong)
#include "../../formats/each.h"
