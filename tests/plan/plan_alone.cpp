// csrc/plan without torch, Metal or Python: prints the kernel of each pass of a plan.
#include <cstdio>

#include "plan/plan.h"

int main() {
  metalmm::Problem p;
  p.op = metalmm::Op::kLinear;
  p.m = 1;
  p.n = p.k = 4096;
  p.format = &metalmm::format_by_name("q4_0");
  p.dtype = metalmm::DType::kF16;
  for (const metalmm::Pass& pass : metalmm::plan(p, metalmm::gpu_by_name("m1")).passes) {
    std::printf("%s\n", pass.kernel.c_str());
  }
  return 0;
}
