// gemm_tiled of every format and dtype.
#include "../../kernels/gemm_tiled.h"

#include "../../entry.h"
#include "../../formats/all.h"

#define MM_FORMAT(name, Struct) MM_EACH_DTYPE(MM_MATMUL, gemm_tiled, name, Struct, GemmTiled)
#include "../../formats/each.h"
