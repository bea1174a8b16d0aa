// dequantize of every format and dtype.
#include "../kernels/rows.h"

#include "../entry.h"
#include "../formats/all.h"

#define MM_DEQUANTIZE(dtype, T, format, Struct)                                            \
  MM_KERNEL(dequantize_##format##_##dtype, (MM_IN(uchar, weight, kSlotWeight), MM_OUT(T)), \
            metalmm::Dequantize<metalmm::Struct, T>::run(weight, y, args, at))
#define MM_FORMAT(name, Struct) MM_EACH_DTYPE(MM_DEQUANTIZE, name, Struct)
#include "../formats/each.h"
