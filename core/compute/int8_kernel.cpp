// Linear layer with int8 weights and int16 activations, accumulated exactly in int32.
//
// Weights arrive packed by Int8Kernel.pack as panels [panels][pairs][16][2]: a panel holds
// 16 output columns, and two consecutive inputs of one column lie side by side, as vpmaddwd wants them.
// Integer sums do not depend on their order, so a row's result cannot depend on its neighbours.
#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <new>

namespace {

constexpr int64_t kPanelColumns = 16;
constexpr int64_t kTileRows = 6;    // 12 accumulators, 2 weights, 1 activation, 1 product: 16 registers
constexpr int64_t kBlockRows = 96;  // quantized rows that stay in the L2 cache while the panels pass by
constexpr int64_t kSharesPerThread = 4;

struct Layer {
    const int8_t* panels;
    const float* scales;  // [columns]
    const float* bias;    // [columns] or null
    int64_t columns;
    int64_t inputs;
    int64_t pairs;
    float limit;  // largest activation code for which no int32 sum can overflow
};

// Returns the row's scale, NaN if the row holds a value that is not finite.
float quantize_row(const float* row, const Layer& layer, int16_t* codes) {
    const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
    // Magnitudes compare as integers, in which order infinities and NaN come last and so are kept.
    __m256i largest = _mm256_setzero_si256();
    int64_t k = 0;
    for (; k + 8 <= layer.inputs; k += 8) {
        const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row + k));
        largest = _mm256_max_epi32(largest, _mm256_and_si256(bits, magnitude));
    }
    alignas(32) int32_t lanes[8];
    _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), largest);
    int32_t top = 0;
    for (int32_t lane : lanes) top = lane > top ? lane : top;
    for (; k < layer.inputs; ++k) {
        int32_t bits;
        std::memcpy(&bits, row + k, sizeof bits);
        bits &= 0x7fffffff;
        top = bits > top ? bits : top;
    }
    float peak;
    std::memcpy(&peak, &top, sizeof peak);
    const int64_t padded = layer.pairs * 2;
    const float scale = peak / layer.limit;
    if (!std::isfinite(peak) || scale < std::numeric_limits<float>::min()) {
        std::memset(codes, 0, padded * sizeof(int16_t));
        return std::isfinite(peak) ? 0.0f : std::numeric_limits<float>::quiet_NaN();
    }
    const __m256 divisor = _mm256_set1_ps(scale);
    for (k = 0; k + 16 <= layer.inputs; k += 16) {
        const __m256i low = _mm256_cvtps_epi32(_mm256_div_ps(_mm256_loadu_ps(row + k), divisor));
        const __m256i high = _mm256_cvtps_epi32(_mm256_div_ps(_mm256_loadu_ps(row + k + 8), divisor));
        const __m256i packed = _mm256_permute4x64_epi64(_mm256_packs_epi32(low, high), 0xD8);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes + k), packed);
    }
    for (; k < layer.inputs; ++k) codes[k] = static_cast<int16_t>(std::nearbyint(row[k] / scale));
    for (; k < padded; ++k) codes[k] = 0;
    return scale;
}

inline __m256i widen(const int8_t* weights) {
    return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(weights)));
}

void store(__m256i sums, float row_scale, const Layer& layer, int64_t column, float* out) {
    alignas(32) float values[8];
    const int64_t count = layer.columns - column;
    const __m256 scaled = _mm256_mul_ps(_mm256_cvtepi32_ps(sums), _mm256_set1_ps(row_scale));
    if (count >= 8) {
        __m256 result = _mm256_mul_ps(scaled, _mm256_loadu_ps(layer.scales + column));
        if (layer.bias) result = _mm256_add_ps(result, _mm256_loadu_ps(layer.bias + column));
        _mm256_storeu_ps(out + column, result);
        return;
    }
    _mm256_store_ps(values, scaled);
    for (int64_t i = 0; i < count; ++i) {
        const float result = values[i] * layer.scales[column + i];
        out[column + i] = layer.bias ? result + layer.bias[column + i] : result;
    }
}

template <int Rows>
void multiply_tile(const int16_t* codes, const float* row_scales, const Layer& layer, int64_t panel, float* out) {
    const int64_t stride = layer.pairs * 2;
    const int8_t* weights = layer.panels + panel * layer.pairs * kPanelColumns * 2;
    __m256i left[Rows], right[Rows];
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) left[r] = right[r] = _mm256_setzero_si256();
    for (int64_t p = 0; p < layer.pairs; ++p) {
        const __m256i weights_left = widen(weights);
        const __m256i weights_right = widen(weights + kPanelColumns);
        weights += kPanelColumns * 2;
#pragma GCC unroll 8
        for (int r = 0; r < Rows; ++r) {
            int32_t pair;
            std::memcpy(&pair, codes + r * stride + p * 2, sizeof pair);
            const __m256i inputs = _mm256_set1_epi32(pair);
            left[r] = _mm256_add_epi32(left[r], _mm256_madd_epi16(weights_left, inputs));
            right[r] = _mm256_add_epi32(right[r], _mm256_madd_epi16(weights_right, inputs));
        }
    }
    const int64_t column = panel * kPanelColumns;
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
        store(left[r], row_scales[r], layer, column, out + r * layer.columns);
        store(right[r], row_scales[r], layer, column + 8, out + r * layer.columns);
    }
}

using Tile = void (*)(const int16_t*, const float*, const Layer&, int64_t, float*);
constexpr Tile kTiles[kTileRows] = {multiply_tile<1>, multiply_tile<2>, multiply_tile<3>,
                                    multiply_tile<4>, multiply_tile<5>, multiply_tile<6>};

}  // namespace

// x [rows, inputs] and out [rows, columns] are contiguous float32. Returns 0, or 1 if memory ran out.
//
// Threads share out pieces: some panels for one block of rows. A thread quantizes the rows of a block for itself: that
// is little work and spares a barrier, at which everyone would wait for a thread that has lost its core.
extern "C" int polymux_int8_linear(const float* x, int64_t rows, const int8_t* panels, const float* scales,
                                   const float* bias, int64_t columns, int64_t inputs, float limit, float* out,
                                   int threads) {
    const Layer layer{panels, scales, bias, columns, inputs, (inputs + 1) / 2, limit};
    const int64_t stride = layer.pairs * 2;
    const int64_t panel_count = (columns + kPanelColumns - 1) / kPanelColumns;
    const int64_t blocks = (rows + kBlockRows - 1) / kBlockRows;
    const int64_t shares = std::min<int64_t>(panel_count, threads * kSharesPerThread);
    int failed = 0;
#pragma omp parallel num_threads(threads)
    {
        const std::unique_ptr<int16_t[]> codes(new (std::nothrow) int16_t[std::min(rows, kBlockRows) * stride]);
        float row_scales[kBlockRows];
        int64_t held = -1;
        if (!codes) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp for schedule(dynamic) nowait
        for (int64_t piece = 0; piece < blocks * shares; ++piece) {
            if (!codes) continue;
            const int64_t first = piece / shares * kBlockRows;
            const int64_t share = piece % shares;
            const int64_t count = std::min(kBlockRows, rows - first);
            if (held != first) {
                for (int64_t r = 0; r < count; ++r)
                    row_scales[r] = quantize_row(x + (first + r) * inputs, layer, codes.get() + r * stride);
                held = first;
            }
            for (int64_t panel = panel_count * share / shares; panel < panel_count * (share + 1) / shares; ++panel)
                for (int64_t r = 0; r < count; r += kTileRows) {
                    const int64_t tile = std::min(kTileRows, count - r);
                    kTiles[tile - 1](codes.get() + r * stride, row_scales + r, layer, panel,
                                     out + (first + r) * columns);
                }
        }
    }
    return failed;
}
