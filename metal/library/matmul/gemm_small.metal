// gemm_small of every format and dtype.
#include "../../kernels/gemm_small.h"

#include "../../entry.h"
#include "../../formats/all.h"

#define MM_FORMAT(name, Struct) MM_EACH_DTYPE(MM_ARRANGED, gemm_small, name, Struct, GemmSmall)
#include "../../formats/each.h"
