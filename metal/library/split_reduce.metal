// split_reduce of every dtype.
#include "../kernels/split_reduce.h"

#include "../entry.h"

#define MM_SPLIT_REDUCE(dtype, T, name)                                          \
  MM_KERNEL(name##_##dtype, (MM_IN(float, partial, kSlotPartial), MM_RESULT(T)), \
            metalmm::SplitReduce<T>::run(partial, {y, bias, c}, args, at))
MM_EACH_DTYPE(MM_SPLIT_REDUCE, split_reduce)
