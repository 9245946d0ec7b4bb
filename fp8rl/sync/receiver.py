"""The receiving end: buckets into the live engine's memory, each tensor checked as it is complete.

Bytes go to their final place at once, so that no second copy of the model is needed. Hence the engine
is dirty from the first byte until `finish`; what fails in between leaves it dirty, and the way out is
to send all of it again.
"""

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

from fp8rl.model.manifest import Entry, Manifest, PublishedWeightsError
from fp8rl.model.published import dtype_name
from fp8rl.sync.buckets import Bucket, plan_buckets
from fp8rl.sync.errors import SyncError


class Receiver:
    """Takes the buckets of one weight version, in order, each once.

    views: where each published tensor lives in the engine, contiguous. limit: bytes of a bucket, as
    the sender's. Raises PublishedWeightsError naming what is missing, unknown, of another shape or
    dtype, or without its scales; nothing has been changed then.
    """

    def __init__(self, views: Mapping[str, Tensor], manifest: Manifest, limit: int) -> None:
        manifest.require_pairs()
        require_fit(views, manifest)
        self._memory = {name: view.view(torch.uint8).reshape(-1) for name, view in views.items()}
        for name, view in views.items():
            assert view.is_contiguous(), name
        self._manifest = manifest
        self.buckets = plan_buckets(manifest, limit)
        self._next = 0
        self._hash = hashlib.sha256()

    def take(self, index: int, payload: Tensor) -> None:
        """Takes bucket `index`: uint8, its bytes. Raises SyncError naming what is wrong with it."""
        bucket = self._expected(index)
        if payload.dtype is not torch.uint8 or payload.dim() != 1 or len(payload) != bucket.size:
            raise SyncError(
                f"{bucket} came as {tuple(payload.shape)} {payload.dtype}, expected were "
                f"{bucket.size} bytes"
            )
        for piece in bucket.pieces:
            part = payload[piece.offset : piece.offset + piece.stop - piece.start]
            self._memory[piece.name][piece.start : piece.stop].copy_(part)
            self._hash.update(part.cpu().numpy().data)
            if piece.is_last:
                found, self._hash = self._hash.hexdigest(), hashlib.sha256()
                wanted = self._manifest.tensors[piece.name].sha256
                if found != wanted:
                    raise SyncError(
                        f"{piece.name} arrived with digest {found[:12]}, the manifest of version "
                        f"{self._manifest.version} says {wanted[:12]} ({bucket})"
                    )
        self._next += 1

    def finish(self) -> None:
        """Raises SyncError naming the first tensor that is missing, if one is."""
        if self._next < len(self.buckets):
            missing = self.buckets[self._next]
            raise SyncError(f"{missing} is missing, and {len(self.buckets) - self._next - 1} after it")

    def _expected(self, index: int) -> Bucket:
        if index != self._next or index >= len(self.buckets):
            wanted = (
                f"{self.buckets[self._next]} is missing"
                if self._next < len(self.buckets)
                else f"all {len(self.buckets)} are in"
            )
            raise SyncError(f"bucket {index} came out of order: {wanted}")
        return self.buckets[index]


def require_fit(views: Mapping[str, Tensor], manifest: Manifest) -> None:
    """Raises PublishedWeightsError naming every tensor that does not fit the engine."""
    entries = manifest.tensors
    problems = [f"{name}: missing" for name in views if name not in entries]
    problems += [f"{name}: not in the engine" for name in entries if name not in views]
    for name in views.keys() & entries.keys():
        problem = _misfit(entries[name], views[name])
        if problem:
            problems.append(f"{name}: {problem}")
    if problems:
        raise PublishedWeightsError(
            "the weights do not fit the engine:\n  " + "\n  ".join(sorted(problems))
        )


def _misfit(sent: Entry, held: Tensor) -> str | None:
    dtype = dtype_name(held)
    if (sent.shape, sent.dtype) == (tuple(held.shape), dtype):
        return None
    return f"sent {sent.shape} {sent.dtype}, the engine holds {tuple(held.shape)} {dtype}"
