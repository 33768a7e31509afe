// One kernel behind a C ABI: built once per kernel source and set of flags by ../emulate.py, loaded with ctypes.
//   -DMXK_KERNEL_SOURCE="file.c"   the kernel, unmodified
//   -DMXK_KERNEL_NAME="mxk_w2x"    for error texts
//   -DMXK_LOCALS="MXK_LOCAL(a)..." its `__local__` variables, found by emulate.py in the preprocessed source
// State is static: a second thread loads a second copy of the file.
#include <csetjmp>
#include <csignal>
#include "tpc_emulator.h"

// What -fsanitize=bounds calls, in the place of its runtime library: an index from memory that was never written, or a
// wrong one, ends the run and not the process. The call counts as one that never throws, so it must not be inlined into
// a function with a handler.
extern "C" [[noreturn]] void __ubsan_handle_out_of_bounds_abort(void *, void *index) {
    tpc_emulator::fail("index %lld outside an array", (long long)(intptr_t)index);
}

#define main __attribute__((noinline)) mxk_kernel_main
#include MXK_KERNEL_SOURCE
#undef main

namespace tpc_emulator {

template <class T> struct IsVector : std::false_type {};
template <class T, int N> struct IsVector<Vector<T, N>> : std::true_type {};
template <> struct IsVector<float128> : std::true_type {};
template <> struct IsVector<bfloat256> : std::true_type {};

template <class T> void account(const T &) {
    using Element = std::remove_all_extents_t<T>;
    const int64_t n = sizeof(T) / sizeof(Element);
    if (!IsVector<Element>::value) state.totals.slm_bytes += sizeof(T);
    else state.totals.vlm_bytes += n * 256 * (sizeof(Element) / sizeof(float64));
}

static void account_local_memory() {
#define MXK_LOCAL(name) account(name);
    MXK_LOCALS
#undef MXK_LOCAL
}

static void poison_local_memory() {
#define MXK_LOCAL(name) memset((void *)&name, 0xa5, sizeof name);
    MXK_LOCALS
#undef MXK_LOCAL
}

template <class A> A argument(const int32_t *words, int i) {
    static_assert(sizeof(A) == 4, "kernel parameters are tensors and 32-bit scalars");
    A value;
    memcpy(&value, &words[i], 4);
    return value;
}
template <class... A, size_t... I>
void call(void (*kernel)(A...), const int32_t *words, std::index_sequence<I...>) {
    kernel(argument<A>(words, int(I))...);
}
template <class... A> constexpr int arity(void (*)(A...)) { return sizeof...(A); }
template <class... A> void call(void (*kernel)(A...), const int32_t *words) {
    call(kernel, words, std::index_sequence_for<A...>());
}

// `array[i] += x` reads before its index is checked: where that hits no memory at all, the run ends as well. The handler is
// installed once and passes on what is not ours.
static thread_local sigjmp_buf *escape __attribute__((tls_model("initial-exec")));
static struct sigaction handler_before;

static void on_bad_access(int signal, siginfo_t *info, void *context) {
    if (escape != nullptr) siglongjmp(*escape, 1);
    if (handler_before.sa_flags & SA_SIGINFO) handler_before.sa_sigaction(signal, info, context);
    else sigaction(signal, &handler_before, nullptr); // the access is repeated, and met by what was there before
}

static bool install_handler() {
    struct sigaction action {};
    action.sa_sigaction = on_bad_access;
    action.sa_flags = SA_SIGINFO | SA_NODEFER;
    return sigaction(SIGSEGV, &action, &handler_before) == 0;
}

} // namespace tpc_emulator

extern "C" __attribute__((visibility("default"))) int mxk_arity() { return tpc_emulator::arity(&mxk_kernel_main); }

// Runs invocations order[0..n); size is that of the whole index space's dim 0. words: tensor ids, then scalars. Totals
// are added to *totals. Returns 0, or 1 with a text in error[512].
extern "C" __attribute__((visibility("default"))) int mxk_run(const tpc_emulator::Tensor *tensors, int num_tensors,
                                                              const int32_t *words, const int32_t *order, int n,
                                                              tpc_emulator::Totals *totals, char *error) {
    using namespace tpc_emulator;
    state = State{};
    state.kernel = MXK_KERNEL_NAME;
    state.num_tensors = num_tensors;
    std::copy(tensors, tensors + num_tensors, state.tensors);
    std::fill(table_used, table_used + 2 * Tables::formats, false);
    account_local_memory();
    static const bool installed = install_handler();
    sigjmp_buf here;
    if (installed && sigsetjmp(here, 1) != 0) {
        escape = nullptr;
        snprintf(error, 512, "%s, invocation %d: access to no memory", state.kernel, state.invocation);
        return 1;
    }
    escape = &here;
    try {
        for (int i = 0; i < n; i++) {
            state.invocation = order[i];
            state.region = Region::prologue;
            state.last_partial[0] = -1;
            for (int k = 0; k < 5; k++) state.offset[k] = k ? 0 : order[i], state.size[k] = 1;
            poison_local_memory();
            call(&mxk_kernel_main, words);
        }
        escape = nullptr;
    } catch (const Fault &fault) {
        escape = nullptr;
        snprintf(error, 512, "%s", fault.text.c_str());
        return 1;
    }
    *totals = state.totals;
    return 0;
}
