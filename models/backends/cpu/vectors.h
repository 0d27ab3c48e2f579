// Vectors of sixteen floats, included before every CPU kernel. Uses the vector extensions of GCC and Clang, which work on
// every CPU.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

// A shuffle of two vectors. GCC before version 12 lacks Clang's name for it.
#ifdef __clang__
#define MIXED(one, other, ...) __builtin_shufflevector(one, other, __VA_ARGS__)
#else
#define MIXED(one, other, ...) __builtin_shuffle(one, other, (Ints){__VA_ARGS__})
#endif

namespace {

constexpr int WIDTH = 16;         // elements of a vector, and positions of a block
constexpr int STRIP = 2 * WIDTH;  // elements of a head that are loaded together

typedef float Floats __attribute__((vector_size(4 * WIDTH)));
typedef int32_t Ints __attribute__((vector_size(4 * WIDTH)));
typedef float LooseFloats __attribute__((vector_size(4 * WIDTH), aligned(4)));
typedef int32_t LooseInts __attribute__((vector_size(4 * WIDTH), aligned(2)));
typedef uint16_t Halves __attribute__((vector_size(2 * WIDTH), aligned(2)));

constexpr int64_t PARALLEL_NUMBERS = 1 << 16;  // below it, waking a thread takes longer than copying
constexpr float NEG_INF = -std::numeric_limits<float>::infinity();
constexpr int32_t UPPER = int32_t(0xffff0000);

inline Floats spread(float value) { return value - (Floats){}; }

inline Floats load(const float* from) { return *reinterpret_cast<const LooseFloats*>(from); }

inline void store(float* to, Floats value) { *reinterpret_cast<LooseFloats*>(to) = value; }

// Thirty-two consecutive elements in fp32. bf16 elements are split into even and odd ones, which takes two operations;
// the order does not affect sums if all operands are split alike.
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

// bf16 in the upper half: round to nearest, ties to even; NaN stays NaN.
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

// exp(x) for x <= 0 with a relative error of about 1e-7: 2^n times a polynomial. 0 below -87; NaN stays NaN.
inline Floats exponential(Floats x) {
    Ints is_zero = (Ints)(x < spread(-87.0f));
    Floats clamped = pick(is_zero, spread(-87.0f), x);
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
    return pick(is_zero, (Floats){}, y * scale);
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
