// Compiled kernels, made on first use and kept. No torch, no Metal: the tests give it a device of
// their own.
//
// A Device has the types Library, Function and Pipeline, handles that copy and are false where
// there is none, and
//
//   Library archive()                                 the library built ahead of time, if it loads
//   Library compile(const std::string& source, std::string* log)
//   Function function(Library, const Pass&, std::string* log)   with the pass's constants
//   Pipeline pipeline(Function, std::string* log)
//   uint32_t max_threads(Pipeline)          of a threadgroup
//   uint32_t simd_width(Pipeline)
//
// The last of `log` is what the compiler says.
#pragma once

#include <array>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>

#include "metal/geometry.h"
#include "plan/launch.h"
#include "source.h"

namespace metalmm::mps {

template <class Device>
class Pipelines {
 public:
  using Pipeline = typename Device::Pipeline;

  explicit Pipelines(Device device) : device_(std::move(device)) {}

  // The pipeline of a pass: of its kernel and function constants. Threads that ask for the same one
  // wait for one compilation; others pass. Throws std::runtime_error: the kernel does not compile,
  // or the GPU cannot run the pass's threadgroup.
  Pipeline of(const Pass& pass) {
    Entry<Pipeline>& entry = find(pipelines_, Key{pass.kernel, pass.constants});
    std::lock_guard<std::mutex> lock(entry.mutex);
    if (!entry.value) entry.value = make(pass);
    return entry.value;
  }

 private:
  using Library = typename Device::Library;
  using Key = std::pair<std::string, std::array<uint32_t, kConstantCount>>;
  template <class T>
  struct Entry {
    std::mutex mutex;
    T value{};
  };

  // Entries stay where they are and are never taken away.
  template <class K, class T>
  Entry<T>& find(std::map<K, Entry<T>>& map, const K& key) {
    std::lock_guard<std::mutex> lock(mutex_);
    return map[key];
  }

  // From the archive, if it has the kernel; an archive of another version falls back to the source.
  Pipeline make(const Pass& pass) {
    std::string log;
    Pipeline out = specialise(archive(), pass, &log);
    if (!out) out = specialise(library(pass.kernel), pass, &log);
    if (!out) throw std::runtime_error("metalmm: no pipeline for " + pass.kernel + ": " + log);
    check(out, pass);
    return out;
  }

  Library archive() {
    std::lock_guard<std::mutex> lock(archive_mutex_);
    if (!archive_is_loaded_) archive_ = device_.archive();
    archive_is_loaded_ = true;
    return archive_;
  }

  Library library(const std::string& kernel) {
    Entry<Library>& entry = find(libraries_, kernel);
    std::lock_guard<std::mutex> lock(entry.mutex);
    if (entry.value) return entry.value;
    std::string log;
    entry.value = device_.compile(source_of(kernel), &log);
    if (!entry.value) {
      throw std::runtime_error("metalmm: Metal cannot compile " + kernel + ":\n" + log);
    }
    return entry.value;
  }

  Pipeline specialise(Library library, const Pass& pass, std::string* log) {
    if (!library) return Pipeline{};
    const typename Device::Function function = device_.function(library, pass, log);
    return function ? device_.pipeline(function, log) : Pipeline{};
  }

  void check(Pipeline pipeline, const Pass& pass) {
    const uint32_t threads = pass.threads[0] * pass.threads[1] * pass.threads[2];
    const uint32_t most = device_.max_threads(pipeline), width = device_.simd_width(pipeline);
    if (threads > most) {
      throw std::runtime_error("metalmm: " + pass.kernel + " needs " + std::to_string(threads) +
                               " threads a threadgroup; compiled for this GPU it can have " +
                               std::to_string(most));
    }
    if (width != kSimdWidth) {
      throw std::runtime_error("metalmm: " + pass.kernel + " is written for simdgroups of " +
                               std::to_string(kSimdWidth) + " threads; this GPU's have " +
                               std::to_string(width));
    }
  }

  Device device_;
  std::mutex mutex_;  // guards the maps, not their values
  std::map<Key, Entry<Pipeline>> pipelines_;
  std::map<std::string, Entry<Library>> libraries_;
  std::mutex archive_mutex_;
  bool archive_is_loaded_ = false;
  Library archive_{};
};

}  // namespace metalmm::mps
