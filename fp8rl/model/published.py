"""Published weights: one version on disk, and the only form in which weights reach a rollout engine.

    v000007/weights.safetensors   FP8 tensors with their scales, BF16 for the rest
    v000007/manifest.json         version, and of each tensor shape, dtype, format, scale and sha256

The manifest is written last; a folder without one is not a version. Tensors are written one at a time,
so that publishing needs no second copy of the model.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from fp8rl import faults
from fp8rl.files import beside, sha256
from fp8rl.journal import WEIGHTS_FILE
from fp8rl.model.manifest import (
    Manifest,
    PublishedWeightsError,
    Spec,
    manifest_of,
    read_manifest,
    write_manifest,
)

_DTYPES = {"float8_e4m3fn": "F8_E4M3", "bfloat16": "BF16", "float32": "F32"}


def bytes_of(tensor: Tensor) -> bytes:
    """A tensor's bytes, on the host."""
    return tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()


def tensor_digest(tensor: Tensor) -> str:
    """sha256 of a tensor's bytes."""
    return sha256(bytes_of(tensor))


def dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _header(specs: Sequence[Spec]) -> bytes:
    """What a safetensors file begins with: the size of its JSON header, and the header."""
    offset, header = 0, {}
    for spec in specs:
        header[spec.name] = {
            "dtype": _DTYPES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [offset, offset + spec.size],
        }
        offset += spec.size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_published(
    folder: Path, version: int, specs: Sequence[Spec], tensors: Iterable[tuple[str, Tensor]]
) -> Manifest:
    """Writes `tensors`, which come in the order of `specs`, as weight `version` into `folder`.

    Raises PublishedWeightsError naming a tensor that is not as specified, DiskFullError where there is
    no room; then the version is not published.
    """
    with beside(folder / WEIGHTS_FILE) as temporary, temporary.open("wb") as file:
        faults.point(f"publish:{version}:tensors")
        file.write(_header(specs))
        digests = _write_tensors(file, specs, tensors)
    manifest = manifest_of(version, {spec.name: spec for spec in specs}, digests)
    manifest.require_pairs()
    faults.point(f"publish:{version}:before-manifest")
    write_manifest(folder, manifest)
    return manifest


def _write_tensors(
    file: BinaryIO, specs: Sequence[Spec], tensors: Iterable[tuple[str, Tensor]]
) -> dict[str, str]:
    digests: dict[str, str] = {}
    for spec, (name, tensor) in zip(specs, tensors, strict=True):
        have = (name, tuple(tensor.shape), dtype_name(tensor))
        if have != (spec.name, spec.shape, spec.dtype):
            raise PublishedWeightsError(f"to be published is {have}, specified was {spec}")
        content = bytes_of(tensor)
        file.write(content)
        digests[name] = hashlib.sha256(content).hexdigest()
    return digests


class PublishedFile:
    """A published version's tensors, read piece by piece.

    Raises PublishedWeightsError where the file is missing, not a safetensors file, or holds other
    tensors than the manifest says (their bytes are not read for that).
    """

    def __init__(self, folder: Path, version: int) -> None:
        self.manifest = read_manifest(folder)
        if self.manifest.version != version:
            raise PublishedWeightsError(
                f"{folder} holds weight version {self.manifest.version}, wanted {version}"
            )
        self.path = folder / WEIGHTS_FILE
        if not self.path.is_file():
            raise PublishedWeightsError(
                f"{self.path} is missing; the version was cleaned up or never whole"
            )
        header = _header(list(self.manifest.tensors.values()))
        self._file = self.path.open("rb")
        size = len(header) + self.manifest.size
        if self._file.read(len(header)) != header or self.path.stat().st_size != size:
            self._file.close()
            raise PublishedWeightsError(
                f"{self.path} is not what its manifest says: another header or size"
            )
        self._starts: dict[str, int] = {}
        offset = len(header)
        for name, entry in self.manifest.tensors.items():
            self._starts[name] = offset
            offset += entry.size

    def read(self, name: str, start: int, stop: int) -> bytes:
        """Bytes [start, stop) of a tensor."""
        self._file.seek(self._starts[name] + start)
        return self._file.read(stop - start)

    def close(self) -> None:
        self._file.close()


def read_published(folder: Path, version: int) -> tuple[Manifest, dict[str, Tensor]]:
    """Reads all of weight `version` from `folder` and checks every tensor against the manifest.

    Raises PublishedWeightsError naming the file, version or tensors that are wrong.
    """
    file = PublishedFile(folder, version)
    file.close()
    manifest = file.manifest
    try:
        tensors = load_file(file.path)
    except SafetensorError as error:
        raise PublishedWeightsError(f"{file.path} is not a whole safetensors file: {error}") from None
    wrong = differing(manifest, tensors)
    if wrong:
        raise PublishedWeightsError(f"{file.path} is not what its manifest says: {', '.join(wrong)}")
    return manifest, tensors


def differing(manifest: Manifest, tensors: Mapping[str, Tensor]) -> list[str]:
    """Names of those of `tensors` whose bytes are not the manifest's."""
    return [n for n, t in tensors.items() if tensor_digest(t) != manifest.tensors[n].sha256]
