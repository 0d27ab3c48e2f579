// Attention of a few nodes over ragged rows, for CPUs: what `models.backends.cpu.attention` compiles and calls.
//
// Each row and key-value head is one task: its keys and values are read once, up to the last column that any of its
// nodes may see, and used by all queries. Sums run in fp32, over columns in one order whatever the window, the other
// rows or the number of nodes. Compiled behind `vectors.h`.

namespace {

constexpr int TILE = 6;           // queries whose sums are kept in registers at once
constexpr uint16_t CLOSED = 0xff80;  // NOTHING in bf16

// Sums of sixteen vectors, in one vector: each round adds halves, side by side, of two.
inline Floats sums_of(Floats (&m)[WIDTH]) {
    for (int i = 0; i < 8; i++)
        m[i] = MIXED(m[i], m[i + 8], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
               MIXED(m[i], m[i + 8], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    for (int i = 0; i < 4; i++)
        m[i] = MIXED(m[i], m[i + 4], 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27) +
               MIXED(m[i], m[i + 4], 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
    for (int i = 0; i < 2; i++)
        m[i] = MIXED(m[i], m[i + 2], 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
               MIXED(m[i], m[i + 2], 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
    return MIXED(m[0], m[1], 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30) +
           MIXED(m[0], m[1], 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
}

// One row's memory for one key-value head, up to the last column that any node sees.
template <typename T>
struct Memory {
    const T* keys;
    const T* values;
    int64_t key_stride, value_stride;
    int64_t num_columns;
};

// Products of some queries (QUERIES, dim) with all keys, into scores (QUERIES, stride). STRIPS is dim in strips, where
// that is known.
template <int QUERIES, int STRIPS, typename T>
void score(const Memory<T>& memory, const float* queries, int64_t dim, float* scores, int64_t stride) {
    const int64_t num_strips = STRIPS ? STRIPS : dim / STRIP;
    for (int64_t column = 0; column < memory.num_columns; column += WIDTH) {
        const int num_columns = int(std::min<int64_t>(WIDTH, memory.num_columns - column));
        Floats products[QUERIES][WIDTH];
        for (int i = 0; i < WIDTH; i++) {
            // Columns behind the last are read as the last once more, and masked later.
            const T* key = memory.keys + (column + std::min(i, num_columns - 1)) * memory.key_stride;
            const char* later = reinterpret_cast<const char*>(key + 2 * WIDTH * memory.key_stride);
            const char* value = reinterpret_cast<const char*>(memory.values + (column + i) * memory.value_stride);
            for (int64_t byte = 0; byte < dim * int64_t(sizeof(T)); byte += 64) {
                __builtin_prefetch(later + byte);
                __builtin_prefetch(value + byte);
            }
            Floats sums[QUERIES] = {};
            for (int64_t strip = 0; strip < num_strips; strip++) {
                const Pair part = load_pair(key + strip * STRIP);
                for (int q = 0; q < QUERIES; q++) {
                    const float* query = queries + q * dim + strip * STRIP;
                    sums[q] += part.one * load(query);
                    sums[q] += part.other * load(query + WIDTH);
                }
            }
            for (int q = 0; q < QUERIES; q++) products[q][i] = sums[q];
        }
        for (int q = 0; q < QUERIES; q++) store(scores + q * stride + column, sums_of(products[q]));
    }
}

// What is added to the scores of columns `column` and on, of which only those below `limit` are seen.
template <typename T>
inline Floats bias_at(const T* mask, int64_t column, int64_t limit) {
    if (column + WIDTH <= limit) return mask ? load_bias(mask + column) : (Floats){};
    T rest[WIDTH] = {};
    const int64_t left = std::max<int64_t>(0, limit - column);
    if (mask) std::memcpy(rest, mask + column, left * sizeof(T));
    Floats bias = load_bias(rest);
    for (int64_t i = left; i < WIDTH; i++) bias[i] = NOTHING;
    return bias;
}

// Scores plus mask -> their exponentials below the largest; 1 / their sum. `scores` is padded to whole vectors.
template <typename T>
float weigh(float* scores, const T* mask, int64_t limit, int64_t num_columns) {
    Floats most = spread(NOTHING);
    for (int64_t column = 0; column < num_columns; column += WIDTH) {
        Floats score = load(scores + column) + bias_at(mask, column, limit);
        store(scores + column, score);
        most = pick((Ints)(score > most), score, most);
    }
    Floats top = spread(largest(most));
    Floats total = {};
    for (int64_t column = 0; column < num_columns; column += WIDTH) {
        Floats weight = exponential(load(scores + column) - top);
        store(scores + column, weight);
        total += weight;
    }
    return 1.0f / sum(total);
}

// STRIPS strips of the values, mixed by weights (QUERIES, stride) and scaled, to out.
template <int QUERIES, int STRIPS, typename T>
void mix(const T* values, int64_t value_stride, int64_t num_columns, const float* weights, int64_t stride,
         const float* scales, T* const* out, int64_t at) {
    Pair sums[QUERIES][STRIPS] = {};
    for (int64_t column = 0; column < num_columns; column++) {
        for (int strip = 0; strip < STRIPS; strip++) {
            const Pair value = load_pair(values + column * value_stride + at + strip * STRIP);
            for (int q = 0; q < QUERIES; q++) {
                sums[q][strip].one += value.one * weights[q * stride + column];
                sums[q][strip].other += value.other * weights[q * stride + column];
            }
        }
    }
    for (int q = 0; q < QUERIES; q++)
        for (int strip = 0; strip < STRIPS; strip++) {
            const Pair sum = sums[q][strip];
            store_pair(out[q] + at + strip * STRIP, {sum.one * scales[q], sum.other * scales[q]});
        }
}

// One query: its place in its row's mask, if there is one, the columns that it may see at most, and where it goes.
template <typename T>
struct Place {
    const T* mask;
    int64_t limit;
    T* out;
};

// One tile of queries over one row's memory.
template <int QUERIES, typename T>
void attend(const Memory<T>& memory, const float* queries, int64_t dim, const Place<T>* places, float* scores,
            int64_t stride) {
    if (dim == 2 * STRIP) score<QUERIES, 2>(memory, queries, dim, scores, stride);
    else if (dim == 4 * STRIP) score<QUERIES, 4>(memory, queries, dim, scores, stride);
    else score<QUERIES, 0>(memory, queries, dim, scores, stride);
    float scales[QUERIES];
    T* out[QUERIES];
    for (int q = 0; q < QUERIES; q++) {
        scales[q] = weigh(scores + q * stride, places[q].mask, places[q].limit, memory.num_columns);
        out[q] = places[q].out;
    }
    int64_t at = 0;
    for (; at + 2 * STRIP <= dim; at += 2 * STRIP)
        mix<QUERIES, 2>(memory.values, memory.value_stride, memory.num_columns, scores, stride, scales, out, at);
    for (; at < dim; at += STRIP)
        mix<QUERIES, 1>(memory.values, memory.value_stride, memory.num_columns, scores, stride, scales, out, at);
}

template <typename T>
bool is_open(T bias);
template <>
bool is_open(float bias) {
    return bias != NOTHING;
}
template <>
bool is_open(uint16_t bias) {
    return bias != CLOSED;
}

// Columns up to the last that any of the nodes may see.
template <typename T>
int64_t seen(const T* mask, int64_t node_stride, int64_t num_nodes, int64_t window) {
    int64_t most = 1;
    for (int64_t node = 0; node < num_nodes; node++) {
        int64_t column = window;
        while (column > most && !is_open(mask[node * node_stride + column - 1])) column--;
        most = std::max(most, column);
    }
    return most;
}

// query (rows, heads * groups, nodes, dim), keys and values (rows, heads, window, dim), mask (rows, 1, nodes, window) or
// none for nodes that see the columns up to their own, out (rows, nodes, heads * groups, dim). Strides in numbers; the
// last axis of each has stride 1.
template <typename T>
void attend_rows(const T* query, const int64_t* query_stride, const T* keys, const int64_t* key_stride, const T* values,
                 const int64_t* value_stride, const T* mask, const int64_t* mask_stride, T* out, const int64_t* sizes,
                 float scaling, int num_threads) {
    const int64_t rows = sizes[0], heads = sizes[1], groups = sizes[2], nodes = sizes[3], dim = sizes[4];
    const int64_t window = sizes[5], padded = (window + WIDTH - 1) / WIDTH * WIDTH, num_queries = groups * nodes;
#pragma omp parallel num_threads(num_threads)
    {
        std::vector<float> queries(num_queries * dim), scores(TILE * padded);
        std::vector<Place<T>> places(num_queries);
#pragma omp for collapse(2) schedule(dynamic, 1)
        for (int64_t row = 0; row < rows; row++) {
            for (int64_t head = 0; head < heads; head++) {
                const T* own_mask = mask ? mask + row * mask_stride[0] : nullptr;
                Memory<T> memory = {keys + row * key_stride[0] + head * key_stride[1],
                                    values + row * value_stride[0] + head * value_stride[1], key_stride[2],
                                    value_stride[2], mask ? seen(own_mask, mask_stride[1], nodes, window) : window};
                for (int64_t q = 0; q < num_queries; q++) {
                    const int64_t whole = head * groups + q / nodes, node = q % nodes;
                    const T* from = query + row * query_stride[0] + whole * query_stride[1] + node * query_stride[2];
                    for (int64_t d = 0; d < dim; d += STRIP) {
                        const Pair part = load_pair(from + d);
                        store(&queries[q * dim + d], part.one * scaling);
                        store(&queries[q * dim + d + WIDTH], part.other * scaling);
                    }
                    places[q] = {mask ? own_mask + node * mask_stride[1] : nullptr, mask ? memory.num_columns : node + 1,
                                 out + ((row * nodes + node) * heads * groups + whole) * dim};
                }
                for (int64_t q = 0; q < num_queries;) {
                    auto run = [&](auto tile) {
                        constexpr int QUERIES = decltype(tile)::value;
                        Memory<T> part = memory;
                        part.num_columns = 0;
                        for (int i = 0; i < QUERIES; i++) part.num_columns = std::max(part.num_columns, places[q + i].limit);
                        attend<QUERIES>(part, &queries[q * dim], dim, &places[q], scores.data(), padded);
                        q += QUERIES;
                    };
                    const int64_t left = num_queries - q;
                    if (left >= TILE) run(std::integral_constant<int, TILE>());
                    else if (left >= 4) run(std::integral_constant<int, 4>());
                    else if (left >= 2) run(std::integral_constant<int, 2>());
                    else run(std::integral_constant<int, 1>());
                }
            }
        }
    }
}

// New entries (rows, heads, nodes, dim) into a memory's rows and columns (rows, nodes).
template <typename T>
void write_rows(const T* entries, T* memory, const int64_t* rows, const int64_t* columns, const int64_t* sizes,
                const int64_t* from, const int64_t* to, int num_threads) {
    const int64_t num_rows = sizes[0], heads = sizes[1], nodes = sizes[3], dim = sizes[4];
#pragma omp parallel for collapse(2) num_threads(num_threads) if (num_rows * heads * nodes * dim > PARALLEL_NUMBERS)
    for (int64_t row = 0; row < num_rows; row++)
        for (int64_t head = 0; head < heads; head++)
            for (int64_t node = 0; node < nodes; node++)
                std::memcpy(memory + rows[row] * to[0] + head * to[1] + columns[row * nodes + node] * to[2],
                            entries + row * from[0] + head * from[1] + node * from[2], dim * sizeof(T));
}

// Where each of some rows' nodes (rows, nodes) goes, its position, and what is added to its scores over a window.
// `visible` (rows, nodes, scratch) says which of the columns behind the committed ones a node sees.
template <typename T>
void place(const int64_t* lens, const int64_t* delta, const int64_t* depth, const bool* visible, const int64_t* sizes,
           const int64_t* strides, int64_t* columns, int64_t* positions, T* mask, T nothing) {
    const int64_t rows = sizes[0], nodes = sizes[1], scratch = sizes[2], offset = sizes[3], window = sizes[4];
    for (int64_t row = 0; row < rows; row++) {
        const int64_t committed = std::min(lens[row], window), end = std::min(lens[row] + scratch, window);
        for (int64_t node = 0; node < nodes; node++, mask += window) {
            *columns++ = lens[row] + offset + node;
            *positions++ = lens[row] + delta[row] + depth[row * strides[0] + node * strides[1]];
            const bool* own = visible + row * strides[2] + node * strides[3];
            std::fill(mask, mask + committed, T(0));
            for (int64_t column = committed; column < end; column++)
                mask[column] = own[(column - committed) * strides[4]] ? T(0) : nothing;
            std::fill(mask + end, mask + window, nothing);
        }
    }
}

// Strides of query, key, value, the memories of both, and the mask, each of its leading axes.
template <typename T>
void step(const T* query, const T* key, const T* value, T* keys, T* values, const int64_t* rows, const int64_t* columns,
          const T* mask, T* out, const int64_t* sizes, const int64_t* strides, float scaling, int num_threads) {
    const int64_t *of_key = strides + 3, *of_value = strides + 6, *of_keys = strides + 9, *of_values = strides + 12;
    write_rows(key, keys, rows, columns, sizes, of_key, of_keys, num_threads);
    write_rows(value, values, rows, columns, sizes, of_value, of_values, num_threads);
    if (mask)
        attend_rows<T>(query, strides, keys, of_keys, values, of_values, mask, strides + 15, out, sizes, scaling, num_threads);
    else
        attend_rows<T>(query, strides, key, of_key, value, of_value, nullptr, nullptr, out, sizes, scaling, num_threads);
}

}  // namespace

extern "C" void step_fp32(const float* query, const float* key, const float* value, float* keys, float* values,
                          const int64_t* rows, const int64_t* columns, const float* mask, float* out,
                          const int64_t* sizes, const int64_t* strides, float scaling, int num_threads) {
    step(query, key, value, keys, values, rows, columns, mask, out, sizes, strides, scaling, num_threads);
}

extern "C" void step_bf16(const uint16_t* query, const uint16_t* key, const uint16_t* value, uint16_t* keys,
                          uint16_t* values, const int64_t* rows, const int64_t* columns, const uint16_t* mask,
                          uint16_t* out, const int64_t* sizes, const int64_t* strides, float scaling, int num_threads) {
    step(query, key, value, keys, values, rows, columns, mask, out, sizes, strides, scaling, num_threads);
}

extern "C" void place_fp32(const int64_t* lens, const int64_t* delta, const int64_t* depth, const bool* visible,
                           const int64_t* sizes, const int64_t* strides, int64_t* columns, int64_t* positions,
                           float* mask) {
    place(lens, delta, depth, visible, sizes, strides, columns, positions, mask, NOTHING);
}

extern "C" void place_bf16(const int64_t* lens, const int64_t* delta, const int64_t* depth, const bool* visible,
                           const int64_t* sizes, const int64_t* strides, int64_t* columns, int64_t* positions,
                           uint16_t* mask) {
    place(lens, delta, depth, visible, sizes, strides, columns, positions, mask, CLOSED);
}
