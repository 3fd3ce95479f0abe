// A pattern of pairs as bands: rectangles of query rows × key rows in which each query keeps one interval of keys.
//
//     strided   the window  i - l < j ≤ i,  and j = i - ml:  shifted diagonals, or one causal band per residue mod l
//     fixed     the own block  ⌊i/l⌋ l ≤ j ≤ i,  and the last keys of the blocks before:  k < ⌊i/l⌋,  j = kl + l - 1
//
// and their mirror images when attention is bidirectional. Together they hold every pair of pattern.py exactly once.
#pragma once
#include <algorithm>
#include <utility>
#include <vector>

#include "simd.h"

constexpr i64 FAR = i64(1) << 60;
INLINE i64 floor_divide(i64 a, i64 b) { return a >= 0 ? a / b : -((b - 1 - a) / b); }

// A non-decreasing step function of a row: multiple · ⌊row / divisor⌋ + offset.
struct Bound {
    i64 multiple, divisor, offset;
    i64 at(i64 row) const { return multiple * floor_divide(row, divisor) + offset; }
    // the first row whose value exceeds y
    i64 first_above(i64 y) const {
        if (multiple == 0) return offset > y ? 0 : FAR;
        return (floor_divide(y - offset, multiple) + 1) * divisor;
    }
};
// Rows start, start + step, … of the sequence, `count` of them.
struct Rows {
    i64 start, step, count;
    i64 at(i64 k) const { return start + k * step; }
    bool operator==(const Rows& o) const { return start == o.start && step == o.step && count == o.count; }
};
// Query a of `queries` sees keys low.at(a) ≤ b < high.at(a) of `keys`.
struct Band {
    Rows queries, keys;
    Bound low, high;
};
Bound line(i64 offset) { return {1, 1, offset}; }
Bound level(i64 value) { return {0, 1, value}; }

enum Kind { DENSE = 0, STRIDED = 1, FIXED = 2 };

// Bands that share their lanes are walked together. Pass 0 goes over all rows; later ones revisit some.
struct Pass {
    Rows lanes;
    std::vector<Band> bands;
};
struct Plan {
    std::vector<Pass> by_query, by_key;
    std::vector<i64> shifts;  // diagonals key = query + shift, walked in pass 0

    void add(const Band& band) {
        for (const auto& [passes, lanes] : {std::make_pair(&by_query, band.queries), std::make_pair(&by_key, band.keys)}) {
            if (passes->empty() || !(passes->back().lanes == lanes)) passes->push_back({lanes, {}});
            passes->back().bands.push_back(band);
        }
    }
};

Plan make_plan(i64 n, i64 kind, i64 l, bool causal, bool regroup) {
    Plan plan;
    const Rows all{0, 1, n};
    const Bound none_below = level(0);
    if (kind == DENSE) plan.add({all, all, none_below, causal ? line(1) : level(n)});
    if (kind == STRIDED) {
        plan.add({all, all, line(1 - l), line(causal ? 1 : l)});
        for (i64 r = 0; regroup && r < std::min(l, n); r++) {
            const Rows every{r, l, (n - r + l - 1) / l};
            plan.add({every, every, none_below, line(0)});
            if (!causal) plan.add({every, every, line(1), level(every.count)});
        }
        for (i64 s = l; !regroup && s < n; s += l) {
            plan.shifts.push_back(-s);
            if (!causal) plan.shifts.push_back(s);
        }
    }
    if (kind == FIXED) {
        const Rows last{l - 1, l, n / l};  // the last key of every whole block
        plan.add({all, all, {l, l, 0}, causal ? line(1) : Bound{l, l, l}});
        plan.add({all, last, none_below, {1, l, 0}});
        if (!causal) plan.add({all, last, {1, l, 1}, level(last.count)});
    }
    return plan;
}
