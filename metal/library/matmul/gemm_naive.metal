// gemm_naive of every format and dtype.
#include "../../kernels/gemm_naive.h"

#include "../../entry.h"
#include "../../formats/all.h"

#define MM_FORMAT(name, Struct) MM_EACH_DTYPE(MM_MATMUL, gemm_naive, name, Struct, GemmNaive)
#include "../../formats/each.h"
