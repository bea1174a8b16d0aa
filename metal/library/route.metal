// route of every dtype.
#include "../layer/route.h"

#include "../entry.h"

#define MM_ROUTE(dtype, T, name)                                                                  \
  MM_KERNEL(                                                                                      \
      name##_##dtype,                                                                             \
      (MM_IN(T, x, kSlotX), MM_IN(float, bias, kSlotBias), MM_IN(float, choice, kSlotX2),         \
       MM_IN(float, shared, kSlotC), MM_OUT_TO(float, y, kSlotY), MM_OUT_TO(long, ids, kSlotY2)), \
      metalmm::Route<T>::run({x, bias, choice, shared}, y, ids, args, at))
MM_EACH_DTYPE(MM_ROUTE, route)
