// The two products with a sparse matrix A, tokens across the lanes.
//
//     multiply:  Y = X Aᵀ          Yᵀ[row] = Σ_i a_i Xᵀ[column_i]                 forward; backward with the transpose
//     sample:    G = (DYᵀ X) ⊙ M   g_i = DYᵀ[row] · Xᵀ[column_i] over tokens      the weight's gradient
//
// X (tokens, columns) and Y (tokens, rows) are transposed a tile of TOKENS at a time, inside the cache and in registers.
// Every sum is taken in an order that depends on shapes alone, so that results are the same for any number of threads, and
// in pieces, each from zero: one long running sum would be rounded to its own last digit at every term.
#pragma once
#include <type_traits>

#include "index.h"
#include "scratch.h"

template <class T> constexpr int WIDTH = Simd<T>::WIDTH;
constexpr int VECTORS = VECTOR_BYTES == 64 ? 4 : 8;  // of one tile: as many accumulators
constexpr i64 TERMS = 128;                           // of one piece of a sum; adding it up costs about 2 terms

// W rows of `from`, `stride` apart, as the W columns of `to`; rows past `valid` count as zero, columns past `width` too.
template <class T, class IO> INLINE void transpose_in(const IO* from, i64 stride, i64 valid, i64 width, T* to, i64 lanes) {
    constexpr int W = WIDTH<T>;
    Vec<T> x[W];
#pragma GCC unroll 16
    for (int i = 0; i < W; i++) {
        x[i] = Vec<T>{};
        if (i < valid) {
            if (width == W) {
                if constexpr (std::is_same<T, IO>::value) x[i] = load(from + i * stride);
                else {
                    T wide[W];
                    convert(from + i * stride, wide, W);
                    x[i] = load(wide);
                }
            } else {
                T wide[W] = {};
                convert(from + i * stride, wide, width);
                x[i] = load(wide);
            }
        }
    }
    Exchange<T, W / 2>().transpose(x);
#pragma GCC unroll 16
    for (int i = 0; i < W; i++) store(to + i * lanes, x[i]);
}
// The other way: the W columns of `from` as rows of `to`.
template <class T, class IO> INLINE void transpose_out(const T* from, i64 lanes, IO* to, i64 stride, i64 valid, i64 width) {
    constexpr int W = WIDTH<T>;
    Vec<T> x[W];
#pragma GCC unroll 16
    for (int i = 0; i < W; i++) x[i] = load(from + i * lanes);
    Exchange<T, W / 2>().transpose(x);
#pragma GCC unroll 16
    for (int i = 0; i < W; i++)
        if (i < valid) {
            if (width == W) {
                if constexpr (std::is_same<T, IO>::value) store(to + i * stride, x[i]);
                else {
                    T wide[W];
                    store(wide, x[i]);
                    convert(wide, to + i * stride, W);
                }
            } else {
                T wide[W];
                store(wide, x[i]);
                convert(wide, to + i * stride, width);
            }
        }
}

// A tile of bfloat keeps two tokens in each word: half of the bytes that the cache has to bring, which limit the products.
struct Pair { uint32_t bits; };  // token l in the high half, token l + W in the low one
template <class P> constexpr int TOKENS_IN = std::is_same<P, Pair>::value ? 2 : 1;
template <class T, class IO> using Panel = std::conditional_t<std::is_same<IO, bfloat>::value, Pair, T>;

typedef uint32_t Words __attribute__((vector_size(VECTOR_BYTES)));
typedef uint16_t Halves __attribute__((vector_size(VECTOR_BYTES / 2)));
INLINE Words words(const bfloat* from, i64 width) {
    Halves bits{};
    if (width == WIDTH<float>) std::memcpy(&bits, from, sizeof bits);
    else std::memcpy(&bits, from, width * 2);
    return __builtin_convertvector(bits, Words);
}
// To nearest even, as `convert`; the result is the high half.
INLINE Words rounded(Vec<float> x) {
    const Words bits = (Words)x;
    return (bits & 0x7fffffff) > 0x7f800000 ? bits | 0x400000 : bits + 0x7fff + (bits >> 16 & 1);
}
// As transpose_in, of 2 W rows.
INLINE void transpose_pairs_in(const bfloat* from, i64 stride, i64 valid, i64 width, Pair* to, i64 lanes) {
    constexpr int W = WIDTH<float>;
    Vec<float> x[W];
#pragma GCC unroll 16
    for (int i = 0; i < W; i++) {
        Words both{};
        if (i < valid) both = words(from + i * stride, width) << 16;
        if (i + W < valid) both |= words(from + (i + W) * stride, width);
        x[i] = (Vec<float>)both;
    }
    Exchange<float, W / 2>().transpose(x);
#pragma GCC unroll 16
    for (int i = 0; i < W; i++) store((float*)(to + i * lanes), x[i]);
}
// The other way, as transpose_out: the tokens of two vectors, rounded and in pairs.
INLINE void transpose_pairs_out(const float* from, i64 lanes, bfloat* to, i64 stride, i64 valid, i64 width) {
    constexpr int W = WIDTH<float>;
    Vec<float> x[W];
#pragma GCC unroll 16
    for (int i = 0; i < W; i++) {
        const Words high = rounded(load(from + i * lanes)), low = rounded(load(from + i * lanes + W));
        x[i] = (Vec<float>)((high & 0xffff0000) | low >> 16);
    }
    Exchange<float, W / 2>().transpose(x);
    const auto put = [&](int row, Words bits) __attribute__((always_inline)) {
        const Halves out = __builtin_convertvector(bits, Halves);
        if (row >= valid) return;
        if (width == W) std::memcpy((void*)(to + row * stride), &out, sizeof out);
        else std::memcpy((void*)(to + row * stride), &out, width * 2);
    };
#pragma GCC unroll 16
    for (int i = 0; i < W; i++) put(i, (Words)x[i] >> 16), put(i + W, (Words)x[i] & 0xffff);
}
// Columns [first, first + count) of `valid` tokens, as rows of V vectors; `to` has room for `count` rounded up to W.
template <int V, class T, class IO, class P>
INLINE void tile_in(const IO* x, i64 stride, i64 valid, i64 first, i64 count, P* to) {
    constexpr i64 W = WIDTH<T>, LANES = V * W / TOKENS_IN<P>, STEP = W * TOKENS_IN<P>;
    for (i64 c = 0; c < count; c += W)
        for (i64 v = 0; v < V / TOKENS_IN<P>; v++) {
            const IO* from = x + v * STEP * stride + first + c;
            P* out = to + c * LANES + v * W;
            if constexpr (std::is_same<P, Pair>::value)
                transpose_pairs_in(from, stride, valid - v * STEP, std::min(W, count - c), out, LANES);
            else transpose_in<T, IO>(from, stride, valid - v * STEP, std::min(W, count - c), out, LANES);
        }
}
// The V vectors of one column.
template <int V, class T, class P> INLINE void row_in(const P* row, Vec<T>* x) {
    constexpr int W = WIDTH<T>;
    if constexpr (std::is_same<P, Pair>::value) {
#pragma GCC unroll 8
        for (int v = 0; v < V; v += 2) {
            const Words both = (Words)load((const float*)(row + v / 2 * W));
            x[v] = (Vec<T>)(both & 0xffff0000), x[v + 1] = (Vec<T>)(both << 16);
        }
    } else {
#pragma GCC unroll 8
        for (int v = 0; v < V; v++) x[v] = load(row + v * W);
    }
}

// total (V vectors) += Σ_i values[i] · row column[i] of the panel over entries [from, to)
template <int V, class T, class P>
INLINE void add_terms(const T* values, const uint16_t* column, i64 from, i64 to, const P* panel, Vec<T>* total) {
    constexpr i64 LANES = V * WIDTH<T> / TOKENS_IN<P>;
    for (i64 i = from; i < to; i++) {
        const Vec<T> w = splat<T>(values[i]);
        Vec<T> x[V];
        row_in<V, T>(panel + column[i] * LANES, x);
#pragma GCC unroll 8
        for (int v = 0; v < V; v++) total[v] = fused(w, x[v], total[v]);
    }
}
// out = start + that sum, or += it if this is not the first panel; `total` is what becomes of out
template <int V, class T, class P>
INLINE void add_row(const T* values, const uint16_t* column, i64 from, i64 to, const P* panel, bool first, T start, T* out,
                    Vec<T>* total) {
    constexpr i64 W = WIDTH<T>;
    const i64 stop = std::min(from + TERMS, to);
#pragma GCC unroll 8
    for (int v = 0; v < V; v++) total[v] = splat<T>(start);
    add_terms<V>(values, column, from, stop, panel, total);
    if (!first)
#pragma GCC unroll 8
        for (int v = 0; v < V; v++) total[v] += load(out + v * W);
    for (i64 i = stop; i < to; i += TERMS) {
        Vec<T> piece[V] = {};
        add_terms<V>(values, column, i, std::min(i + TERMS, to), panel, piece);
#pragma GCC unroll 8
        for (int v = 0; v < V; v++) total[v] += piece[v];
    }
#pragma GCC unroll 8
    for (int v = 0; v < V; v++) store(out + v * W, total[v]);
}

template <int V, class T, class IO, class P>
void multiply_tile(const Index& a, const T* values, const IO* x, const IO* bias, IO* y, i64 valid, i64 from, i64 to,
                   P* panel, T* sums) {
    constexpr i64 W = WIDTH<T>, LANES = V * W;
    const i64 count = panels(a.columns), width = panel_width(a.columns);
    for (i64 p = 0; p < count; p++) {
        tile_in<V, T>(x, a.columns, valid, p * width, std::min(width, a.columns - p * width), panel);
        const i64* begin = a.begin + p * a.rows;
        for (i64 block = from; block < to; block += W) {
            const i64 last = std::min(block + W, to);
            T* out = sums + (count == 1 ? 0 : block - from) * LANES;
            for (i64 r = block; r < last; r++) {
                T start[1] = {0};
                if (p == 0 && bias) convert(bias + r, start, 1);
                Vec<T> total[V];
                add_row<V>(values, a.column, begin[r], begin[r + 1], panel, p == 0, start[0], out + (r - block) * LANES,
                           total);
            }
            if (p + 1 == count)
                for (i64 v = 0; v < V; v += TOKENS_IN<P>) {
                    IO* to = y + v * W * a.rows + block;
                    if constexpr (std::is_same<P, Pair>::value)
                        transpose_pairs_out(out + v * W, LANES, to, a.rows, valid - v * W, last - block);
                    else transpose_out<T, IO>(out + v * W, LANES, to, a.rows, valid - v * W, last - block);
                }
        }
    }
}

// Y = X Aᵀ (+ bias), parallel over tiles of tokens, and over rows where tiles are few.
template <class T, class IO>
void multiply(const Index& a, const T* values, const IO* x, const IO* bias, IO* y, i64 tokens, i64 threads) {
    constexpr i64 W = WIDTH<T>, LANES = VECTORS * W;
    const i64 tiles = (tokens + LANES - 1) / LANES, blocks = (a.rows + W - 1) / W;
    if (tiles == 0) return;
    const i64 chunks = std::max<i64>(1, std::min(blocks, tiles >= 2 * threads ? 1 : (2 * threads + tiles - 1) / tiles));
    const i64 per_chunk = (blocks + chunks - 1) / chunks * W;
#pragma omp parallel num_threads(threads)
    {
        typedef Panel<T, IO> P;
        Buffer<P> panel((panel_width(a.columns) + W) * LANES / TOKENS_IN<P>);
        Buffer<T> sums((panels(a.columns) == 1 ? W : per_chunk + W) * LANES);
#pragma omp for schedule(dynamic, 1)
        for (i64 item = 0; item < tiles * chunks; item++) {
            const i64 first = item / chunks * LANES, valid = std::min(LANES, tokens - first);
            const i64 from = item % chunks * per_chunk, to = std::min(from + per_chunk, a.rows);
            const IO* in = x + first * a.columns;
            IO* out = y + first * a.rows;
            if (from >= to) continue;
            if (valid <= W) multiply_tile<1, T, IO>(a, values, in, bias, out, valid, from, to, (T*)(P*)panel, sums);
            else multiply_tile<VECTORS, T, IO>(a, values, in, bias, out, valid, from, to, (P*)panel, sums);
        }
    }
}

// gradient[i] (+)= dy_row · x_column over one tile, for a run of entries of one row; `y` is the row's V vectors. AVX512-BF16
// multiplies and adds two tokens at a time, a quarter to a third faster: the products are exact either way, the order of
// the sum differs. (In add_terms it would gain less than a tenth, and its results would depend on the processor.)
template <int V, class T, class P>
INLINE void sample_run(const P* y, const P* panel, const uint16_t* column, i64 n, T* gradient, bool add) {
    constexpr i64 W = WIDTH<T>, LANES = V * W / TOKENS_IN<P>;
    Vec<T> row[V];
    row_in<V, T>(y, row);
    const auto dot = [&](i64 i) __attribute__((always_inline)) {
#if defined(__AVX512BF16__)
        if constexpr (std::is_same<P, Pair>::value) {
            __m512 s = _mm512_setzero_ps();
            const Pair* x = panel + column[i] * LANES;
#pragma GCC unroll 8
            for (int v = 0; v < V / 2; v++) {
                const auto a = _mm512_loadu_si512(y + v * W), b = _mm512_loadu_si512(x + v * W);
                s = _mm512_dpbf16_ps(s, (__m512bh)a, (__m512bh)b);
            }
            return (Vec<T>)s;
        }
#endif
        Vec<T> x[V];
        row_in<V, T>(panel + column[i] * LANES, x);
        Vec<T> sum = row[0] * x[0];
#pragma GCC unroll 8
        for (int v = 1; v < V; v++) sum = fused(row[v], x[v], sum);
        return sum;
    };
    i64 i = 0;
    for (; i + W <= n; i += W) {
        Vec<T> d[W];
#pragma GCC unroll 16
        for (int j = 0; j < W; j++) d[j] = dot(i + j);
        const Vec<T> s = Exchange<T, W / 2>().sums(d);
        store(gradient + i, add ? load(gradient + i) + s : s);
    }
    if (i < n) {
        T kept[W * W], s[W];
        for (i64 j = 0; j < W; j++) store(kept + j * W, i + j < n ? dot(i + j) : Vec<T>{});
        Vec<T> d[W];
        for (int j = 0; j < W; j++) d[j] = load(kept + j * W);
        store(s, Exchange<T, W / 2>().sums(d));
        for (i64 j = 0; i + j < n; j++) gradient[i + j] = add ? gradient[i + j] + s[j] : s[j];
    }
}

// The rows of equal shares of entries: boundaries[t] … boundaries[t + 1] for thread t, whole vectors of rows.
inline std::vector<i64> shares(const Index& a, i64 threads, i64 W) {
    std::vector<i64> cut(threads + 1, a.rows);
    cut[0] = 0;
    for (i64 t = 1; t < threads; t++) {
        const i64 want = a.row_entries[a.rows] * t / threads;
        const i64 row = std::lower_bound(a.row_entries, a.row_entries + a.rows + 1, want) - a.row_entries;
        cut[t] = std::max(cut[t - 1], std::min(a.rows, (row + W / 2) / W * W));
    }
    return cut;
}

// A number for each entry, in their order. Parallel over rows; tokens in blocks whose transposed X all threads share.
template <class T, class IO>
void sample(const Index& a, const IO* dy, const IO* x, T* gradient, i64 tokens, i64 threads) {
    typedef Panel<T, IO> P;
    constexpr i64 W = WIDTH<T>, V = VECTORS, LANES = V * W, STRIDE = LANES / TOKENS_IN<P>, AT_ONCE = 16;
    const i64 tiles = (tokens + LANES - 1) / LANES, count = panels(a.columns), width = panel_width(a.columns);
    const i64 padded = (width + W - 1) / W * W;
    const std::vector<i64> cut = shares(a, threads, W);
    if (tokens == 0) std::fill(gradient, gradient + a.row_entries[a.rows], T(0));
    Buffer<P> transposed(std::min(AT_ONCE, tiles) * count * padded * STRIDE);
#pragma omp parallel num_threads(threads)
    {
        P block[W * STRIDE] __attribute__((aligned(64)));
        for (i64 first = 0; first < tiles; first += AT_ONCE) {
            const i64 here = std::min(AT_ONCE, tiles - first);
#pragma omp for schedule(dynamic, 1)
            for (i64 item = 0; item < here * count; item++) {
                const i64 tile = first + item / count, p = item % count;
                tile_in<V, T>(x + tile * LANES * a.columns, a.columns, std::min(LANES, tokens - tile * LANES), p * width,
                              std::min(width, a.columns - p * width), transposed + item * padded * STRIDE);
            }
#pragma omp for schedule(static, 1)
            for (i64 t = 0; t < threads; t++)
                for (i64 item = 0; item < here * count; item++) {
                    const i64 tile = first + item / count, p = item % count, at = tile * LANES;
                    const i64* begin = a.begin + p * a.rows;
                    for (i64 r0 = cut[t]; r0 < cut[t + 1]; r0 += W) {
                        const i64 rows = std::min(W, cut[t + 1] - r0);
                        if (begin[r0] == begin[r0 + rows]) continue;
                        tile_in<V, T>(dy + at * a.rows, a.rows, std::min(LANES, tokens - at), r0, rows, (P*)block);
                        for (i64 r = r0; r < r0 + rows; r++)
                            sample_run<V, T>(block + (r - r0) * STRIDE, transposed + item * padded * STRIDE,
                                             a.column + begin[r], begin[r + 1] - begin[r], gradient + begin[r], tile > 0);
                    }
                }
        }
    }
}
