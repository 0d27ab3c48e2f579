// Sixteen numbers at once, for the loops that are compiled for CPUs: what stands before each of them. Written with the
// vector types of GCC and Clang, which exist for every CPU.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

// Numbers of two vectors, by their places in both. GCC had no name in common with Clang before its version 12.
#ifdef __clang__
#define MIXED(one, other, ...) __builtin_shufflevector(one, other, __VA_ARGS__)
#else
#define MIXED(one, other, ...) __builtin_shuffle(one, other, (Ints){__VA_ARGS__})
#endif

namespace {

constexpr int WIDTH = 16;         // numbers of one vector, and columns of one block
constexpr int STRIP = 2 * WIDTH;  // places of a head that are loaded at once

typedef float Floats __attribute__((vector_size(4 * WIDTH)));
typedef int32_t Ints __attribute__((vector_size(4 * WIDTH)));
typedef float LooseFloats __attribute__((vector_size(4 * WIDTH), aligned(4)));
typedef int32_t LooseInts __attribute__((vector_size(4 * WIDTH), aligned(2)));
typedef uint16_t Halves __attribute__((vector_size(2 * WIDTH), aligned(2)));

constexpr int64_t PARALLEL_NUMBERS = 1 << 16;  // below it, waking a thread takes longer than copying
constexpr float NOTHING = -std::numeric_limits<float>::infinity();
constexpr int32_t UPPER = int32_t(0xffff0000);

inline Floats spread(float value) { return value - (Floats){}; }

inline Floats load(const float* from) { return *reinterpret_cast<const LooseFloats*>(from); }

inline void store(float* to, Floats value) { *reinterpret_cast<LooseFloats*>(to) = value; }

// Thirty-two neighbours in fp32. Those of bf16, the upper half of an fp32 number, are parted into those of even and of
// odd place, which takes two operations; order means nothing to sums, as long as all that meets is parted alike.
struct Pair {
    Floats one, other;
};

inline Pair load_pair(const float* from) { return {load(from), load(from + WIDTH)}; }

inline Pair load_pair(const uint16_t* from) {
    Ints both = *reinterpret_cast<const LooseInts*>(from);
    return {(Floats)(both << 16), (Floats)(both & UPPER)};
}

inline void store_pair(float* to, Pair value) {
    store(to, value.one);
    store(to + WIDTH, value.other);
}

// The bits of bf16 in the upper half: rounded to the nearest, ties to even; NaN stays NaN.
inline Ints rounded(Floats value) {
    Ints bits = (Ints)value;
    Ints is_nan = (Ints)(value != value);
    return (is_nan & 0x7fc00000) | (~is_nan & ((bits + 0x7fff + ((bits >> 16) & 1)) & UPPER));
}

inline void store_pair(uint16_t* to, Pair value) {
    *reinterpret_cast<LooseInts*>(to) = ((rounded(value.one) >> 16) & ~UPPER) | rounded(value.other);
}

inline Floats load_bias(const float* from) { return load(from); }

inline Floats load_bias(const uint16_t* from) {
    return (Floats)(__builtin_convertvector(*reinterpret_cast<const Halves*>(from), Ints) << 16);
}

inline Floats pick(Ints which, Floats yes, Floats no) { return (Floats)((which & (Ints)yes) | (~which & (Ints)no)); }

// exp for values at or below zero: 2^n times a polynomial on half a binary order, to about 1e-7; below -87 it is 0,
// and NaN stays NaN.
inline Floats exponential(Floats x) {
    Ints is_nothing = (Ints)(x < spread(-87.0f));
    Floats clamped = pick(is_nothing, spread(-87.0f), x);
    Floats shifted = clamped * 1.44269504f + 12582912.0f;  // rounds to whole numbers
    Floats n = shifted - 12582912.0f;
    Floats r = clamped - n * 0.693359375f + n * 2.12194440e-4f;
    Floats p = spread(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    Floats y = p * r * r + r + 1.0f;
    Floats scale = (Floats)((__builtin_convertvector(n, Ints) + 127) << 23);
    return pick(is_nothing, (Floats){}, y * scale);
}

inline float sum(Floats v) {
    float parts[WIDTH];
    std::memcpy(parts, &v, sizeof v);
    for (int half = WIDTH / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) parts[i] += parts[i + half];
    return parts[0];
}

inline float largest(Floats v) {
    float parts[WIDTH];
    std::memcpy(parts, &v, sizeof v);
    return *std::max_element(parts, parts + WIDTH);
}

}  // namespace
