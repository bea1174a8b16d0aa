// Runs kernels of shader libraries through launch_emulated(), for builds with sanitizers:
//   emulator_check LIBRARY KERNEL...
// prints for each kernel the sum of its results, or what the emulator reports.
#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "emulator/launch.h"

int main(int count, char** arguments) {
  using namespace metalmm;
  load_emulated(arguments[1]);
  for (int i = 2; i < count; ++i) {
    for (bool descending : {false, true}) {
      // 3 threadgroups of 70 threads: a simdgroup that is not full.
      constexpr uint32_t kGroups = 3, kThreads = 70;
      std::vector<float> x(kGroups * kThreads), y(kGroups * kThreads, -1.0f);
      for (size_t n = 0; n < x.size(); ++n) x[n] = static_cast<float>(n % 7);
      Pass pass;
      pass.kernel = arguments[i];
      pass.grid = {kGroups, 1, 1};
      pass.threads = {kThreads, 1, 1};
      pass.threadgroup_bytes = 512;
      pass.slots = kBindProbe;
      pass.args.count = kGroups * kThreads;
      Buffers buffers{};
      buffers[kSlotX] = {x.data(), 0, x.size() * sizeof(float)};
      buffers[kSlotX2] = {x.data(), 0, x.size() * sizeof(float)};
      buffers[kSlotY] = {y.data(), 0, y.size() * sizeof(float)};
      EmulatorOptions options;
      options.descending = descending;
      options.workers = 3;
      options.seconds = strcmp(arguments[i], "endless") ? 60 : 1;
      Plan plan;
      plan.passes = {pass, pass};
      try {
        launch_emulated({{plan, buffers}}, options);
        double sum = 0;
        for (float v : y) sum += v;
        printf("%s: %g\n", arguments[i], sum);
      } catch (const std::runtime_error& e) {
        printf("%s: %s\n", arguments[i], e.what());
      }
    }
  }
}
