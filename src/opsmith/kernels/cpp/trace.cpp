// Stack trace of a process that dies, calls `exit` or receives SIGUSR1: its frames, as addresses in libraries.
//
// A line begins with `C++ frame: `, then the library's path, a space, and the address in its file.
#include <dlfcn.h>
#include <execinfo.h>
#include <signal.h>
#include <ucontext.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>

namespace {
constexpr int most = 64;
constexpr int signals[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGUSR1};
struct sigaction before[65];
int out = 2;

void write_text(const char* text) {
  size_t left = std::strlen(text);
  while (left > 0) {
    ssize_t done = write(out, text, left);
    if (done <= 0) return;
    text += done;
    left -= size_t(done);
  }
}

void write_frame(void* frame) {
  Dl_info info;
  if (!dladdr(frame, &info) || !info.dli_fname) return;
  char digits[19] = "0x0000000000000000";
  uintptr_t address = uintptr_t(frame) - uintptr_t(info.dli_fbase);
  for (int place = 17; place > 1; place--, address >>= 4) digits[place] = "0123456789abcdef"[address & 15];
  write_text("C++ frame: ");
  write_text(info.dli_fname);
  write_text(" ");
  write_text(digits);
  write_text("\n");
}

void write_frames() {
  void* frames[most];
  int count = backtrace(frames, most);
  for (int at = 0; at < count; at++) write_frame(frames[at]);
}

// The interrupted instruction. Its address is increased by one, because readers subtract one from return addresses.
void write_interrupted(void* context) {
#if defined(__x86_64__)
  write_frame(reinterpret_cast<void*>(static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_RIP] + 1));
#elif defined(__aarch64__)
  write_frame(reinterpret_cast<void*>(static_cast<ucontext_t*>(context)->uc_mcontext.pc + 1));
#else
  (void)context;
#endif
}

void handle(int number, siginfo_t* info, void* context) {
  write_interrupted(context);
  write_frames();
  struct sigaction& old = before[number];
  sigaction(number, &old, nullptr);
  if (old.sa_flags & SA_SIGINFO) {
    old.sa_sigaction(number, info, context);
  } else if (old.sa_handler == SIG_DFL) {
    raise(number);
  } else if (old.sa_handler != SIG_IGN) {
    old.sa_handler(number);
  }
}

// Ends the process at once: exit handlers may wait for threads that do not exist after a fork.
void leave(int status, void*) {
  write_text("C++ frame: exit\n");
  write_frames();
  for (FILE* stream : {stdout, stderr}) {
    if (ftrylockfile(stream) != 0) continue;  // held by a thread that does not exist after the fork
    fflush_unlocked(stream);
    funlockfile(stream);
  }
  _exit(status);
}
}  // namespace

// Called by kernels instead of `exit`, before any part of the process is torn down.
extern "C" __attribute__((visibility("default"))) void opsmith_leave(int status) { leave(status, nullptr); }

// Writes the stack trace to a file when `exit` is called.
extern "C" __attribute__((visibility("default"))) void opsmith_trace_exit(int file) {
  out = file;
  void* first[1];
  backtrace(first, 1);  // loads its library and allocates now
  on_exit(leave, nullptr);  // for libraries that a kernel calls
}

// Also writes the stack trace to a file on each of `signals`; the previous handlers run afterwards.
extern "C" __attribute__((visibility("default"))) void opsmith_trace(int file) {
  opsmith_trace_exit(file);
  for (int number : signals) {
    struct sigaction action;
    std::memset(&action, 0, sizeof action);
    action.sa_sigaction = handle;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    sigaction(number, &action, &before[number]);
  }
}
