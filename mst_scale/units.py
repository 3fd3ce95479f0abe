"""Formats numbers with the unit in which they are easy to read: 123 k parameters, 12.9 B tokens, 201 MB, 15.6 hours."""

from __future__ import annotations

COUNTS = ((1e12, " T"), (1e9, " B"), (1e6, " M"), (1e3, " k"))
BYTES = ((1e12, " TB"), (1e9, " GB"), (1e6, " MB"), (1e3, " kB"))
FLOPS = (
    (1e24, "YFLOP"), (1e21, "ZFLOP"), (1e18, "EFLOP"), (1e15, "PFLOP"), (1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP"),
)  # fmt: skip
TIMES = ((2 * 86400, 86400, "days"), (2 * 3600, 3600, "hours"), (120, 60, "min"), (1, 1, "s"))


def format_count(number: float) -> str:
    """Format a number of parameters or tokens, such as "123 k"."""
    return _scaled(number, COUNTS, "")


def format_bytes(number: float) -> str:
    """Format a size, such as "201 MB"."""
    return _scaled(number, BYTES, " B") if number else "0"


def format_flops(number: float) -> str:
    """Format a number of FLOPs, such as "1.97 TFLOP"."""
    size, unit = flops_unit(number)
    return f"{_digits(number / size)} {unit}"


def flops_unit(largest: float) -> tuple[float, str]:
    """Return a divisor and its unit, by which the largest value becomes a small number."""
    return next(((size, name) for size, name in FLOPS if largest >= size), (1.0, "FLOP"))


def format_time(seconds: float) -> str:
    """Format a duration, such as "0.232 ms", "15.7 s" or "26.1 days"."""
    for least, unit, name in TIMES:
        if seconds >= least:
            return f"{_digits(seconds / unit)} {name}"
    return f"{_digits(1e3 * seconds)} ms"


def _scaled(number: float, units: tuple[tuple[float, str], ...], smallest: str) -> str:
    size, unit = next(((size, unit) for size, unit in units if number >= 0.9995 * size), (1.0, smallest))
    return f"{_digits(number / size)}{unit}"


def _digits(value: float) -> str:
    """Format with three significant digits, and never as a power of ten."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
