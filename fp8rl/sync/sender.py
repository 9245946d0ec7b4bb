"""The sending end: the bytes of a bucket, read from the published version."""

from pathlib import Path

import torch
from torch import Tensor

from fp8rl.model.published import PublishedFile
from fp8rl.sync.buckets import plan_buckets


class Sender:
    """Weight `version`, published in `folder`, in buckets of at most `limit` bytes.

    Raises PublishedWeightsError as `PublishedFile`.
    """

    def __init__(self, folder: Path, version: int, limit: int) -> None:
        self._file = PublishedFile(folder, version)
        self.manifest = self._file.manifest
        self.buckets = plan_buckets(self.manifest, limit)

    def payload(self, index: int) -> Tensor:
        """uint8: the bytes of bucket `index`. They are not checked here: the receiver does."""
        bucket = self.buckets[index]
        payload = bytearray(bucket.size)
        for piece in bucket.pieces:
            content = self._file.read(piece.name, piece.start, piece.stop)
            payload[piece.offset : piece.offset + len(content)] = content
        return torch.frombuffer(payload, dtype=torch.uint8)

    def close(self) -> None:
        self._file.close()
