// attention_join of every dtype.
#include "../attention/join.h"

#include "../entry.h"

#define MM_ATTENTION_JOIN(dtype, T, name)                                                 \
  MM_KERNEL(name##_##dtype,                                                               \
            (MM_IN(float, partial, kSlotPartial), MM_IN(T, sinks, kSlotBias), MM_OUT(T)), \
            metalmm::AttentionJoin<T>::run(partial, sinks, y, args, memory, at))
MM_EACH_DTYPE(MM_ATTENTION_JOIN, attention_join)
