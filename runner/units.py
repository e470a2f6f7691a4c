"""Conversions between units, and their display. Everything inside is in bytes and seconds."""

from __future__ import annotations


def format_bytes(num_bytes: float) -> str:
    """Return a byte count with three significant digits and a binary unit: ``1536`` -> ``1.50 KiB``."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.3g} {unit}"
        value /= 1024
    return f"{value:.3g} TiB"


def format_seconds(seconds: float) -> str:
    """Return a duration in the largest unit that keeps it readable: ``0.0123`` -> ``12.3 ms``."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.3g} µs"
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"
