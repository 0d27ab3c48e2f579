// CPU attention of a few nodes per row over rows of different lengths. Built by `models.backends.cpu.attention`, after
// `vectors.h`.
//
// Each pair of row and key-value head is one task. It reads keys and values once, up to the last unmasked position, for
// all queries. Sums are in fp32 over positions in ascending order, independent of window, other rows and node count.

namespace {

constexpr int TILE = 6;           // queries with sums in registers at a time
constexpr uint16_t NEG_INF_BF16 = 0xff80;

// The sums of sixteen vectors in one vector. Each round adds halves of two vectors.
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

// The KV cache of one row and key-value head, up to the last position that any node reads.
template <typename T>
struct KvCache {
    const T* keys;
    const T* values;
    int64_t key_stride, value_stride;
    int64_t num_columns;
};

// Dot products of QUERIES queries (QUERIES, dim) with all keys, into scores (QUERIES, stride). STRIPS is dim / STRIP if
// known at compile time, else 0.
template <int QUERIES, int STRIPS, typename T>
void score(const KvCache<T>& memory, const float* queries, int64_t dim, float* scores, int64_t stride) {
    const int64_t num_strips = STRIPS ? STRIPS : dim / STRIP;
    for (int64_t column = 0; column < memory.num_columns; column += WIDTH) {
        const int num_columns = int(std::min<int64_t>(WIDTH, memory.num_columns - column));
        Floats products[QUERIES][WIDTH];
        for (int i = 0; i < WIDTH; i++) {
            // Positions after the last one repeat it; the mask excludes them later.
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

// The bias of WIDTH scores from `column`; positions from `limit` on get -inf.
template <typename T>
inline Floats bias_at(const T* mask, int64_t column, int64_t limit) {
    if (column + WIDTH <= limit) return mask ? load_bias(mask + column) : (Floats){};
    T rest[WIDTH] = {};
    const int64_t left = std::max<int64_t>(0, limit - column);
    if (mask) std::memcpy(rest, mask + column, left * sizeof(T));
    Floats bias = load_bias(rest);
    for (int64_t i = left; i < WIDTH; i++) bias[i] = NEG_INF;
    return bias;
}

// Adds the mask and replaces scores by exp(score - max); returns 1 / their sum. `scores` is padded to whole vectors.
template <typename T>
float softmax_weights(float* scores, const T* mask, int64_t limit, int64_t num_columns) {
    Floats most = spread(NEG_INF);
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

// Weighted sum of STRIPS strips of the values by weights (QUERIES, stride), scaled, into `out`.
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

// One query: its row of the mask (or null), its position limit, and its output.
template <typename T>
struct Query {
    const T* mask;
    int64_t limit;
    T* out;
};

// One tile of queries over the KV cache of one row.
template <int QUERIES, typename T>
void attend(const KvCache<T>& memory, const float* queries, int64_t dim, const Query<T>* places, float* scores,
            int64_t stride) {
    if (dim == 2 * STRIP) score<QUERIES, 2>(memory, queries, dim, scores, stride);
    else if (dim == 4 * STRIP) score<QUERIES, 4>(memory, queries, dim, scores, stride);
    else score<QUERIES, 0>(memory, queries, dim, scores, stride);
    float scales[QUERIES];
    T* out[QUERIES];
    for (int q = 0; q < QUERIES; q++) {
        scales[q] = softmax_weights(scores + q * stride, places[q].mask, places[q].limit, memory.num_columns);
        out[q] = places[q].out;
    }
    int64_t at = 0;
    for (; at + 2 * STRIP <= dim; at += 2 * STRIP)
        mix<QUERIES, 2>(memory.values, memory.value_stride, memory.num_columns, scores, stride, scales, out, at);
    for (; at < dim; at += STRIP)
        mix<QUERIES, 1>(memory.values, memory.value_stride, memory.num_columns, scores, stride, scales, out, at);
}

template <typename T>
bool is_visible(T bias);
template <>
bool is_visible(float bias) {
    return bias != NEG_INF;
}
template <>
bool is_visible(uint16_t bias) {
    return bias != NEG_INF_BF16;
}

// Number of positions up to the last one that any node reads.
template <typename T>
int64_t visible_length(const T* mask, int64_t node_stride, int64_t num_nodes, int64_t window) {
    int64_t most = 1;
    for (int64_t node = 0; node < num_nodes; node++) {
        int64_t column = window;
        while (column > most && !is_visible(mask[node * node_stride + column - 1])) column--;
        most = std::max(most, column);
    }
    return most;
}

// query (rows, heads * groups, nodes, dim), keys and values (rows, heads, window, dim), mask (rows, 1, nodes, window) or
// null for causal attention over the nodes, out (rows, nodes, heads * groups, dim). Strides count elements; the last
// axis of each has stride 1.
template <typename T>
void attend_rows(const T* query, const int64_t* query_stride, const T* keys, const int64_t* key_stride, const T* values,
                 const int64_t* value_stride, const T* mask, const int64_t* mask_stride, T* out, const int64_t* sizes,
                 float scaling, int num_threads) {
    const int64_t rows = sizes[0], heads = sizes[1], groups = sizes[2], nodes = sizes[3], dim = sizes[4];
    const int64_t window = sizes[5], padded = (window + WIDTH - 1) / WIDTH * WIDTH, num_queries = groups * nodes;
#pragma omp parallel num_threads(num_threads)
    {
        std::vector<float> queries(num_queries * dim), scores(TILE * padded);
        std::vector<Query<T>> places(num_queries);
#pragma omp for collapse(2) schedule(dynamic, 1)
        for (int64_t row = 0; row < rows; row++) {
            for (int64_t head = 0; head < heads; head++) {
                const T* row_mask = mask ? mask + row * mask_stride[0] : nullptr;
                KvCache<T> memory = {keys + row * key_stride[0] + head * key_stride[1],
                                    values + row * value_stride[0] + head * value_stride[1], key_stride[2],
                                    value_stride[2], mask ? visible_length(row_mask, mask_stride[1], nodes, window) : window};
                for (int64_t q = 0; q < num_queries; q++) {
                    const int64_t whole = head * groups + q / nodes, node = q % nodes;
                    const T* from = query + row * query_stride[0] + whole * query_stride[1] + node * query_stride[2];
                    for (int64_t d = 0; d < dim; d += STRIP) {
                        const Pair part = load_pair(from + d);
                        store(&queries[q * dim + d], part.one * scaling);
                        store(&queries[q * dim + d + WIDTH], part.other * scaling);
                    }
                    places[q] = {mask ? row_mask + node * mask_stride[1] : nullptr, mask ? memory.num_columns : node + 1,
                                 out + ((row * nodes + node) * heads * groups + whole) * dim};
                }
                for (int64_t q = 0; q < num_queries;) {
                    auto run = [&](auto tile) {
                        constexpr int QUERIES = decltype(tile)::value;
                        KvCache<T> part = memory;
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

// Copies new entries (rows, heads, nodes, dim) to the cache rows and positions (rows, nodes).
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

// Writes new keys and values, then attends. `strides` holds those of query, key, value, both caches and the mask.
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
