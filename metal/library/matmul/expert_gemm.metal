// expert_gemm of every format and dtype.
#include "../../kernels/experts.h"

#include "../../entry.h"
#include "../../formats/all.h"

#define MM_FORMAT(name, Struct) MM_EACH_DTYPE(MM_EXPERTS, expert_gemm, name, Struct, ExpertGemm)
#include "../../formats/each.h"
