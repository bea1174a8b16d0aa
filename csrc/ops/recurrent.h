// The arguments of the recurrent ops, as checks.h has those of the others.
#pragma once

#include "args.h"

namespace metalmm {

void check(const args::causal_conv& a);

struct DeltaShape {
  c10::SymInt batch, positions, key_heads, heads, dk, dv;
};
DeltaShape check(const args::gated_delta& a);

struct SsmShape {
  c10::SymInt batch, positions, groups, heads, values;  // values of a head of x
};
SsmShape check(const args::ssm_scan& a);

}  // namespace metalmm
