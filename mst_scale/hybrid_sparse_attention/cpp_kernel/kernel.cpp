// Computes attention over a pattern of pairs on a CPU, at the cost of the pairs.
//
//     out_i = Σ_j p_ij v_j,   p_ij = exp(scale (s_ij - top_i)) / total_i,   s_ij = q_i·k_j     over the pairs (i, j) kept
//     ds_ij = p_ij (do_i·v_j - do_i·out_i),   dq_i = scale Σ_j ds_ij k_j,   dk_j = scale Σ_i ds_ij q_i,
//     dv_j = Σ_i p_ij do_i
//
// A pattern is a few bands (`Band`): rectangles of query rows × key rows, taken with a step, in which each query keeps
// one interval of keys. A band is walked in tiles: LANES rows of one side lie across SIMD lanes, the other side is
// streamed. All matrix work is then one register-blocked product (`gemm`) of operands that are already in place, and the
// softmax is vertical. Forward keeps queries in the lanes and a running maximum; backward keeps keys in the lanes, so
// that dk and dv stay in cache and only dq is accumulated in memory.
//
// The strided pairs (i, i - ml) lie on few diagonals when length/l is small: dot products of shifted rows. When it is
// large (`regroup`) the rows i, i - l, i - 2l … are gathered, and are an ordinary causal band of their own.
//
// A pair's score has the same bits wherever it is computed, forward and backward, and is scaled after the row's largest
// is subtracted: at scores of 10^5 the last digit is 0.01, so that a score rounded in another order, or a rounded
// log-sum-exp, would be an error of 1 % in p.
//
// Plain C++17 with GCC/Clang vector types and OpenMP, no other dependency; called through C structs (see cpp.py).

#include "backward.h"
#include "forward.h"

template <class T, class IO> void run(const Call& call, bool backward) {
    backward ? Backward<T, IO>(call).run() : Forward<T, IO>(call).run();
}
static int run(const Call& call, bool backward) {
    switch (call.dtype) {
        case 0: run<float, float>(call, backward); return 0;
        case 1: run<double, double>(call, backward); return 0;
        case 2: run<float, bfloat>(call, backward); return 0;
        case 3: run<float, half>(call, backward); return 0;
    }
    return 1;
}
EXPORTED int hsa_forward(const Call* call) { return run(*call, false); }
EXPORTED int hsa_backward(const Call* call) { return run(*call, true); }
