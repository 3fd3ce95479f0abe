// The positions of the weights that a mask keeps, built once per topology step.
//
// An output is a sum over the inputs that its row keeps. Inputs are cut into panels, so that the part of the input that
// one panel reads (PANEL rows of a tile of tokens) stays in the second-level cache. Entries are ordered by (panel, row,
// column); begin[panel · rows + row] is where a run of them starts. Columns count from the panel's first and fit 16 bits.
#pragma once
#include <cstdlib>
#include <memory>
#include <vector>

#include "simd.h"

constexpr i64 PANEL_ROWS = 1536;  // × 64 tokens × 4 bytes = 384 KiB

extern "C" {
struct Index {
    i64 rows, columns;         // of this matrix: outputs × inputs, or inputs × outputs for the transpose
    const i64* begin;          // panels · rows + 1
    const uint16_t* column;    // entries
    const i64* row_entries;    // rows + 1: entries of all rows before, over all panels
};
}

inline i64 panels(i64 columns) { return std::max<i64>(1, (columns + PANEL_ROWS - 1) / PANEL_ROWS); }
inline i64 panel_width(i64 columns) { return (columns + panels(columns) - 1) / panels(columns); }

struct Builder {
    i64 rows, columns, *begin;
    uint16_t* column;
    i64* row_entries;
    const i64 width = panel_width(columns), count = panels(columns);

    // counts[row] of one panel → begin, row_entries
    void sum_up() {
        std::fill(row_entries, row_entries + rows + 1, 0);
        i64 total = 0;
        for (i64 p = 0; p < count; p++)
            for (i64 r = 0; r < rows; r++) {
                const i64 here = begin[p * rows + r];
                begin[p * rows + r] = total, total += here, row_entries[r + 1] += here;
            }
        begin[count * rows] = total;
        for (i64 r = 0; r < rows; r++) row_entries[r + 1] += row_entries[r];
    }
};

// `active` is a byte per weight, 0 if it is inactive. All arrays have room for all entries. Values lie in the order of the flattened
// matrix; flat[i] is the place of our i-th entry among them, flat_t[i] that of the transpose's. `flat` may be null if there
// is one panel, since it would count 0, 1, 2, …
inline void build(const uint8_t* active, Builder a, Builder t, uint32_t* flat, uint32_t* flat_t, i64 threads) {
#pragma omp parallel for num_threads(threads)
    for (i64 r = 0; r < a.rows; r++)
        for (i64 p = 0; p < a.count; p++) {
            const i64 from = p * a.width, to = std::min(from + a.width, a.columns);
            i64 here = 0;
            for (i64 c = from; c < to; c++) here += active[r * a.columns + c] != 0;
            a.begin[p * a.rows + r] = here;
        }
    a.sum_up();
#pragma omp parallel for num_threads(threads)
    for (i64 r = 0; r < a.rows; r++)
        for (i64 p = 0; p < a.count; p++) {
            const i64 from = p * a.width, to = std::min(from + a.width, a.columns);
            uint16_t* out = a.column + a.begin[p * a.rows + r];
            for (i64 c = from; c < to; c++)
                if (active[r * a.columns + c]) *out++ = uint16_t(c - from);
        }
    std::fill(t.begin, t.begin + t.count * t.rows + 1, 0);
    const auto each = [&](auto use) {  // entries in the order of the flattened matrix
        for (i64 r = 0; r < a.rows; r++)
            for (i64 p = 0; p < a.count; p++)
                for (i64 i = a.begin[p * a.rows + r]; i < a.begin[p * a.rows + r + 1]; i++)
                    use(i, r, p * a.width + a.column[i]);
    };
    each([&](i64, i64 r, i64 c) { t.begin[r / t.width * t.rows + c]++; });
    t.sum_up();
    std::vector<i64> next(t.begin, t.begin + t.count * t.rows);
    uint32_t place = 0;
    each([&](i64 i, i64 r, i64 c) {
        const i64 at = next[r / t.width * t.rows + c]++;
        t.column[at] = uint16_t(r % t.width), flat_t[at] = place;
        if (flat) flat[i] = place;
        place++;
    });
}
