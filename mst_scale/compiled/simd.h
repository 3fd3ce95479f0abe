// Vectors, 2^x, storage types, and the one matrix product that all tiles use.
//
// GCC/Clang vector types keep this free of intrinsics, except for float16 (x86 compilers do not vectorise its cast, and
// GCC before 12 has no type for it there) and for products that must be rounded alike everywhere.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#if defined(__AVX512F__) || defined(__F16C__) || defined(__FMA__)
#include <immintrin.h>
#endif

#define INLINE inline __attribute__((always_inline))
#define EXPORTED extern "C" __attribute__((visibility("default")))
typedef int64_t i64;

#if defined(__AVX512F__)
constexpr int VECTOR_BYTES = 64, PANEL = 4;  // 32 registers: 6 × 4 accumulators + 4 + 1
#elif defined(__AVX__)
constexpr int VECTOR_BYTES = 32, PANEL = 2;  // 16 registers: 6 × 2 accumulators + 2 + 1
#else
constexpr int VECTOR_BYTES = 16, PANEL = 4;
#endif

template <class T> struct Simd;
template <> struct Simd<float> {
    typedef float V __attribute__((vector_size(VECTOR_BYTES)));
    typedef float Unaligned __attribute__((vector_size(VECTOR_BYTES), aligned(4), may_alias));
    typedef int32_t I __attribute__((vector_size(VECTOR_BYTES)));
    static constexpr int WIDTH = VECTOR_BYTES / 4, MANTISSA = 23, DEGREE = 7;
    static constexpr float ROUND = 12582912.0f, LEAST = -125.0f;  // 1.5 · 2^23; smallest exponent kept normal
};
template <> struct Simd<double> {
    typedef double V __attribute__((vector_size(VECTOR_BYTES)));
    typedef double Unaligned __attribute__((vector_size(VECTOR_BYTES), aligned(8), may_alias));
    typedef i64 I __attribute__((vector_size(VECTOR_BYTES)));
    static constexpr int WIDTH = VECTOR_BYTES / 8, MANTISSA = 52, DEGREE = 13;
    static constexpr double ROUND = 6755399441055744.0, LEAST = -1021.0;
};
template <class T> using Vec = typename Simd<T>::V;
template <class T> INLINE Vec<T> load(const T* p) { return *(const typename Simd<T>::Unaligned*)p; }
template <class T> INLINE void store(T* p, Vec<T> x) { *(typename Simd<T>::Unaligned*)p = x; }
template <class T> INLINE Vec<T> splat(T x) { return x - Vec<T>{}; }

// a·b + c, rounded once where x86 can. Left to itself, GCC decides that anew for each loop (tuned for AMD's it does not
// fuse a lone chain of additions), so that the same sum would get other bits in another loop.
#if defined(__AVX512F__)
INLINE Vec<float> fused(Vec<float> a, Vec<float> b, Vec<float> c) {
    return (Vec<float>)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
}
INLINE Vec<double> fused(Vec<double> a, Vec<double> b, Vec<double> c) {
    return (Vec<double>)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c);
}
#elif defined(__FMA__)
INLINE Vec<float> fused(Vec<float> a, Vec<float> b, Vec<float> c) {
    return (Vec<float>)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
}
INLINE Vec<double> fused(Vec<double> a, Vec<double> b, Vec<double> c) {
    return (Vec<double>)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c);
}
#else
template <class V> INLINE V fused(V a, V b, V c) { return a * b + c; }
#endif

// 2^(factor x) for x ≤ 0 (or a rounding error above) and factor > 0: 2^round(factor x) in the exponent bits times a Taylor
// polynomial on [-½, ½], whose remainder (½ ln 2)^(DEGREE+1) / (DEGREE+1)! is below half an ulp. The product is not rounded
// where there is a fused one. NaN stays NaN, -inf gives 0. Make it a local of the loop's function, which stays in registers.
template <class T> struct Exp2 {
    using S = Simd<T>;
    Vec<T> factor, least;
    INLINE explicit Exp2(T f) : factor(splat<T>(f)), least(splat<T>(S::LEAST / f)) {}
    INLINE Vec<T> operator()(Vec<T> x) const {
        constexpr double LN2 = 0.69314718055994530942;
        const auto tiny = x <= least;  // whatever comes of these below is replaced by 0
        const Vec<T> zero = splat<T>(S::ROUND), any = fused(x, factor, zero);
        const Vec<T> rounded = any < zero ? any : zero;  // not NaN, whose bits would change the exponent
        const Vec<T> r = fused(x, factor, zero - rounded);
        double c[S::DEGREE + 1];
        c[0] = 1;
        for (int k = 1; k <= S::DEGREE; k++) c[k] = c[k - 1] * LN2 / k;
        Vec<T> p = splat<T>(T(c[S::DEGREE]));
        for (int k = S::DEGREE - 1; k >= 0; k--) p = fused(p, r, splat<T>(T(c[k])));
        const auto scaled = (typename S::I)p + ((typename S::I)rounded << S::MANTISSA);
        return tiny ? Vec<T>{} : (Vec<T>)scaled;
    }
};
// Two vectors with their blocks of S lanes exchanged: `low` is a's even blocks with b's between them, `high` the odd ones.
// log2(WIDTH) rounds of this transpose WIDTH vectors; with an addition instead of the exchange they sum each of them.
template <class T, int S> struct Exchange {
    using V = Vec<T>;
    using I = typename Simd<T>::I;
    I low, high;
    INLINE Exchange() {
        constexpr int W = Simd<T>::WIDTH;
        for (int i = 0; i < W; i++) low[i] = i & S ? W + i - S : i, high[i] = i & S ? W + i : i + S;
    }
#if defined(__clang__)
    static INLINE V pick(V a, V b, I at) {
        V out;
        for (int i = 0; i < Simd<T>::WIDTH; i++) out[i] = at[i] < Simd<T>::WIDTH ? a[at[i]] : b[at[i] - Simd<T>::WIDTH];
        return out;
    }
#else
    static INLINE V pick(V a, V b, I at) { return __builtin_shuffle(a, b, at); }
#endif
    INLINE void transpose(V* x) const {
#pragma GCC unroll 16
        for (int i = 0; i < Simd<T>::WIDTH; i++)
            if (!(i & S)) {
                const V a = x[i], b = x[i + S];
                x[i] = pick(a, b, low), x[i + S] = pick(a, b, high);
            }
        if constexpr (S > 1) Exchange<T, S / 2>().transpose(x);
    }
    INLINE V sums(V* x) const {  // lane i of the result is the sum of x[i]
#pragma GCC unroll 16
        for (int i = 0; i < S; i++) x[i] = pick(x[i], x[i + S], low) + pick(x[i], x[i + S], high);
        if constexpr (S > 1) return Exchange<T, S / 2>().sums(x);
        return x[0];
    }
};

// Storage types that are computed in float.
struct bfloat { uint16_t bits; };
struct half { uint16_t bits; };

template <class T> INLINE void convert(const T* from, T* to, i64 n) { std::memcpy(to, from, n * sizeof(T)); }
INLINE void convert(const bfloat* from, float* to, i64 n) {
    for (i64 i = 0; i < n; i++) {
        const uint32_t bits = uint32_t(from[i].bits) << 16;
        std::memcpy(to + i, &bits, 4);
    }
}
INLINE void convert(const float* from, bfloat* to, i64 n) {
    for (i64 i = 0; i < n; i++) {
        uint32_t bits;
        std::memcpy(&bits, from + i, 4);
        const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;  // to nearest even
        to[i].bits = uint16_t((bits & 0x7fffffff) > 0x7f800000 ? (bits >> 16) | 0x40 : rounded);
    }
}
#if defined(__AVX512F__)
INLINE void convert(const half* from, float* to, i64 n) {
    for (i64 i = 0; i < n; i += 16) {
        const __mmask16 m = n - i >= 16 ? 0xffff : (1u << (n - i)) - 1;
        uint16_t part[16] = {};
        std::memcpy(part, from + i, std::min<i64>(16, n - i) * 2);
        _mm512_mask_storeu_ps(to + i, m, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)part)));
    }
}
INLINE void convert(const float* from, half* to, i64 n) {
    for (i64 i = 0; i < n; i += 16) {
        const __mmask16 m = n - i >= 16 ? 0xffff : (1u << (n - i)) - 1;
        uint16_t part[16];
        _mm256_storeu_si256((__m256i*)part, _mm512_cvtps_ph(_mm512_maskz_loadu_ps(m, from + i), 0));
        std::memcpy(to + i, part, std::min<i64>(16, n - i) * 2);
    }
}
#elif defined(__F16C__)
INLINE void convert(const half* from, float* to, i64 n) {
    for (i64 i = 0; i < n; i += 8) {
        uint16_t part[8] = {};
        float wide[8];
        const i64 here = std::min<i64>(8, n - i);
        std::memcpy(part, from + i, here * 2);
        _mm256_storeu_ps(wide, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)part)));
        std::memcpy(to + i, wide, here * 4);
    }
}
INLINE void convert(const float* from, half* to, i64 n) {
    for (i64 i = 0; i < n; i += 8) {
        uint16_t part[8];
        float wide[8] = {};
        const i64 here = std::min<i64>(8, n - i);
        std::memcpy(wide, from + i, here * 4);
        _mm_storeu_si128((__m128i*)part, _mm256_cvtps_ph(_mm256_loadu_ps(wide), 0));
        std::memcpy(to + i, part, here * 2);
    }
}
#else
INLINE void convert(const half* from, float* to, i64 n) {
    for (i64 i = 0; i < n; i++) {
        const uint32_t sign = uint32_t(from[i].bits & 0x8000) << 16, rest = from[i].bits & 0x7fff;
        uint32_t bits = rest << 13;  // the value times 2^-112, the difference of the exponents' biases
        if (rest >= 0x7c00) {
            bits |= 0x7f800000 | (rest > 0x7c00 ? 0x400000 : 0);  // inf; NaN, made quiet
        } else {
            float value;
            std::memcpy(&value, &bits, 4);
            value *= 0x1p112f;
            std::memcpy(&bits, &value, 4);
        }
        bits |= sign;
        std::memcpy(to + i, &bits, 4);
    }
}
INLINE void convert(const float* from, half* to, i64 n) {
    for (i64 i = 0; i < n; i++) {
        uint32_t bits;
        std::memcpy(&bits, from + i, 4);
        const uint32_t sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
        uint32_t out;
        if (size > 0x7f800000) out = 0x7e00 | (size >> 13 & 0x3ff);  // NaN
        else if (size >= 0x477ff000) out = 0x7c00;                    // 65520 and more round to inf
        else if (size >= 0x38800000) out = (size - 0x38000000 + 0xfff + (size >> 13 & 1)) >> 13;  // to nearest even
        else {  // below 2^-14: half's unit is the last place of ½, so that this addition rounds
            float value;
            std::memcpy(&value, &size, 4);
            value += 0.5f;
            std::memcpy(&out, &value, 4);
            out -= 0x3f000000;
        }
        to[i].bits = uint16_t(out | sign);
    }
}
#endif

// C (+)= A·B with A(m, k) at a[m·am + k·ak], read as scalars; rows of B and C are vectors, bk and ck apart. What is added
// to C is summed by itself first: a sum over thousands, 64 at a time, is then rounded to its last digit once in 64 terms.
template <class T, int ROWS, int VECS>
INLINE void block(i64 depth, const T* a, i64 am, i64 ak, const T* b, i64 bk, T* c, i64 ck, bool add) {
    constexpr int W = Simd<T>::WIDTH;
    Vec<T> total[ROWS][VECS];
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 16
        for (int v = 0; v < VECS; v++) total[r][v] = Vec<T>{};
    for (i64 k = 0; k < depth; k++, a += ak, b += bk) {
        Vec<T> row[VECS];
#pragma GCC unroll 16
        for (int v = 0; v < VECS; v++) row[v] = load(b + v * W);
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; r++) {
            const Vec<T> x = splat<T>(a[r * am]);
#pragma GCC unroll 16
            for (int v = 0; v < VECS; v++) total[r][v] = fused(x, row[v], total[r][v]);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 16
        for (int v = 0; v < VECS; v++) {
            T* to = c + r * ck + v * W;
            store(to, add ? load(to) + total[r][v] : total[r][v]);
        }
}
template <class T, int VECS>
void panel(i64 rows, i64 depth, const T* a, i64 am, i64 ak, const T* b, i64 bk, T* c, i64 ck, bool add) {
    constexpr int MOST = VECS == 4 ? 6 : VECS == 3 ? 8 : PANEL == 2 ? (VECS == 2 ? 6 : 8) : 8;
    i64 r = 0;
    for (; r + MOST <= rows; r += MOST) block<T, MOST, VECS>(depth, a + r * am, am, ak, b, bk, c + r * ck, ck, add);
    if (r + 4 <= rows) block<T, 4, VECS>(depth, a + r * am, am, ak, b, bk, c + r * ck, ck, add), r += 4;
    if (r + 2 <= rows) block<T, 2, VECS>(depth, a + r * am, am, ak, b, bk, c + r * ck, ck, add), r += 2;
    for (; r < rows; r++) block<T, 1, VECS>(depth, a + r * am, am, ak, b, bk, c + r * ck, ck, add);
}
template <class T>
void gemm(i64 rows, i64 columns, i64 depth, const T* a, i64 am, i64 ak, const T* b, i64 bk, T* c, i64 ck, bool add) {
    constexpr int W = Simd<T>::WIDTH;
    for (i64 n = 0; n < columns; n += PANEL * W) {
        switch (std::min<i64>(PANEL, (columns - n) / W)) {
            case 1: panel<T, 1>(rows, depth, a, am, ak, b + n, bk, c + n, ck, add); break;
            case 2: panel<T, 2>(rows, depth, a, am, ak, b + n, bk, c + n, ck, add); break;
            case 3: panel<T, 3>(rows, depth, a, am, ak, b + n, bk, c + n, ck, add); break;
            default: panel<T, 4>(rows, depth, a, am, ak, b + n, bk, c + n, ck, add); break;
        }
    }
}
