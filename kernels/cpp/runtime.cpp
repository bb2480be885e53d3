// What runs the serving kernels: a pool of threads that shares one kernel's work, and the replay of recorded calls.
//
// Why not OpenMP: its regions end when every thread has arrived. A server's threads share their cores with an event loop,
// clients and other processes; whenever a thread loses its core for a moment, the others wait for it at each of the
// hundreds of kernels of a step (two cores with one busy neighbour: 25 tokens/s instead of 600). Here work is cut into
// chunks that whoever is there takes, the caller first of all, and nobody waits for a thread that has taken none.

#include <sched.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>

namespace {

using Task = void (*)(void* context, int64_t chunk);

constexpr int kMaxThreads = 256;
constexpr int kWorkerSpins = 2000;  // some 30 us, several kernels long: a worker stays awake within a step
constexpr int kCallerSpins = 2000;

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

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
        threads_.store(threads, std::memory_order_relaxed);
        pending_.store(num_chunks, std::memory_order_relaxed);
        const uint64_t job = ++last_job_;
        ticket_.store(job << 32 | static_cast<uint32_t>(num_chunks));
        if (sleepers_.load() > 0) {
            std::lock_guard<std::mutex> lock(sleep_);
            awake_.notify_all();
        }
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
        uint64_t ticket = ticket_.load(std::memory_order_acquire);
        while ((ticket >> 32) == (job & 0xffffffff) && static_cast<uint32_t>(ticket) > 0) {
            if (!ticket_.compare_exchange_weak(ticket, ticket - 1, std::memory_order_acq_rel)) continue;
            task(context, static_cast<uint32_t>(ticket) - 1);
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
                relax();
            } else {
                std::unique_lock<std::mutex> lock(sleep_);
                sleepers_.fetch_add(1);
                awake_.wait(lock, [&] { return ticket_.load() != ticket; });
                sleepers_.fetch_sub(1);
                spins = 0;
            }
        }
    }

    std::mutex caller_, sleep_;
    std::condition_variable awake_;
    std::atomic<uint64_t> ticket_{0};
    std::atomic<int64_t> pending_{0}, threads_{0};
    std::atomic<int> sleepers_{0};
    std::atomic<Task> task_{nullptr};
    std::atomic<void*> context_{nullptr};
    uint64_t last_job_ = 0;
    int64_t num_workers_ = 0;  // a forked child has none of them, and does all chunks itself
};

Pool& pool() {
    static Pool* pool = new Pool;  // never destroyed: workers use it until the process ends
    return *pool;
}

}  // namespace

extern "C" void run_parallel(Task task, void* context, int64_t num_chunks, int64_t threads) {
    pool().run(task, context, num_chunks, threads);
}

// calls: num_calls pairs of (kernel, its arguments); see kernels/_tape.py.
extern "C" void replay(const int64_t* calls, int64_t num_calls) {
    for (int64_t i = 0; i < num_calls; i++) {
        reinterpret_cast<void (*)(const int64_t*)>(calls[2 * i])(reinterpret_cast<const int64_t*>(calls[2 * i + 1]));
    }
}
