// Parts of the library in memory: its code, its variables and shared memory; and memory faults that no check predicted.
#pragma once
#include <link.h>
#include <signal.h>

#include <new>

#include "reports.h"

namespace emulated {

static uint64_t tls_begin, tls_end, dynamic_begin, dynamic_end, image_begin, image_end, data_begin, data_end;

static bool is_shared(uint64_t address) { return address >= tls_begin && address < tls_end; }

static int find_segments(dl_phdr_info* info, size_t, void*) {
  const uint64_t here = (uint64_t)&find_segments;
  const auto begins = [&](int at) { return uint64_t(info->dlpi_addr + info->dlpi_phdr[at].p_vaddr); };
  const auto ends = [&](int at) { return begins(at) + info->dlpi_phdr[at].p_memsz; };
  bool ours = false;
  for (int at = 0; at < info->dlpi_phnum; at++)
    ours |= info->dlpi_phdr[at].p_type == PT_LOAD && here >= begins(at) && here < ends(at);
  if (!ours) return 0;
  library = info->dlpi_addr;
  image_begin = UINT64_MAX, image_end = 0;
  for (int at = 0; at < info->dlpi_phnum; at++) {
    const auto& part = info->dlpi_phdr[at];
    if (part.p_type == PT_LOAD) {
      image_begin = std::min(image_begin, begins(at)), image_end = std::max(image_end, ends(at));
      if (part.p_flags & PF_W) data_begin = begins(at), data_end = ends(at);
    }
    if (part.p_type == PT_TLS) tls_begin = (uint64_t)info->dlpi_tls_data, tls_end = tls_begin + part.p_memsz;
  }
  return 1;
}

// Variables of the kernel, between labels that the linker places around them: see compiler.py.
extern "C" {
extern unsigned char emulated_data_begin[], emulated_data_end[], emulated_bss_begin[], emulated_bss_end[];
}

// Resets the kernel's variables to their values before the very first launch.
static void reset_variables() {
  static std::vector<unsigned char> data, bss;
  static bool kept;
  if (!kept) {
    data.assign(emulated_data_begin, emulated_data_end), bss.assign(emulated_bss_begin, emulated_bss_end);
    kept = true;
  }
  std::copy(data.begin(), data.end(), emulated_data_begin);
  std::copy(bss.begin(), bss.end(), emulated_bss_begin);
}

static void out_of_memory() {
  std::set_new_handler(nullptr);
  running = nullptr;
  report(OUT_OF_MEMORY, 0);
  _exit(4);
}

static void on_fault(int, siginfo_t* info, void* context) {
  const uint64_t address = (uint64_t)info->si_addr;
  uint64_t pc = 0;
#if defined(__x86_64__)
  const auto& registers = ((ucontext_t*)context)->uc_mcontext.gregs;
  pc = registers[REG_RIP];
  const uint64_t top = registers[REG_RSP];
  const bool on_stack = running && top >= stack_of(*running) + GUARD && top < stack_of(*running) + STACK;
  if (on_stack && !(pc >= image_begin && pc < image_end)) pc = *(uint64_t*)top - 1;  // a call to nowhere
#elif defined(__aarch64__)
  pc = ((ucontext_t*)context)->uc_mcontext.pc;
#endif
  if (running && outcome) {
    const bool overrun = address >= stack_of(*running) && address < stack_of(*running) + GUARD;
    const bool inside = pc >= image_begin && pc < image_end;
    report(overrun ? STACK_OVERFLOW : CRASH, inside ? pc - library : running->last_access);
  }
  _exit(3);
}

static void handle_faults() {
  static void* stack = mmap(nullptr, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  const stack_t other = {stack, 0, STACK};
  sigaltstack(&other, nullptr);
  struct sigaction action = {};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  for (int number : {SIGSEGV, SIGBUS, SIGFPE, SIGILL}) sigaction(number, &action, nullptr);
  std::set_new_handler(out_of_memory);
}

}  // namespace emulated
