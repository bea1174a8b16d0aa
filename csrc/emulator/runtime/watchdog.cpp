// Faults that arrive as signals. Where one interrupts code of a shader, the handler leaves the
// lane's stack for good, as any fault does.
//
// A launch that takes too long: a loop without an end reaches no collective and no check. A timer
// of each worker's own thread sends it a signal. In the emulator, or in a function of the C
// library, the next signal, a little later, tries again.
//
// An access that the processor refuses, in a library without memory checks: of an argument that is
// not bound, or far outside of one. Elsewhere it goes to the handler that was there before.
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

#include "worker.h"

extern "C" {
// The code of the emulator itself, in the section that worker.h names.
extern const char __start_mm_runtime[] __attribute__((visibility("hidden"), weak));
extern const char __stop_mm_runtime[] __attribute__((visibility("hidden"), weak));
}

namespace metalmm {
namespace {

constexpr long kRetryNanoseconds = 20'000'000;
constexpr int kRefused[] = {SIGSEGV, SIGBUS};

struct sigaction g_before[2];  // handlers of kRefused
bool g_is_installed;
pthread_mutex_t g_installing = PTHREAD_MUTEX_INITIALIZER;

int signal_number() { return SIGRTMIN + 7; }

const char* interrupted(const void* context) {
  const auto& machine = static_cast<const ucontext_t*>(context)->uc_mcontext;
#if defined(__x86_64__)
  return reinterpret_cast<const char*>(machine.gregs[REG_RIP]);
#else
  return reinterpret_cast<const char*>(machine.pc);
#endif
}

bool in_shader(const Worker& w, const char* pc) {
  const Launch& launch = *w.launch;
  return w.current && launch.code.contains(pc, 1) && !launch.runtime.contains(pc, 1);
}

// The place of a call at pc, whose return address is behind it.
uint64_t place_of(const Worker& w, const char* pc) {
  return static_cast<uint64_t>(pc - w.launch->code.begin) + 1;
}

// Several libraries may install it; a signal brings its own worker, whose library may be another.
void on_signal(int, siginfo_t* info, void* context) {
  if (info->si_code != SI_TIMER || !info->si_value.sival_ptr) return;
  Worker& w = *static_cast<Worker*>(info->si_value.sival_ptr);
  const char* pc = interrupted(context);
  if (in_shader(w, pc)) w.launch->time_out(w, pc);
}

void on_refused(int number, siginfo_t* info, void* context) {
  Worker* w = this_worker();
  const char* pc = interrupted(context);
  if (w && in_shader(*w, pc)) {
    char where[96];
    name_memory(*w, static_cast<const char*>(info->si_addr), where, sizeof where);
    fail_here(kMmOutOfBounds, place_of(*w, pc), "out of bounds: accesses %s", where);
  }
  const struct sigaction& before = g_before[number == kRefused[1]];
  if ((before.sa_flags & SA_SIGINFO) && before.sa_sigaction) {
    before.sa_sigaction(number, info, context);
  } else if (before.sa_handler == SIG_DFL || before.sa_handler == SIG_IGN) {
    signal(number, SIG_DFL);  // the access is tried once more
  } else {
    before.sa_handler(number);
  }
}

// Once for each library and never again: each keeps the handler before it, and two that did so in
// turn would call each other for ever.
void catch_refused() {
  pthread_mutex_lock(&g_installing);
  for (int i = 0; i < 2 && !g_is_installed; ++i) {
    struct sigaction action = {};
    action.sa_sigaction = on_refused;
    action.sa_flags = SA_SIGINFO | SA_NODEFER;
    sigaction(kRefused[i], &action, &g_before[i]);
  }
  g_is_installed = true;
  pthread_mutex_unlock(&g_installing);
}

[[noreturn]] void time_out(Worker& w, const char* pc) {
  fail_here(kMmTimeout, place_of(w, pc), "timeout: runs for more than %u s; an endless loop?",
            w.launch->in->seconds);
}

}  // namespace

void prepare_watchdog(Launch& launch, Span code) {
  launch.code = code;
  launch.runtime = {const_cast<char*>(__start_mm_runtime), const_cast<char*>(__stop_mm_runtime)};
  launch.time_out = time_out;
  catch_refused();
}

Watchdog::Watchdog(Worker& w) {
  if (w.launch->in->seconds == 0) return;
  struct sigaction action = {};
  action.sa_sigaction = on_signal;
  action.sa_flags = SA_SIGINFO | SA_RESTART | SA_NODEFER;  // no mask: on_signal never returns
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
  if (armed_) timer_delete(timer_);
}

}  // namespace metalmm
