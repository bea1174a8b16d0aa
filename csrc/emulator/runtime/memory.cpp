// Checks of memory: clang calls these functions before each load and store, and where an alignment
// is wrong.
#include <dlfcn.h>
#include <link.h>
#include <sys/mman.h>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "msl/host/abi.h"
#include "worker.h"

namespace metalmm {

Worker** this_worker_slot();

namespace {

Span g_image;  // this library: constant tables of shaders are in it

struct Image {
  const char* inside;
  Span image, locals;
};

int find_image(dl_phdr_info* info, size_t, void* data) {
  auto found = static_cast<Image*>(data);
  auto base = reinterpret_cast<char*>(info->dlpi_addr);
  char* end = base;
  size_t tls_bytes = 0;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const auto& p = info->dlpi_phdr[i];
    if (p.p_type == PT_LOAD && base + p.p_vaddr + p.p_memsz > end) {
      end = base + p.p_vaddr + p.p_memsz;
    }
    if (p.p_type == PT_TLS) tls_bytes = p.p_memsz;
  }
  if (found->inside < base || found->inside >= end) return 0;
  auto tls = static_cast<char*>(info->dlpi_tls_data);
  found->image = {base, end};
  found->locals = {tls, tls ? tls + tls_bytes : nullptr};
  return 1;
}

uint64_t relative(const void* pc) { return static_cast<const char*>(pc) - g_image.begin; }

// The shadow of a byte of threadgroup memory; null if p is none.
Shadow* shadow_of(Worker& w, const char* p, size_t n) {
  for (uint32_t i = 0; i < kMmMaxSlots; ++i) {
    if (w.memory[i].contains(p, n)) return w.shadow + w.shadow_at[i] + (p - w.memory[i].begin);
  }
  return w.locals.contains(p, n) ? w.shadow + kMaxThreadgroupBytes + (p - w.locals.begin) : nullptr;
}

void report_race(Worker& w, const Shadow& s, const char* p, bool now_writes, bool before_wrote,
                 const void* pc) {
  uint32_t other = before_wrote ? s.writer : s.reader;
  char where[96];
  name_memory(w, p, where, sizeof where);
  w.other =
      before_wrote ? Other{s.write_pc, s.write_file, s.write_line} : Other{s.read_pc, nullptr, 0};
  fail_here(
      kMmRace, relative(pc),
      "missing barrier: %s %s that thread %u (simdgroup %u, lane %u) %s with no barrier between",
      now_writes ? "writes" : "reads", where, other, other / kSimdWidth, other % kSimdWidth,
      before_wrote ? "wrote" : "read");
}

bool unordered(const Worker& w, uint32_t me, uint32_t other, uint32_t epoch, uint32_t simd_epoch) {
  return other != me && epoch == w.epoch &&
         (other / kSimdWidth != me / kSimdWidth || simd_epoch == w.simd_epoch[me / kSimdWidth]);
}

void track(Worker& w, Shadow* s, const char* p, size_t n, bool write, bool atomic, const void* pc) {
  uint32_t me = w.current->index, epoch = w.epoch, simd_epoch = w.simd_epoch[me / kSimdWidth];
  for (size_t i = 0; i < n; ++i, ++s) {
    bool written = s->write_epoch >= w.first_epoch, read = s->read_epoch >= w.first_epoch;
    if (written && !(atomic && s->atomic) &&
        unordered(w, me, s->writer, s->write_epoch, s->write_simd_epoch)) {
      if (!write || atomic || s->atomic || n > sizeof w.current->shared_write.before) {
        report_race(w, *s, p + i, write, true, pc);
      }
      SharedWrite& shared = w.current->shared_write;
      if (shared.bytes == 0) {
        shared = {p, n, {}, pc, *s};
        memcpy(shared.before, p, n);
      }
    }
    if (write) {
      bool many = s->read_by_many && s->read_epoch == epoch;
      if (read && (many || unordered(w, me, s->reader, s->read_epoch, s->read_simd_epoch))) {
        report_race(w, *s, p + i, true, false, pc);
      }
      s->atomic = atomic;
      s->writer = static_cast<uint16_t>(me);
      s->write_epoch = epoch;
      s->write_simd_epoch = simd_epoch;
      s->write_pc = relative(pc);
      s->write_file = w.current->site_file;
      s->write_line = w.current->site_line;
      continue;
    }
    if (!written && !(w.launch->in->flags & kMmAllowUninitialized)) {
      char where[96];
      name_memory(w, p + i, where, sizeof where);
      fail_here(kMmUninitialized, relative(pc),
                "uninitialized: reads %s that no thread has written", where);
    }
    if (atomic) continue;
    bool same_epoch = read && s->read_epoch == epoch;
    s->read_by_many = same_epoch && (s->read_by_many || s->reader / kSimdWidth != me / kSimdWidth);
    s->reader = static_cast<uint16_t>(me);
    s->read_epoch = epoch;
    s->read_simd_epoch = simd_epoch;
    s->read_pc = relative(pc);
  }
}

void check_access(const char* p, size_t n, bool write, bool atomic, const void* pc) {
  Worker* w = this_worker();
  if (!w || !w->current) return;
  if (stopped(*w)) stop_here(*w);
  check_shared_write(*w, *w->current);
  const char* stack = w->current->stack;
  if (p >= stack && p + n <= stack + kStackBytes) return;
  bool is_read_only = false;
  for (const Place& b : w->launch->buffers) {
    if (b.span.contains(p, n)) {
      if (!write || !b.is_read_only) return;
      is_read_only = true;
    }
  }
  if (Shadow* s = shadow_of(*w, p, n)) return track(*w, s, p, n, write, atomic, pc);
  if (!write && g_image.contains(p, n)) return;
  char where[96];
  name_memory(*w, p, where, sizeof where);
  if (is_read_only) {
    fail_here(kMmReadOnly, relative(pc),
              "read-only: writes %zu bytes at %s, which the kernel takes as const", n, where);
  }
  fail_here(kMmOutOfBounds, relative(pc), "out of bounds: %s %zu bytes at %s",
            write ? "writes" : "reads", n, where);
}

}  // namespace

void check_shared_write(Worker& w, Lane& lane) {
  SharedWrite& shared = lane.shared_write;
  const size_t n = shared.bytes;
  shared.bytes = 0;
  if (n != 0 && memcmp(shared.at, shared.before, n) != 0) {
    report_race(w, shared.was, shared.at, true, true, shared.pc);
  }
}

Span prepare_memory(Worker& w) {
  Image found{reinterpret_cast<const char*>(&g_image), {}, {}};
  dl_iterate_phdr(find_image, &found);
  g_image = found.image;
  w.locals = found.locals;
  if (!mm_checked) return g_image;
  size_t bytes = (kMaxThreadgroupBytes + (w.locals.end - w.locals.begin)) * sizeof(Shadow);
  if (w.shadow_bytes < bytes) {
    if (w.shadow) munmap(w.shadow, w.shadow_bytes);
    void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    w.shadow = p == MAP_FAILED ? nullptr : static_cast<Shadow*>(p);
    w.shadow_bytes = w.shadow ? bytes : 0;
  }
  if (!w.shadow) {
    perror("emulator: mmap of the shadow memory");
    abort();
  }
  return g_image;
}

void poison_memory(Worker& w) {
  Worker* me = *this_worker_slot();
  for (const Span& s : w.memory) memset(s.begin, 0xFF, s.end - s.begin);
  if (w.locals.begin != w.locals.end) {
    memset(w.locals.begin, 0xFF, w.locals.end - w.locals.begin);
    *this_worker_slot() = me;
  }
}

void name_memory(const Worker& w, const char* p, char* text, size_t n) {
  if (p >= w.arena && p < w.arena + kArenaBytes) {
    const auto i = static_cast<uint32_t>((p - w.arena) / kSlotBytes);
    const Span& s = w.memory[i];
    snprintf(text, n, "byte %td of the %td of [[threadgroup(%u)]]", p - s.begin, s.end - s.begin,
             i);
  } else if (w.locals.contains(p, 1)) {
    snprintf(text, n, "byte %td of the kernel's own threadgroup memory", p - w.locals.begin);
  } else if (g_image.contains(p, 1)) {
    snprintf(text, n, "a constant of the program");
  } else if (p >= w.stacks && p < w.stacks + kMaxThreads * kStackBytes) {
    snprintf(text, n, "the private memory of thread %td", (p - w.stacks) / kStackBytes);
  } else if (!name_argument(*w.launch, p, text, n)) {
    snprintf(text, n, "address %p, far from every buffer", static_cast<const void*>(p));
  }
}

// A frame that does not fit has been made already, over the stack of another lane of this
// threadgroup: it has no turn left.
void check_stack(const char* frame, const void* pc) {
  Worker* w = this_worker();
  if (w && w->current && frame < w->current->stack + kStackMargin) {
    fail_here(kMmOutOfBounds, relative(pc),
              "out of private memory: the arrays and calls of a thread need more than %zu bytes",
              kStackBytes - kStackMargin);
  }
}

}  // namespace metalmm

// Names that clang's -fsanitize=kernel-address and -fsanitize=alignment,array-bounds call.
extern "C" {

#define MM_HERE __builtin_return_address(0)
#define MM_TRACE(n)                                                               \
  void __asan_load##n##_noabort(const void* p) {                                  \
    metalmm::check_access(static_cast<const char*>(p), n, false, false, MM_HERE); \
  }                                                                               \
  void __asan_store##n##_noabort(const void* p) {                                 \
    metalmm::check_access(static_cast<const char*>(p), n, true, false, MM_HERE);  \
  }
MM_TRACE(1)
MM_TRACE(2)
MM_TRACE(4)
MM_TRACE(8)
MM_TRACE(16)

void __asan_loadN_noabort(const void* p, size_t n) {
  metalmm::check_access(static_cast<const char*>(p), n, false, false, MM_HERE);
}
void __asan_storeN_noabort(const void* p, size_t n) {
  metalmm::check_access(static_cast<const char*>(p), n, true, false, MM_HERE);
}
// For each function that is not inlined: -finstrument-function-entry-bare.
void __cyg_profile_func_enter_bare() {
  metalmm::check_stack(static_cast<const char*>(__builtin_frame_address(0)), MM_HERE);
}
#if !defined(__SANITIZE_ADDRESS__)  // else the emulator itself is checked
void __asan_handle_no_return() {}
#endif
void* __asan_memset(void* to, int value, size_t n) {
  metalmm::check_access(static_cast<const char*>(to), n, true, false, MM_HERE);
  return memset(to, value, n);
}
void* __asan_memcpy(void* to, const void* from, size_t n) {
  metalmm::check_access(static_cast<const char*>(from), n, false, false, MM_HERE);
  metalmm::check_access(static_cast<const char*>(to), n, true, false, MM_HERE);
  return memcpy(to, from, n);
}
void* __asan_memmove(void* to, const void* from, size_t n) {
  metalmm::check_access(static_cast<const char*>(from), n, false, false, MM_HERE);
  metalmm::check_access(static_cast<const char*>(to), n, true, false, MM_HERE);
  return memmove(to, from, n);
}

// An atomic access.
void mm_access(const void* p, uint64_t n, bool write, bool atomic) {
  metalmm::check_access(static_cast<const char*>(p), n, write, atomic, MM_HERE);
}

struct UbsanPlace {
  const char* file;
  uint32_t line, column;
};
struct UbsanTypeMismatch {
  UbsanPlace place;
  const void* type;
  unsigned char log_alignment, kind;
};

static void fail_at(const UbsanPlace& place, MmFault fault, const char* format, uint64_t a,
                    uint64_t b) {
  metalmm::Worker* w = metalmm::this_worker();
  if (!w || !w->current) return;
  if (!w->current->site_file) mm_site(place.file, place.line);
  metalmm::fail_here(fault, 0, format, a, b);
}

static void fail_misaligned(const void* p, uint32_t alignment, const char* file, uint32_t line) {
  metalmm::Worker* w = metalmm::this_worker();
  if (!w || !w->current) return;
  char where[96];
  metalmm::name_memory(*w, static_cast<const char*>(p), where, sizeof where);
  if (!w->current->site_file) mm_site(file, line);
  metalmm::fail_here(kMmMisaligned, 0, "misaligned: %s is not a multiple of %u bytes in memory",
                     where, alignment);
}
void __ubsan_handle_type_mismatch_v1(UbsanTypeMismatch* data, uintptr_t p) {
  fail_misaligned(reinterpret_cast<const void*>(p), 1u << data->log_alignment, data->place.file,
                  data->place.line);
}
void mm_aligned(const void* p, uint32_t alignment, const char* file, uint32_t line) {
  if (reinterpret_cast<uintptr_t>(p) % alignment) fail_misaligned(p, alignment, file, line);
}
void __ubsan_handle_out_of_bounds(UbsanPlace* place, uintptr_t index) {
  fail_at(*place, kMmUndefined, "out of bounds: index %lld of an array of fixed length", index, 0);
}
void __ubsan_handle_divrem_overflow(UbsanPlace* place, uintptr_t a, uintptr_t b) {
  fail_at(*place, kMmUndefined, "undefined: an integer division of %lld by %lld", a, b);
}
void __ubsan_handle_type_mismatch_v1_abort(UbsanTypeMismatch* data, uintptr_t p) {
  __ubsan_handle_type_mismatch_v1(data, p);
}
}
