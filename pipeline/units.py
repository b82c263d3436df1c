"""Sizes and durations in words."""

import math


def size_text(count: float) -> str:
    """Bytes in decimal units: 999 bytes, 1.5 MB, 2,000.0 TB."""
    if count < 1000:
        return f"{count:,.0f} bytes"
    for unit in ("KB", "MB", "GB"):
        count /= 1000
        if count < 1000:
            return f"{count:,.1f} {unit}"
    return f"{count / 1000:,.1f} TB"


def time_text(seconds: float) -> str:
    """A rough duration: 3 s, 12 min, 5.4 h."""
    if seconds < 90:
        return f"{math.ceil(seconds)} s"
    if seconds < 5400:
        return f"{seconds / 60:,.0f} min"
    return f"{seconds / 3600:,.1f} h"
