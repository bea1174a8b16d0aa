// A context switch for x86-64 and aarch64 ELF: the registers that a call preserves, then the stack
// pointer.
#pragma once

#include <cstddef>
#include <cstdint>

#include "stack.h"

// Saves the running context in *from and continues `to`, whose own save returns.
extern "C" void mm_switch(void** from, void* to);

#if defined(__x86_64__)
__asm__(
    ".pushsection mm_runtime,\"ax\",@progbits\n.p2align 4\n.type mm_switch,@function\n.hidden "
    "mm_switch\n.globl "
    "mm_switch\nmm_switch:\n"
    "push %rbp\npush %rbx\npush %r12\npush %r13\npush %r14\npush %r15\n"
    "mov %rsp, (%rdi)\nmov %rsi, %rsp\n"
    "pop %r15\npop %r14\npop %r13\npop %r12\npop %rbx\npop %rbp\nret\n"
    ".size mm_switch,.-mm_switch\n.popsection\n");
#elif defined(__aarch64__)
__asm__(
    ".pushsection mm_runtime,\"ax\",@progbits\n.p2align 4\n.type mm_switch,%function\n.hidden "
    "mm_switch\n.globl "
    "mm_switch\nmm_switch:\n"
    "sub sp, sp, #160\n"
    "stp x19, x20, [sp]\nstp x21, x22, [sp, #16]\nstp x23, x24, [sp, #32]\n"
    "stp x25, x26, [sp, #48]\nstp x27, x28, [sp, #64]\nstp x29, x30, [sp, #80]\n"
    "stp d8, d9, [sp, #96]\nstp d10, d11, [sp, #112]\nstp d12, d13, [sp, #128]\n"
    "stp d14, d15, [sp, #144]\nmov x9, sp\nstr x9, [x0]\nmov sp, x1\n"
    "ldp x19, x20, [sp]\nldp x21, x22, [sp, #16]\nldp x23, x24, [sp, #32]\n"
    "ldp x25, x26, [sp, #48]\nldp x27, x28, [sp, #64]\nldp x29, x30, [sp, #80]\n"
    "ldp d8, d9, [sp, #96]\nldp d10, d11, [sp, #112]\nldp d12, d13, [sp, #128]\n"
    "ldp d14, d15, [sp, #144]\nadd sp, sp, #160\nret\n"
    ".size mm_switch,.-mm_switch\n.popsection\n");
#else
#error "the emulator switches stacks on x86-64 and aarch64 only"
#endif

namespace metalmm {

// mm_switch() between two stacks.
inline void switch_stacks(Stack& mine, void** from, const Stack& other, void* to) {
  mine.leave(other);
  mm_switch(from, to);
  mine.enter();
}

// The `to` with which `entry` starts on an empty stack that ends at `top`; `entry` never returns.
inline void* fresh_context(void* top, void (*entry)()) {
  auto sp = reinterpret_cast<void**>(reinterpret_cast<uintptr_t>(top) & ~uintptr_t{63});
#if defined(__x86_64__)
  sp -= 2;  // entry finds the stack as after a call: 8 bytes past a multiple of 16
  sp[0] = reinterpret_cast<void*>(entry);
  sp[1] = nullptr;
  sp -= 6;
  for (int i = 0; i < 6; ++i) sp[i] = nullptr;
#else
  sp -= 20;
  for (int i = 0; i < 20; ++i) sp[i] = nullptr;
  sp[11] = reinterpret_cast<void*>(entry);  // x30
#endif
  return sp;
}

}  // namespace metalmm
