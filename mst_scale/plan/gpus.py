"""Lists the peaks of GPUs, their nodes and networks, and the fraction of each peak that plans assume.

Peaks are those of NVIDIA's data sheets, without structured sparsity; 1 GB is 10⁹ bytes. Nodes are DGX nodes with one
network port per GPU. The fraction of a peak that a run reaches is an assumption (`Efficiency`). The bandwidth of an L2
cache, which no data sheet states, is that of a published microbenchmark.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from mst_scale.errors import UserError, suggestion

GB, TERA = 10**9, 10**12


@dataclass(frozen=True)
class GPU:
    """FLOP/s, bytes and bytes/s of one card; memory and bandwidth of the node are divided among its cards."""

    name: str
    memory: float
    bandwidth: float  # its own memory
    l2: float  # its L2 cache, read
    bf16: float  # tensor cores, fp32 accumulation; fp16 is the same
    fp32: float  # as PyTorch multiplies by default, without TF32
    link: float  # to the other GPUs of the node, one direction
    port: float  # to the network, one direction
    pcie: float  # to the host, one direction
    host_memory: float
    host_bandwidth: float
    per_node: int
    sources: str

    def peak(self, precision: str) -> float:
        """Return the FLOP/s of matrix products."""
        return self.fp32 if precision == "fp32" else self.bf16


A100_NODE = "NVIDIA DGX A100 data sheet: 8 GPUs, 8 × HDR 200 Gb/s, 2 × EPYC 7742 (8 × DDR4-3200 each)"
H100_NODE = "NVIDIA DGX H100 data sheet: 8 GPUs, 8 × NDR 400 Gb/s, 2 × Xeon 8480C (8 × DDR5-4800 each), 2 TB"
L2 = "github.com/te42kyfo/gpu-benches (gpu-l2-cache)"

GPUS = {
    gpu.name: gpu
    for gpu in (
        GPU("a100-40gb", 40 * GB, 1555 * GB, 5400 * GB, 312 * TERA, 19.5 * TERA, 300 * GB, 25 * GB, 32 * GB, 125 * GB,
            51 * GB, 8, f"NVIDIA A100 data sheet (SXM4, 40 GB); {A100_NODE}, 1 TB; L2 cache: that of 80 GB"),
        GPU("a100-80gb", 80 * GB, 2039 * GB, 5400 * GB, 312 * TERA, 19.5 * TERA, 300 * GB, 25 * GB, 32 * GB, 250 * GB,
            51 * GB, 8, f"NVIDIA A100 data sheet (SXM4, 80 GB); {A100_NODE}, 2 TB; L2 cache measured: {L2}"),
        GPU("h100-80gb", 80 * GB, 3350 * GB, 9700 * GB, 989 * TERA, 67 * TERA, 450 * GB, 50 * GB, 64 * GB, 250 * GB,
            76 * GB, 8, f"NVIDIA H100 data sheet (SXM5); {H100_NODE}; L2 cache: assumed to be the H200's, {L2}"),
        GPU("h200", 141 * GB, 4800 * GB, 9700 * GB, 989 * TERA, 67 * TERA, 450 * GB, 50 * GB, 64 * GB, 250 * GB,
            76 * GB, 8, f"NVIDIA H200 data sheet (SXM); {H100_NODE}; L2 cache measured: {L2}"),
    )
}  # fmt: skip


@dataclass(frozen=True)
class Efficiency:
    """The fraction of each peak that a plan assumes and prints; replace it with your own measurements by --efficiency.

    These are assumptions, except the values that `MEASURED` has for a GPU. With them GPT-3 configurations reach 41 to
    52 % of an A100's peak. Narayanan et al. (2021) report 44 to 52 %, with tensor and pipeline parallelism and counting
    recomputed FLOPs.
    """

    matmul: float = 0.6  # large bf16 matrix products inside a transformer
    attention: float = 0.45  # flash attention, forward and backward
    sparse_attention: float = 0.45  # the kernels for patterns, of the pairs in whole tiles
    memory: float = 0.8  # element-wise passes and the optimizer
    l2: float = 0.7  # tiles gathered from the L2 cache by the kernels for blocks
    narrow: float = 0.5  # of matmul: tiles of 16 columns, bound by the other operand's reads of shared memory
    network: float = 0.8  # large collectives, in and between nodes
    host: float = 0.6  # the CPU's Adam on offloaded states


# Fitted to the steps and products of benchmarks/results/gpu.md: 54 block products within a factor of 1.32 (root mean
# square), steps at the widths of 1.5B and 6.7B within 15 %. An H200 has the same chip with faster memory.
_HOPPER = Efficiency(matmul=0.74, sparse_attention=0.29, memory=0.7, l2=0.45, narrow=0.1)
MEASURED = {"h100-80gb": _HOPPER, "h200": _HOPPER}


@dataclass(frozen=True)
class Latency:
    """Seconds before the first byte of a collective's hop arrives: the α of the α–β model. These are assumed too."""

    inside: float = 4e-6  # between GPUs of a node
    between: float = 12e-6  # between nodes
    launch: float = 20e-6  # of any collective
    kernel: float = 20e-6  # of a Triton kernel, from Python


@dataclass(frozen=True)
class Machine:
    """The GPUs, nodes and efficiencies that a plan assumes."""

    gpu: GPU
    efficiency: Efficiency = Efficiency()
    latency: Latency = Latency()


def gpu_named(name: str) -> GPU:
    """Look up a GPU; an unknown name is an error that suggests the nearest known one."""
    if name in GPUS:
        return GPUS[name]
    raise UserError(f"unknown GPU {name!r}{suggestion(name.lower(), GPUS)} (known are {', '.join(GPUS)})")


def machine(
    name: str,
    gpus: int,
    nodes: int | None = None,
    efficiencies: tuple[str, ...] = (),
    network: float | None = None,
) -> Machine:
    """Describe the GPUs, nodes and efficiencies of a plan.

    Nodes are full DGX nodes unless their number, or the Gb/s from a node to the others, is given. Efficiencies are such
    as "matmul=0.5".
    """
    gpu = gpu_named(name)
    if nodes is not None:
        if nodes < 1 or gpus % nodes:
            raise UserError(f"{gpus} GPUs cannot be spread evenly over --nodes {nodes}: give a divisor of {gpus}")
        gpu = replace(gpu, per_node=gpus // nodes)
    if network is not None:
        if not 0 < network < 1e6:
            raise UserError(f"--network {network:g}: give the Gb/s from a node to the others, such as 400")
        gpu = replace(gpu, port=network / 8 * GB / gpu.per_node)
    known = {f.name for f in fields(Efficiency)}
    given: dict[str, float] = {}
    for pair in efficiencies:
        key, _, value = pair.partition("=")
        try:
            given[key] = float(value)
        except ValueError:
            given[key] = 0.0
        if key not in known or not 0 < given[key] <= 1:
            raise UserError(
                f"--efficiency {pair}: write KEY=FRACTION with a fraction in (0, 1], of {', '.join(sorted(known))}"
            )
    return Machine(gpu, replace(MEASURED.get(name, Efficiency()), **given))
