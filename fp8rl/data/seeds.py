"""Seeds that are functions of what they are for, so that a repeat draws the same numbers."""

import hashlib


def seed_of(*parts: int | str) -> int:
    """A 48-bit seed from `parts`, for example (run seed, iteration, prompt id, sample)."""
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big")
