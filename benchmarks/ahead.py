"""Compiles our Triton kernels for GPUs that need not be present, and reads the compiler's statistics.

A kernel is compiled with the specialization of a launch: pointers and the sizes of a real model as multiples of 16,
strides of 1 as constants. Registers and stack are read from the machine code with Triton's cuobjdump; ptxas spills to
the stack. Registers, shared memory and warps determine how many programs a multiprocessor runs concurrently.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

KIB = 1024
REGISTERS, WARPS, PROGRAMS = 65536, 64, 32  # of one multiprocessor, of capability 8.0 and 9.0
RESERVED = KIB  # shared memory that the driver takes of every program


@dataclass(frozen=True)
class Target:
    """A GPU: its compute capability, shared memory of one multiprocessor, and what one program may have of it."""

    name: str
    capability: int
    shared: int
    largest: int


A100 = Target("A100", 80, 164 * KIB, 163 * KIB)
H100 = Target("H100", 90, 228 * KIB, 227 * KIB)  # H200 too
TARGETS = (A100, H100)


@dataclass(frozen=True)
class Built:
    """One kernel compiled for one target."""

    target: Target
    warps: int
    shared: int
    registers: int
    stack: int
    ptx: str

    @property
    def programs(self) -> int:
        """That one multiprocessor holds at a time."""
        return min(self.limits.values())

    @property
    def limits(self) -> dict[str, int]:
        """What each resource allows."""
        per_warp = -(-self.registers * 32 // 256) * 256  # registers are handed out in units of 256 to a warp
        return {
            "registers": REGISTERS // (per_warp * self.warps),
            "shared memory": self.target.shared // (self.shared + RESERVED),
            "warps": min(WARPS // self.warps, PROGRAMS),
        }

    @property
    def instruction(self) -> str:
        """That multiplies matrices, in a loop; "none" where nothing of the matrix unit stands in one."""
        loops = "".join(_loops(self.ptx))
        return next((name for name in ("wgmma.mma_async", "mma.sync") if name in loops), "none")

    @property
    def atomics(self) -> int:
        """The number of atomic operations."""
        return len(re.findall(r"\b(?:atom|red)\.", self.ptx))

    @property
    def copies(self) -> list[int]:
        """Bytes of each asynchronous copy from global to shared memory."""
        found = re.findall(r"cp\.async\.c[ag]\.shared\.global [^;]*?, 0x([0-9a-f]+), ", self.ptx)
        return [int(size, 16) for size in found]


def build(
    kernel: Any,
    types: Mapping[str, str],
    constants: Mapping[str, Any],
    target: Target,
    *,
    aligned: Sequence[str] = (),
    warps: int = 4,
    stages: int = 2,
) -> Built:
    """`types` of what is not a 32-bit integer; pointers and what `aligned` names are multiples of 16."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in names}
    sixteen = [n for n, kind in signature.items() if kind.startswith("*") or (n in aligned and kind == "i32")]
    source = ASTSource(
        kernel,
        signature,
        {(names.index(n),): value for n, value in constants.items()},
        {(names.index(n),): [["tt.divisibility", 16]] for n in sixteen},
    )
    compiled = triton.compile(
        source, target=GPUTarget("cuda", target.capability, 32), options={"num_warps": warps, "num_stages": stages}
    )
    registers, stack = _resources(compiled.asm["cubin"])
    return Built(target, warps, compiled.metadata.shared, registers, stack, compiled.asm["ptx"])


def _loops(ptx: str) -> Iterator[str]:
    """What stands between a label and a jump back to it."""
    labels = {found[1]: found.end() for found in re.finditer(r"^(\$L\w+):", ptx, re.M)}
    for jump in re.finditer(r"\bbra(?:\.uni)?\s+(\$L\w+);", ptx):
        if labels[jump[1]] < jump.start():
            yield ptx[labels[jump[1]] : jump.start()]


def _resources(machine_code: bytes) -> tuple[int, int]:
    """(registers of a thread, bytes of its stack)"""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(machine_code)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", said)
    assert found is not None, said
    return int(found[1]), int(found[2])
