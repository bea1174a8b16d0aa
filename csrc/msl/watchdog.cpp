// Ends a launch that takes too long: a loop without an end reaches no collective and no check.
//
// A timer of each worker's own thread sends it a signal. Where that interrupts code of a shader,
// the handler leaves the lane's stack for good, as a fault does; anywhere else (in the emulator, or
// in a function of the C library) the next signal, a little later, tries again.
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

#include "worker.h"

extern "C" {
// The code of the emulator itself, in the section that runtime.h names.
extern const char __start_mm_runtime[] __attribute__((visibility("hidden"), weak));
extern const char __stop_mm_runtime[] __attribute__((visibility("hidden"), weak));
}

namespace metalmm {
namespace {

constexpr long kRetryNanoseconds = 20'000'000;

int signal_number() { return SIGRTMIN + 7; }

const char* interrupted(const void* context) {
  const auto& machine = static_cast<const ucontext_t*>(context)->uc_mcontext;
#if defined(__x86_64__)
  return reinterpret_cast<const char*>(machine.gregs[REG_RIP]);
#else
  return reinterpret_cast<const char*>(machine.pc);
#endif
}

// Several libraries may install it; a signal brings its own worker, whose library may be another.
void on_signal(int, siginfo_t* info, void* context) {
  if (info->si_code != SI_TIMER || !info->si_value.sival_ptr) {
    return;
  }
  Worker& w = *static_cast<Worker*>(info->si_value.sival_ptr);
  const char* pc = interrupted(context);
  const Launch& launch = *w.launch;
  const bool in_shader = launch.code.contains(pc, 1) && !launch.runtime.contains(pc, 1);
  if (w.current && in_shader) {
    launch.time_out(w, pc);
  }
}

[[noreturn]] void time_out(Worker& w, const char* pc) {
  fail_here(kMmTimeout, static_cast<uint64_t>(pc - w.launch->code.begin) + 1,
            "timeout: runs for more than %u s; an endless loop?", w.launch->in->seconds);
}

}  // namespace

void prepare_watchdog(Launch& launch, Span code) {
  launch.code = code;
  launch.runtime = {const_cast<char*>(__start_mm_runtime), const_cast<char*>(__stop_mm_runtime)};
  launch.time_out = time_out;
}

Watchdog::Watchdog(Worker& w) {
  if (w.launch->in->seconds == 0) {
    return;
  }
  struct sigaction action = {};
  action.sa_sigaction = on_signal;
  action.sa_flags = SA_SIGINFO | SA_RESTART | SA_NODEFER;  // it does not return: block nothing
  sigevent event = {};
  event.sigev_notify = SIGEV_THREAD_ID;
  event.sigev_signo = signal_number();
  event.sigev_value.sival_ptr = &w;
  event._sigev_un._tid = static_cast<int>(syscall(SYS_gettid));
  itimerspec when = {{0, kRetryNanoseconds}, {static_cast<time_t>(w.launch->in->seconds), 0}};
  armed_ = sigaction(signal_number(), &action, nullptr) == 0 &&
           timer_create(CLOCK_MONOTONIC, &event, &timer_) == 0 &&
           timer_settime(timer_, 0, &when, nullptr) == 0;
}

Watchdog::~Watchdog() {
  if (armed_) {
    timer_delete(timer_);
  }
}

}  // namespace metalmm
