// Whether the processor drops subnormal numbers of f32, as Apple's GPUs do: operands and results
// below 2^-126 become zeros of their sign. It holds for the thread that makes it, while it lives.
//
// f16 keeps its subnormals: x86-64 computes with halves in f32, where they are normal numbers, and
// its conversions ignore the mode for f16; aarch64 has a bit of its own for f16, which is cleared.
// bf16 is computed in f32 too, and rounding.cpp asks the processor before it rounds. Operations
// that only move or widen bits (a load, a store, as_type, bf16 to f32) keep subnormals.
#pragma once

#include <cstdint>

namespace metalmm {

class FloatMode {
 public:
  explicit FloatMode(bool flush) : before_(control()) {
    set_control((before_ & ~kHalves & ~kFlush) | (flush ? kFlush : 0));
  }
  ~FloatMode() { set_control(before_); }
  FloatMode(const FloatMode&) = delete;

 private:
#if defined(__x86_64__)
  using Control = uint32_t;
  static constexpr Control kFlush = 0x8040, kHalves = 0;  // FTZ | DAZ of MXCSR
  static Control control() {
    Control c;
    __asm__ volatile("stmxcsr %0" : "=m"(c));
    return c;
  }
  static void set_control(Control c) { __asm__ volatile("ldmxcsr %0" : : "m"(c)); }
#else
  using Control = uint64_t;
  static constexpr Control kFlush = 1 << 24, kHalves = 1 << 19;  // FZ and FZ16 of FPCR
  static Control control() {
    Control c;
    __asm__ volatile("mrs %0, fpcr" : "=r"(c));
    return c;
  }
  static void set_control(Control c) { __asm__ volatile("msr fpcr, %0" : : "r"(c)); }
#endif

  Control before_;
};

}  // namespace metalmm
