"""Quantities in a few characters."""


def memory(size: int) -> str:
    """Bytes, as "512 MiB" or "1.5 GiB"; empty for 0, which means that nobody told."""
    if size <= 0:
        return ""
    value = size / 2**20
    for unit in ("MiB", "GiB"):
        if value < 1000:
            return f"{value:.1f} {unit}" if value < 10 else f"{value:.0f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB" if value < 10 else f"{value:.0f} TiB"


def seconds(value: float) -> str:
    """Three digits at most: "8 ms", "0.82 s", "12.3 s", "123 s"."""
    if value < 0.1:
        return f"{value * 1000:.0f} ms"
    if value < 10:
        return f"{value:.2f} s"
    return f"{value:.1f} s" if value < 100 else f"{value:.0f} s"


def count(value: float) -> str:
    """At most seven characters: "12,345", "1,235k", "12.3M"."""
    if value < 100_000:
        return f"{value:,.0f}"
    if value < 10_000_000:
        return f"{value / 1000:,.0f}k"
    return f"{value / 1e6:,.1f}M" if value < 1e9 else f"{value / 1e9:,.1f}G"
