// The two ceilings of a CPU, as plain loops: reading memory and f32 multiply-adds.
// Compiled when a benchmark starts (bench/roofs.py), for the machine it runs on.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <thread>
#include <vector>
#ifdef __linux__
#include <sys/mman.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int kBytes = 64;
#elif defined(__AVX__)
constexpr int kBytes = 32;
#else
constexpr int kBytes = 16;
#endif
typedef uint64_t U64 __attribute__((vector_size(kBytes)));
typedef float F32 __attribute__((vector_size(kBytes)));

// One part on the caller's thread, the others on threads of their own.
template <class F>
void on_threads(int threads, const F& work) {
  std::vector<std::thread> others;
  for (int t = 1; t < threads; ++t) others.emplace_back(work, t);
  work(0);
  for (std::thread& t : others) t.join();
}

template <class V>
V sum(const V* v, int n) {
  V total = v[0];
  for (int i = 1; i < n; ++i) total += v[i];
  return total;
}

// ORs [p, p + bytes) as kStreams streams that advance together, a cache line at a time.
template <int kStreams>
uint64_t read_part(const char* p, size_t bytes, size_t ahead) {
  const size_t span = bytes / kStreams / 64 * 64;
  U64 acc[kStreams] = {};
  for (size_t i = 0; i < span; i += 64) {
    for (int s = 0; s < kStreams; ++s) {
      const char* line = p + s * span + i;
      if (ahead) __builtin_prefetch(line + ahead);
      for (int b = 0; b < 64; b += kBytes) acc[s] |= *reinterpret_cast<const U64*>(line + b);
    }
  }
  return sum(acc, kStreams)[0];
}

}  // namespace

extern "C" {

// A buffer of ones, on 2 MiB pages where the system gives them: address translation costs nothing.
char* roof_buffer(size_t bytes) {
  const size_t page = size_t{2} << 20;
  void* p = nullptr;
  if (posix_memalign(&p, page, (bytes + page - 1) / page * page) != 0) return nullptr;
#ifdef __linux__
  madvise(p, bytes, MADV_HUGEPAGE);
#endif
  char* out = static_cast<char*>(p);
  for (size_t i = 0; i < bytes; ++i) out[i] = 1;
  return out;
}

// Reads the buffer `passes` times.
uint64_t roof_read(const char* p, size_t bytes, int passes, int threads, int streams,
                   size_t ahead) {
  const size_t part = bytes / threads / 4096 * 4096;
  std::vector<uint64_t> found(threads * 8);
  on_threads(threads, [&](int t) {
    for (int i = 0; i < passes; ++i) {
      const char* from = p + t * part;
      found[t * 8] |= streams == 1   ? read_part<1>(from, part, ahead)
                      : streams == 2 ? read_part<2>(from, part, ahead)
                      : streams == 4 ? read_part<4>(from, part, ahead)
                      : streams == 8 ? read_part<8>(from, part, ahead)
                                     : read_part<16>(from, part, ahead);
    }
  });
  return sum(found.data(), threads * 8);
}

// Every thread does `steps` multiply-adds in kChains independent vectors; returns the flops of all.
double roof_fma(int64_t steps, int threads) {
  constexpr int kChains = 12;
  std::vector<float> found(threads * 16);
  on_threads(threads, [&](int t) {
    F32 acc[kChains], scale = F32{} + .999f, add = F32{} + .001f;
    for (int c = 0; c < kChains; ++c) acc[c] = F32{} + static_cast<float>(c);
    for (int64_t i = 0; i < steps; ++i) {
      for (int c = 0; c < kChains; ++c) acc[c] = acc[c] * scale + add;
    }
    found[t * 16] = sum(acc, kChains)[0];
  });
  const volatile float keep = sum(found.data(), threads * 16);
  (void)keep;
  return 2. * kChains * (kBytes / 4) * static_cast<double>(steps) * threads;
}

}  // extern "C"
