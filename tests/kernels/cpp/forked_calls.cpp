// Program that forks while another thread reads the plans of a kernel. Each child adds a plan. The runtime is the real
// one; nothing of torch is called. Argument: the number of forks. Prints the number of children that added their plan.
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <thread>

#include "runtime.cpp"

extern "C" void Py_IncRef(PyObject*) {}

int main(int, char** arguments) {
  const int64_t none[] = {0};
  Record* record = static_cast<Record*>(opsmith_record(none, 1, nullptr));
  Words words;
  for (uint64_t word = 0; word < (1 << 18); word++) words.push(word);  // the lock is held while they are compared
  const int64_t plan[] = {1, 0, 0, 0, 0};  // nothing is run by it
  opsmith_remember(record, new Awaited{Signature(words), Signature(words), {}}, plan, nullptr);
  words.push(0);

  std::atomic<bool> stopped{false};
  std::thread reader([&] {
    while (!stopped) record->plans.find(words);
  });
  int added = 0;
  for (int left = std::stoi(arguments[1]); left > 0; left--) {
    const pid_t child = fork();
    if (child == 0) {
      alarm(60);  // a child that hangs ends the test
      opsmith_remember(record, new Awaited{Signature(words), Signature(words), {}}, plan, nullptr);
      _exit(record->plans.find(words) ? 0 : 1);
    }
    int status;
    waitpid(child, &status, 0);
    added += status == 0;
    if (WIFSIGNALED(status)) break;
  }
  stopped = true;
  reader.join();
  std::printf("%d\n", added);
}
