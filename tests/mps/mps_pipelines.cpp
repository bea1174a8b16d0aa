// Pipelines, Commits and supported_gpu on a device that is scripted: test_mps_pipelines.py runs one
// scenario per process and reads the lines.
#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "mps/decisions/commits.h"
#include "mps/decisions/residency.h"
#include "mps/facts.h"
#include "mps/pipelines.h"

using namespace metalmm;
using namespace metalmm::mps;

namespace {

struct Script {
  bool has_archive = false, archive_works = true, has_function = true, makes_pipeline = true;
  int fails_to_compile = 0;  // times
  uint32_t max_threads = 1024, simd_width = 32;
  std::function<void()> while_compiling = [] {};

  std::mutex mutex;
  int archives = 0, compilations = 0, functions = 0, pipelines = 0;
  std::string source;  // source of the last compilation
  void count(int& counter) {
    std::lock_guard<std::mutex> lock(mutex);
    ++counter;
  }
};

class Device {
 public:
  using Library = std::shared_ptr<std::string>;
  using Function = std::shared_ptr<Pass>;
  using Pipeline = std::shared_ptr<Pass>;

  explicit Device(Script* script) : s_(script) {}

  Library archive() {
    s_->count(s_->archives);
    return s_->has_archive ? std::make_shared<std::string>("archive") : nullptr;
  }
  Library compile(const std::string& source, std::string* log) {
    s_->while_compiling();
    s_->count(s_->compilations);
    std::lock_guard<std::mutex> lock(s_->mutex);
    s_->source = source;
    *log = "metal/a.h:3:1: error: no";
    return s_->fails_to_compile-- > 0 ? nullptr : std::make_shared<std::string>("source");
  }
  Function function(Library library, const Pass& pass, std::string* log) {
    s_->count(s_->functions);
    *log = "no function of the name in " + *library;
    const bool works = *library == "archive" ? s_->archive_works : s_->has_function;
    return works ? std::make_shared<Pass>(pass) : nullptr;
  }
  Pipeline pipeline(Function function, std::string* log) {
    s_->count(s_->pipelines);
    *log = "too many registers";
    return s_->makes_pipeline ? function : nullptr;
  }
  uint32_t max_threads(Pipeline) { return s_->max_threads; }
  uint32_t simd_width(Pipeline) { return s_->simd_width; }

 private:
  Script* s_;
};

Pass pass_of(const std::string& kernel, uint32_t k = 64) {
  Pass out;
  out.kernel = kernel;
  out.grid = {1, 1, 1};
  out.threads = {128, 1, 1};
  out.constants[kConstantK] = k;
  return out;
}

const std::string kGemv = "gemv_q4_0_f16", kGemm = "gemm_q4_0_f16";

void print(const Script& s) {
  printf("archives %d compilations %d functions %d pipelines %d\n", s.archives, s.compilations,
         s.functions, s.pipelines);
}

void attempt(Pipelines<Device>& pipelines, const Pass& pass) {
  try {
    const auto made = pipelines.of(pass);
    printf("made %s %u\n", made->kernel.c_str(), made->constants[kConstantK]);
  } catch (const std::exception& e) {
    printf("error %s\n", e.what());
  }
}

// One pipeline for passes that differ in what is set at a dispatch, one for each constant.
void keys(Script& s) {
  Pipelines<Device> pipelines{Device(&s)};
  Pass pass = pass_of(kGemv);
  const auto first = pipelines.of(pass);
  pass.grid = {7, 8, 9};
  pass.slots = 5;
  pass.args.m = 3;
  pass.threadgroup_bytes = 64;
  printf("same %d\n", pipelines.of(pass) == first);
  for (uint32_t i = 0; i < kConstantCount; ++i) {
    Pass other = pass_of(kGemv);
    other.constants[i] += 1;
    printf("same %d\n", pipelines.of(other) == first);
  }
  attempt(pipelines, pass_of(kGemm));
  print(s);
}

// Eight threads, three pipelines.
void threads(Script& s) {
  Pipelines<Device> pipelines{Device(&s)};
  std::vector<std::thread> all;
  for (int t = 0; t < 8; ++t) {
    all.emplace_back([&, t] {
      for (int i = 0; i < 300; ++i) pipelines.of(pass_of(kGemv, 32 * ((t + i) % 3)));
    });
  }
  for (std::thread& t : all) t.join();
  print(s);
}

// While one kernel compiles, another one's pipeline is made: the first waits for it.
void overlap(Script& s) {
  Pipelines<Device> pipelines{Device(&s)};
  std::mutex mutex;
  std::condition_variable condition;
  bool other_is_made = false;
  bool is_first = true;
  s.while_compiling = [&] {
    std::unique_lock<std::mutex> lock(mutex);
    if (!is_first) return;
    is_first = false;
    condition.notify_all();
    condition.wait(lock, [&] { return other_is_made; });
  };
  std::thread slow([&] { attempt(pipelines, pass_of(kGemv)); });
  {
    std::unique_lock<std::mutex> lock(mutex);
    condition.wait(lock, [&] { return !is_first; });
  }
  attempt(pipelines, pass_of(kGemm));
  {
    std::lock_guard<std::mutex> lock(mutex);
    other_is_made = true;
  }
  condition.notify_all();
  slow.join();
  print(s);
}

// A sequence of passes on a device that `set` has changed.
struct Sequence {
  const char* name;
  void (*set)(Script&);
  std::vector<std::string> kernels;
};

const Sequence kSequences[] = {
    {"source", [](Script&) {}, {kGemv}},
    {"archive", [](Script& s) { s.has_archive = true; }, {kGemv, kGemm}},
    {"old_archive", [](Script& s) { s.has_archive = true, s.archive_works = false; }, {kGemv}},
    {"log", [](Script& s) { s.fails_to_compile = 1; }, {kGemv, kGemv}},
    {"no_function", [](Script& s) { s.has_function = false; }, {kGemv}},
    {"no_pipeline", [](Script& s) { s.makes_pipeline = false; }, {kGemv}},
    {"max_threads", [](Script& s) { s.max_threads = 96; }, {kGemv}},
    {"simd_width", [](Script& s) { s.simd_width = 16; }, {kGemv}},
    {"no_kernel", [](Script&) {}, {"gemv_q4_0"}},
};

void run(const Sequence& sequence, Script& s) {
  sequence.set(s);
  Pipelines<Device> pipelines{Device(&s)};
  for (const std::string& kernel : sequence.kernels) attempt(pipelines, pass_of(kernel));
  print(s);
  if (!strcmp(sequence.name, "source")) printf("%s", s.source.c_str());
}

// Two streams in turn, passes of 1, 2 and 7; then four threads with a stream each and one in
// common.
void commits() {
  const int a = 0, b = 0;
  Commits every(3);
  for (const auto& [stream, passes] : std::vector<std::pair<const int*, size_t>>{
           {&a, 1}, {&b, 2}, {&a, 1}, {&b, 1}, {&a, 1}, {&a, 7}, {&b, 1}, {&a, 2}, {&a, 1}}) {
    printf("%c %zu %d\n", stream == &a ? 'a' : 'b', passes, every.is_due(stream, passes));
  }
  Commits never(0);
  int due = 0;
  for (int i = 0; i < 100; ++i) due += never.is_due(&a, 10);
  printf("never %d\n", due);

  std::atomic<int> own{0}, common{0};
  std::vector<std::thread> all;
  for (int t = 0; t < 4; ++t) {
    all.emplace_back([&] {
      const int stream = 0;
      for (int i = 0; i < 3000; ++i) {
        own += every.is_due(&stream, 1);
        common += every.is_due(&never, 1);
      }
    });
  }
  for (std::thread& t : all) t.join();
  printf("own %d common %d\n", own.load(), common.load());
}

// A set that prints what it is told. Buffers 1 and 2 lie in one heap, the others alone.
struct PrintedSet {
  using Handle = const char*;
  Handle of(const void* buffer) {
    const auto number = reinterpret_cast<uintptr_t>(buffer);
    return number <= 2 ? "heap" : "buffer";
  }
  void add(Handle handle) { printf(" add %s", handle); }
  void remove(Handle handle) { printf(" remove %s", handle); }
  void commit() { printf(" commit"); }
  void request() { printf(" request"); }
  void end() { printf(" end"); }
};

void residency() {
  using Weak = std::weak_ptr<int>;
  Residency<PrintedSet, Weak> r{PrintedSet{}};
  std::shared_ptr<int> weights[3];
  for (auto& w : weights) w = std::make_shared<int>(0);
  auto now = std::chrono::steady_clock::time_point{} + std::chrono::hours(1);
  const auto use = [&](uintptr_t buffer, const std::shared_ptr<int>& weight) {
    r.use(reinterpret_cast<const void*>(buffer), [&] { return Weak(weight); }, now);
  };
  const auto beat = [&](const char* what) {
    printf("%s:", what);
    r.beat(now);
    printf("\n");
    now += kBeat;
  };
  beat("nothing");
  use(1, weights[0]);
  use(2, weights[1]);
  use(3, weights[2]);
  use(3, weights[2]);
  beat("used");
  beat("again");
  weights[0].reset();
  beat("one of a heap is gone");
  weights[2].reset();
  weights[2] = std::make_shared<int>(1);
  use(3, weights[2]);
  beat("another has its memory");
  now += kKeepFor;
  beat("of no use");
  beat("still");
  use(2, weights[1]);
  beat("in use");
  for (auto& w : weights) w.reset();
  beat("gone");
  beat("and stays so");
}

void supported(const Facts& f) {
  try {
    const Gpu gpu = supported_gpu(f);
    printf("gpu %s %d %u %u %u\n", gpu.name.c_str(), gpu.family, gpu.cores,
           gpu.max_threadgroup_memory, gpu.max_threads);
  } catch (const std::runtime_error& e) {
    printf("error %s\n", e.what());
  }
}

}  // namespace

int main(int, char** argv) {
  Script s;
  const std::string scenario = argv[1];
  if (scenario == "keys") keys(s);
  if (scenario == "threads") threads(s);
  if (scenario == "overlap") overlap(s);
  if (scenario == "commits") commits();
  if (scenario == "residency") residency();
  for (const Sequence& sequence : kSequences) {
    if (scenario == sequence.name) run(sequence, s);
  }
  if (scenario == "facts") {
    supported({"Apple M4 Max", 9, 32, 32768, 1024, 15});
    supported({"Apple M2", 8, 0, 0, 0, 14});
    supported({"Apple M9 Pro", 13, 24, 65536, 2048, 30});
    supported({"AMD Radeon Pro 5500M", 0, 0, 65536, 1024, 15});
    supported({"Apple A13", 6, 4, 32768, 1024, 15});
    supported({"Apple M1", 7, 8, 32768, 1024, 13});
    for (int family : {0, 5}) supported({kVirtualDevice, family, 0, 16384, 1024, 15});
  }
  return 0;
}
