// Memory that a kernel works in, aligned to a cache line.
#pragma once
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>

template <class T> struct Buffer {
    std::unique_ptr<T, void (*)(void*)> data;
    explicit Buffer(int64_t n) : data((T*)std::aligned_alloc(64, (n * sizeof(T) + 127) / 64 * 64), std::free) {
        if (data) return;
        std::fprintf(stderr, "mst_scale: a CPU kernel finds no %.0f MB of memory: use fewer threads or tokens\n", 1e-6 * n * sizeof(T));
        std::abort();  // an exception must not leave an OpenMP region
    }
    operator T*() const { return data.get(); }
};
