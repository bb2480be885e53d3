// What the serving kernels share: boxed arguments, bfloat16, work sharing.
//
// Every serving kernel is `extern "C" void name(const int64_t* args)`. One signature for all of them lets Python record
// calls on a tape and replay a whole forward in one call (kernels/_tape.py). Pointers and integers travel as they are,
// floats as the bits of a double; the last argument is always the number of threads, negative for torch's own threads
// instead of our pool's (runtime.cpp says which is for whom).

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace lowbit {

using Task = void (*)(void* context, int64_t chunk);
inline void (*run_parallel)(Task, void*, int64_t, int64_t) = nullptr;  // runtime.cpp's; Python hands it over at load

inline int64_t thread_count(int64_t threads) { return threads < 0 ? -threads : threads; }

// body(begin, end) over parts of 0..num_items, `parts_per_thread` for each thread: more parts even out what differs in
// length or is interrupted, fewer cost less. The parts must not share what they write. `threads` as it came from Python.
template <typename Body>
void parallel_for(int64_t num_items, int64_t threads, Body&& body, int64_t parts_per_thread = 4) {
    if (thread_count(threads) <= 1 || num_items <= 1 || !run_parallel) {
        if (num_items > 0) body(int64_t{0}, num_items);
        return;
    }
    using Plain = std::remove_reference_t<Body>;
    struct Context {
        Plain* body;
        int64_t num_items, num_parts;
    } context{&body, num_items, std::min(num_items, thread_count(threads) * parts_per_thread)};
    const Task task = [](void* opaque, int64_t part) {
        const Context& c = *static_cast<Context*>(opaque);
        (*c.body)(c.num_items * part / c.num_parts, c.num_items * (part + 1) / c.num_parts);
    };
    run_parallel(task, &context, context.num_parts, threads);
}

enum DType : int64_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2, kInt8 = 3 };

class Args {
  public:
    explicit Args(const int64_t* args) : next_(args) {}
    template <typename T> T* pointer() { return reinterpret_cast<T*>(*next_++); }
    int64_t integer() { return *next_++; }
    float real() {
        double value;
        std::memcpy(&value, next_++, 8);
        return static_cast<float>(value);
    }

  private:
    const int64_t* next_;
};

inline float from_bfloat16(uint16_t bits) {
    const uint32_t wide = static_cast<uint32_t>(bits) << 16;
    float value;
    std::memcpy(&value, &wide, 4);
    return value;
}

// Round to nearest, ties to even; nan stays nan.
inline uint16_t to_bfloat16(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return static_cast<uint16_t>(bits >> 16 | 0x40);
    return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline float load(const float* p) { return *p; }
inline float load(const uint16_t* p) { return from_bfloat16(*p); }
inline void store(float* p, float value) { *p = value; }
inline void store(uint16_t* p, float value) { *p = to_bfloat16(value); }
inline float round_as(const float*, float value) { return value; }  // what a store and a load would give
inline float round_as(const uint16_t*, float value) { return from_bfloat16(to_bfloat16(value)); }

}  // namespace lowbit

extern "C" __attribute__((visibility("default"), used)) inline void use_pool(void* run_parallel) {
    lowbit::run_parallel = reinterpret_cast<decltype(lowbit::run_parallel)>(run_parallel);
}
