// Forward: queries lie in the lanes, keys are streamed, a running maximum and sum per lane (online softmax).
#pragma once
#include "tiles.h"

template <class T, class IO> struct Forward : Tiles<T, IO> {
    using Base = Tiles<T, IO>;
    using typename Base::Diagonal;
    using typename Base::Matrix;
    using Base::call, Base::plan, Base::n, Base::d, Base::wide, Base::factor, Base::W, Base::LANES, Base::STREAM;
    using Base::rows, Base::copy_rows, Base::transpose, Base::pieces, Base::mask, Base::diagonals, Base::scores;
    using Base::Base, Base::whole_vectors;

    struct Scratch {
        Buffer<T> natural, qt, out, s, keys, values, top, total, diagonal;
        explicit Scratch(i64 wide)
            : natural(LANES * wide), qt(LANES * wide), out(LANES * wide), s(STREAM * LANES),
              keys(std::max(STREAM, LANES) * wide), values(std::max(STREAM, LANES) * wide), top(LANES), total(LANES),
              diagonal(LANES) {}
    };
    struct Head {  // one query head as the forward reads and writes it
        View<IO> q, k, v, out;
        T *top, *total;
    };
    Head head(i64 b, i64 h) const {
        const i64 g = h / (call.heads / call.kv_heads);
        T *top = (T*)call.top + (b * call.heads + h) * n, *total = (T*)call.total + (b * call.heads + h) * n;
        return {{call.q, b, h}, {call.k, b, g}, {call.v, b, g}, {call.out, b, h}, top, total};
    }
    // Scores s (rows × lanes) become probabilities against the running maximum; what was summed before is rescaled.
    void soften(Scratch& f, i64 count, i64 begin, i64 end) const {
        const Exp2<T> power(factor);
        for (i64 v = begin; v < end; v++) {
            T* s = f.s + v * W;
            const Vec<T> before = load(f.top + v * W);
            Vec<T> top = before;
            for (i64 r = 0; r < count; r++) {
                const Vec<T> x = load(s + r * LANES);
                top = x > top ? x : top;
            }
            // a lane that has seen no key yet keeps -inf; subtract 0 there, so that exp2(-inf) = 0 and not NaN
            const Vec<T> base = top == -std::numeric_limits<T>::infinity() ? Vec<T>{} : top;
            const Vec<T> shrink = power(before - base);
            Vec<T> total{};
            for (i64 r = 0; r < count; r++) {
                const Vec<T> p = power(load(s + r * LANES) - base);
                store<T>(s + r * LANES, p);
                total += p;
            }
            store<T>(f.total + v * W, load(f.total + v * W) * shrink + total);
            store<T>(f.top + v * W, top);
            for (i64 i = 0; i < W; i++)
                if (shrink[i] != T(1)) {
                    T* o = f.out + (v * W + i) * wide;
                    for (i64 c = 0; c < wide; c += W) store<T>(o + c, load(o + c) * shrink[i]);
                }
        }
    }
    void forward_band(Scratch& f, const Band& band, i64 a0, i64 lanes, const View<IO>& k, const View<IO>& v) const {
        const i64 from = std::max<i64>(0, band.low.at(a0));
        const i64 to = std::min(band.keys.count, band.high.at(a0 + lanes - 1));
        const auto interval = [&](i64 b) {
            return std::pair<i64, i64>(band.high.first_above(b) - a0, band.low.first_above(b) - a0);
        };
        pieces(from, to, lanes, interval, [&](i64 b, i64 count, i64 begin, i64 end, bool whole) {
            const i64 first = band.keys.at(b), step = band.keys.step, at = begin * W, width = (end - begin) * W;
            const Matrix key = rows(k, first, step, count, f.keys), value = rows(v, first, step, count, f.values);
            gemm<T>(count, width, d, key.data, key.row, 1, f.qt + at, LANES, f.s + at, LANES, false);
            if (!whole) mask(f.s, b, count, begin, end, lanes, interval);
            soften(f, count, begin, end);
            gemm<T>(width, wide, count, f.s + at, 1, LANES, value.data, value.row, f.out + at * wide, wide, true);
        });
    }
    void forward_diagonals(Scratch& f, i64 row, i64 lanes, const View<IO>& k, const View<IO>& v) const {
        const auto found = diagonals(row, lanes, 1);
        for (size_t at = 0; at < found.size(); at += STREAM) {
            const i64 count = std::min<i64>(STREAM, found.size() - at);
            for (i64 m = 0; m < count; m++) {
                const Diagonal& g = found[at + m];
                T* s = f.s + m * LANES;
                const i64 inside = g.last - g.first;
                const Matrix key = rows(k, row + g.shift + g.first, 1, inside, f.keys);
                scores(f.qt + g.first, key, inside, f.diagonal);
                std::fill(s, s + LANES, -std::numeric_limits<T>::infinity());
                std::copy_n(f.diagonal + 0, inside, s + g.first);
            }
            soften(f, count, 0, (lanes + W - 1) / W);
            for (i64 m = 0; m < count; m++) {
                const Diagonal& g = found[at + m];
                const Matrix value = rows(v, row + g.shift + g.first, 1, g.last - g.first, f.values);
                for (i64 i = g.first; i < g.last; i++) {
                    const T p = f.s[m * LANES + i];
                    T* o = f.out + i * wide;
                    const T* x = value.data + (i - g.first) * value.row;
                    for (i64 c = 0; c < wide; c += W) store<T>(o + c, load(o + c) + p * load(x + c));
                }
            }
        }
    }
    void load_queries(Scratch& f, const View<IO>& q, const Rows& r, i64 a0, i64 lanes) const {
        copy_rows(q, r.at(a0), r.step, lanes, whole_vectors(lanes), f.natural);
        transpose(f.natural, lanes, f.qt);
    }
    void finish(Scratch& f, const Rows& r, i64 a0, i64 lanes, const Head& x) const {
        for (i64 i = 0; i < lanes; i++) {
            const i64 row = r.at(a0 + i);
            const T total = f.total[i], inverse = total == 0 ? T(0) : 1 / total;  // no key at all: zeros, top = -inf
            T* o = f.out + i * wide;
            for (i64 c = 0; c < wide; c += W) store<T>(o + c, load(o + c) * inverse);
            convert((const T*)o, x.out.data + row * x.out.row, d);
            x.top[row] = f.top[i], x.total[row] = total;
        }
    }
    void reset(Scratch& f) const {
        std::fill(f.out + 0, f.out + LANES * wide, T(0));
        std::fill(f.total + 0, f.total + LANES, T(0));
        std::fill(f.top + 0, f.top + LANES, -std::numeric_limits<T>::infinity());
    }
    void forward_tile(Scratch& f, const Head& x, i64 row) const {
        const Pass& pass = plan.by_query[0];
        const i64 lanes = std::min(LANES, n - row);
        load_queries(f, x.q, pass.lanes, row, lanes);
        reset(f);
        for (const Band& band : pass.bands) forward_band(f, band, row, lanes, x.k, x.v);
        forward_diagonals(f, row, lanes, x.k, x.v);
    }
    // Several passes over the same rows: the unnormalised state of the softmax waits in between.
    void forward_passes(Scratch& f, const Head& x) const {
        Buffer<T> sums(n * wide), top(n), total(n);
        for (i64 row = 0; row < n; row += LANES) {
            const i64 lanes = std::min(LANES, n - row);
            forward_tile(f, x, row);
            std::copy_n(f.out + 0, lanes * wide, sums + row * wide);
            std::copy_n(f.top + 0, lanes, top + row);
            std::copy_n(f.total + 0, lanes, total + row);
        }
        for (size_t p = 1; p < plan.by_query.size(); p++) {  // together these hold every row once
            const Rows& r = plan.by_query[p].lanes;
            for (i64 a0 = 0; a0 < r.count; a0 += LANES) {
                const i64 lanes = std::min(LANES, r.count - a0);
                load_queries(f, x.q, r, a0, lanes);
                reset(f);
                for (i64 i = 0; i < lanes; i++) {
                    std::copy_n(sums + r.at(a0 + i) * wide, wide, f.out + i * wide);
                    f.top[i] = top[r.at(a0 + i)], f.total[i] = total[r.at(a0 + i)];
                }
                for (const Band& band : plan.by_query[p].bands) forward_band(f, band, a0, lanes, x.k, x.v);
                finish(f, r, a0, lanes, x);
            }
        }
    }
    void run() const {
        const bool single = plan.by_query.size() == 1;
        const i64 tiles = single ? (n + LANES - 1) / LANES : 1;
#pragma omp parallel num_threads(call.threads)
        {
            Scratch f(wide);
#pragma omp for schedule(dynamic)
            for (i64 task = 0; task < call.batches * call.heads * tiles; task++) {
                const i64 row = task % tiles * LANES, h = task / tiles % call.heads, b = task / tiles / call.heads;
                const Head x = head(b, h);
                if (single) {
                    forward_tile(f, x, row);
                    finish(f, plan.by_query[0].lanes, row, std::min(LANES, n - row), x);
                } else {
                    forward_passes(f, x);
                }
            }
        }
    }
};
