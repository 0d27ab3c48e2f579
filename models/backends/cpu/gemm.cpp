// Products with weights in bf16, for CPUs that multiply bf16 by themselves: what `models.backends.cpu.gemm` compiles and
// calls.
//
// Weights lie in blocks of BLOCK outputs. A block holds pairs of neighbouring inputs one after the other, each pair for
// all outputs of the block side by side, as the instruction takes them: few rows read all weights as one stream. Every
// number is summed in fp32 over the inputs in their order, whatever the number of rows and threads.

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)
#include <immintrin.h>
#include <omp.h>

namespace {

constexpr int WIDTH = 16;             // numbers in fp32 of one vector
constexpr int VECTORS = 2;            // of outputs in a block
constexpr int BLOCK = VECTORS * WIDTH;
constexpr int TILE = 12;              // rows whose sums are kept in registers at once
constexpr int64_t CHUNK = 16 * TILE;  // rows that are multiplied with all weights before the next: their inputs stay near
constexpr int64_t AHEAD = 8192;       // bytes: how far ahead of the stream the memory is told
constexpr int64_t PARALLEL_PRODUCTS = 1 << 18;  // below it, waking a thread takes longer than multiplying
constexpr int64_t UNITS = 4;          // of work for each thread, at least, where there are rows enough

struct Product {
    const uint16_t* input;    // (rows, inputs)
    const uint16_t* weights;  // (blocks, inputs / 2, BLOCK, 2)
    const float* bias;        // (blocks * BLOCK), or none
    uint16_t* out;            // (rows, outputs)
    int64_t rows, inputs, outputs;
};

// ROWS rows from `first` on with one block of weights.
template <int ROWS>
void multiply_tile(const Product& product, int64_t first, int64_t block) {
    const uint16_t* input = product.input + first * product.inputs;
    const uint16_t* weights = product.weights + block * BLOCK * product.inputs;
    __m512 sums[VECTORS][ROWS];
    for (int i = 0; i < VECTORS; i++)
        for (int row = 0; row < ROWS; row++)
            sums[i][row] = product.bias ? _mm512_loadu_ps(product.bias + block * BLOCK + i * WIDTH) : _mm512_setzero_ps();
    for (int64_t at = 0; at < product.inputs; at += 2) {
        __m512bh here[VECTORS];
        for (int i = 0; i < VECTORS; i++) {
            const uint16_t* from = weights + at * BLOCK + 2 * i * WIDTH;
            here[i] = (__m512bh)_mm512_loadu_si512(from);
            _mm_prefetch(reinterpret_cast<const char*>(from) + AHEAD, _MM_HINT_T0);
        }
#pragma GCC unroll 12
        for (int row = 0; row < ROWS; row++) {
            int32_t both;
            std::memcpy(&both, input + row * product.inputs + at, sizeof both);
            const __m512bh pair = (__m512bh)_mm512_set1_epi32(both);
            for (int i = 0; i < VECTORS; i++) sums[i][row] = _mm512_dpbf16_ps(sums[i][row], here[i], pair);
        }
    }
    const int64_t left = product.outputs - block * BLOCK;
    for (int i = 0; i < VECTORS; i++) {
        const int64_t there = std::clamp<int64_t>(left - i * WIDTH, 0, WIDTH);
        const __mmask16 mask = __mmask16((1u << there) - 1);
        for (int row = 0; row < ROWS; row++)
            _mm256_mask_storeu_epi16(product.out + (first + row) * product.outputs + block * BLOCK + i * WIDTH, mask,
                                     (__m256i)_mm512_cvtneps_pbh(sums[i][row]));
    }
}

template <int ROWS = TILE>
void multiply_rows(const Product& product, int64_t first, int64_t rows, int64_t block) {
    if (rows == ROWS) return multiply_tile<ROWS>(product, first, block);
    if constexpr (ROWS > 1) multiply_rows<ROWS - 1>(product, first, rows, block);
}

void multiply_chunk(const Product& product, int64_t first, int64_t rows, int num_threads) {
    const int64_t blocks = (product.outputs + BLOCK - 1) / BLOCK, tiles = (rows + TILE - 1) / TILE;
    // Few blocks and many threads: rows are shared out as well.
    const int64_t groups = std::clamp<int64_t>((UNITS * num_threads + blocks - 1) / blocks, 1, tiles);
    const bool is_small = rows * product.inputs * product.outputs < PARALLEL_PRODUCTS;
#pragma omp parallel for schedule(static) num_threads(num_threads) if (!is_small)
    for (int64_t unit = 0; unit < blocks * groups; unit++) {
        const int64_t block = unit / groups, group = unit % groups;
        for (int64_t tile = tiles * group / groups; tile < tiles * (group + 1) / groups; tile++) {
            const int64_t start = rows * tile / tiles, stop = rows * (tile + 1) / tiles;
            multiply_rows(product, first + start, stop - start, block);
        }
    }
}

}  // namespace

// Asked of this CPU and not of the one that compiled: caches of what is compiled may be shared.
extern "C" void can_multiply(bool* answer) { *answer = __builtin_cpu_supports("avx512bf16"); }

extern "C" void multiply(const uint16_t* input, const uint16_t* weights, const float* bias, uint16_t* out, int64_t rows,
                         int64_t inputs, int64_t outputs, int num_threads) {
    const Product product = {input, weights, bias, out, rows, inputs, outputs};
    for (int64_t first = 0; first < rows; first += CHUNK)
        multiply_chunk(product, first, std::min(CHUNK, rows - first), num_threads);
}

#else

// What has tile units, or lacks the instruction, is served better by torch's own kernels.
extern "C" void can_multiply(bool* answer) { *answer = false; }

extern "C" void multiply(const uint16_t*, const uint16_t*, const float*, uint16_t*, int64_t, int64_t, int64_t, int) {}

#endif
