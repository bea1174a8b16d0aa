// The first pass of a plan as values, by csrc/plan alone: FORMAT M N K, of f32 x on an M1.
#include <cstdio>
#include <cstdlib>

#include "plan/plan.h"

int main(int, char** argv) {
  metalmm::Problem p;
  p.format = &metalmm::format_by_name(argv[1]);
  p.m = std::atoi(argv[2]);
  p.n = std::atoi(argv[3]);
  p.k = std::atoi(argv[4]);
  p.dtype = metalmm::DType::kF32;
  const metalmm::Pass pass = metalmm::plan(p, metalmm::gpu_by_name("m1")).passes.at(0);
  std::printf("%s\n%u %u %u\n%u\n%u\n", pass.kernel.c_str(), pass.grid[0], pass.grid[1],
              pass.grid[2], pass.threads[0], pass.threadgroup_bytes);
  for (uint32_t value : pass.constants) std::printf("%u ", value);
  std::printf("\n");
  const auto* bytes = reinterpret_cast<const unsigned char*>(&pass.args);
  for (size_t i = 0; i < sizeof pass.args; ++i) std::printf("%02x", bytes[i]);
  std::printf("\n");
  return 0;
}
