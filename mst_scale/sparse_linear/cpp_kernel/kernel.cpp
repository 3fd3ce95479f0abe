// Multiplies with a sparse matrix whose values lie in a dense one, at the cost of the weights that the mask keeps.
//
// index.h: the structure; products.h: the two products; head.h: the output matrix with its loss. The values are gathered anew at each forward pass, since they
// change at each step. Plain C++17 with GCC/Clang vector types and OpenMP, no other dependency; called through C structs
// (see cpu.py).
#include <type_traits>

#include "head.h"

extern "C" {
struct Call {
    Index matrix, transpose;
    const uint32_t* order;
    const void *x, *weight, *bias, *dy;
    void *values, *y, *dx, *dw;
    i64 tokens, dtype, threads;
    // the head: targets, -1 where a token does not count; all else in float (or double), weights: of the counted losses
    const i64* targets;
    const void* weights;
    void *losses, *gradient;
    double scale;
};
}

template <class T, class IO> void gather(const Call& c) {
    const Index& a = c.matrix;
    const i64 count = panels(a.columns), width = panel_width(a.columns);
    const IO* weight = (const IO*)c.weight;
    T* values = (T*)c.values;
#pragma omp parallel for num_threads(c.threads)
    for (i64 r = 0; r < a.rows; r++)
        for (i64 p = 0; p < count; p++)
            for (i64 i = a.begin[p * a.rows + r]; i < a.begin[p * a.rows + r + 1]; i++)
                convert(weight + r * a.columns + p * width + a.column[i], values + i, 1);
}
template <class T, class IO> void forward(const Call& c) {
    gather<T, IO>(c);
    multiply<T, IO>(c.matrix, (T*)c.values, (const IO*)c.x, (const IO*)c.bias, (IO*)c.y, c.tokens, c.threads);
}
template <class T, class IO> void backward(const Call& c) {
    if (c.dx) {
        const i64 n = c.matrix.row_entries[c.matrix.rows];
        Buffer<T> values(n + 1);
        const T* ours = (const T*)c.values;
        T* theirs = values;
#pragma omp parallel for num_threads(c.threads)
        for (i64 i = 0; i < n; i++) theirs[i] = ours[c.order[i]];
        multiply<T, IO>(c.transpose, theirs, (const IO*)c.dy, (const IO*)nullptr, (IO*)c.dx, c.tokens, c.threads);
    }
    if (c.dw) sample<T, IO>(c.matrix, (const IO*)c.dy, (const IO*)c.x, (IO*)c.dw, c.tokens, c.threads);
}
template <class T, class IO> void head(const Call& c) {
    gather<T, IO>(c);
    Head<T>{c.matrix, (const T*)c.values, c.tokens, c.threads}.run(
        (const IO*)c.x, c.targets, (const T*)c.weights, (T*)c.losses, (T*)c.dx, (T*)c.gradient);
}
template <class T, class IO> void head_backward(const Call& c) {
    scatter<T, IO>(c.matrix, (const T*)c.gradient, T(c.scale), (IO*)c.dw, c.threads);
}

#define FOR_EVERY_DTYPE(name, function)                    \
    EXPORTED int name(const Call* c) {                     \
        switch (c->dtype) {                                \
            case 0: function<float, float>(*c); return 0;  \
            case 1: function<double, double>(*c); return 0; \
            case 2: function<float, bfloat>(*c); return 0; \
            case 3: function<float, half>(*c); return 0;   \
        }                                                  \
        return 1;                                          \
    }
FOR_EVERY_DTYPE(sl_forward, forward)
FOR_EVERY_DTYPE(sl_backward, backward)
FOR_EVERY_DTYPE(sl_head, head)
FOR_EVERY_DTYPE(sl_head_backward, head_backward)
EXPORTED i64 sl_panels(i64 columns) { return panels(columns); }
// The arrays of both matrices are the caller's.
EXPORTED int sl_build(const uint8_t* active, const Call* c) {
    const auto builder = [](const Index& a) {
        return Builder{a.rows, a.columns, (i64*)a.begin, (uint16_t*)a.column, (i64*)a.row_entries};
    };
    build(active, builder(c->matrix), builder(c->transpose), (uint32_t*)c->order, c->threads);
    return 0;
}
