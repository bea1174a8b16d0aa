// The emulator's binary interface. A library is the compiled shaders of a file, a table of them and
// the emulator itself (csrc/emulator/runtime); csrc/emulator loads it, reads the table and launches
// its kernels. The lists give each enumerator and the word that Python has for it.
#pragma once

#if !defined(__METAL_VERSION__)
#include <cstdint>
#endif

#define ENUMERATOR(name, word) name,

// The value of a kernel's parameter, by the attribute that asks for it.
#define EMULATOR_ROLES(ROLE)                                                   \
  ROLE(kMmRoleBuffer, "buffer")                                                \
  /* [[buffer(i), function_constant(f)]]: reads zeros where it is not bound */ \
  ROLE(kMmRoleOptionalBuffer, "optional_buffer")                               \
  ROLE(kMmRoleThreadgroup, "threadgroup")                                      \
  ROLE(kMmRoleThreadPositionInGrid, "thread_position_in_grid")                 \
  ROLE(kMmRoleThreadgroupPositionInGrid, "threadgroup_position_in_grid")       \
  ROLE(kMmRoleThreadPositionInThreadgroup, "thread_position_in_threadgroup")   \
  ROLE(kMmRoleThreadsPerThreadgroup, "threads_per_threadgroup")                \
  ROLE(kMmRoleThreadsPerGrid, "threads_per_grid")                              \
  ROLE(kMmRoleThreadgroupsPerGrid, "threadgroups_per_grid")                    \
  ROLE(kMmRoleThreadIndexInThreadgroup, "thread_index_in_threadgroup")         \
  ROLE(kMmRoleThreadIndexInSimdgroup, "thread_index_in_simdgroup")             \
  ROLE(kMmRoleSimdgroupIndexInThreadgroup, "simdgroup_index_in_threadgroup")   \
  ROLE(kMmRoleThreadsPerSimdgroup, "threads_per_simdgroup")                    \
  ROLE(kMmRoleSimdgroupsPerThreadgroup, "simdgroups_per_threadgroup")          \
  ROLE(kMmRoleThreadIndexInQuadgroup, "thread_index_in_quadgroup")             \
  ROLE(kMmRoleQuadgroupIndexInThreadgroup, "quadgroup_index_in_threadgroup")   \
  ROLE(kMmRoleQuadgroupsPerThreadgroup, "quadgroups_per_threadgroup")          \
  ROLE(kMmRoleGridOrigin, "grid_origin")
enum MmRole : uint32_t { EMULATOR_ROLES(ENUMERATOR) };

// The types of function constants.
#define EMULATOR_CONSTANT_KINDS(KIND) \
  KIND(kMmInteger, "integer")         \
  KIND(kMmFloat, "float")             \
  KIND(kMmHalf, "half")               \
  KIND(kMmBfloat, "bfloat")
enum MmConstantKind : uint32_t { EMULATOR_CONSTANT_KINDS(ENUMERATOR) };

// The table of a library, which torch_metalmm/msl/tables.py writes behind the shaders: mm_kernels
// and mm_constants.
struct MmArgument {
  MmRole role;
  uint32_t index;  // i of [[buffer(i)]] and [[threadgroup(i)]]
  bool is_read_only;
};
struct MmKernelEntry {
  const char* name;
  void (*run)();  // calls the kernel for the current thread
  uint32_t n_arguments;
  const MmArgument* arguments;
};
struct MmConstantEntry {
  const char* name;
  uint32_t index;
  MmConstantKind kind;
  uint32_t bytes, count;  // `count` values of the kind, which take `bytes`
  void* storage;
};

// Calls of compiled shaders into the emulator. A scope: how many lanes wait for each other; 0: all.
enum MmScope : uint32_t { kMmScopeThreadgroup = 0, kMmScopeQuad = 4, kMmScopeSimd = 32 };
constexpr uint32_t kMmOrdersThreadgroup = 2;  // a barrier: mem_flags::mem_threadgroup
// Computes a collective once all its lanes have arrived: in[i] and out[i] are lane i's, null where
// there is none.
using MmCombine = void (*)(void* const* in, void* const* out);
extern "C" {
// Waits for the other lanes of `scope`; the last to arrive calls `combine` (if any). `flags`: the
// memory a barrier orders. Two lanes that wait at different kinds or lines are reported as a
// divergent collective.
void mm_collective(uint32_t scope, const char* kind, uint32_t flags, const char* file,
                   uint32_t line, MmCombine combine, void* in, void* out);
uint32_t mm_lane();  // index in the simdgroup
bool mm_constant_is_set(const void* storage);
// The line that the reports of the next accesses name; null ends it.
void mm_site(const char* file, uint32_t line);
// An access of n bytes: clang calls functions of its own, but for atomic ones.
void mm_access(const void* p, uint64_t n, bool write, bool atomic);
// A cast to a pointer: p is a multiple of `alignment`, or that is a fault.
void mm_aligned(const void* p, uint32_t alignment, const char* file, uint32_t line);
// A line on stderr with the thread's place; `format` is printf's.
void mm_log(const char* level, const char* format, ...);
// An argument of the kernel: where its memory is, or the three numbers of a position.
void* mm_argument_memory(MmRole role, uint32_t index);
void mm_argument_value(MmRole role, uint32_t* xyz);
}

#if !defined(__METAL_VERSION__)  // shaders do not launch; to them kernel and thread are macros

extern "C" {
extern const MmKernelEntry mm_kernels[];
extern const uint32_t mm_n_kernels;
extern const MmConstantEntry mm_constants[];
extern const uint32_t mm_n_constants;
extern const uint32_t mm_checked;  // 1: clang was told to check each access
}

// In the order of MmReport::fault; 0 is a launch without a fault.
#define EMULATOR_FAULTS(FAULT)                                          \
  FAULT(kMmNone, "none")                                                \
  /* the launch itself is wrong: no such kernel, no threads … */        \
  FAULT(kMmUsage, "usage")                                              \
  /* lanes of one simdgroup wait at different collectives */            \
  FAULT(kMmDivergent, "divergent")                                      \
  /* threads wait at a barrier that others do not reach */              \
  FAULT(kMmDeadlock, "deadlock")                                        \
  FAULT(kMmOutOfBounds, "out_of_bounds")                                \
  FAULT(kMmMisaligned, "misaligned")                                    \
  /* two threads, one byte of threadgroup memory, no barrier between */ \
  FAULT(kMmRace, "race")                                                \
  /* a read of threadgroup memory that nobody wrote */                  \
  FAULT(kMmUninitialized, "uninitialized")                              \
  /* an index outside a local array, a division by zero */              \
  FAULT(kMmUndefined, "undefined")                                      \
  /* MmLaunch::seconds have passed */                                   \
  FAULT(kMmTimeout, "timeout")                                          \
  /* a write to a buffer that the kernel takes as const */              \
  FAULT(kMmReadOnly, "read_only")
enum MmFault : uint32_t { EMULATOR_FAULTS(ENUMERATOR) };

enum MmFlags : uint32_t {
  kMmDescending = 1,     // the last simdgroup and lane first, not the first
  kMmAllowInactive = 2,  // a collective may run without lanes that have returned or wait elsewhere
  kMmAllowUninitialized =
      4,                   // threadgroup memory that nobody wrote may be read (it holds 0xFF bytes)
  kMmFlushSubnormals = 8,  // f32 and bf16, as Apple's GPUs do: float_mode.h
};

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

struct MmLaunch {
  const char* kernel;
  uint32_t grid[3];        // threadgroups
  uint32_t tg_threads[3];  // threads per threadgroup
  uint32_t threads[3];     // threads of the grid; fewer than grid * tg_threads make its last
                           // threadgroups smaller
  uint32_t workers;        // OS threads
  uint32_t flags;
  uint32_t seconds;  // after which the launch is a fault; 0: never
  uint32_t n_constants;
  const MmConstant* constants;
  MmBuffer buffers[kMmMaxSlots];            // [[buffer(i)]]
  uint32_t threadgroup_bytes[kMmMaxSlots];  // [[threadgroup(i)]]
};

// The fault of a launch that is earliest in its schedule. Where `file` is null the place is the
// machine address `pc`, relative to the library.
struct MmReport {
  MmFault fault;
  uint32_t threadgroup[3], simdgroup, lane;
  uint64_t pc, other_pc;
  const char* file;
  const char* other_file;
  uint32_t line, other_line;
  char text[512];  // the event, without kernel and place
};

// 0, or the fault in *report.
extern "C" int mm_launch(const MmLaunch* launch, MmReport* report);

#endif

#undef ENUMERATOR
