// What forward and backward share: the call, views of its tensors, and a band cut into pieces of tiles.
#pragma once
#include <cmath>
#include <cstdlib>
#include <limits>
#include <memory>
#include <type_traits>

#include "bands.h"
#include "scratch.h"

extern "C" {
struct Tensor {
    void* data;
    i64 batch, head, row;  // strides in elements; the last dimension is contiguous
};
struct Call {
    Tensor q, k, v, out, dout, dq, dk, dv;
    void *top, *total;  // (batch, heads, length), float or double: of each row max q·k and Σ exp(scale (q·k - max))
    i64 batches, heads, kv_heads, length, dim;
    i64 dtype, kind, stride, causal, regroup, threads;
    double scale;
};
}

template <class IO> struct View {  // one head of a tensor
    IO* data;
    i64 row;
    View(const Tensor& t, i64 b, i64 h) : data((IO*)t.data + b * t.batch + h * t.head), row(t.row) {}
};

constexpr i64 STRIP = 16;  // streamed rows taken at once where the band's edge cuts the tile

template <class T, class IO> struct Tiles {
    static constexpr int W = Simd<T>::WIDTH;
    static constexpr i64 LANES = 4 * W;  // rows of one tile
    static constexpr i64 STREAM = 64;    // rows streamed at once inside a band
    const Call& call;
    const Plan plan;
    const i64 n, d, wide;  // wide: d rounded up to whole vectors; the padding is zero
    const T factor = T(call.scale * 1.44269504088896340736);  // exp(scale x) = 2^(factor x)

    explicit Tiles(const Call& c)
        : call(c), plan(make_plan(c.length, c.kind, c.stride, c.causal, c.regroup)), n(c.length), d(c.dim),
          wide((c.dim + W - 1) / W * W) {}

    struct Matrix {
        const T* data;
        i64 row;
    };
    // `count` rows as T, padded to `wide`: in place when they are that already, else copied into scratch.
    Matrix rows(const View<IO>& x, i64 first, i64 step, i64 count, T* scratch) const {
        if constexpr (std::is_same<T, IO>::value)
            if (wide == d && step == 1) return {x.data + first * x.row, x.row};
        copy_rows(x, first, step, count, count, scratch);
        return {scratch, wide};
    }
    i64 whole_vectors(i64 lanes) const { return (lanes + W - 1) / W * W; }
    void copy_rows(const View<IO>& x, i64 first, i64 step, i64 count, i64 padded, T* to) const {
        for (i64 r = 0; r < count; r++) {
            convert(x.data + (first + r * step) * x.row, to + r * wide, d);
            for (i64 c = d; c < wide; c++) to[r * wide + c] = 0;
        }
        std::fill(to + count * wide, to + padded * wide, T(0));
    }
    // Columns of `to` (LANES apart) are the first `lanes` rows of `from`, times `scale`.
    void transpose(const T* from, i64 lanes, T* to, T scale = 1) const {
        for (i64 r = 0; r < lanes; r += W)
            for (i64 c = 0; c < wide; c += W) {
                Vec<T> x[W];
#pragma GCC unroll 16
                for (int i = 0; i < W; i++) x[i] = scale * load(from + (r + i) * wide + c);
                Exchange<T, W / 2>().transpose(x);
#pragma GCC unroll 16
                for (int i = 0; i < W; i++) store<T>(to + (c + i) * LANES + r, x[i]);
            }
    }

    // Cut the streamed rows [from, to) of a band into pieces, each with the whole vectors of lanes it can touch: STREAM
    // rows where all lanes see all of them, STRIP at the band's edges, so that little is computed in vain.
    // `interval(row)` gives the lanes [first, second) that the row touches, non-decreasing in the row.
    template <class Interval, class Use>
    INLINE void pieces(i64 from, i64 to, i64 lanes, Interval interval, Use use) const {
        for (i64 row = from, count; row < to; row += count) {
            count = std::min(STREAM, to - row);
            if (interval(row + count - 1).first > 0 || interval(row).second < lanes) count = std::min(STRIP, to - row);
            const auto first = interval(row), last = interval(row + count - 1);
            const i64 begin = std::max<i64>(first.first, 0) / W, end = (std::min(last.second, lanes) + W - 1) / W;
            if (begin >= end) continue;
            const bool whole = last.first <= begin * W && std::min(first.second, lanes) >= end * W;
            use(row, count, begin, end, whole);
        }
    }
    // -inf where a lane lies outside its row's interval
    template <class Interval>
    INLINE void mask(T* s, i64 row, i64 count, i64 begin, i64 end, i64 lanes, Interval interval) const {
        typename Simd<T>::I lane;
        for (int i = 0; i < W; i++) lane[i] = i;
        using Int = typename std::remove_reference<decltype(lane[0])>::type;
        for (i64 r = 0; r < count; r++) {
            const auto keep = interval(row + r);
            const i64 first = std::max<i64>(keep.first, 0), last = std::max<i64>(std::min(keep.second, lanes), 0);
            for (i64 v = begin; v < end; v++) {
                const auto at = lane + Int(v * W);
                const auto inside = (at >= Int(first)) & (at < Int(last));
                T* x = s + r * LANES + v * W;
                store<T>(x, inside ? load(x) : splat<T>(-std::numeric_limits<T>::infinity()));
            }
        }
    }

    struct Diagonal {  // lanes [first, last) pair with row + shift
        i64 shift, first, last;
    };
    std::vector<Diagonal> diagonals(i64 row, i64 lanes, i64 sign) const {
        std::vector<Diagonal> found;
        for (const i64 shift : plan.shifts) {
            const i64 o = sign * shift, first = std::max<i64>(0, -(row + o)), last = std::min(lanes, n - row - o);
            if (first < last) found.push_back({o, first, last});
        }
        return found;
    }
    // out[i] = lane i of `columns` (LANES apart) · row i of `from`, for `count` ≤ LANES rows: with the bits that `gemm`
    // gives, since it adds the products in the same order. Reads and writes whole vectors.
    void scores(const T* columns, const Matrix& from, i64 count, T* out) const {
        Vec<T> total[LANES / W] = {};
        for (i64 c = 0; c < wide; c += W)
            for (i64 r = 0; r < count; r += W) {
                const T* at = from.data + r * from.row + c;
                const i64 last = count - 1 - r;
                Vec<T> x[W];
                if (last >= W - 1) {
#pragma GCC unroll 16
                    for (int i = 0; i < W; i++) x[i] = load(at + i * from.row);
                } else {
                    for (int i = 0; i < W; i++) x[i] = load(at + std::min<i64>(i, last) * from.row);
                }
                Exchange<T, W / 2>().transpose(x);
#pragma GCC unroll 16
                for (int i = 0; i < W; i++)
                    total[r / W] = fused(x[i], load(columns + (c + i) * LANES + r), total[r / W]);
            }
        for (i64 r = 0; r < count; r += W) store<T>(out + r, total[r / W]);
    }
    // out[i] = row i of a · row i of b, for `count` rows, in whatever order is fastest; writes whole vectors
    void dots(const Matrix& a, const Matrix& b, i64 count, T* out) const {
        for (i64 r = 0; r < count; r += W) {
            Vec<T> x[W];
            for (i64 i = 0; i < W; i++) {
                x[i] = Vec<T>{};
                for (i64 c = 0; r + i < count && c < wide; c += W)
                    x[i] += load(a.data + (r + i) * a.row + c) * load(b.data + (r + i) * b.row + c);
            }
            store<T>(out + r, Exchange<T, W / 2>().sums(x));
        }
    }
};
