// ssm_scan of every dtype.
#include "../layer/ssm_scan.h"

#include "../entry.h"

#define MM_SSM_SCAN(dtype, T, name)                                                       \
  MM_KERNEL(                                                                              \
      name##_##dtype,                                                                     \
      (MM_IN(T, x, kSlotX), MM_IN(T, dt, kSlotX2), MM_IN(T, gate, kSlotC),                \
       MM_IN(T, a_log, kSlotNorm), MM_IN(T, dt_bias, kSlotNorm2), MM_IN(T, d, kSlotBias), \
       MM_OUT(T), MM_OUT_TO(float, state, kSlotY2)),                                      \
      metalmm::SsmScan<T>::run({x, dt, gate, a_log, dt_bias, d}, y, state, args, memory, at))
MM_EACH_DTYPE(MM_SSM_SCAN, ssm_scan)
