// Nothing is linked: GOMP_parallel and its companions are looked up among torch's own dependencies at first use. LLVM's
// and Intel's runtimes export the same entry points, so there never is a second pool beside torch's, and a machine
// without any OpenMP library still loads this one. A forked child must not touch the parent's pool, whose threads it
// does not have: there everything runs on the calling thread.
#include "threads.h"

#include <dirent.h>
#include <dlfcn.h>
#include <pthread.h>

#include <atomic>
#include <initializer_list>

namespace {

struct Runtime {
  void (*parallel)(void (*)(void*), void*, unsigned, unsigned) = nullptr;
  void (*barrier)() = nullptr;
  int (*thread_num)() = nullptr;
  int (*in_parallel)() = nullptr;
  const char* file = "none";
};

std::atomic<bool> pool_lost{false};
bool threads_at_fork = false;
thread_local bool in_team = false;

void before_fork() {
  int tasks = 0;
  if (DIR* dir = opendir("/proc/self/task")) {
    while (readdir(dir)) ++tasks;
    closedir(dir);
  }
  threads_at_fork = tasks != 3;  // ".", ".." and one thread; or unknown
}
void after_fork_in_child() {
  if (threads_at_fork) pool_lost = true;
  in_team = false;
}

template <class F>
bool look_up(void* scope, const char* name, F& function) {
  return (function = reinterpret_cast<F>(dlsym(scope, name))) != nullptr;
}

// When the library is loaded, not at the first call: a fork in between must be noticed too.
__attribute__((constructor)) void watch_forks() { pthread_atfork(before_fork, nullptr, after_fork_in_child); }

Runtime find() {
  Runtime runtime;
  for (void* scope : {dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD), RTLD_DEFAULT}) {
    if (scope == nullptr && scope != RTLD_DEFAULT) continue;
    Runtime found;
    if (look_up(scope, "GOMP_parallel", found.parallel) && look_up(scope, "GOMP_barrier", found.barrier) &&
        look_up(scope, "omp_get_thread_num", found.thread_num) && look_up(scope, "omp_in_parallel", found.in_parallel)) {
      Dl_info info;
      found.file = dladdr(reinterpret_cast<void*>(found.parallel), &info) ? info.dli_fname : "unnamed";
      return found;
    }
  }
  return runtime;
}

const Runtime& runtime() {
  static const Runtime found = find();
  return found;
}

struct Job {
  ThreadBody body;
  void* data;
};

void trampoline(void* at) {
  const Job& job = *static_cast<Job*>(at);
  in_team = true;
  job.body(job.data, runtime().thread_num());
  in_team = false;
}

}  // namespace

void run_threads(int threads, ThreadBody body, void* data) {
  const Runtime& omp = runtime();
  if (threads <= 1 || omp.parallel == nullptr || pool_lost || omp.in_parallel()) return body(data, 0);
  Job job{body, data};
  omp.parallel(trampoline, &job, unsigned(threads), 0);
}

void thread_barrier() {
  if (in_team) runtime().barrier();
}

const char* thread_runtime() { return runtime().file; }
