// The emulator's C interface: one library holds the compiled shaders, their table and the emulator
// itself.
#pragma once

#include <cstddef>
#include <cstdint>

extern "C" {

constexpr uint32_t kMmMaxSlots = 32;

struct MmBuffer {
  void* data;      // null: not bound, which is a fault where a lane touches it
  uint64_t bytes;  // accesses outside [data, data + bytes) are reported by checked libraries
};

// A value of the function constant `index`: its first `bytes` bytes.
struct MmConstant {
  uint32_t index, bytes;
  uint8_t value[32];
};

enum MmFlags : uint32_t {
  kMmDescending = 1,     // the last simdgroup and lane first, not the first
  kMmAllowInactive = 2,  // a collective may run without lanes that have returned or wait elsewhere
  kMmAllowUninitialized =
      4,                   // threadgroup memory that nobody wrote may be read (it holds 0xFF bytes)
  kMmFlushSubnormals = 8,  // f32 and bf16, as Apple's GPUs do: float_mode.h
};

struct MmLaunch {
  const char* kernel;
  uint32_t grid[3];     // threadgroups
  uint32_t group[3];    // threads per threadgroup
  uint32_t threads[3];  // threads of the grid; fewer than grid * group make its last threadgroups
                        // smaller
  uint32_t workers;     // OS threads
  uint32_t flags;
  uint32_t seconds;  // after which the launch is a fault; 0: never
  uint32_t n_constants;
  const MmConstant* constants;
  MmBuffer buffers[kMmMaxSlots];            // [[buffer(i)]]
  uint32_t threadgroup_bytes[kMmMaxSlots];  // [[threadgroup(i)]]
};

enum MmFault : uint32_t {
  kMmNone = 0,
  kMmUsage,      // the launch itself is wrong: no such kernel, no threads …
  kMmDivergent,  // lanes of one simdgroup wait at different collectives
  kMmDeadlock,   // threads wait at a barrier that others do not reach
  kMmOutOfBounds,
  kMmMisaligned,
  kMmRace,           // two threads, one byte of threadgroup memory, no barrier between
  kMmUninitialized,  // a read of threadgroup memory that nobody wrote
  kMmUndefined,      // an index outside a local array, a division by zero
  kMmTimeout,        // MmLaunch::seconds have passed
  kMmReadOnly,       // a write to a buffer that the kernel takes as const
};

// The fault of a launch that is earliest in its schedule. Where `file` is null the place is the
// machine address `pc`, relative to the library.
struct MmReport {
  uint32_t fault;
  uint32_t threadgroup[3], simdgroup, lane, thread;
  uint64_t pc, other_pc;
  const char* file;
  const char* other_file;
  uint32_t line, other_line;
  char text[512];  // what happened, without kernel and place
};

// 0, or the fault in *report.
int mm_launch(const MmLaunch* launch, MmReport* report);
}
