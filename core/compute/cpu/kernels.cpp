// The steps of a decoder layer between its matrix products, in float32, and paged attention of single queries.
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

namespace {

constexpr int64_t kLanes = 8;
constexpr int64_t kShareElements = 1 << 14;  // elementwise work from which on waking a thread pays
constexpr int64_t kShareProducts = 1 << 19;  // the same for the products of attention

enum Gate : int { kSilu = 0, kGeluTanh = 1 };

// e^x with a relative error below 2e-7: 2^n times a Taylor polynomial on [-ln 2 / 2, ln 2 / 2]. NaN stays NaN.
inline float exponential(float x) {
    constexpr float kShift = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, found in the low bits
    x = x < -87.0f ? -87.0f : x;
    x = x > 88.0f ? 88.0f : x;
    const float shifted = x * 1.44269504f + kShift;
    const float n = shifted - kShift;
    const float r = std::fma(n, 2.12194440e-4f, std::fma(n, -0.693359375f, x));
    float p = 1.0f / 5040;
    p = std::fma(p, r, 1.0f / 720);
    p = std::fma(p, r, 1.0f / 120);
    p = std::fma(p, r, 1.0f / 24);
    p = std::fma(p, r, 1.0f / 6);
    p = std::fma(p, r, 0.5f);
    p = std::fma(p, r, 1.0f);
    p = std::fma(p, r, 1.0f);
    uint32_t bits;
    std::memcpy(&bits, &shifted, sizeof bits);
    bits = (bits << 23) + (127u << 23);
    float power;
    std::memcpy(&power, &bits, sizeof power);
    return p * power;
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

// Keys [first, length) of one row and kv head against the `group` queries that share it. `scores` is [group][count].
void attend_group(const float* query, int64_t group, const Cache& cache, const int64_t* table, int64_t head,
                  int64_t first, int64_t length, const Scoring& scoring, float* scores, float* out) {
    const int64_t dim = cache.dim, count = length - first;
    const int64_t step = cache.kv_heads * dim;
    for (int64_t at = first; at < length;) {
        const int64_t offset = at % cache.block;
        const int64_t end = std::min(length, at + cache.block - offset);
        const float* key = cache.key(table[at / cache.block], offset, head);
        for (; at < end; ++at, key += step)
            for (int64_t g = 0; g < group; ++g)
                scores[g * count + at - first] = dot(query + g * dim, key, dim) * scoring.scale;
    }
    for (int64_t g = 0; g < group; ++g) {
        float* row = scores + g * count;
        if (scoring.softcap != 0.0f)
            for (int64_t i = 0; i < count; ++i) row[i] = scoring.softcap * std::tanh(row[i] / scoring.softcap);
        const float sink = scoring.sinks ? scoring.sinks[head * group + g] : -std::numeric_limits<float>::infinity();
        float most = sink;
        for (int64_t i = 0; i < count; ++i) most = row[i] > most ? row[i] : most;
        for (int64_t i = 0; i < count; ++i) row[i] = exponential(row[i] - most);
        const float total = add_up(row, count) + (scoring.sinks ? exponential(sink - most) : 0.0f);
        for (int64_t i = 0; i < count; ++i) row[i] /= total;
        std::memset(out + g * dim, 0, dim * sizeof(float));
    }
    // block by block, so that values come from the nearest cache for all queries; the order of each sum stays
    for (int64_t at = first; at < length;) {
        const int64_t offset = at % cache.block;
        const int64_t tokens = std::min(length - at, cache.block - offset);
        const float* values = cache.key(table[at / cache.block], offset, head) + cache.value_step;
        for (int64_t g = 0; g < group; ++g) {
            const float* weights = scores + g * count + at - first;
            float* mixed = out + g * dim;
            int64_t d = 0;
            for (; d + 4 * kLanes <= dim; d += 4 * kLanes) {
                __m256 sums[4];
                for (int k = 0; k < 4; ++k) sums[k] = _mm256_loadu_ps(mixed + d + k * kLanes);
                for (int64_t t = 0; t < tokens; ++t) {
                    const __m256 weight = _mm256_set1_ps(weights[t]);
                    for (int k = 0; k < 4; ++k)
                        sums[k] = _mm256_fmadd_ps(weight, _mm256_loadu_ps(values + t * step + d + k * kLanes), sums[k]);
                }
                for (int k = 0; k < 4; ++k) _mm256_storeu_ps(mixed + d + k * kLanes, sums[k]);
            }
            for (; d < dim; ++d)
                for (int64_t t = 0; t < tokens; ++t) mixed[d] = std::fma(weights[t], values[t * step + d], mixed[d]);
        }
        at += tokens;
    }
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
        if (kind == kSilu) {
            for (int64_t i = 0; i < width; ++i) result[i] = gate[i] / (1.0f + exponential(-gate[i])) * up[i];
        } else {
            for (int64_t i = 0; i < width; ++i) {
                const float x = gate[i];
                // x (1 + tanh u) / 2 = x / (1 + e^(-2u))
                const float u = 0.7978845608f * (x + 0.044715f * x * x * x);
                result[i] = x / (1.0f + exponential(-2.0f * u)) * up[i];
            }
        }
    }
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

// One query per row, [rows][heads][dim], against all the row has in the cache; out like query. Returns 0, or 1 if
// memory ran out.
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
    int failed = 0;
#pragma omp parallel num_threads(threads) if (threads > 1 && products >= kShareProducts)
    {
        const std::unique_ptr<float[]> scores(new (std::nothrow) float[group * longest]);
        if (!scores) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp for schedule(dynamic) nowait
        for (int64_t piece = 0; piece < rows * kv_heads; ++piece) {
            if (!scores) continue;
            const int64_t r = piece / kv_heads, head = piece % kv_heads;
            const int64_t length = lengths[r];
            const int64_t first = window ? std::max<int64_t>(0, length - window) : 0;
            const int64_t at = (r * heads + head * group) * dim;
            attend_group(query + at, group, cache, tables + slots[r] * columns, head, first, length, scoring,
                         scores.get(), out + at);
        }
    }
    return failed;
}
