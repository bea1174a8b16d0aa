// mm_launch: checks a launch, sets its function constants, runs its threadgroups on all cores.
#include <pthread.h>
#include <sys/mman.h>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "msl/host/abi.h"
#include "worker.h"

namespace metalmm {

void run_worker(Worker& w);

}  // namespace metalmm

extern "C" {
using MmInitializer = void (*)(int, char**, char**);
extern MmInitializer __init_array_start[] __attribute__((visibility("hidden"), weak));
extern MmInitializer __init_array_end[] __attribute__((visibility("hidden"), weak));
}

namespace metalmm {
namespace {

bool* g_constants_set;  // [mm_n_constants]: whether it has a value in this launch
pthread_mutex_t g_launching = PTHREAD_MUTEX_INITIALIZER;  // function constants are the library's
Worker* g_free_workers;

int usage(MmReport* report, const char* format, ...) {
  va_list args;
  va_start(args, format);
  report->fault = kMmUsage;
  vsnprintf(report->text, sizeof report->text, format, args);
  va_end(args);
  return kMmUsage;
}

void* map(size_t bytes) {
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) {
    perror("emulator: mmap");
    abort();
  }
  return p;
}

Worker* take_worker(Launch* launch) {
  Worker* w = g_free_workers;
  if (w) {
    g_free_workers = w->next_free;
  } else {
    w = static_cast<Worker*>(map(sizeof(Worker)));
    // No pages between two stacks that are not accessible: a checked library finds the access of
    // one lane to another's, and 1024 such pages in each library would be too many maps.
    w->stacks = static_cast<char*>(map(kBelowStacks + kMaxThreads * kStackBytes)) + kBelowStacks;
    w->arena = static_cast<char*>(map(kArenaBytes));
  }
  w->launch = launch;
  return w;
}

void lay_out_threadgroup_memory(Worker& w) {
  uint32_t shadow_at = 0;
  for (uint32_t i = 0; i < kMmMaxSlots; ++i) {
    const uint32_t bytes = w.launch->in->threadgroup_bytes[i];
    char* at = w.arena + i * kSlotBytes + kSlotBytes / 2;
    at = w.launch->no_memory[i] ? w.launch->no_memory[i] : at;
    w.memory[i] = {at, at + bytes};
    w.shadow_at[i] = shadow_at;
    shadow_at += bytes;
  }
}

void set_constants(const MmLaunch& in) {
  if (!g_constants_set && mm_n_constants) g_constants_set = static_cast<bool*>(map(mm_n_constants));
  for (uint32_t i = 0; i < mm_n_constants; ++i) {
    g_constants_set[i] = false;
    memset(mm_constants[i].storage, 0, mm_constants[i].bytes);
    for (uint32_t c = 0; c < in.n_constants; ++c) {
      if (in.constants[c].index == mm_constants[i].index) {
        memcpy(mm_constants[i].storage, in.constants[c].value, mm_constants[i].bytes);
        g_constants_set[i] = true;
      }
    }
  }
  // Constants that are computed from function constants.
  for (MmInitializer* f = __init_array_start; mm_n_constants && f && f != __init_array_end; ++f) {
    if (*f) (*f)(0, nullptr, nullptr);
  }
}

int check(const MmLaunch& in, const MmKernelEntry*& kernel, MmReport* report) {
  for (uint32_t i = 0; i < mm_n_kernels; ++i) {
    if (strcmp(mm_kernels[i].name, in.kernel) == 0) kernel = &mm_kernels[i];
  }
  if (!kernel) return usage(report, "the library has no kernel %s", in.kernel);
  uint64_t threads = uint64_t{in.tg_threads[0]} * in.tg_threads[1] * in.tg_threads[2];
  if (threads == 0 || threads > kMaxThreads) {
    return usage(report, "%llu threads per threadgroup; 1 to %u are allowed",
                 static_cast<unsigned long long>(threads), kMaxThreads);
  }
  uint64_t bytes = 0;
  for (uint32_t b : in.threadgroup_bytes) bytes += b;
  if (bytes > kMaxThreadgroupBytes) {
    return usage(report, "%llu bytes of threadgroup memory; at most %u are allowed",
                 static_cast<unsigned long long>(bytes), kMaxThreadgroupBytes);
  }
  for (uint32_t i = 0; i < kernel->n_arguments; ++i) {
    const MmArgument& a = kernel->arguments[i];
    const bool is_buffer = a.role == kMmRoleBuffer || a.role == kMmRoleOptionalBuffer;
    if ((is_buffer || a.role == kMmRoleThreadgroup) && a.index >= kMmMaxSlots) {
      return usage(report, "%s: [[%s(%u)]]; indices below %u are allowed", in.kernel,
                   is_buffer ? "buffer" : "threadgroup", a.index, kMmMaxSlots);
    }
  }
  return 0;
}

void* worker_main(void* w) {
  run_worker(*static_cast<Worker*>(w));
  return nullptr;
}

void run_all(Launch& launch, uint32_t n) {
  pthread_t threads[256];
  Worker* workers[256];
  for (uint32_t i = 0; i < n; ++i) {
    workers[i] = take_worker(&launch);
    lay_out_threadgroup_memory(*workers[i]);
  }
  uint32_t started = 0;
  while (started + 1 < n &&
         pthread_create(&threads[started], nullptr, worker_main, workers[started + 1]) == 0) {
    ++started;
  }
  run_worker(*workers[0]);
  for (uint32_t i = 0; i < started; ++i) pthread_join(threads[i], nullptr);
  for (uint32_t i = 0; i < n; ++i) {
    workers[i]->next_free = g_free_workers;
    g_free_workers = workers[i];
  }
}

}  // namespace

bool constant_is_set(const void* storage) {
  for (uint32_t i = 0; i < mm_n_constants; ++i) {
    if (mm_constants[i].storage == storage) {
      return g_constants_set && g_constants_set[i];  // none while the library is loaded
    }
  }
  return false;
}

}  // namespace metalmm

using namespace metalmm;

extern "C" {

__attribute__((visibility("default"))) int mm_launch(const MmLaunch* in, MmReport* report) {
  memset(report, 0, sizeof *report);
  const MmKernelEntry* kernel = nullptr;
  if (int fault = check(*in, kernel, report)) return fault;
  pthread_mutex_lock(&g_launching);
  set_constants(*in);
  Launch launch{};
  launch.in = in;
  launch.report = report;
  launch.faulty = kNoTurn;
  launch.reporting = PTHREAD_MUTEX_INITIALIZER;
  launch.threadgroups = uint64_t{in->grid[0]} * in->grid[1] * in->grid[2];
  launch.run = kernel->run;
  launch.arguments = kernel->arguments;
  launch.n_arguments = kernel->n_arguments;
  place_arguments(launch, mm_checked);
  uint32_t n = in->workers < 1 ? 1 : in->workers > 256 ? 256 : in->workers;
  n = launch.threadgroups < n ? static_cast<uint32_t>(launch.threadgroups) : n;
  if (n) run_all(launch, n);
  return_arguments(launch);
  pthread_mutex_unlock(&g_launching);
  return static_cast<int>(report->fault);
}

bool mm_constant_is_set(const void* storage) { return constant_is_set(storage); }

void mm_log(const char* level, const char* format, ...) {
  const Worker& w = *this_worker();
  char text[512];
  va_list args;
  va_start(args, format);
  vsnprintf(text, sizeof text, format, args);
  va_end(args);
  // One call, so that lines of several workers stay whole.
  fprintf(stderr, "%s: threadgroup (%u, %u, %u), thread %u: %s: %s\n", w.launch->in->kernel,
          w.tg[0], w.tg[1], w.tg[2], w.current->index, level, text);
}

void* mm_argument_memory(MmRole role, uint32_t index) {
  const Worker& w = *this_worker();
  return role == kMmRoleThreadgroup ? w.memory[index].begin : w.launch->buffers[index].span.begin;
}

void mm_argument_value(MmRole role, uint32_t* v) {
  const Worker& w = *this_worker();
  const MmLaunch& in = *w.launch->in;
  uint32_t i = w.current->index;
  uint32_t at[3] = {i % w.tg_threads[0], i / w.tg_threads[0] % w.tg_threads[1],
                    i / w.tg_threads[0] / w.tg_threads[1]};
  auto set = [v](uint32_t x, uint32_t y, uint32_t z) { v[0] = x, v[1] = y, v[2] = z; };
  switch (role) {
    case kMmRoleThreadPositionInGrid:
      return set(w.tg[0] * in.tg_threads[0] + at[0], w.tg[1] * in.tg_threads[1] + at[1],
                 w.tg[2] * in.tg_threads[2] + at[2]);
    case kMmRoleThreadgroupPositionInGrid:
      return set(w.tg[0], w.tg[1], w.tg[2]);
    case kMmRoleThreadPositionInThreadgroup:
      return set(at[0], at[1], at[2]);
    case kMmRoleThreadsPerThreadgroup:
      return set(in.tg_threads[0], in.tg_threads[1], in.tg_threads[2]);
    case kMmRoleThreadsPerGrid:
      return set(in.threads[0], in.threads[1], in.threads[2]);
    case kMmRoleThreadgroupsPerGrid:
      return set(in.grid[0], in.grid[1], in.grid[2]);
    case kMmRoleThreadIndexInThreadgroup:
      return set(i, 0, 0);
    case kMmRoleThreadIndexInSimdgroup:
      return set(i % kSimdWidth, 0, 0);
    case kMmRoleSimdgroupIndexInThreadgroup:
      return set(i / kSimdWidth, 0, 0);
    case kMmRoleThreadsPerSimdgroup:
      return set(kSimdWidth, 1, 1);
    case kMmRoleSimdgroupsPerThreadgroup:
      return set(w.n_simdgroups, 1, 1);
    case kMmRoleThreadIndexInQuadgroup:
      return set(i % kQuadWidth, 0, 0);
    case kMmRoleQuadgroupIndexInThreadgroup:
      return set(i / kQuadWidth, 0, 0);
    case kMmRoleQuadgroupsPerThreadgroup:
      return set((w.n_threads + kQuadWidth - 1) / kQuadWidth, 1, 1);
    default:
      return set(0, 0, 0);
  }
}
}
