// The places of the arguments of a launch.
//
// A checked library runs on copies of its buffers, each in a window of addresses of its own: an
// access beyond one meets no other, however close the caller's memory lies. An argument without
// memory has an empty window. A kernel may take it, and a lane that touches it is reported.
#include <sys/mman.h>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "msl/host/abi.h"
#include "worker.h"

namespace metalmm {
namespace {

// Larger buffers stay where they are: tests have them that no memory could hold twice.
constexpr uint64_t kMovedBytes = 256 << 20;
constexpr uint64_t kCompared = 4 << 10;  // no larger than a page: memory that is not written to may
                                         // be read-only
constexpr uint32_t kWindows = 2 * kMmMaxSlots;  // buffers, then threadgroup memory
#if defined(__SANITIZE_ADDRESS__)
constexpr uint64_t kWindowBytes[] = {1 << 30};  // ASan writes the shadow of a window
#else
constexpr uint64_t kWindowBytes[] = {uint64_t{1} << 36, 1 << 30};  // the first that fits
#endif

// Addresses for all windows, not accessible.
void reserve(Launch& launch) {
  for (uint64_t bytes : kWindowBytes) {
    if (launch.windows) return;
    void* p = mmap(nullptr, kWindows * bytes, PROT_NONE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    launch.windows = p == MAP_FAILED ? nullptr : static_cast<char*>(p);
    launch.window_bytes = bytes;
  }
  if (!launch.windows) {
    perror("emulator: mmap of the windows of arguments");
    abort();
  }
}

char* middle(Launch& launch, uint32_t window) {
  reserve(launch);
  return launch.windows + window * launch.window_bytes + launch.window_bytes / 2;
}

Span memory_of(const MmBuffer& b) {
  auto begin = static_cast<char*>(b.data);
  return {begin, begin + b.bytes};
}

bool overlap(Span a, Span b) { return a.begin < b.end && b.begin < a.end; }

// Buffers that share bytes which the kernel may write, and all their memory.
struct Overlap {
  uint32_t slots;
  Span span;
};
Overlap overlap_of(const Launch& launch, uint32_t slot) {
  Overlap g{1u << slot, memory_of(launch.in->buffers[slot])};
  bool is_writable = !launch.buffers[slot].is_read_only;
  for (uint32_t i = 0; i < kMmMaxSlots; ++i) {
    const MmBuffer& b = launch.in->buffers[i];
    const Span span = memory_of(b);
    const bool writes = !launch.buffers[i].is_read_only;
    if (!b.data || (g.slots >> i & 1) || !overlap(span, g.span) || !(is_writable || writes)) {
      continue;
    }
    g.slots |= 1u << i;
    g.span = {span.begin < g.span.begin ? span.begin : g.span.begin,
              span.end > g.span.end ? span.end : g.span.end};
    is_writable = is_writable || writes;
    i = ~0u;  // the overlap is larger: once more
  }
  return g;
}

// Copies the memory of an overlap into the window of `slot`, at the same place of a page, which
// keeps its alignment. False if it stays where it is.
bool move(Launch& launch, uint32_t slot, const Overlap& g) {
  for (uint32_t i = 0; i < kMmMaxSlots; ++i) {
    if ((g.slots >> i & 1) && !launch.buffers[i].is_argument) return false;
  }
  const uint64_t bytes = g.span.end - g.span.begin;
  if (bytes > kMovedBytes || bytes > launch.window_bytes / 4) return false;
  char* page = middle(launch, slot);
  char* begin = page + reinterpret_cast<uintptr_t>(g.span.begin) % kPage;
  const uint64_t mapped = (begin + bytes - page + kPage - 1) / kPage * kPage;
  if (bytes && mprotect(page, mapped, PROT_READ | PROT_WRITE) != 0) return false;
  memcpy(begin, g.span.begin, bytes);
  for (uint32_t i = 0; i < kMmMaxSlots; ++i) {
    if (g.slots >> i & 1) {
      const Span from = memory_of(launch.in->buffers[i]);
      launch.buffers[i].span = {begin + (from.begin - g.span.begin),
                                begin + (from.end - g.span.begin)};
    }
  }
  return true;
}

}  // namespace

void place_arguments(Launch& launch, bool checked) {
  // Kernels read from an argument that a function constant takes away, and drop what they read.
  alignas(16) static const char absent[4096] = {};
  for (uint32_t i = 0; i < kMmMaxSlots; ++i) {
    launch.buffers[i].span = memory_of(launch.in->buffers[i]);
  }
  for (uint32_t i = 0; i < launch.n_arguments; ++i) {
    const MmArgument& a = launch.arguments[i];
    if (a.role == kMmRoleThreadgroup && !launch.in->threadgroup_bytes[a.index]) {
      launch.no_memory[a.index] = middle(launch, kMmMaxSlots + a.index);
    }
    if (a.role != kMmRoleBuffer && a.role != kMmRoleOptionalBuffer) continue;
    Place& p = launch.buffers[a.index];
    p.is_argument = true;
    p.is_read_only = a.is_read_only;
    if (!launch.in->buffers[a.index].data) {
      char* at = a.role == kMmRoleBuffer ? middle(launch, a.index) : const_cast<char*>(absent);
      p.span = {at, at};
    }
  }
  uint32_t done = 0;
  for (uint32_t i = 0; checked && i < kMmMaxSlots; ++i) {
    if (!launch.in->buffers[i].data || (done >> i & 1)) continue;
    reserve(launch);
    const Overlap g = overlap_of(launch, i);
    done |= g.slots;
    if (move(launch, i, g)) launch.moved |= g.slots;
  }
}

// Copies back the bytes that were written, and touches no others.
void return_arguments(Launch& launch) {
  for (uint32_t i = 0; i < kMmMaxSlots; ++i) {
    if (!(launch.moved >> i & 1) || launch.buffers[i].is_read_only) continue;
    const Span to = memory_of(launch.in->buffers[i]);
    const char* from = launch.buffers[i].span.begin;
    for (char* p = to.begin; p < to.end;) {
      const uint64_t whole = kCompared - reinterpret_cast<uintptr_t>(p) % kCompared;
      const uint64_t left = to.end - p;
      const uint64_t n = left < whole ? left : whole;
      if (memcmp(p, from, n) != 0) memcpy(p, from, n);
      p += n;
      from += n;
    }
  }
  if (launch.windows) munmap(launch.windows, kWindows * launch.window_bytes);
}

namespace {

// The window of p; kWindows where p is in none.
uint32_t window_of(const Launch& launch, const char* p) {
  const bool inside =
      launch.windows && p >= launch.windows && p < launch.windows + kWindows * launch.window_bytes;
  return inside ? static_cast<uint32_t>((p - launch.windows) / launch.window_bytes) : kWindows;
}

}  // namespace

bool name_argument(const Launch& launch, const char* p, char* text, size_t n) {
  const uint32_t window = window_of(launch, p);
  if (window >= kMmMaxSlots && window < kWindows) {
    const uint32_t i = window - kMmMaxSlots;
    snprintf(text, n, "byte %td of [[threadgroup(%u)]], which has no memory",
             p - launch.no_memory[i], i);
    return true;
  }
  uint32_t nearest = kMmMaxSlots;
  uint64_t distance = uint64_t{1} << 40;
  for (uint32_t i = 0; i < kMmMaxSlots; ++i) {
    const Span& s = launch.buffers[i].span;
    if (!s.begin || window_of(launch, s.begin) != window) continue;
    const uint64_t d = p < s.begin ? s.begin - p : p < s.end ? 0 : p - s.end + 1;
    if (d < distance) {
      nearest = i;
      distance = d;
    }
  }
  if (nearest == kMmMaxSlots) return false;
  const Span& s = launch.buffers[nearest].span;
  if (launch.in->buffers[nearest].data) {
    snprintf(text, n, "byte %td of the %td of [[buffer(%u)]]", p - s.begin, s.end - s.begin,
             nearest);
  } else {
    snprintf(text, n, "byte %td of [[buffer(%u)]], which is not bound", p - s.begin, nearest);
  }
  return true;
}

}  // namespace metalmm
