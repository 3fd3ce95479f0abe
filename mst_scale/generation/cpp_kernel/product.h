// Multiplies few tokens with a matrix of which only the nonzero values are in memory: y = x Wᵀ + bias.
//
// A row of W is its values in the order of columns, a byte for the column of each, counted from the first of its chunk
// of 64 or 256, and a 16-bit count per chunk: 5 bytes per weight in float32, 3 in bfloat16. Decoding text reads every weight
// once per token, so these bytes are the time. A row's bytes become column numbers in a buffer that stays in the
// first-level cache. One token is then a dot product over gathered inputs; several tokens are stored as
// (columns, tokens), so that each weight is multiplied with a vector of tokens. Sums are in float32, in the order of
// columns (one token: in as many partial sums as a vector has lanes); they do not depend on the number of threads.
#pragma once
#include "scratch.h"
#include "simd.h"

constexpr i64 SLACK = 64;   // column numbers are decoded 16 at a time, past the end of a row
constexpr i64 NARROW = 64;  // columns of a chunk whose inputs fit four vectors

extern "C" {
struct Call {
    const void* values;     // entries
    const uint8_t* column;  // entries + SLACK
    const uint16_t* count;  // rows × chunks of `chunk` columns: 64 or 256
    const i64* begin;       // rows + 1: where the entries of a row start
    const float *x, *bias;  // (tokens, columns); rows or null
    float* y;               // (tokens, rows)
    i64 rows, columns, chunk, tokens, dtype, threads;
};
}

INLINE float widened(float x) { return x; }
INLINE float widened(bfloat x) {
    float out;
    convert(&x, &out, 1);
    return out;
}

// 16 column numbers from 16 bytes. Intrinsics: a byte may alias anything, so that a compiler stores one at a time.
INLINE void widen(const uint8_t* from, int32_t base, int32_t* into) {
#if defined(__AVX512F__)
    const __m512i wide = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)from));
    _mm512_storeu_si512(into, _mm512_add_epi32(wide, _mm512_set1_epi32(base)));
#elif defined(__AVX2__)
    for (int half = 0; half < 2; half++) {
        const __m256i wide = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(from + 8 * half)));
        _mm256_storeu_si256((__m256i*)(into + 8 * half), _mm256_add_epi32(wide, _mm256_set1_epi32(base)));
    }
#else
    for (int j = 0; j < 16; j++) into[j] = base + from[j];
#endif
}

// The column numbers of row r; returns how many there are.
INLINE i64 decode(const Call& c, i64 r, int32_t* into) {
    const i64 chunks = (c.columns + c.chunk - 1) / c.chunk;
    const uint8_t* column = c.column + c.begin[r];
    const uint16_t* count = c.count + r * chunks;
    i64 n = 0;
    for (i64 k = 0; k < chunks; k++) {
        const i64 end = n + count[k];
        for (i64 i = n; i < end; i += 16) widen(column + i, int32_t(k * c.chunk), into + i);
        n = end;
    }
    return n;
}

#if defined(__AVX512F__)
INLINE __m512 values_at(const float* v, __mmask16 m) { return _mm512_maskz_loadu_ps(m, v); }
INLINE __m512 values_at(const bfloat* v, __mmask16 m) {
#if defined(__AVX512BW__) && defined(__AVX512VL__)
    const __m256i bits = _mm256_maskz_loadu_epi16(m, v);
#else
    alignas(32) uint16_t part[16] = {};
    std::memcpy(part, v, __builtin_popcount(m) * sizeof(bfloat));
    const __m256i bits = _mm256_load_si256((const __m256i*)part);
#endif
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}
template <class IO> INLINE float dot(const IO* v, const int32_t* column, i64 n, const float* x) {
    __m512 sum = _mm512_setzero_ps();
    for (i64 i = 0; i < n; i += 16) {
        const __mmask16 m = n - i >= 16 ? 0xffff : (1u << (n - i)) - 1;
        const __m512i at = _mm512_loadu_si512(column + i);
        const __m512 inputs = _mm512_mask_i32gather_ps(_mm512_setzero_ps(), m, at, x, 4);
        sum = _mm512_fmadd_ps(values_at(v + i, m), inputs, sum);
    }
    return _mm512_reduce_add_ps(sum);
}
// The same for chunks of 64 columns, whose inputs are looked up in four registers instead of gathered from memory: half
// the time at 80 % zeros. x has room for whole chunks.
template <class IO> INLINE float dot_narrow(const Call& c, i64 r, const float* x) {
    const i64 chunks = (c.columns + NARROW - 1) / NARROW;
    const IO* v = (const IO*)c.values + c.begin[r];
    const uint8_t* column = c.column + c.begin[r];
    const uint16_t* count = c.count + r * chunks;
    __m512 sum = _mm512_setzero_ps();
    for (i64 k = 0; k < chunks; k++, x += NARROW) {
        const __m512 a = _mm512_loadu_ps(x), b = _mm512_loadu_ps(x + 16), d = _mm512_loadu_ps(x + 32), e = _mm512_loadu_ps(x + 48);
        const i64 n = count[k];
        for (i64 i = 0; i < n; i += 16) {
            const __mmask16 m = n - i >= 16 ? 0xffff : (1u << (n - i)) - 1;
            const __m512i at = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)(column + i)));
            const __m512 low = _mm512_permutex2var_ps(a, at, b), high = _mm512_permutex2var_ps(d, at, e);
            const __m512 inputs = _mm512_mask_blend_ps(_mm512_test_epi32_mask(at, _mm512_set1_epi32(32)), low, high);
            sum = _mm512_mask3_fmadd_ps(values_at(v + i, m), inputs, sum, m);
        }
        v += n, column += n;
    }
    return _mm512_reduce_add_ps(sum);
}
constexpr bool HAS_NARROW = true;
#else
template <class IO> INLINE float dot_narrow(const Call&, i64, const float*) { return 0; }
constexpr bool HAS_NARROW = false;
template <class IO> INLINE float dot(const IO* v, const int32_t* column, i64 n, const float* x) {
    constexpr int LANES = 8;
    float sum[LANES] = {};
    i64 i = 0;
    for (; i + LANES <= n; i += LANES)
#pragma GCC unroll 8
        for (int j = 0; j < LANES; j++) sum[j] += widened(v[i + j]) * x[column[i + j]];
    for (int j = 0; i + j < n; j++) sum[j] += widened(v[i + j]) * x[column[i + j]];
    return ((sum[0] + sum[4]) + (sum[2] + sum[6])) + ((sum[1] + sum[5]) + (sum[3] + sum[7]));
}
#endif

// LANES tokens a vector, VECTORS of them, and SUMS partial sums to hide the latency of an addition.
template <int LANES> struct Lanes {
    typedef float V __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
};
template <class IO, int LANES, int VECTORS, int SUMS>
INLINE void row_times(const IO* v, const int32_t* column, i64 n, const float* x, float* y) {
    typedef typename Lanes<LANES>::V V;
    constexpr int WIDTH = LANES * VECTORS;
    V sum[SUMS][VECTORS] = {};
    i64 i = 0;
    for (; i + SUMS <= n; i += SUMS)
#pragma GCC unroll 8
        for (int s = 0; s < SUMS; s++) {
            const float w = widened(v[i + s]);
            const float* row = x + i64(column[i + s]) * WIDTH;
#pragma GCC unroll 4
            for (int k = 0; k < VECTORS; k++) sum[s][k] += w * *(const V*)(row + k * LANES);
        }
    for (; i < n; i++)
#pragma GCC unroll 4
        for (int k = 0; k < VECTORS; k++) sum[0][k] += widened(v[i]) * *(const V*)(x + i64(column[i]) * WIDTH + k * LANES);
#pragma GCC unroll 4
    for (int k = 0; k < VECTORS; k++) {
#pragma GCC unroll 8
        for (int s = 1; s < SUMS; s++) sum[0][k] += sum[s][k];
        *(V*)(y + k * LANES) = sum[0][k];
    }
}

// The first row whose entries start at or after the share `part` of `parts`: threads get equally many entries.
inline i64 first_row(const Call& c, i64 part, i64 parts) {
    if (part == parts) return c.rows;
    const i64 wanted = c.begin[c.rows] / parts * part;
    return std::lower_bound(c.begin, c.begin + c.rows, wanted) - c.begin;
}

// Calls `row` with the column numbers of each row. Some rows are decoded at a time: a load that reads what several
// stores have just written would wait for all of them.
constexpr i64 AHEAD = 4;
template <class Row> void each_row(const Call& c, Row row) {
#pragma omp parallel for num_threads(c.threads) schedule(static, 1)
    for (i64 t = 0; t < c.threads; t++) {
        const i64 room = c.columns + SLACK, end = first_row(c, t + 1, c.threads);
        Buffer<int32_t> column(AHEAD * room);
        i64 n[AHEAD];
        for (i64 r = first_row(c, t, c.threads); r < end; r += AHEAD) {
            const i64 here = std::min(AHEAD, end - r);
            for (i64 i = 0; i < here; i++) n[i] = decode(c, r + i, column + i * room);
            for (i64 i = 0; i < here; i++) row(r + i, column + i * room, n[i], c.bias ? c.bias[r + i] : 0.0f);
        }
    }
}

template <class IO, int LANES, int VECTORS, int SUMS> void tile(const Call& c, i64 first, float* transposed) {
    constexpr int WIDTH = LANES * VECTORS;
    const i64 here = std::min<i64>(WIDTH, c.tokens - first);
    const float* x = c.x + first * c.columns;
    float* y = c.y + first * c.rows;
#pragma omp parallel for num_threads(c.threads)
    for (i64 k = 0; k < c.columns; k++)
        for (i64 t = 0; t < WIDTH; t++) transposed[k * WIDTH + t] = t < here ? x[t * c.columns + k] : 0.0f;
    each_row(c, [&](i64 r, const int32_t* column, i64 n, float bias) {
        alignas(64) float sums[WIDTH];
        row_times<IO, LANES, VECTORS, SUMS>((const IO*)c.values + c.begin[r], column, n, transposed, sums);
        for (i64 t = 0; t < here; t++) y[t * c.rows + r] = sums[t] + bias;
    });
}

template <class IO> void multiply(const Call& c) {
    if (c.tokens == 1 && HAS_NARROW && c.chunk == NARROW) {
        Buffer<float> x((c.columns + NARROW - 1) / NARROW * NARROW);
        std::memcpy(x, c.x, c.columns * sizeof(float));
        std::memset(x + c.columns, 0, (-c.columns & (NARROW - 1)) * sizeof(float));
#pragma omp parallel for num_threads(c.threads) schedule(static, 1)
        for (i64 t = 0; t < c.threads; t++)
            for (i64 r = first_row(c, t, c.threads), end = first_row(c, t + 1, c.threads); r < end; r++)
                c.y[r] = dot_narrow<IO>(c, r, x) + (c.bias ? c.bias[r] : 0.0f);
        return;
    }
    if (c.tokens == 1) {
        each_row(c, [&](i64 r, const int32_t* column, i64 n, float bias) {
            c.y[r] = dot((const IO*)c.values + c.begin[r], column, n, c.x) + bias;
        });
        return;
    }
    Buffer<float> transposed(c.columns * 32);
    for (i64 first = 0; first < c.tokens;) {
        const i64 left = c.tokens - first;
        if (left <= 4) tile<IO, 4, 1, 4>(c, first, transposed), first += 4;
        else if (left <= 8) tile<IO, 8, 1, 4>(c, first, transposed), first += 8;
        else if (left <= 16) tile<IO, 16, 1, 4>(c, first, transposed), first += 16;
        else tile<IO, 16, 2, 2>(c, first, transposed), first += 32;
    }
}
