// The vector unit of both attention kernels, for training and for the paged cache: vectors are the compiler's, as wide as
// the machine's, and every operation is the same in each lane.
#pragma once

#include "lowbit.h"

#include <limits>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace {

// Lanes, and the register tile (rows x vectors) whose sums, operands and one broadcast fit the registers.
#if defined(__AVX512F__)
constexpr int kLanes = 16, kMaxRows = 6, kMaxVectors = 4;
#elif defined(__AVX__)
constexpr int kLanes = 8, kMaxRows = 6, kMaxVectors = 2;
#elif defined(__aarch64__)
constexpr int kLanes = 4, kMaxRows = 6, kMaxVectors = 4;
#else
constexpr int kLanes = 4, kMaxRows = 4, kMaxVectors = 2;
#endif

typedef float Vector __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));
typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));


constexpr float kInfinity = std::numeric_limits<float>::infinity();

template <typename V> V load_as(const void* p) {
    V value;
    std::memcpy(&value, p, sizeof(V));
    return value;
}
Vector load_vector(const float* p) { return load_as<Vector>(p); }
Vector load_vector(const uint16_t* p) {  // widened by name: GCC 12's own conversion goes through half vectors
#if defined(__AVX512F__)
    return (Vector)_mm512_slli_epi32(_mm512_cvtepu16_epi32(load_as<__m256i>(p)), 16);
#elif defined(__AVX2__)
    return (Vector)_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_as<__m128i>(p)), 16);
#else
    return (Vector)(__builtin_convertvector(load_as<Halves>(p), Words) << 16);
#endif
}
void store_vector(float* p, Vector value) { std::memcpy(p, &value, sizeof(Vector)); }
void store_vector(uint16_t* p, Vector value) {  // lowbit::to_bfloat16 in all lanes
    const Words bits = (Words)value;
    const Words rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    const Words nan = bits >> 16 | 0x40;
    const Halves halves = __builtin_convertvector((bits & 0x7fffffff) > 0x7f800000 ? nan : rounded, Halves);
    std::memcpy(p, &halves, sizeof(Halves));
}
Vector splat(float value) { return value - Vector{}; }

Vector multiply_add(Vector a, Vector b, Vector c) {
#if defined(__AVX512F__)
    return (Vector)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (Vector)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (Vector)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

float total(Vector v) {
    float result = 0;
    for (int i = 0; i < kLanes; i++) result += v[i];
    return result;
}

}  // namespace
