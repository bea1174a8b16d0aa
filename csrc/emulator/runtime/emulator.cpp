// The lockstep scheduler: runs each lane until it waits, and a collective once all its lanes do.
#include "msl/host/abi.h"

#include <cstdarg>
#include <cstdio>
#include <cstring>

#include "fiber.h"
#include "float_mode.h"
#include "worker.h"

namespace metalmm {
namespace {

thread_local Worker* g_worker;  // poison_memory() steps around it

uint64_t place(const Worker& w, uint64_t i, uint64_t n) { return descending(w) ? n - 1 - i : i; }

[[noreturn]] void leave(Worker& w, Lane& lane) {
  w.current = nullptr;
  switch_stacks(lane.described, &lane.context, w.thread, w.scheduler);
  __builtin_unreachable();
}

void fiber_main();

// Continues the next lane of the pass, or the scheduler. Returns when this lane is resumed.
void yield(Worker& w, Lane& lane) {
  while (w.pass_next < w.pass_end) {
    Lane& next = w.lanes[w.pass_first + place(w, w.pass_next++, kSimdWidth)];
    if (next.state == State::kReady) {
      w.current = &next;
      switch_stacks(lane.described, &lane.context, next.described, next.context);
      return;
    }
  }
  w.current = nullptr;
  switch_stacks(lane.described, &lane.context, w.thread, w.scheduler);
}

void fiber_main() {
  Worker& w = *this_worker();
  Lane& lane = *w.current;
  lane.described.enter();
  w.launch->run();
  check_shared_write(w, lane);
  lane.state = State::kReturned;
  yield(w, lane);
  __builtin_unreachable();
}

bool same_place(const Wait& a, const Wait& b) {
  if (a.line != b.line || a.scope != b.scope) return false;
  // Equal literals are mostly one; two instances of a template may have a copy each.
  return (a.kind == b.kind || strcmp(a.kind, b.kind) == 0) &&
         (a.file == b.file || strcmp(a.file, b.file) == 0);
}

// Runs the collective of lanes [first, first + width) if it can. `leader` waits in it.
bool try_collective(Worker& w, uint32_t first, uint32_t width, const Lane& leader, bool partial) {
  void *in[kSimdWidth] = {}, *out[kSimdWidth] = {};
  bool member[kSimdWidth] = {};
  for (uint32_t i = 0; i < width; ++i) {
    Lane& lane = w.lanes[first + i];
    if (lane.state == State::kAbsent || (partial && lane.state == State::kReturned)) continue;
    member[i] = lane.state == State::kWaiting && same_place(lane.wait, leader.wait);
    if (!member[i] && !partial) return false;
    if (member[i]) {
      in[i] = lane.wait.in;
      out[i] = lane.wait.out;
    }
  }
  if (leader.wait.combine) leader.wait.combine(in, out);
  for (uint32_t i = 0; i < width; ++i) {
    if (member[i]) w.lanes[first + i].state = State::kReady;
  }
  w.simd_epoch[leader.index / kSimdWidth] = ++w.last_simd_epoch;
  return true;
}

// The lanes of `first`'s simdgroup that wait in a simd or quad collective; runs one that is
// complete.
bool advance_simdgroup(Worker& w, uint32_t first, bool partial) {
  bool advanced = false;
  for (uint32_t i = 0; i < kSimdWidth; ++i) {
    Lane& lane = w.lanes[first + i];
    if (lane.state != State::kWaiting || lane.wait.scope == kMmScopeThreadgroup) continue;
    uint32_t width = lane.wait.scope, start = first + i / width * width;
    if (try_collective(w, start, width, lane, partial)) advanced = true;
  }
  return advanced;
}

void run_simdgroup(Worker& w, uint32_t sg) {
  do {
    w.pass_first = sg * kSimdWidth;
    w.pass_next = 0;
    w.pass_end = kSimdWidth;
    while (w.pass_next < w.pass_end && !stopped(w)) {
      Lane& lane = w.lanes[w.pass_first + place(w, w.pass_next++, kSimdWidth)];
      if (lane.state == State::kReady) {
        w.current = &lane;
        switch_stacks(w.thread, &w.scheduler, lane.described, lane.context);
        w.current = nullptr;
      }
    }
  } while (!stopped(w) && advance_simdgroup(w, sg * kSimdWidth, false));
}

// Reports a simdgroup whose lanes wait at different places; false if there is none.
bool report_divergence(Worker& w) {
  for (uint32_t sg = 0; sg < w.n_simdgroups; ++sg) {
    const Lane* waiting = nullptr;
    for (uint32_t i = 0; i < kSimdWidth && !waiting; ++i) {
      const Lane& lane = w.lanes[sg * kSimdWidth + i];
      if (lane.state == State::kWaiting && lane.wait.scope != kMmScopeThreadgroup) waiting = &lane;
    }
    for (uint32_t i = 0; waiting && i < kSimdWidth; ++i) {
      const Lane& lane = w.lanes[sg * kSimdWidth + i];
      if (lane.state != State::kAbsent &&
          (lane.state == State::kReturned || !same_place(lane.wait, waiting->wait))) {
        fail_pair(w, *waiting, lane, kMmDivergent, "");
        return true;
      }
    }
  }
  return false;
}

// All lanes wait at a threadgroup barrier or have returned: opens it, or reports why it cannot
// open.
bool open_barrier(Worker& w) {
  const Lane* first = nullptr;
  for (uint32_t i = 0; i < w.n_threads && !first; ++i) {
    first = w.lanes[i].state == State::kWaiting ? &w.lanes[i] : nullptr;
  }
  if (!first) return false;
  for (uint32_t i = 0; i < w.n_threads; ++i) {
    const Lane& lane = w.lanes[i];
    bool returned = lane.state == State::kReturned;
    if (returned && (w.launch->in->flags & kMmAllowInactive)) continue;
    if (returned || !same_place(lane.wait, first->wait)) {
      char who[48];
      snprintf(who, sizeof who, " (thread %u, simdgroup %u)", lane.index, lane.index / kSimdWidth);
      bool one = first->index / kSimdWidth == lane.index / kSimdWidth && !returned;
      fail_pair(w, *first, lane, one ? kMmDivergent : kMmDeadlock, who);
      return false;
    }
  }
  if (first->wait.flags & kMmOrdersThreadgroup) ++w.epoch;
  for (uint32_t i = 0; i < w.n_threads; ++i) {
    if (w.lanes[i].state == State::kWaiting) w.lanes[i].state = State::kReady;
  }
  for (uint32_t sg = 0; sg < w.n_simdgroups; ++sg) w.simd_epoch[sg] = ++w.last_simd_epoch;
  return true;
}

bool any_waits_in_simdgroup(const Worker& w) {
  for (uint32_t i = 0; i < w.n_threads; ++i) {
    if (w.lanes[i].state == State::kWaiting && w.lanes[i].wait.scope != kMmScopeThreadgroup) {
      return true;
    }
  }
  return false;
}

void start_lanes(Worker& w) {
  w.n_threads = w.tg_threads[0] * w.tg_threads[1] * w.tg_threads[2];
  w.n_simdgroups = (w.n_threads + kSimdWidth - 1) / kSimdWidth;
  for (uint32_t i = 0; i < w.n_simdgroups * kSimdWidth; ++i) {
    Lane& lane = w.lanes[i];
    lane.index = i;
    lane.site_file = nullptr;
    lane.shared_write.bytes = 0;
    lane.state = i < w.n_threads ? State::kReady : State::kAbsent;
    lane.stack = w.stacks + i * kStackBytes;
    lane.described.set(lane.stack, kStackBytes);
    lane.context = fresh_context(w.stacks + (i + 1) * kStackBytes, fiber_main);
  }
  w.first_epoch = ++w.epoch;
  for (uint32_t& e : w.simd_epoch) e = ++w.last_simd_epoch;
}

void run_threadgroup(Worker& w) {
  const MmLaunch& in = *w.launch->in;
  const uint64_t index = place(w, w.turn, w.launch->threadgroups);
  w.other = {};
  w.tg[0] = index % in.grid[0];
  w.tg[1] = index / in.grid[0] % in.grid[1];
  w.tg[2] = index / in.grid[0] / in.grid[1];
  for (int d = 0; d < 3; ++d) {
    uint32_t left = in.threads[d] - w.tg[d] * in.tg_threads[d];
    w.tg_threads[d] = left < in.tg_threads[d] ? left : in.tg_threads[d];
  }
  poison_memory(w);
  start_lanes(w);
  while (!stopped(w)) {
    for (uint32_t i = 0; i < w.n_simdgroups; ++i) run_simdgroup(w, place(w, i, w.n_simdgroups));
    if (stopped(w)) return;
    if (any_waits_in_simdgroup(w)) {
      bool advanced = false;
      for (uint32_t sg = 0; sg < w.n_simdgroups && (in.flags & kMmAllowInactive); ++sg) {
        advanced = advance_simdgroup(w, sg * kSimdWidth, true) || advanced;
      }
      if (!advanced && report_divergence(w)) return;
    } else if (!open_barrier(w)) {
      return;
    }
  }
}

}  // namespace

Worker* this_worker() { return g_worker; }
Worker** this_worker_slot() { return &g_worker; }
bool descending(const Worker& w) { return (w.launch->in->flags & kMmDescending) != 0; }
bool stopped(const Worker& w) {
  return __atomic_load_n(&w.launch->faulty, __ATOMIC_ACQUIRE) <= w.turn;
}

void fail_here(MmFault fault, uint64_t pc, const char* format, ...) {
  Worker& w = *g_worker;
  Lane& lane = *w.current;
  // No shader runs from here on: without the section of worker.h, which g++ does not make, the
  // watchdog would interrupt the report and wait for its lock.
  w.current = nullptr;
  char text[sizeof MmReport::text];
  va_list args;
  va_start(args, format);
  vsnprintf(text, sizeof text, format, args);
  va_end(args);
  write_report(w, lane, fault, pc, text);
  leave(w, lane);
}

void stop_here(Worker& w) { leave(w, *w.current); }

void run_worker(Worker& w) {
  g_worker = &w;
  prepare_watchdog(*w.launch, prepare_memory(w));
  const Watchdog watchdog(w);
  const FloatMode mode((w.launch->in->flags & kMmFlushSubnormals) != 0);
  w.thread.set_to_thread();
  while ((w.turn = __atomic_fetch_add(&w.launch->next, 1, __ATOMIC_RELAXED)) <
             w.launch->threadgroups &&
         !stopped(w)) {
    run_threadgroup(w);
  }
  g_worker = nullptr;
}

}  // namespace metalmm

using metalmm::Lane;
using metalmm::State;
using metalmm::this_worker;
using metalmm::Worker;

extern "C" {

void mm_collective(uint32_t scope, const char* kind, uint32_t flags, const char* file,
                   uint32_t line, MmCombine combine, void* in, void* out) {
  Worker& w = *this_worker();
  Lane& lane = *w.current;
  check_shared_write(w, lane);
  lane.wait = {scope, flags, line, kind, file, combine, in, out};
  lane.state = State::kWaiting;
  metalmm::yield(w, lane);
}

uint32_t mm_lane() { return this_worker()->current->index % metalmm::kSimdWidth; }

void mm_site(const char* file, uint32_t line) {
  Lane& lane = *this_worker()->current;
  lane.site_file = file;
  lane.site_line = line;
}
}
