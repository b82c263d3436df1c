"""All randomness of a run: 64 bits from its seed, a purpose and a row's id. No torch here."""

import hashlib

from pipeline.geometry import Geometry


def row_seed(seed: int, purpose: str, sample_id: str) -> int:
    """64 bits that depend on the run's seed, what they are for, and the row: on nothing else."""
    text = f"{seed}\0{purpose}\0{sample_id}".encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big")


def position_offset(
    geometry: Geometry, *, seed: int, sample_id: str, num_tokens: int, shift_max: int
) -> int:
    """The row's random RoPE shift, uniform in [0, shift_max], never past the trained context.

    Where RoPE depends on the length no shift is possible (DESIGN §3): 0.
    """
    if not geometry.can_shift:
        return 0
    highest = min(shift_max, geometry.context_length - num_tokens)
    return row_seed(seed, "position", sample_id) % (highest + 1)
