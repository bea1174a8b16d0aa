// route: the k best of n experts for each row of logits, and their weights.
//
// Of experts that are equal the lowest comes first. So each choice is the best of what follows the
// one before in one order of all, and nothing of those chosen is kept.
//
// Owner    a simdgroup owns a token; a lane every kSimdWidth-th expert, a group, and a choice.
// Traffic  logits k + 2 times, but for once from the cache, and once more where there are groups.
// Needs    k and groups at most kSimdWidth.
#pragma once

#include <metal_simdgroup>

#include "../entry.h"
#include "activation.h"

namespace metalmm {

template <class T>
struct Route {
  struct From {
    device const T* x;
    device const float* bias;
    device const float* choice_bias;
    device const float* shared;
  };

  // Softmax of a logit is exp(logit - most) / total.
  struct Row {
    From from;
    float most, total;
    uint kept;  // bit g: group g is chosen from
    uint size;  // experts of a group
  };

  static METAL_FUNC float logit(From from, uint e) {
    const float l = float(from.x[e]);
    return fc_epilogue & kRouteBias ? l + from.bias[e] : l;
  }

  static METAL_FUNC float score(thread const Row& row, uint e) {
    const float l = logit(row.from, e);
    if (fc_epilogue & kRouteSigmoid) return sigmoid(l);
    return exp(l - row.most) / row.total;
  }

  // The key by which an expert is chosen.
  static METAL_FUNC float key(thread const Row& row, uint e) {
    float v;
    if (fc_epilogue & (kRouteChoiceBias | kRouteGroups)) {
      v = score(row, e);
      if (fc_epilogue & kRouteChoiceBias) v += row.from.choice_bias[e];
    } else {
      v = logit(row.from, e);
    }
    return isnan(v) ? INFINITY : v;
  }

  static METAL_FUNC void normalise(thread Row& row, constant KernelArgs& args, uint lane) {
    float most = -INFINITY, total = 0.0f;
    for (uint e = lane; e < args.n; e += kSimdWidth) most = max(most, logit(row.from, e));
    row.most = simd_max(most);
    for (uint e = lane; e < args.n; e += kSimdWidth) total += exp(logit(row.from, e) - row.most);
    row.total = simd_sum(total);
  }

  // The groups whose best sum to the most.
  static METAL_FUNC uint kept_groups(thread const Row& row, constant KernelArgs& args, uint lane) {
    float first = -INFINITY, second = -INFINITY;
    if (lane < args.heads) {
      for (uint e = lane * row.size; e < (lane + 1) * row.size; ++e) {
        const float v = key(row, e);
        second = max(second, min(first, v));
        first = max(first, v);
      }
    }
    const float best = args.positions == 2 ? first + second : first;
    uint rank = 0;
    for (uint g = 0; g < args.heads; ++g) {
      const float other = simd_shuffle(best, ushort(g));
      rank += other > best || (other == best && g < lane) ? 1 : 0;
    }
    return simd_sum(lane < args.heads && rank < args.kv_heads ? 1u << lane : 0u);
  }

  static METAL_FUNC void run(From from, device float* y, device long* ids,
                             constant KernelArgs& args, Position at) {
    const uint token = at.tg.x * (RouteGeometry::kThreads / kSimdWidth) + at.sg;
    if (token >= args.m) return;
    from.x += ulong(token) * args.x_stride;
    Row row = {from, 0.0f, 1.0f, ~0u, args.n / args.heads};
    if (!(fc_epilogue & kRouteSigmoid)) normalise(row, args, at.lane);
    if (fc_epilogue & kRouteGroups) row.kept = kept_groups(row, args, at.lane);
    float before = INFINITY, weight = 0.0f;
    uint last = 0, id = 0;
    for (uint c = 0; c < args.k; ++c) {
      float best = -INFINITY;
      uint which = args.n;
      for (uint e = at.lane; e < args.n; e += kSimdWidth) {
        if (!(row.kept >> (e / row.size) & 1) && (fc_epilogue & kRouteGroups)) continue;
        const float v = key(row, e);
        const bool is_behind = c == 0 || v < before || (v == before && e > last);
        if (is_behind && (which == args.n || v > best)) {
          best = v;
          which = e;
        }
      }
      before = simd_max(best);
      last = simd_min(best == before ? which : args.n);
      if (at.lane == c) {
        id = last;
        weight = score(row, last);
      }
    }
    if (fc_epilogue & kRouteRenormalise) weight /= simd_sum(weight) + kRouteLeast;
    weight *= args.alpha;
    uint width = args.k;
    if (fc_epilogue & kRouteShared) {
      if (at.lane == width) {
        weight = sigmoid(from.shared[ulong(token) * args.y_stride]);
        id = args.n;
      }
      ++width;
    }
    if (at.lane < width) {
      y[ulong(token) * width + at.lane] = weight;
      ids[ulong(token) * width + at.lane] = long(id);
    }
  }
};

}  // namespace metalmm
