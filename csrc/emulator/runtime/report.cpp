// The report of a launch about its earliest fault.
#include <cstdio>
#include <cstring>

#include "msl/host/abi.h"
#include "worker.h"

namespace metalmm {
namespace {

MmReport report_of(const Worker& w, const Lane& lane, MmFault fault, uint64_t pc,
                   const char* text) {
  MmReport r = {};
  r.fault = fault;
  memcpy(r.threadgroup, w.tg, sizeof w.tg);
  r.simdgroup = lane.index / kSimdWidth;
  r.lane = lane.index % kSimdWidth;
  r.pc = pc;
  r.file = lane.state == State::kWaiting ? lane.wait.file : lane.site_file;
  r.line = lane.state == State::kWaiting ? lane.wait.line : lane.site_line;
  r.other_pc = w.other.pc;
  r.other_file = w.other.file;
  r.other_line = w.other.line;
  snprintf(r.text, sizeof r.text, "%s", text);
  return r;
}

// "lane l waits at kind, file:line"
void describe(char* text, size_t n, const Lane& lane) {
  if (lane.state == State::kReturned) {
    snprintf(text, n, "lane %u has returned from the kernel", lane.index % kSimdWidth);
    return;
  }
  const char* base = strrchr(lane.wait.file, '/');
  snprintf(text, n, "lane %u waits at %s, %s:%u", lane.index % kSimdWidth, lane.wait.kind,
           base ? base + 1 : lane.wait.file, lane.wait.line);
}

}  // namespace

void write_report(const Worker& w, const Lane& lane, MmFault fault, uint64_t pc, const char* text) {
  Launch& launch = *w.launch;
  pthread_mutex_lock(&launch.reporting);
  if (!stopped(w)) {
    *launch.report = report_of(w, lane, fault, pc, text);
    __atomic_store_n(&launch.faulty, w.turn, __ATOMIC_RELEASE);
  }
  pthread_mutex_unlock(&launch.reporting);
}

void fail_pair(Worker& w, const Lane& waiting, const Lane& lane, MmFault fault, const char* who) {
  char a[160], b[160], text[sizeof MmReport::text];
  describe(a, sizeof a, waiting);
  describe(b, sizeof b, lane);
  const char* what = fault == kMmDivergent ? "divergent collective" : "deadlock";
  snprintf(text, sizeof text, "%s: %s, but %s%s", what, a, b, who);
  w.other = {0, lane.state == State::kWaiting ? lane.wait.file : nullptr, lane.wait.line};
  write_report(w, waiting, fault, 0, text);
}

}  // namespace metalmm
