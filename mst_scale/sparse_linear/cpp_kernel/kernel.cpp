// Multiplies with a sparse matrix at the cost of the weights that its mask keeps.
//
// index.h: the structure; products.h: the two products; head.h: the output matrix with its loss. All of them take the
// values of the active weights, one after the other; `gather` and `scatter` bring them from and to a dense matrix. Plain
// C++17 with GCC/Clang vector types and OpenMP, no other dependency; called through C structs (see cpu.py).
#include "head.h"

extern "C" {
struct Call {
    Index matrix, transpose;
    const uint32_t *flat, *flat_transpose;  // see index.h; null if the entries lie in the order of the values
    const void *x, *weight, *bias, *dy;     // in the storage type
    const void* values;                     // in float (or double), as all that follows
    void *y, *dx, *dw;                      // in the storage type; of the head, dx is in float (or double) too
    void* gathered;                         // values of `weight`
    i64 tokens, dtype, threads;
    // the head: targets, -1 where a token does not count; weights: of the counted losses
    const i64* targets;
    const void* weights;
    void *losses, *gradient;
    double scale;
};
}

// Values in the order of the entries: themselves, or a copy.
template <class T> struct InOrder {
    Buffer<T> copy;
    const T* values;
    InOrder(const T* from, const uint32_t* flat, i64 n, i64 threads) : copy(flat ? n : 0), values(flat ? copy : from) {
        if (!flat) return;
        T* to = copy;
#pragma omp parallel for num_threads(threads)
        for (i64 i = 0; i < n; i++) to[i] = from[flat[i]];
    }
};
// Where a kernel puts a number for each entry, and `finish` brings them into the order of the values.
template <class T> struct OutOfOrder {
    Buffer<T> copy;
    const uint32_t* flat;
    T *to, *entries;
    OutOfOrder(T* to, const uint32_t* flat, i64 n) : copy(flat ? n : 0), flat(flat), to(to), entries(flat ? copy : to) {}
    void finish(i64 n, i64 threads) {
        if (!flat) return;
#pragma omp parallel for num_threads(threads)
        for (i64 i = 0; i < n; i++) to[flat[i]] = entries[i];
    }
};
// use(i, position in the flattened weight, place among the values) for every entry
template <class Use> void each_entry(const Call& c, Use use) {
    const Index& a = c.matrix;
    const i64 count = panels(a.columns), width = panel_width(a.columns);
#pragma omp parallel for num_threads(c.threads)
    for (i64 r = 0; r < a.rows; r++)
        for (i64 p = 0; p < count; p++)
            for (i64 i = a.begin[p * a.rows + r]; i < a.begin[p * a.rows + r + 1]; i++)
                use(r * a.columns + p * width + a.column[i], c.flat ? c.flat[i] : i);
}
template <class T, class IO> void gather(const Call& c) {
    each_entry(c, [&](i64 at, i64 value) { convert((const IO*)c.weight + at, (T*)c.gathered + value, 1); });
}
// dw (dense) = scale · gradient, zero where masked
template <class T, class IO> void scatter(const Call& c) {
    const i64 row = c.matrix.columns * sizeof(IO);
#pragma omp parallel for num_threads(c.threads)
    for (i64 r = 0; r < c.matrix.rows; r++) std::memset((char*)c.dw + r * row, 0, row);
    each_entry(c, [&](i64 at, i64 value) {
        const T scaled = T(c.scale) * ((const T*)c.gradient)[value];
        convert(&scaled, (IO*)c.dw + at, 1);
    });
}
template <class T, class IO> void forward(const Call& c) {
    const InOrder<T> ours((const T*)c.values, c.flat, c.matrix.row_entries[c.matrix.rows], c.threads);
    multiply<T, IO>(c.matrix, ours.values, (const IO*)c.x, (const IO*)c.bias, (IO*)c.y, c.tokens, c.threads);
}
template <class T, class IO> void backward(const Call& c) {
    const i64 n = c.matrix.row_entries[c.matrix.rows];
    if (c.dx) {
        const InOrder<T> theirs((const T*)c.values, c.flat_transpose, n, c.threads);
        multiply<T, IO>(c.transpose, theirs.values, (const IO*)c.dy, (const IO*)nullptr, (IO*)c.dx, c.tokens, c.threads);
    }
    if (c.gradient) {
        OutOfOrder<T> out((T*)c.gradient, c.flat, n);
        sample<T, IO>(c.matrix, (const IO*)c.dy, (const IO*)c.x, out.entries, c.tokens, c.threads);
        out.finish(n, c.threads);
    }
}
template <class T, class IO> void head(const Call& c) {
    const i64 n = c.matrix.row_entries[c.matrix.rows];
    const InOrder<T> ours((const T*)c.values, c.flat, n, c.threads);
    OutOfOrder<T> out((T*)c.gradient, c.gradient ? c.flat : nullptr, n);
    Head<T>{c.matrix, ours.values, c.tokens, c.threads}.run(
        (const IO*)c.x, c.targets, (const T*)c.weights, (T*)c.losses, (T*)c.dx, out.entries);
    out.finish(n, c.threads);
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
FOR_EVERY_DTYPE(sl_gather, gather)
FOR_EVERY_DTYPE(sl_scatter, scatter)
FOR_EVERY_DTYPE(sl_forward, forward)
FOR_EVERY_DTYPE(sl_backward, backward)
FOR_EVERY_DTYPE(sl_head, head)
EXPORTED i64 sl_panels(i64 columns) { return panels(columns); }
// The arrays of both matrices are the caller's.
EXPORTED int sl_build(const uint8_t* active, const Call* c) {
    const auto builder = [](const Index& a) {
        return Builder{a.rows, a.columns, (i64*)a.begin, (uint16_t*)a.column, (i64*)a.row_entries};
    };
    build(active, builder(c->matrix), builder(c->transpose), (uint32_t*)c->flat, (uint32_t*)c->flat_transpose, c->threads);
    return 0;
}
