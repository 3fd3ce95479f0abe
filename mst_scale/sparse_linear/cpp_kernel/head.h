// Computes the loss of a sparse output matrix without storing its logits.
//
//     z = A x,   loss_t = (max_r z_r - z_target) + ln Σ_r exp(z_r - max z),   d = (softmax(z) - onehot(target)) · weight_t
//     dx = Aᵀ d,   g_i = Σ_t d_row x_column
//
// It works on a tile of tokens at a time: the logits (rows × LANES, float) lie in a buffer of one thread, with tokens across
// the lanes, so that the softmax is vertical and nothing is transposed. Both gradients are computed in the same pass over
// the rows, since they need the same d. Each thread takes a contiguous share of the tiles and has its own sum for g.
//
// Sums over the rows are taken in pieces: a term added to a sum of 50,000 is rounded to the last digit of that sum, and
// many small ones would be lost altogether. The maximum and Σ stay two numbers: at logits of 100 their log-sum-exp would
// be rounded by 4e-6, which is an error of every probability.
#pragma once
#include <cmath>
#include <limits>

#include "products.h"

template <class T> struct Head {
    const Index& a;
    const T* values;
    i64 tokens, threads;
    static constexpr i64 W = WIDTH<T>, V = VECTORS, LANES = V * W;
    const i64 count = panels(a.columns), width = panel_width(a.columns);
    const T log2e = T(1.44269504088896340736);
    static constexpr i64 PIECE = 64 * W;  // rows of a piece of Σ exp, itself summed W rows at a time

    // logits of one tile into z, and the maximum and Σ exp(z - maximum) over all rows
    INLINE void logits(const T* x, T* z, Vec<T>* top, Vec<T>* sum) const {
#pragma GCC unroll 8
        for (int v = 0; v < V; v++) top[v] = splat<T>(-std::numeric_limits<T>::infinity()), sum[v] = Vec<T>{};
        for (i64 first = 0; first < a.rows; first += PIECE) {
            Vec<T> piece[V] = {};
            logits_of_piece(first, std::min(first + PIECE, a.rows), x, z, top, sum, piece);
#pragma GCC unroll 8
            for (int v = 0; v < V; v++) sum[v] += piece[v];
        }
    }
    // the same for rows [first, end): their Σ exp into `piece`; the `sum` of rows before is scaled to the new maximum
    INLINE void logits_of_piece(i64 first, i64 end, const T* x, T* z, Vec<T>* top, Vec<T>* sum, Vec<T>* piece) const {
        const Exp2<T> power(log2e);
        for (i64 r0 = first; r0 < end; r0 += W) {
            const i64 last = std::min(r0 + W, end);
            Vec<T> most[V];
#pragma GCC unroll 8
            for (int v = 0; v < V; v++) most[v] = top[v];
            for (i64 r = r0; r < last; r++) {
                Vec<T> logit[V];
                for (i64 p = 0; p < count; p++) {
                    const i64* begin = a.begin + p * a.rows + r;
                    const T* panel = x + p * width * LANES;
                    add_row<V>(values, a.column, begin[0], begin[1], panel, p == 0, T(0), z + r * LANES, logit);
                }
#pragma GCC unroll 8
                for (int v = 0; v < V; v++) most[v] = logit[v] > most[v] ? logit[v] : most[v];
            }
#pragma GCC unroll 8
            for (int v = 0; v < V; v++) {
                const Vec<T> shrink = power(top[v] - most[v]);
                Vec<T> block{};
                for (i64 r = r0; r < last; r++) block += power(load(z + r * LANES + v * W) - most[v]);
                piece[v] = piece[v] * shrink + block, sum[v] *= shrink, top[v] = most[v];
            }
        }
    }

    // the row's d into `d`, its share of dx and of g
    INLINE void gradients(const T* d, const T* x, T* dx, i64 from, i64 to, T* g) const {
        Vec<T> row[V];
#pragma GCC unroll 8
        for (int v = 0; v < V; v++) row[v] = load(d + v * W);
        const auto step = [&](i64 i) __attribute__((always_inline)) {
            const Vec<T> w = splat<T>(values[i]);
            const T* in = x + a.column[i] * LANES;
            T* out = dx + a.column[i] * LANES;
            Vec<T> sum{};
#pragma GCC unroll 8
            for (int v = 0; v < V; v++) {
                sum = fused(row[v], load(in + v * W), sum);
                store(out + v * W, fused(w, row[v], load(out + v * W)));
            }
            return sum;
        };
        i64 i = from;
        for (; i + W <= to; i += W) {
            Vec<T> s[W];
#pragma GCC unroll 16
            for (int j = 0; j < W; j++) s[j] = step(i + j);
            store(g + i, load(g + i) + Exchange<T, W / 2>().sums(s));
        }
        if (i < to) {
            T kept[W * W], part[W];
            for (i64 j = 0; j < W; j++) store(kept + j * W, i + j < to ? step(i + j) : Vec<T>{});
            Vec<T> s[W];
            for (int j = 0; j < W; j++) s[j] = load(kept + j * W);
            store(part, Exchange<T, W / 2>().sums(s));
            for (i64 j = 0; i + j < to; j++) g[i + j] += part[j];
        }
    }

    // a piece of dx goes to its sum, and the next one starts at zero
    INLINE void add_piece(T* piece, T* sum, i64 count) const {
        for (i64 i = 0; i < count; i += W) {
            store<T>(sum + i, load(sum + i) + load(piece + i));
            store<T>(piece + i, Vec<T>{});
        }
    }

    // losses (tokens): before weighting; with dx (tokens × columns) and g (entries) also their gradients, weighted
    template <class IO>
    void run(const IO* x, const i64* targets, const T* weights, T* losses, T* dx, T* g) const {
        const i64 tiles = (tokens + LANES - 1) / LANES, entries = a.row_entries[a.rows];
        Buffer<T> shares(dx ? threads * entries + 1 : 1);
#pragma omp parallel num_threads(threads)
        {
            const i64 padded = count * ((width + W - 1) / W * W) + W;
            Buffer<T> in(padded * LANES), z(a.rows * LANES);
            Buffer<T> piece(dx ? padded * LANES : 1), out(dx ? padded * LANES : 1);
            T most[LANES] __attribute__((aligned(64))), per_exp[LANES] __attribute__((aligned(64)));
            const Exp2<T> power(log2e);
            T weight[LANES], d[LANES] __attribute__((aligned(64)));
#pragma omp for schedule(static, 1)
            for (i64 share = 0; share < threads; share++) {
                T* mine = shares + share * entries;
                if (dx) std::fill(mine, mine + entries, T(0));
                for (i64 tile = tiles * share / threads; tile < tiles * (share + 1) / threads; tile++) {
                    const i64 at = tile * LANES, valid = std::min(LANES, tokens - at);
                    for (i64 p = 0; p < count; p++)
                        tile_in<V, T>(x + at * a.columns, a.columns, valid, p * width,
                                      std::min(width, a.columns - p * width), in + p * width * LANES);
                    Vec<T> top[V], sum[V];
                    logits(in, z, top, sum);
                    std::pair<i64, i64> order[LANES];  // (target, lane)
                    for (i64 t = 0; t < LANES; t++) {
                        const T total = sum[t / W][t % W];
                        const bool counts = t < valid && targets[at + t] >= 0;
                        most[t] = top[t / W][t % W], weight[t] = counts ? weights[at + t] : 0;
                        per_exp[t] = weight[t] / total;
                        order[t] = {counts ? targets[at + t] : a.rows, t};
                        if (t < valid)
                            losses[at + t] = counts ? most[t] - z[targets[at + t] * LANES + t] + std::log(total) : 0;
                    }
                    if (!dx) continue;
                    std::sort(order, order + LANES);
                    std::fill(out + 0, out + padded * LANES, T(0));
                    std::fill(piece + 0, piece + padded * LANES, T(0));
                    i64 next = 0, added = 0;  // added: entries of all rows before the piece
                    for (i64 r = 0; r < a.rows; r++) {
                        for (i64 v = 0; v < V; v++)
                            store(d + v * W, power(load(z + r * LANES + v * W) - load(most + v * W)) * load(per_exp + v * W));
                        for (; next < LANES && order[next].first == r; next++) d[order[next].second] -= weight[order[next].second];
                        for (i64 p = 0; p < count; p++)
                            gradients(d, in + p * width * LANES, piece + p * width * LANES, a.begin[p * a.rows + r],
                                      a.begin[p * a.rows + r + 1], mine);
                        if (r + 1 == a.rows || a.row_entries[r + 1] - added >= TERMS * a.columns)
                            add_piece(piece, out, padded * LANES), added = a.row_entries[r + 1];
                    }
                    for (i64 c = 0; c < a.columns; c += W)
                        for (i64 v = 0; v < V; v++)
                            transpose_out<T, T>(out + c * LANES + v * W, LANES, dx + (at + v * W) * a.columns + c, a.columns,
                                                valid - v * W, std::min(W, a.columns - c));
                }
            }
            if (dx) {
#pragma omp for
                for (i64 i = 0; i < entries; i++) {
                    T total = 0;
                    for (i64 share = 0; share < threads; share++) total += shares[share * entries + i];
                    g[i] = total;
                }
            }
        }
    }
};
