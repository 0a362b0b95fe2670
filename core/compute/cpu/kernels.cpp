// The steps of a decoder layer between its matrix products, in float32, and paged attention.
//
// A result never depends on neighbours, on the number of threads or on where its data lies: each is the work of one
// thread, and every sum has eight lanes, a tail and an order that follow from its length alone.
#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <type_traits>

namespace {

constexpr int64_t kLanes = 8;
constexpr int64_t kShareElements = 1 << 14;  // elementwise work from which on waking a thread pays
constexpr int64_t kShareProducts = 1 << 19;  // the same for the products of attention
constexpr int64_t kTileTokens = 8;           // tokens of a prompt that read keys and values together
constexpr int64_t kTileScores = 1 << 16;     // scores of a tile: half of a usual second-level cache

enum Gate : int { kSilu = 0, kGeluTanh = 1 };

// e^x with a relative error below 2e-7: 2^n times a Taylor polynomial on [-ln 2 / 2, ln 2 / 2]. NaN stays NaN.
inline __m256 exponential(__m256 x) {
    const __m256 shift = _mm256_set1_ps(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer, in the low bits
    x = _mm256_min_ps(_mm256_set1_ps(88.0f), _mm256_max_ps(_mm256_set1_ps(-87.0f), x));
    const __m256 shifted = _mm256_add_ps(_mm256_mul_ps(x, _mm256_set1_ps(1.44269504f)), shift);
    const __m256 n = _mm256_sub_ps(shifted, shift);
    __m256 r = _mm256_fmadd_ps(n, _mm256_set1_ps(-0.693359375f), x);
    r = _mm256_fmadd_ps(n, _mm256_set1_ps(2.12194440e-4f), r);
    __m256 p = _mm256_set1_ps(1.0f / 5040);
    for (const float term : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f})
        p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(term));
    const __m256i bits = _mm256_slli_epi32(_mm256_castps_si256(shifted), 23);
    return _mm256_mul_ps(p, _mm256_castsi256_ps(_mm256_add_epi32(bits, _mm256_set1_epi32(127 << 23))));
}

inline float exponential(float x) { return _mm256_cvtss_f32(exponential(_mm256_set1_ps(x))); }

// work(x) for all `count`, eight at a time; the last ones stand among others that are thrown away.
template <typename Work>
inline void for_lanes(int64_t count, Work work) {
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes)
        work([i](const float* x) { return _mm256_loadu_ps(x + i); },
             [i](float* out, __m256 value) { _mm256_storeu_ps(out + i, value); });
    if (i == count) return;
    const __m256i kept = _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(count - i)),
                                            _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
    work([i, kept](const float* x) { return _mm256_maskload_ps(x + i, kept); },
         [i, kept](float* out, __m256 value) { _mm256_maskstore_ps(out + i, kept, value); });
}

inline float add_lanes(__m256 sums) {
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps(sums, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}

float dot(const float* a, const float* b, int64_t count) {
    __m256 even = _mm256_setzero_ps(), odd = _mm256_setzero_ps();
    int64_t i = 0;
    for (; i + 2 * kLanes <= count; i += 2 * kLanes) {
        even = _mm256_fmadd_ps(_mm256_loadu_ps(a + i), _mm256_loadu_ps(b + i), even);
        odd = _mm256_fmadd_ps(_mm256_loadu_ps(a + i + kLanes), _mm256_loadu_ps(b + i + kLanes), odd);
    }
    float sum = add_lanes(_mm256_add_ps(even, odd));
    for (; i < count; ++i) sum = std::fma(a[i], b[i], sum);
    return sum;
}

float add_up(const float* x, int64_t count) {
    __m256 sums = _mm256_setzero_ps();
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) sums = _mm256_add_ps(sums, _mm256_loadu_ps(x + i));
    float sum = add_lanes(sums);
    for (; i < count; ++i) sum += x[i];
    return sum;
}

void normalize(const float* x, const float* weight, float eps, int64_t width, float* out) {
    const float factor = 1.0f / std::sqrt(dot(x, x, width) / static_cast<float>(width) + eps);
    for (int64_t i = 0; i < width; ++i) out[i] = x[i] * factor * weight[i];
}

// One layer's cache: [blocks][2][block][kv_heads][dim], whose two outer steps are given.
struct Cache {
    float* data;
    int64_t block_step;
    int64_t value_step;
    int64_t block;
    int64_t kv_heads;
    int64_t dim;

    float* key(int64_t id, int64_t offset, int64_t head) const {
        return data + id * block_step + (offset * kv_heads + head) * dim;
    }
};

struct Scoring {
    float scale;
    int64_t window;      // keys a query sees; 0: all
    float softcap;       // 0: none
    const float* sinks;  // [heads] or null
};

// The sums of the eight lanes of four vectors, each added up as `add_lanes` does.
inline __m128 add_lanes(__m256 a, __m256 b, __m256 c, __m256 d) {
    const __m256 ab = _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
    const __m256 cd = _mm256_add_ps(_mm256_permute2f128_ps(c, d, 0x20), _mm256_permute2f128_ps(c, d, 0x31));
    const __m256 two = _mm256_add_ps(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xee));
    const __m256 one = _mm256_add_ps(_mm256_shuffle_ps(two, two, 0x88), _mm256_shuffle_ps(two, two, 0xdd));
    return _mm_unpacklo_ps(_mm256_castps256_ps128(one), _mm256_extractf128_ps(one, 1));
}

// Products of `Queries` queries and `Keys` keys that lie `step` apart, times scale: scores[q * count + k].
template <int Queries, int Keys>
inline void score(const float* const* queries, const float* keys, int64_t step, int64_t dim, float scale,
                  float* scores, int64_t count) {
    __m256 sums[Queries][4];
    for (int q = 0; q < Queries; ++q)
        for (int k = 0; k < 4; ++k) sums[q][k] = _mm256_setzero_ps();
    int64_t i = 0;
    for (; i + kLanes <= dim; i += kLanes)
        for (int k = 0; k < Keys; ++k) {
            const __m256 key = _mm256_loadu_ps(keys + k * step + i);
            for (int q = 0; q < Queries; ++q)
                sums[q][k] = _mm256_fmadd_ps(_mm256_loadu_ps(queries[q] + i), key, sums[q][k]);
        }
    for (int q = 0; q < Queries; ++q) {
        alignas(16) float found[4];
        _mm_store_ps(found, add_lanes(sums[q][0], sums[q][1], sums[q][2], sums[q][3]));
        for (int k = 0; k < Keys; ++k) {
            for (int64_t d = i; d < dim; ++d) found[k] = std::fma(queries[q][d], keys[k * step + d], found[k]);
            scores[q * count + k] = found[k] * scale;
        }
    }
}

template <int Queries>
void score_run(const float* const* queries, const float* keys, int64_t step, int64_t tokens, int64_t dim, float scale,
               float* scores, int64_t count) {
    int64_t t = 0;
    for (; t + 4 <= tokens; t += 4)
        score<Queries, 4>(queries, keys + t * step, step, dim, scale, scores + t, count);
    for (; t < tokens; ++t) score<Queries, 1>(queries, keys + t * step, step, dim, scale, scores + t, count);
}

// mixed[q] += the sum of `tokens` values that lie `step` apart, each with its weight [q * count + t], in their order.
template <int Queries>
void mix_run(const float* weights, int64_t count, const float* values, int64_t step, int64_t tokens, int64_t dim,
             float* const* mixed) {
    int64_t d = 0;
    for (; d + 4 * kLanes <= dim; d += 4 * kLanes) {
        __m256 sums[Queries][4];
        for (int q = 0; q < Queries; ++q)
            for (int k = 0; k < 4; ++k) sums[q][k] = _mm256_loadu_ps(mixed[q] + d + k * kLanes);
        for (int64_t t = 0; t < tokens; ++t) {
            __m256 weight[Queries];
            for (int q = 0; q < Queries; ++q) weight[q] = _mm256_set1_ps(weights[q * count + t]);
            for (int k = 0; k < 4; ++k) {
                const __m256 value = _mm256_loadu_ps(values + t * step + d + k * kLanes);
                for (int q = 0; q < Queries; ++q) sums[q][k] = _mm256_fmadd_ps(weight[q], value, sums[q][k]);
            }
        }
        for (int q = 0; q < Queries; ++q)
            for (int k = 0; k < 4; ++k) _mm256_storeu_ps(mixed[q] + d + k * kLanes, sums[q][k]);
    }
    for (int q = 0; q < Queries; ++q)
        for (int64_t e = d; e < dim; ++e)
            for (int64_t t = 0; t < tokens; ++t)
                mixed[q][e] = std::fma(weights[q * count + t], values[t * step + e], mixed[q][e]);
}

// Scores become weights, in place.
void weigh(float* row, int64_t count, const Scoring& scoring, int64_t head) {
    if (scoring.softcap != 0.0f)
        for (int64_t i = 0; i < count; ++i) row[i] = scoring.softcap * std::tanh(row[i] / scoring.softcap);
    float most = scoring.sinks ? scoring.sinks[head] : -std::numeric_limits<float>::infinity();
    __m256 largest = _mm256_set1_ps(most);
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) largest = _mm256_max_ps(_mm256_loadu_ps(row + i), largest);
    alignas(32) float lanes[kLanes];
    _mm256_store_ps(lanes, largest);
    for (float lane : lanes) most = lane > most ? lane : most;
    for (; i < count; ++i) most = row[i] > most ? row[i] : most;
    const __m256 peak = _mm256_set1_ps(most);
    for_lanes(count, [&](auto load, auto store) { store(row, exponential(_mm256_sub_ps(load(row), peak))); });
    const float total = add_up(row, count) + (scoring.sinks ? exponential(scoring.sinks[head] - most) : 0.0f);
    for (i = 0; i < count; ++i) row[i] /= total;
}

// work(how many, from which) for a group's heads, up to three at a time: that many fill the sixteen registers.
template <typename Work>
inline void for_heads(int64_t group, Work work) {
    for (int64_t g = 0; g < group;) {
        const int64_t left = group - g;
        if (left >= 3 && left != 4)
            work(std::integral_constant<int, 3>(), g), g += 3;
        else if (left >= 2)
            work(std::integral_constant<int, 2>(), g), g += 2;
        else
            work(std::integral_constant<int, 1>(), g), g += 1;
    }
}

// Consecutive tokens of one row, the first of which sees keys up to `length`, and the heads of one kv head's group: what
// they read is read once for all. Token i's queries begin at query + i * heads * dim; out likewise. `scores` has room
// for `count` of each. Nothing that a query's result is made of depends on how many tokens are here.
void attend_tile(const float* query, int64_t tokens, int64_t heads, int64_t group, const Cache& cache,
                 const int64_t* table, int64_t head, int64_t length, const Scoring& scoring, float* scores,
                 int64_t count, float* out) {
    const int64_t dim = cache.dim, step = cache.kv_heads * dim, end = length + tokens - 1;
    const auto first_of = [&](int64_t token) {
        return scoring.window ? std::max<int64_t>(0, length + token - scoring.window) : 0;
    };
    const auto visit = [&](bool values, auto work) {  // what each token sees of each block
        for (int64_t at = first_of(0); at < end;) {
            const int64_t offset = at % cache.block;
            const int64_t stop = std::min(end, at + cache.block - offset);
            const float* data = cache.key(table[at / cache.block], offset, head) + (values ? cache.value_step : 0);
            for (int64_t i = 0; i < tokens; ++i) {
                const int64_t first = std::max(at, first_of(i)), seen = std::min(stop, length + i) - first;
                if (seen > 0) work(i, first - first_of(i), seen, data + (first - at) * step);
            }
            at = stop;
        }
    };
    visit(false, [&](int64_t i, int64_t place, int64_t seen, const float* keys) {
        for_heads(group, [&](auto heads_here, int64_t g) {
            const float* queries[heads_here];
            for (int64_t q = 0; q < heads_here; ++q) queries[q] = query + (i * heads + g + q) * dim;
            float* row = scores + (i * group + g) * count + place;
            score_run<heads_here>(queries, keys, step, seen, dim, scoring.scale, row, count);
        });
    });
    for (int64_t i = 0; i < tokens; ++i)
        for (int64_t g = 0; g < group; ++g) {
            weigh(scores + (i * group + g) * count, length + i - first_of(i), scoring, head * group + g);
            std::memset(out + (i * heads + g) * dim, 0, dim * sizeof(float));
        }
    visit(true, [&](int64_t i, int64_t place, int64_t seen, const float* values) {
        for_heads(group, [&](auto heads_here, int64_t g) {
            float* mixed[heads_here];
            for (int64_t q = 0; q < heads_here; ++q) mixed[q] = out + (i * heads + g + q) * dim;
            mix_run<heads_here>(scores + (i * group + g) * count + place, count, values, step, seen, dim, mixed);
        });
    });
}

void rotate_head(const float* x, const float* cos, const float* sin, int64_t dim, float* out) {
    const int64_t half = dim / 2;
    for (int64_t i = 0; i < half; ++i) {
        out[i] = x[i] * cos[i] - x[i + half] * sin[i];
        out[i + half] = x[i + half] * cos[i + half] + x[i] * sin[i + half];
    }
}

}  // namespace

// out = norm(x + residual) * weight, and residual += x. [rows][width]; residual may be null, then out = norm(x).
extern "C" void polymux_add_norm(const float* x, float* residual, const float* weight, float eps, int64_t rows,
                                 int64_t width, float* out, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows > 1 && rows * width >= kShareElements)
    for (int64_t r = 0; r < rows; ++r) {
        const float* row = x + r * width;
        if (residual) {
            float* sum = residual + r * width;
            for (int64_t i = 0; i < width; ++i) sum[i] += row[i];
            row = sum;
        }
        normalize(row, weight, eps, width, out + r * width);
    }
}

// out [rows][width] = act(gate) * up, from gate_up [rows][2 * width].
extern "C" void polymux_gate(const float* gate_up, int kind, int64_t rows, int64_t width, float* out, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows > 1 && rows * width >= kShareElements)
    for (int64_t r = 0; r < rows; ++r) {
        const float* gate = gate_up + r * 2 * width;
        const float* up = gate + width;
        float* result = out + r * width;
        for_lanes(width, [&](auto load, auto store) {
            const __m256 x = load(gate), one = _mm256_set1_ps(1.0f);
            __m256 exponent = x;
            if (kind == kGeluTanh) {  // x (1 + tanh u) / 2 = x / (1 + e^(-2u))
                const __m256 cube = _mm256_mul_ps(_mm256_mul_ps(_mm256_mul_ps(_mm256_set1_ps(0.044715f), x), x), x);
                exponent = _mm256_mul_ps(_mm256_set1_ps(2.0f * 0.7978845608f), _mm256_add_ps(x, cube));
            }
            const __m256 below = _mm256_add_ps(one, exponential(_mm256_sub_ps(_mm256_setzero_ps(), exponent)));
            store(result, _mm256_mul_ps(_mm256_div_ps(x, below), load(up)));
        });
    }
}

// out += (x down') up': what an adapter adds to a linear layer. x [rows][inputs], down [rank][inputs], up [outputs][rank];
// rows of out lie `step` apart. Returns 0, or 1 if memory ran out.
extern "C" int polymux_add_low_rank(const float* x, int64_t rows, int64_t inputs, const float* down, int64_t rank,
                                    const float* up, int64_t outputs, float* out, int64_t step, int threads) {
    int failed = 0;
#pragma omp parallel num_threads(threads) if (threads > 1 && rows > 1 && rows * rank * inputs >= kShareProducts)
    {
        const std::unique_ptr<float[]> inner(new (std::nothrow) float[rank]);
        if (!inner) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp for nowait
        for (int64_t r = 0; r < rows; ++r) {
            if (!inner) continue;
            for (int64_t k = 0; k < rank; ++k) inner[k] = dot(x + r * inputs, down + k * inputs, inputs);
            for (int64_t o = 0; o < outputs; ++o) out[r * step + o] += dot(inner.get(), up + o * rank, rank);
        }
    }
    return failed;
}

// From a merged projection [tokens][heads + 2 * kv_heads][dim]: rotated queries into query [tokens][heads][dim], rotated
// keys and values into the cache at `positions`; `turns` are the rows of cos and sin. Norms of queries and keys come first where their weights are not null.
extern "C" void polymux_rotate_write(const float* merged, int64_t tokens, int64_t heads, const float* query_norm,
                                     float query_eps, const float* key_norm, float key_eps, const float* cos,
                                     const float* sin, const int64_t* turns, const int64_t* positions, float* data,
                                     int64_t block_step, int64_t value_step, int64_t block, int64_t kv_heads,
                                     int64_t dim, const int64_t* tables, int64_t columns, const int64_t* slots,
                                     float* query, int threads) {
    const Cache cache{data, block_step, value_step, block, kv_heads, dim};
    const int64_t width = (heads + 2 * kv_heads) * dim;
#pragma omp parallel for num_threads(threads) if (threads > 1 && tokens > 1 && tokens * width >= kShareElements)
    for (int64_t t = 0; t < tokens; ++t) {
        float normed[256];
        const float* token = merged + t * width;
        const int64_t position = positions[t];
        const float* row_cos = cos + turns[t] * dim;
        const float* row_sin = sin + turns[t] * dim;
        for (int64_t h = 0; h < heads; ++h) {
            const float* head = token + h * dim;
            if (query_norm) normalize(head, query_norm, query_eps, dim, normed), head = normed;
            rotate_head(head, row_cos, row_sin, dim, query + (t * heads + h) * dim);
        }
        const int64_t id = tables[slots[t] * columns + position / block];
        for (int64_t h = 0; h < kv_heads; ++h) {
            const float* head = token + (heads + h) * dim;
            float* key = cache.key(id, position % block, h);
            if (key_norm) normalize(head, key_norm, key_eps, dim, normed), head = normed;
            rotate_head(head, row_cos, row_sin, dim, key);
            std::memcpy(key + value_step, token + (heads + kv_heads + h) * dim, dim * sizeof(float));
        }
    }
}

// Queries [rows][heads][dim], each against the first `lengths` tokens that its slot has in the cache; out like query.
// Returns 0, or 1 if memory ran out.
extern "C" int polymux_attend(const float* query, int64_t rows, int64_t heads, const float* data, int64_t block_step,
                              int64_t value_step, int64_t block, int64_t kv_heads, int64_t dim, const int64_t* tables,
                              int64_t columns, const int64_t* slots, const int64_t* lengths, float scale,
                              int64_t window, float softcap, const float* sinks, float* out, int threads) {
    const Cache cache{const_cast<float*>(data), block_step, value_step, block, kv_heads, dim};
    const Scoring scoring{scale, window, softcap, sinks};
    const int64_t group = heads / kv_heads;
    int64_t longest = 0, products = 0;
    for (int64_t r = 0; r < rows; ++r) {
        const int64_t seen = window ? std::min(window, lengths[r]) : lengths[r];
        longest = std::max(longest, seen);
        products += seen * heads * dim * 2;
    }
    const int64_t most = std::clamp<int64_t>(kTileScores / std::max<int64_t>(1, group * longest), 1, kTileTokens);
    const std::unique_ptr<int64_t[]> starts(new (std::nothrow) int64_t[rows + 1]);
    if (!starts) return 1;
    int64_t tiles = 0;
    for (int64_t r = 0; r < rows; ++r)
        if (r == 0 || slots[r] != slots[r - 1] || lengths[r] != lengths[r - 1] + 1 || r - starts[tiles - 1] == most)
            starts[tiles++] = r;
    starts[tiles] = rows;
    int failed = 0;
#pragma omp parallel num_threads(threads) if (threads > 1 && products >= kShareProducts)
    {
        const std::unique_ptr<float[]> scores(new (std::nothrow) float[most * group * longest]);
        if (!scores) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp for schedule(dynamic) nowait
        for (int64_t piece = 0; piece < tiles * kv_heads; ++piece) {
            if (!scores) continue;
            const int64_t r = starts[piece / kv_heads], head = piece % kv_heads;
            const int64_t at = (r * heads + head * group) * dim;
            attend_tile(query + at, starts[piece / kv_heads + 1] - r, heads, group, cache, tables + slots[r] * columns,
                        head, lengths[r], scoring, scores.get(), longest, out + at);
        }
    }
    return failed;
}
