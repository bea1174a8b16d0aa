// gemm of every format and dtype.
#include "../../kernels/gemm.h"

#include "../../entry.h"
#include "../../formats/all.h"

#define MM_FORMAT(name, Struct) MM_EACH_DTYPE(MM_MATMUL, gemm, name, Struct, Gemm)
#include "../../formats/each.h"
