// Threads are those of the OpenMP runtime that torch has loaded, whatever its name: same pool, same limits.
#pragma once

using ThreadBody = void (*)(void* data, int thread);
// Runs body on up to `threads` threads (1 in nested regions, in forked children and without a runtime).
void run_threads(int threads, ThreadBody body, void* data);
void thread_barrier();        // inside a body
const char* thread_runtime();  // file of the runtime, or "none"
