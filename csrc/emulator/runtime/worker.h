// One OS thread of the emulator and the threadgroup that it runs: a fiber per GPU thread.
#pragma once

#include <pthread.h>
#include <time.h>
#include <cstddef>

#include "msl/host/abi.h"
#include "stack.h"

// The emulator's code in a section of its own: what a signal interrupts outside it is a shader.
#if defined(__clang__)
#pragma clang section text = "mm_runtime"
#endif

namespace metalmm {

constexpr uint32_t kSimdWidth = kMmScopeSimd, kQuadWidth = kMmScopeQuad;
constexpr uint32_t kMaxThreads = 1024, kMaxSimdgroups = kMaxThreads / kSimdWidth;
constexpr size_t kStackBytes = 64 << 10;  // per GPU thread
constexpr size_t kPage = 16 << 10;        // a multiple of every page size in use
// Bytes of a lane's stack for its checks, and bytes below all stacks: a function's frame is on the
// stack before check_stack() sees it, and msl/build.py refuses frames of 1 MB.
constexpr size_t kStackMargin = 8 << 10, kBelowStacks = 2 << 20;
constexpr uint32_t kMaxThreadgroupBytes = 32 << 10;
constexpr size_t kSlotBytes = 1 << 20;  // addresses of one [[threadgroup(i)]] argument

enum class State : uint8_t { kReady, kWaiting, kReturned, kAbsent };

// The collective at which a lane waits.
struct Wait {
  uint32_t scope, flags, line;
  const char* kind;
  const char* file;
  MmCombine combine;
  void* in;
  void* out;
};

// Last accesses to a byte of threadgroup memory. An epoch of the threadgroup ends at a threadgroup
// barrier that orders this memory, one of a simdgroup at any of its collectives; epochs count on
// from threadgroup to threadgroup, so that an entry older than first_epoch says that nobody did.
struct Shadow {
  uint32_t write_epoch, write_simd_epoch, read_epoch, read_simd_epoch;
  uint16_t writer, reader;
  bool read_by_many, atomic;
  uint64_t write_pc, read_pc;
  const char* write_file;
  uint32_t write_line;
};

// A write to bytes that another thread has written with no barrier between. It is a race if it
// changes them: many kernels let every simdgroup write the same table.
struct SharedWrite {
  const char* at;
  size_t bytes;  // 0: none
  uint8_t before[16];
  const void* pc;
  Shadow was;  // the first byte that another thread wrote
};

struct Lane {
  void* context;
  State state;
  uint32_t index;  // in the threadgroup
  const char* stack;
  Stack described;
  Wait wait;
  const char* site_file;  // the line that reports name instead of the machine address; null: none
  uint32_t site_line;
  SharedWrite shared_write;
};

// The second place of a fault, e.g. of the write that races with a read.
struct Other {
  uint64_t pc;
  const char* file;
  uint32_t line;
};

struct Span {
  char* begin;
  char* end;
  bool contains(const char* p, size_t n) const { return p >= begin && p + n <= end; }
};

// The memory of a [[buffer(i)]] in a launch.
struct Place {
  Span span;          // empty: it is not bound
  bool is_argument;   // a kernel's; else reached by its address alone
  bool is_read_only;  // the kernel takes it as const
};

struct Launch;

struct Worker {
  Launch* launch;
  Worker* next_free;
  char* stacks;
  void* scheduler;  // the context that resumes lanes
  Stack thread;     // the scheduler's stack
  Lane* current;    // null while the scheduler or a collective runs
  Lane lanes[kMaxThreads];
  uint64_t turn;  // its threadgroup in the order of the schedule
  Other other;    // the fault that is about to be reported
  uint32_t tg_threads[3], tg[3], n_threads, n_simdgroups;
  uint32_t pass_next, pass_end,
      pass_first;  // lanes of the simdgroup that runs, in the order of the schedule
  uint32_t epoch, first_epoch, simd_epoch[kMaxSimdgroups], last_simd_epoch;
  Span memory[kMmMaxSlots];  // [[threadgroup(i)]], kSlotBytes apart in the arena
  uint32_t shadow_at[kMmMaxSlots];
  char* arena;
  Span locals;     // threadgroup variables declared in kernels: this thread's TLS of the library
  Shadow* shadow;  // shadow of `memory`, then of `locals`
  size_t shadow_bytes;
};

constexpr uint64_t kNoTurn = ~uint64_t{0};

struct Launch {
  const MmLaunch* in;
  MmReport* report;
  uint64_t next;              // turn to take, atomically incremented
  uint64_t faulty;            // the earliest turn with a fault, atomic; kNoTurn: none
  pthread_mutex_t reporting;  // holds *report and changes of `faulty`
  uint64_t threadgroups;
  void (*run)();
  const MmArgument* arguments;
  uint32_t n_arguments;
  Place buffers[kMmMaxSlots];
  uint32_t moved;                // bit i: buffers[i] is a copy
  char* no_memory[kMmMaxSlots];  // placeholders for a [[threadgroup(i)]] of 0 bytes
  char* windows;                 // arguments, window_bytes each; null: none
  uint64_t window_bytes;
  Span code, runtime;  // the library, and the emulator in it
  void (*time_out)(Worker& w, const char* pc);
};

// Sends this thread, the worker's, a signal when the launch has run for too long.
class Watchdog {
 public:
  explicit Watchdog(Worker& w);
  ~Watchdog();
  Watchdog(const Watchdog&) = delete;

 private:
  timer_t timer_;
  bool armed_ = false;
};
void prepare_watchdog(Launch& launch, Span code);

constexpr size_t kArenaBytes = (kMmMaxSlots + 1) * kSlotBytes;

// Sets buffers, no_memory and windows of a launch; the second copies results back.
void place_arguments(Launch& launch, bool checked);
void return_arguments(Launch& launch);
// Names p if it is in or near an argument.
bool name_argument(const Launch& launch, const char* p, char* text, size_t n);

Worker* this_worker();
bool descending(const Worker& w);
// Whether a worker's threadgroup ends here: a fault was in it, or in one whose turn is earlier.
// Later turns than a faulty one end at once; earlier ones run on, up to the time limit of the
// launch, so that the fault it reports does not depend on the speed of its workers.
bool stopped(const Worker& w);

// Reports a fault of the current lane and never returns to it; the fault of the earliest turn is
// kept.
[[noreturn]] void fail_here(MmFault fault, uint64_t pc, const char* format, ...);
// Leaves the current lane because another has failed.
[[noreturn]] void stop_here(Worker& w);
// Reports that `waiting` waits where `lane` does not; returns. `who`: words that name `lane`.
void fail_pair(Worker& w, const Lane& waiting, const Lane& lane, MmFault fault, const char* who);
// Keeps the fault of a lane, if its turn is the earliest. Where the lane waits, that is the place.
void write_report(const Worker& w, const Lane& lane, MmFault fault, uint64_t pc, const char* text);

Span prepare_memory(Worker& w);  // finds `locals`, once per launch; the span of the library
void poison_memory(Worker& w);   // before each threadgroup
void check_shared_write(Worker& w, Lane& lane);  // before `lane` does anything else
void name_memory(const Worker& w, const char* p, char* text, size_t n);

}  // namespace metalmm
