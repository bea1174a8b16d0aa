// arrange_x of halves for gemm_small, which takes 8 rows of the other dtypes at a time, as they
// lie; of floats for gemv_batched, whose lanes read twice as far apart.
#include "../kernels/arrange_x.h"

#include "../entry.h"

#define MM_ARRANGE_X(dtype, T, Order)                                                  \
  MM_KERNEL(arrange_x_##dtype, (MM_IN(T, x, kSlotX), MM_OUT_TO(T, arranged, kSlotY2)), \
            metalmm::ArrangeX<T, metalmm::Order>::run(x, arranged, args, at))
MM_ARRANGE_X(f16, half, TileOrder)
MM_ARRANGE_X(f32, float, PieceOrder)
