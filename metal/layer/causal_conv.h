// A causal convolution of each channel of a sequence, whose last inputs are a state:
//     y[p] = act(bias + sum of weight[j] x[p - taps + 1 + j]).
// x of positions before the first is the end of the state [channel, width], which then holds the
// last `width` of both.
//
// x are rows of n channels, fc_k taps of each; y is [m, n].
//
// Owner    a thread owns kPositions positions of a channel, and that of the first the state: no
//          other one reads or writes it.
// Traffic  x 1 + (taps - 1) / kPositions times, y and the state once.
// Needs    taps up to kMostTaps, width at least taps - 1.
#pragma once

#include "../entry.h"
#include "activation.h"

namespace metalmm {

template <class T>
struct CausalConv {
  MM_CONST uint kPositions = CausalConvGeometry::kPositions;
  MM_CONST uint kMostTaps = CausalConvGeometry::kMostTaps;

  struct From {
    device const T* x;
    device const T* weight;
    device const T* bias;
  };

  // A value of weight or bias, f32 where fc_epilogue says so.
  static METAL_FUNC float parameter(device const T* values, uint i) {
    if (fc_epilogue & kConvFloatWeight) return reinterpret_cast<device const float*>(values)[i];
    return float(values[i]);
  }

  static METAL_FUNC T input(From from, constant KernelArgs& args, ulong m, uint channel) {
    return from.x[m * args.x_stride + channel];
  }

  // Stores the state behind the last position; `row` is that of position 0.
  static METAL_FUNC void keep(From from, device T* state, constant KernelArgs& args, ulong row,
                              uint channel) {
    for (uint i = 0; i < args.count; ++i) {
      const uint p = i + args.positions;  // beyond the state that was: of it, or of x
      state[i] = p < args.count ? state[p] : input(from, args, row + (p - args.count), channel);
    }
  }

  static METAL_FUNC void run(From from, device T* y, device T* state, constant KernelArgs& args,
                             Position at) {
    const uint chunks = (args.positions + kPositions - 1) / kPositions;
    const uint item = at.tg.x * CausalConvGeometry::kThreads + at.index;
    const uint channel = item % args.n, chunk = item / args.n % chunks;
    const uint sequence = item / args.n / chunks;
    if (sequence >= args.m / args.positions) return;
    const uint first = chunk * kPositions, last = min(first + kPositions, args.positions);
    const ulong row = ulong(sequence) * args.positions;
    state += (ulong(sequence) * args.n + channel) * args.count;
    float weight[kMostTaps], in[kMostTaps];  // only the last fc_k are read
    MM_UNROLL
    for (uint j = 0; j < kMostTaps; ++j) {
      const uint back = kMostTaps - j;
      if (back <= fc_k) weight[j] = parameter(from.weight, channel * fc_k + fc_k - back);
      if (back >= fc_k) continue;
      // The input `back` positions before the first; a chunk is longer than the taps.
      in[j] = float(chunk == 0 ? state[args.count - back]
                               : input(from, args, row + first - back, channel));
    }
    if (chunk == 0) keep(from, state, args, row, channel);
    const float bias = fc_epilogue & kConvBias ? parameter(from.bias, channel) : 0.0f;
    for (uint p = first; p < last; ++p) {
      MM_UNROLL
      for (uint j = 1; j < kMostTaps; ++j) {
        if (kMostTaps - j < fc_k) in[j - 1] = in[j];
      }
      in[kMostTaps - 1] = float(input(from, args, row + p, channel));
      float sum = bias;
      MM_UNROLL
      for (uint j = 0; j < kMostTaps; ++j) {
        if (kMostTaps - j <= fc_k) sum = fma(weight[j], in[j], sum);
      }
      if (fc_epilogue & kConvSilu) sum = silu(sum);
      y[(row + p) * args.n + channel] = T(sum);
    }
  }
};

}  // namespace metalmm
