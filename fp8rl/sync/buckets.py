"""Which bytes go in which bucket: a pure function of the manifest, so that both sides agree on it.

Tensors come in the manifest's order, which keeps a layer's together. A tensor larger than a bucket is
cut into pieces, so no side ever holds more of the weights than a bucket besides its own copy.
"""

from dataclasses import dataclass

from fp8rl.model.manifest import Manifest


@dataclass(frozen=True)
class Piece:
    """Bytes [start, stop) of the tensor `name`, which lie at [offset, offset + stop - start) of the
    bucket. is_last: the tensor ends with it.
    """

    name: str
    start: int
    stop: int
    offset: int
    is_last: bool


@dataclass(frozen=True)
class Bucket:
    """index: from 0, in the order in which buckets are sent."""

    index: int
    pieces: tuple[Piece, ...]

    @property
    def size(self) -> int:
        """Bytes."""
        last = self.pieces[-1]
        return last.offset + last.stop - last.start

    def __str__(self) -> str:
        first, last = self.pieces[0].name, self.pieces[-1].name
        return f"bucket {self.index} ({first}{'' if first == last else f' to {last}'})"


def plan_buckets(manifest: Manifest, limit: int) -> list[Bucket]:
    """Buckets of at most `limit` bytes that hold every byte of every tensor exactly once."""
    if limit < 1:
        raise ValueError(f"a bucket of {limit} bytes holds nothing")
    buckets: list[Bucket] = []
    pieces: list[Piece] = []
    filled = 0
    for name, entry in manifest.tensors.items():
        start = 0
        while start < entry.size:
            stop = min(entry.size, start + limit - filled)
            pieces.append(Piece(name, start, stop, filled, stop == entry.size))
            filled += stop - start
            start = stop
            if filled == limit:
                buckets.append(Bucket(len(buckets), tuple(pieces)))
                pieces, filled = [], 0
    if pieces:
        buckets.append(Bucket(len(buckets), tuple(pieces)))
    return buckets
