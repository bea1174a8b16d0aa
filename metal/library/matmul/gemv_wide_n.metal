// gemv_wide_n of every format and dtype.
#include "../../kernels/gemv.h"

#include "../../entry.h"
#include "../../formats/all.h"

#define MM_FORMAT(name, Struct) MM_EACH_DTYPE(MM_GEMV, gemv_wide_n, name, Struct, GemvWide)
#include "../../formats/each.h"
