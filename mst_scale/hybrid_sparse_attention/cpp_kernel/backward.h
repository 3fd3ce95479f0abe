// Backward: keys lie in the lanes, so that dk and dv of a tile stay in cache; queries are streamed, dq summed in memory.
#pragma once
#include "tiles.h"

template <class T, class IO> struct Backward : Tiles<T, IO> {
    using Base = Tiles<T, IO>;
    using typename Base::Diagonal;
    using typename Base::Matrix;
    using Base::call, Base::plan, Base::n, Base::d, Base::wide, Base::factor, Base::W, Base::LANES, Base::STREAM;
    using Base::rows, Base::copy_rows, Base::transpose, Base::pieces, Base::mask, Base::diagonals, Base::dots;
    using Base::Base, Base::whole_vectors, Base::scores;

    struct Scratch {
        Buffer<T> kt, vt, k, v, dk, dv, s, dp, q, dout;
        explicit Scratch(i64 wide)
            : kt(LANES * wide), vt(LANES * wide), k(LANES * wide), v(LANES * wide), dk(LANES * wide), dv(LANES * wide),
              s(STREAM * LANES), dp(STREAM * LANES), q(std::max(STREAM, LANES) * wide),
              dout(std::max(STREAM, LANES) * wide) {}
    };
    struct Queries {  // one query head as the backward reads it
        View<IO> q, dout;
        const T *top, *inverse, *delta;  // top (+inf for a row without keys), 1 / total, scale · do_i·out_i
        T* dq;
        i64 row;  // stride of dq
    };
    void load_keys(Scratch& f, const View<IO>& k, const View<IO>& v, const Rows& r, i64 b0, i64 lanes) const {
        const i64 padded = whole_vectors(lanes);
        copy_rows(k, r.at(b0), r.step, lanes, padded, f.k);
        copy_rows(v, r.at(b0), r.step, lanes, padded, f.v);
        transpose(f.k, lanes, f.kt);
        transpose(f.v, lanes, f.vt, T(call.scale));
        std::fill(f.dk + 0, f.dk + padded * wide, T(0));
        std::fill(f.dv + 0, f.dv + padded * wide, T(0));
    }
    void backward_band(Scratch& f, const Band& band, i64 b0, i64 lanes, const Queries& x) const {
        const i64 from = std::max<i64>(0, band.high.first_above(b0));
        const i64 to = std::min(band.queries.count, band.low.first_above(b0 + lanes - 1));
        const auto interval = [&](i64 a) { return std::pair<i64, i64>(band.low.at(a) - b0, band.high.at(a) - b0); };
        pieces(from, to, lanes, interval, [&](i64 a, i64 count, i64 begin, i64 end, bool whole) {
            const i64 first = band.queries.at(a), step = band.queries.step, width = (end - begin) * W, at = begin * W;
            const Matrix q = rows(x.q, first, step, count, f.q), dout = rows(x.dout, first, step, count, f.dout);
            gemm<T>(count, width, d, q.data, q.row, 1, f.kt + at, LANES, f.s + at, LANES, false);
            gemm<T>(count, width, d, dout.data, dout.row, 1, f.vt + at, LANES, f.dp + at, LANES, false);
            if (!whole) mask(f.s, a, count, begin, end, lanes, interval);
            const Exp2<T> power(factor);
            for (i64 r = 0; r < count; r++) {
                const i64 row = first + r * step;
                const T top = x.top[row], inverse = x.inverse[row], delta = x.delta[row];
                for (i64 c = r * LANES + at; c < r * LANES + at + width; c += W) {
                    const Vec<T> p = power(load(f.s + c) - top) * inverse;
                    store<T>(f.s + c, p);
                    store<T>(f.dp + c, p * (load(f.dp + c) - delta));
                }
            }
            gemm<T>(width, wide, count, f.s + at, 1, LANES, dout.data, dout.row, f.dv + at * wide, wide, true);
            gemm<T>(width, wide, count, f.dp + at, 1, LANES, q.data, q.row, f.dk + at * wide, wide, true);
            T* dq = x.dq + first * x.row;
            gemm<T>(count, wide, width, f.dp + at, LANES, 1, f.k + at * wide, wide, dq, step * x.row, true);
        });
    }
    void backward_diagonals(Scratch& f, i64 row, i64 lanes, const Queries& x) const {
        const Exp2<T> power(factor);
        for (const Diagonal& g : diagonals(row, lanes, -1)) {
            const i64 first = row + g.shift + g.first, count = g.last - g.first;
            const Matrix q = rows(x.q, first, 1, count, f.q), dout = rows(x.dout, first, 1, count, f.dout);
            scores(f.kt + g.first, q, count, f.s);
            dots(dout, {f.v + g.first * wide, wide}, count, f.dp);
            for (i64 r = 0; r < count; r += W) {
                const i64 at = first + r;
                const Vec<T> p = power(load(f.s + r) - load(x.top + at)) * load(x.inverse + at);
                store<T>(f.s + r, p);
                store<T>(f.dp + r, p * (T(call.scale) * load(f.dp + r) - load(x.delta + at)));
            }
            for (i64 r = 0; r < count; r++) {
                const T p = f.s[r], ds = f.dp[r];
                const i64 lane = (g.first + r) * wide;
                const T *qr = q.data + r * q.row, *dor = dout.data + r * dout.row;
                T* dq = x.dq + (first + r) * x.row;
                for (i64 c = 0; c < wide; c += W) {
                    store<T>(f.dv + lane + c, load(f.dv + lane + c) + p * load(dor + c));
                    store<T>(f.dk + lane + c, load(f.dk + lane + c) + ds * load(qr + c));
                    store<T>(dq + c, load(dq + c) + ds * load(f.k + lane + c));
                }
            }
        }
    }
    // Where dk or dv of one key head is summed: in the tensor itself, in scratch if several passes add to a tensor of
    // another type, or nowhere if one pass writes each row once.
    struct Sum {
        const View<IO> to;
        Buffer<T> scratch;
        T* data;
        i64 row;
        Sum(const View<IO>& to, bool in_place, i64 elements, i64 wide)
            : to(to), scratch(elements), data(in_place ? (T*)to.data : elements ? (T*)scratch : nullptr),
              row(in_place ? to.row : wide) {}
    };
    void deposit(const T* from, const Sum& sum, i64 at, bool add) const {
        if (!sum.data) return convert(from, sum.to.data + at * sum.to.row, d);
        T* to = sum.data + at * sum.row;
        for (i64 c = 0; c < wide; c += W) store<T>(to + c, add ? load(to + c) + load(from + c) : load(from + c));
    }
    // One key head with all the query heads that share it.
    void backward_head(Scratch& f, i64 b, i64 g) const {
        const i64 group = call.heads / call.kv_heads;
        const bool in_place = std::is_same<T, IO>::value && wide == d, several = plan.by_key.size() > 1;
        const View<IO> k(call.k, b, g), v(call.v, b, g);
        const Sum dk({call.dk, b, g}, in_place, several && !in_place ? n * wide : 0, wide);
        const Sum dv({call.dv, b, g}, in_place, several && !in_place ? n * wide : 0, wide);
        Buffer<T> top(group * n), inverse(group * n), delta(group * n), dqs(in_place ? 0 : group * n * wide);
        std::vector<Queries> queries;
        for (i64 e = 0; e < group; e++) {
            const i64 h = g * group + e;
            const View<IO> dq(call.dq, b, h), out(call.out, b, h), dout(call.dout, b, h);
            const i64 head = (b * call.heads + h) * n, mine = e * n;
            T* to = in_place ? (T*)dq.data : dqs + e * n * wide;
            const i64 row = in_place ? dq.row : wide;
            for (i64 i = 0; i < n; i += LANES) {
                const i64 count = std::min(LANES, n - i);
                const Matrix o = rows(out, i, 1, count, f.q), x = rows(dout, i, 1, count, f.dout);
                dots(o, x, count, f.s);
                for (i64 r = 0; r < count; r++) {
                    const T most = ((const T*)call.top)[head + i + r], total = ((const T*)call.total)[head + i + r];
                    top[mine + i + r] = most == -std::numeric_limits<T>::infinity() ? -most : most;
                    inverse[mine + i + r] = total == 0 ? T(0) : 1 / total;
                    delta[mine + i + r] = T(call.scale) * f.s[r];
                    std::fill_n(to + (i + r) * row, wide, T(0));
                }
            }
            queries.push_back({{call.q, b, h}, dout, top + mine, inverse + mine, delta + mine, to, row});
        }
        for (size_t p = 0; p < plan.by_key.size(); p++) {
            const Pass& pass = plan.by_key[p];
            for (i64 b0 = 0; b0 < pass.lanes.count; b0 += LANES) {
                const i64 lanes = std::min(LANES, pass.lanes.count - b0);
                load_keys(f, k, v, pass.lanes, b0, lanes);
                for (const Queries& x : queries) {
                    for (const Band& band : pass.bands) backward_band(f, band, b0, lanes, x);
                    if (p == 0) backward_diagonals(f, b0, lanes, x);
                }
                for (i64 i = 0; i < lanes; i++) {
                    deposit(f.dk + i * wide, dk, pass.lanes.at(b0 + i), p > 0);
                    deposit(f.dv + i * wide, dv, pass.lanes.at(b0 + i), p > 0);
                }
            }
        }
        if (in_place) return;
        for (const Sum* sum : {&dk, &dv})
            for (i64 i = 0; sum->data && i < n; i++)
                convert((const T*)sum->data + i * wide, sum->to.data + i * sum->to.row, d);
        for (i64 e = 0; e < group; e++) {
            const View<IO> dq(call.dq, b, g * group + e);
            for (i64 i = 0; i < n; i++) convert((const T*)queries[e].dq + i * wide, dq.data + i * dq.row, d);
        }
    }
    void run() const {
#pragma omp parallel num_threads(call.threads)
        {
            Scratch f(wide);
#pragma omp for schedule(dynamic)
            for (i64 task = 0; task < call.batches * call.kv_heads; task++)
                backward_head(f, task / call.kv_heads, task % call.kv_heads);
        }
    }
};
