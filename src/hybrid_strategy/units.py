"""How quantities are printed. Inside the program bytes are bytes and seconds are seconds."""

from __future__ import annotations

import re

KIB, MIB, GIB = 2**10, 2**20, 2**30


_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": KIB, "MI": MIB, "GI": GIB, "TI": 2**40}


def parse_bytes(text: str) -> int:
    """Bytes as people write them.

    Raises:
        ValueError: it is no size.

    >>> parse_bytes("5GB"), parse_bytes("1.5 MiB"), parse_bytes("200")
    (5000000000, 1572864, 200)
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?\s*", text.upper())
    if found is None or found[2] not in _UNITS:
        raise ValueError(f"{text!r} is not a number of bytes such as 5GB or 200MiB")
    return int(float(found[1]) * _UNITS[found[2]])


def format_bytes(num_bytes: float) -> str:
    """Bytes for people, in binary units.

    >>> format_bytes(3 * 2**30), format_bytes(1536), format_bytes(12)
    ('3.00 GiB', '1.5 KiB', '12 B')
    """
    if abs(num_bytes) >= GIB:
        return f"{num_bytes / GIB:,.2f} GiB"
    if abs(num_bytes) >= MIB:
        return f"{num_bytes / MIB:.1f} MiB"
    if abs(num_bytes) >= KIB:
        return f"{num_bytes / KIB:.1f} KiB"
    return f"{num_bytes:.0f} B"


def format_count(count: float) -> str:
    """A count for people, in decimal units.

    >>> format_count(8_030_261_248), format_count(20_400_000), format_count(950)
    ('8.03B', '20.40M', '950')
    """
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(count) >= size:
            return f"{count / size:.2f}{letter}"
    return f"{count:.0f}"


def format_seconds(seconds: float) -> str:
    """A duration for people.

    >>> format_seconds(0.0123), format_seconds(0.99996), format_seconds(75), format_seconds(100.8), format_seconds(7300)
    ('12.3 ms', '1 s', '1 min 15 s', '1 min 41 s', '2 h 2 min')
    """
    if seconds < 0.9995:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 59.95:
        return f"{seconds:.3g} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60} min"
