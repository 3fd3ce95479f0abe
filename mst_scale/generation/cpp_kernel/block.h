// All blocks of a GPT for one more token of each sequence, in one call: at this size, calling one operator after the
// other from Python takes as long as the products. decoder.py has the same in torch, which is its definition.
//
//     x ← x + proj(attend(qkv(ln_1(x))));   x ← x + down(gelu(up(ln_2(x))))
#pragma once
#include <cmath>

#include "product.h"

extern "C" {
struct Layer {
    const Call *qkv, *proj, *up, *down;  // without x, y, tokens and threads
    const float *ln_1, *ln_1_bias, *ln_2, *ln_2_bias;  // biases may be null
    float *keys, *values;                // (batch, heads, room, dim)
};
struct Step {
    const Layer* layers;
    const i64* visible;  // n_visible positions that the new token sees, without its own; -1: all before it
    float* x;            // (batch, heads · dim), in and out
    i64 n_layers, n_visible, batch, heads, dim, room, length, threads;
    double eps;
};
}

constexpr i64 PER_THREAD = 1 << 13;  // values, or products of attention, per thread at least

INLINE i64 padded(i64 n) { return (n + Simd<float>::WIDTH - 1) / Simd<float>::WIDTH * Simd<float>::WIDTH; }

inline void product(const Call& matrix, const float* x, float* y, const Step& s) {
    Call c = matrix;
    c.x = x, c.y = y, c.tokens = s.batch;
    c.threads = std::max<i64>(1, std::min(s.threads, s.batch * c.begin[c.rows] / PER_THREAD));
    if (c.dtype == 0) multiply<float>(c);
    else multiply<bfloat>(c);
}

inline void norm(const float* x, const float* weight, const float* bias, float* y, i64 width, float eps) {
    float sum = 0, squares = 0;
#pragma omp simd reduction(+ : sum)
    for (i64 i = 0; i < width; i++) sum += x[i];
    const float mean = sum / width;
#pragma omp simd reduction(+ : squares)
    for (i64 i = 0; i < width; i++) squares += (x[i] - mean) * (x[i] - mean);
    const float scale = 1 / std::sqrt(squares / width + eps);
    for (i64 i = 0; i < width; i++) y[i] = (x[i] - mean) * scale * weight[i] + (bias ? bias[i] : 0.0f);
}

// x / (1 + e^(-2u)), which is GPT-2's tanh form, with u = √(2/π) (x + 0.044715 x³); n is a multiple of a vector.
inline void gelu(float* x, i64 n) {
    const Exp2<float> exp2(1.44269504f);
    for (i64 i = 0; i < n; i += Simd<float>::WIDTH) {
        const Vec<float> v = load(x + i), u2 = 1.59576912f * (v + 0.044715f * v * v * v);
        const Vec<float> e = exp2(u2 < 0 ? u2 : -u2), one = splat(1.0f);
        store(x + i, v * (u2 < 0 ? e : one) / (one + e));
    }
}

// One head of one sequence: softmax(q·k / √dim) v over the visible keys and the new one. Scores have room for a vector.
inline void attend(const Step& s, const float* q, const float* keys, const float* values, float* scores, float* out) {
    const i64 dim = s.dim, seen = s.n_visible < 0 ? s.length : s.n_visible, n = seen + 1;
    const auto at = [&](i64 j) { return (j == seen ? s.length : s.n_visible < 0 ? j : s.visible[j]) * dim; };
    const float scale = 1 / std::sqrt(float(dim));
    float top = -INFINITY, total = 0;
    for (i64 j = 0; j < n; j++) {
        const float* k = keys + at(j);
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (i64 i = 0; i < dim; i++) sum += q[i] * k[i];
        scores[j] = sum * scale;
        top = std::max(top, scores[j]);
    }
    const Exp2<float> exp2(1.44269504f);
    for (i64 j = n; j < padded(n); j++) scores[j] = -INFINITY;
    for (i64 j = 0; j < n; j += Simd<float>::WIDTH) store(scores + j, exp2(load(scores + j) - splat(top)));
    std::fill(out, out + dim, 0.0f);
    for (i64 j = 0; j < n; j++) {
        const float *v = values + at(j), p = scores[j];
        total += p;
        for (i64 i = 0; i < dim; i++) out[i] += p * v[i];
    }
    for (i64 i = 0; i < dim; i++) out[i] /= total;
}

inline void step(const Step& s) {
    const i64 d = s.heads * s.dim, ff = s.layers[0].up->rows, n = (s.n_visible < 0 ? s.length : s.n_visible) + 1;
    Buffer<float> h(s.batch * d), wide(padded(s.batch * std::max(3 * d, ff))), mixed(s.batch * d);
    for (i64 l = 0; l < s.n_layers; l++) {
        const Layer& layer = s.layers[l];
        for (i64 b = 0; b < s.batch; b++) norm(s.x + b * d, layer.ln_1, layer.ln_1_bias, h + b * d, d, s.eps);
        product(*layer.qkv, h, wide, s);
        const i64 threads = std::max<i64>(1, std::min(s.threads, s.batch * d * n / PER_THREAD));
#pragma omp parallel num_threads(threads)
        {
            Buffer<float> scores(padded(n));
#pragma omp for
            for (i64 i = 0; i < s.batch * s.heads; i++) {
                const float* q = wide + i / s.heads * 3 * d + i % s.heads * s.dim;
                float *keys = layer.keys + i * s.room * s.dim, *values = layer.values + i * s.room * s.dim;
                std::memcpy(keys + s.length * s.dim, q + d, s.dim * sizeof(float));
                std::memcpy(values + s.length * s.dim, q + 2 * d, s.dim * sizeof(float));
                attend(s, q, keys, values, scores, mixed + i * s.dim);
            }
        }
        product(*layer.proj, mixed, h, s);
        for (i64 i = 0; i < s.batch * d; i++) s.x[i] += h[i];
        for (i64 b = 0; b < s.batch; b++) norm(s.x + b * d, layer.ln_2, layer.ln_2_bias, h + b * d, d, s.eps);
        product(*layer.up, h, wide, s);
        gelu(wide, padded(s.batch * ff));
        product(*layer.down, wide, h, s);
        for (i64 i = 0; i < s.batch * d; i++) s.x[i] += h[i];
    }
}
