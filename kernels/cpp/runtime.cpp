// What runs the kernels: a pool of threads that shares one kernel's work, and the replay of recorded calls.
//
// Why not OpenMP for a server: its regions end when every thread has arrived. A server's threads share their cores with an event loop,
// clients and other processes; whenever a thread loses its core for a moment, the others wait for it at each of the
// hundreds of kernels of a step (two cores with one busy neighbour: 25 tokens/s instead of 600). Here work is cut into
// chunks that whoever is there takes, the caller first of all, and nobody waits for a thread that has taken none.
//
// Training alternates our kernels with torch's matrix products, whose OpenMP threads spin for some milliseconds after
// each: a second pool would fight them for the cores. Its kernels ask for those threads by a negative number.

#include <pthread.h>
#include <sched.h>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <atomic>
#include <climits>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>

namespace {

using Task = void (*)(void* context, int64_t chunk);

constexpr int kMaxThreads = 256;
constexpr int kWorkerSpins = 2000;  // some 30 us, several kernels long: a worker stays awake within a step
constexpr int kCallerSpins = 2000;
constexpr int kSpinsPerYield = 64;

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("isb");  // some 10 ns; "yield" takes none on most cores
#endif
}

// Where workers sleep. The word is twice the number of the last job, plus 1 if a worker may sleep: the caller makes a
// system call only then, and once. Not a condition variable: glibc's notify_all waits for those that an earlier one woke
// (a mutex has the same fault), so that a worker without a core would hold up the caller.
class Bell {
  public:
    void ring(uint32_t job) {
        if (word_.exchange(2 * job) & 1) wake();
    }
    // Returns when a job after this one has come, or earlier.
    void sleep(uint32_t job) {
        uint32_t word = 2 * job;
        if (word_.compare_exchange_strong(word, 2 * job + 1) || word == 2 * job + 1) wait(2 * job + 1);
    }

  private:
#if defined(__linux__)
    void wait(uint32_t word) { syscall(SYS_futex, &word_, FUTEX_WAIT_PRIVATE, word, nullptr, nullptr, 0); }
    void wake() { syscall(SYS_futex, &word_, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0); }
#else
    void wait(uint32_t word) {
        std::unique_lock<std::mutex> lock(mutex_);
        rung_.wait(lock, [&] { return word_.load() != word; });
    }
    void wake() {
        std::lock_guard<std::mutex> lock(mutex_);
        rung_.notify_all();
    }
    std::mutex mutex_;
    std::condition_variable rung_;
#endif
    std::atomic<uint32_t> word_{0};
};

// One job at a time. `ticket_` holds the job's number and how many of its chunks nobody has taken: a compare-and-swap on
// both at once means that a late worker cannot take a chunk of a job that it has not read.
class Pool {
  public:
    void run(Task task, void* context, int64_t num_chunks, int64_t threads) {
        std::unique_lock<std::mutex> alone(caller_, std::try_to_lock);
        if (threads <= 1 || num_chunks <= 1 || !alone.owns_lock()) {  // another Python thread has the pool
            for (int64_t chunk = 0; chunk < num_chunks; chunk++) task(context, chunk);
            return;
        }
        start_workers(threads - 1);
        task_.store(task, std::memory_order_relaxed);
        context_.store(context, std::memory_order_relaxed);
        num_chunks_.store(num_chunks, std::memory_order_relaxed);
        threads_.store(threads, std::memory_order_relaxed);
        pending_.store(num_chunks, std::memory_order_relaxed);
        const uint64_t job = ++last_job_;
        ticket_.store(job << 32 | static_cast<uint32_t>(num_chunks), std::memory_order_release);
        bell_.ring(static_cast<uint32_t>(job));
        work(job);
        for (int spins = 0; pending_.load(std::memory_order_acquire) > 0; spins++) {
            if (spins < kCallerSpins) relax();
            else sched_yield();  // whoever has the last chunk may wait for this core
        }
    }

  private:
    void start_workers(int64_t wanted) {
        for (; num_workers_ < wanted && num_workers_ < kMaxThreads; num_workers_++) {
            std::thread([this, index = num_workers_] { stay(index); }).detach();
        }
    }

    void work(uint64_t job) {
        const Task task = task_.load(std::memory_order_relaxed);
        void* context = context_.load(std::memory_order_relaxed);
        const int64_t num_chunks = num_chunks_.load(std::memory_order_relaxed);
        uint64_t ticket = ticket_.load(std::memory_order_acquire);
        while ((ticket >> 32) == (job & 0xffffffff) && static_cast<uint32_t>(ticket) > 0) {
            if (!ticket_.compare_exchange_weak(ticket, ticket - 1, std::memory_order_acq_rel)) continue;
            task(context, num_chunks - static_cast<uint32_t>(ticket));  // in ascending order
            pending_.fetch_sub(1, std::memory_order_release);
            ticket = ticket_.load(std::memory_order_acquire);
        }
    }

    void stay(int64_t index) {
        for (int spins = 0;; spins++) {
            const uint64_t ticket = ticket_.load(std::memory_order_acquire);
            if (static_cast<uint32_t>(ticket) > 0 && index < threads_.load(std::memory_order_relaxed) - 1) {
                work(ticket >> 32);
                spins = 0;
            } else if (spins < kWorkerSpins) {
                if (spins % kSpinsPerYield == kSpinsPerYield - 1) sched_yield();  // to the caller, if this is its core
                else relax();
            } else {
                bell_.sleep(static_cast<uint32_t>(ticket >> 32));
                spins = 0;
            }
        }
    }

    std::mutex caller_;
    Bell bell_;
    alignas(64) std::atomic<uint64_t> ticket_{0};  // awake workers read it all the time
    alignas(64) std::atomic<int64_t> pending_{0};  // each finished chunk writes it
    std::atomic<int64_t> num_chunks_{0}, threads_{0};
    std::atomic<Task> task_{nullptr};
    std::atomic<void*> context_{nullptr};
    uint64_t last_job_ = 0;
    int64_t num_workers_ = 0;
};

Pool* pool = nullptr;  // never destroyed: workers use it until the process ends

// A forked child has none of the workers, and its copy of the pool may be locked or in the middle of a job.
[[maybe_unused]] const int renewed = [] {
    pool = new Pool;
    return pthread_atfork(nullptr, nullptr, [] { pool = new Pool; });
}();

}  // namespace

extern "C" void run_parallel(Task task, void* context, int64_t num_chunks, int64_t threads) {
    if (threads < 0) {
#pragma omp parallel for schedule(dynamic, 1) num_threads(-threads)
        for (int64_t chunk = 0; chunk < num_chunks; chunk++) task(context, chunk);
        return;
    }
    pool->run(task, context, num_chunks, threads);
}

// calls: num_calls pairs of (kernel, its arguments); see kernels/_tape.py.
extern "C" void replay(const int64_t* calls, int64_t num_calls) {
    for (int64_t i = 0; i < num_calls; i++) {
        reinterpret_cast<void (*)(const int64_t*)>(calls[2 * i])(reinterpret_cast<const int64_t*>(calls[2 * i + 1]));
    }
}
