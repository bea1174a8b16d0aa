// expert_gemv of every format and dtype.
#include "../../kernels/experts.h"

#include "../../entry.h"
#include "../../formats/all.h"

#define MM_FORMAT(name, Struct) MM_EACH_DTYPE(MM_EXPERTS, expert_gemv, name, Struct, ExpertGemv)
#include "../../formats/each.h"
