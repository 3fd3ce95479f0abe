"""Numbers in the unit in which they are easy to read."""

import pytest

from mst_scale.units import format_bytes, format_count, format_flops, format_time


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (format_count(123_264), "123 k"),
        (format_count(12.9e9), "12.9 B"),
        (format_count(999_999), "1 M"),
        (format_count(7), "7"),
        (format_bytes(2.01e8), "201 MB"),
        (format_bytes(9.54e9), "9.54 GB"),
        (format_bytes(0), "0"),
        (format_flops(1.97e12), "1.97 TFLOP"),
        (format_flops(5e30), "5,000,000 YFLOP"),
        (format_time(2.32e-4), "0.232 ms"),
        (format_time(0.66), "660 ms"),
        (format_time(15.7), "15.7 s"),
        (format_time(1200), "20 min"),
        (format_time(56_000), "15.6 hours"),
        (format_time(1.08e8), "1,250 days"),
    ],
)
def test_units(text, expected):
    assert text == expected
