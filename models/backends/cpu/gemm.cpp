// bf16 GEMM for CPUs with bf16 instructions. Built by `models.backends.cpu.gemm`.
//
// Weights are stored in blocks of BLOCK outputs. A block holds pairs of consecutive inputs, each pair for all outputs of
// the block, which is the layout of the instruction: with few rows all weights are read as one stream. Sums are in fp32
// over the inputs in order, independent of the number of rows and threads.

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)
#include <immintrin.h>
#include <omp.h>

namespace {

constexpr int WIDTH = 16;             // fp32 elements of a vector
constexpr int VECTORS = 2;            // vectors of outputs in a block
constexpr int BLOCK = VECTORS * WIDTH;
constexpr int TILE = 12;              // rows with sums in registers at a time
constexpr int64_t CHUNK = 16 * TILE;  // rows per pass over all weights, so that their inputs stay in cache
constexpr int64_t AHEAD = 8192;       // prefetch distance in bytes
constexpr int64_t PARALLEL_MULTIPLICATIONS = 1 << 18;  // below it, waking a thread takes longer than multiplying
constexpr int64_t UNITS = 4;          // minimum units of work per thread if there are enough rows

struct Gemm {
    const uint16_t* input;    // (rows, inputs)
    const uint16_t* weights;  // (blocks, inputs / 2, BLOCK, 2)
    const float* bias;        // (blocks * BLOCK), or null
    uint16_t* out;            // (rows, outputs)
    int64_t rows, inputs, outputs;
};

// ROWS rows from `first` times one block of weights.
template <int ROWS>
void multiply_tile(const Gemm& gemm, int64_t first, int64_t block) {
    const uint16_t* input = gemm.input + first * gemm.inputs;
    const uint16_t* weights = gemm.weights + block * BLOCK * gemm.inputs;
    __m512 sums[VECTORS][ROWS];
    for (int i = 0; i < VECTORS; i++)
        for (int row = 0; row < ROWS; row++)
            sums[i][row] = gemm.bias ? _mm512_loadu_ps(gemm.bias + block * BLOCK + i * WIDTH) : _mm512_setzero_ps();
    for (int64_t at = 0; at < gemm.inputs; at += 2) {
        __m512bh here[VECTORS];
        for (int i = 0; i < VECTORS; i++) {
            const uint16_t* from = weights + at * BLOCK + 2 * i * WIDTH;
            here[i] = (__m512bh)_mm512_loadu_si512(from);
            _mm_prefetch(reinterpret_cast<const char*>(from) + AHEAD, _MM_HINT_T0);
        }
#pragma GCC unroll 12
        for (int row = 0; row < ROWS; row++) {
            int32_t both;
            std::memcpy(&both, input + row * gemm.inputs + at, sizeof both);
            const __m512bh pair = (__m512bh)_mm512_set1_epi32(both);
            for (int i = 0; i < VECTORS; i++) sums[i][row] = _mm512_dpbf16_ps(sums[i][row], here[i], pair);
        }
    }
    const int64_t left = gemm.outputs - block * BLOCK;
    for (int i = 0; i < VECTORS; i++) {
        const int64_t there = std::clamp<int64_t>(left - i * WIDTH, 0, WIDTH);
        const __mmask16 mask = __mmask16((1u << there) - 1);
        for (int row = 0; row < ROWS; row++)
            _mm256_mask_storeu_epi16(gemm.out + (first + row) * gemm.outputs + block * BLOCK + i * WIDTH, mask,
                                     (__m256i)_mm512_cvtneps_pbh(sums[i][row]));
    }
}

template <int ROWS = TILE>
void multiply_rows(const Gemm& gemm, int64_t first, int64_t rows, int64_t block) {
    if (rows == ROWS) return multiply_tile<ROWS>(gemm, first, block);
    if constexpr (ROWS > 1) multiply_rows<ROWS - 1>(gemm, first, rows, block);
}

void multiply_chunk(const Gemm& gemm, int64_t first, int64_t rows, int num_threads) {
    const int64_t blocks = (gemm.outputs + BLOCK - 1) / BLOCK, tiles = (rows + TILE - 1) / TILE;
    // With few blocks and many threads, rows are divided too.
    const int64_t groups = std::clamp<int64_t>((UNITS * num_threads + blocks - 1) / blocks, 1, tiles);
    const bool is_small = rows * gemm.inputs * gemm.outputs < PARALLEL_MULTIPLICATIONS;
#pragma omp parallel for schedule(static) num_threads(num_threads) if (!is_small)
    for (int64_t unit = 0; unit < blocks * groups; unit++) {
        const int64_t block = unit / groups, group = unit % groups;
        for (int64_t tile = tiles * group / groups; tile < tiles * (group + 1) / groups; tile++) {
            const int64_t start = rows * tile / tiles, stop = rows * (tile + 1) / tiles;
            multiply_rows(gemm, first + start, stop - start, block);
        }
    }
}

}  // namespace

// Tests the running CPU, because build caches may be shared between machines.
extern "C" void can_multiply(bool* answer) { *answer = __builtin_cpu_supports("avx512bf16"); }

extern "C" void multiply(const uint16_t* input, const uint16_t* weights, const float* bias, uint16_t* out, int64_t rows,
                         int64_t inputs, int64_t outputs, int num_threads) {
    const Gemm gemm = {input, weights, bias, out, rows, inputs, outputs};
    for (int64_t first = 0; first < rows; first += CHUNK)
        multiply_chunk(gemm, first, std::min(CHUNK, rows - first), num_threads);
}

#else

// torch's kernels are faster with AMX, and required without the instruction.
extern "C" void can_multiply(bool* answer) { *answer = false; }

extern "C" void multiply(const uint16_t*, const uint16_t*, const float*, uint16_t*, int64_t, int64_t, int64_t, int) {}

#endif
