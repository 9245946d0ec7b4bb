"""Published weights: what the learner sends and the engine loads, as files with a manifest.

    weights/v00003/weights.safetensors   tensors by Hugging Face name; FP8 ones as E4M3 bytes with
                                         their FP32 descales beside them as `<name>_scale_inv`
    weights/v00003/manifest.json         version, and shape, dtype and sha256 of every tensor

The manifest is written last; a folder without one is not a version.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from fp8rl import faults
from fp8rl.files import disk_error, fsync_file, sha256, write_atomic
from fp8rl.journal import WEIGHTS_FILE

SCALE_SUFFIX = "_scale_inv"
_MANIFEST = "manifest.json"


class PublishedWeightsError(ValueError):
    """Published weights that are incomplete or not what their manifest says."""


@dataclass(frozen=True)
class Manifest:
    """tensors: {name: {"shape", "dtype", "sha256"}}. digest: sha256 over all of them, in order."""

    version: int
    tensors: dict[str, dict[str, object]]
    digest: str


def tensor_digest(tensor: Tensor) -> str:
    """sha256 of a tensor's bytes."""
    return sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes())


def _manifest(version: int, tensors: Mapping[str, Tensor]) -> Manifest:
    entries: dict[str, dict[str, object]] = {
        name: {
            "shape": list(tensor.shape),
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "sha256": tensor_digest(tensor),
        }
        for name, tensor in sorted(tensors.items())
    }
    return Manifest(version, entries, _digest(entries))


def _digest(entries: dict[str, dict[str, object]]) -> str:
    return sha256(json.dumps(entries).encode())


def write_published(folder: Path, version: int, tensors: Mapping[str, Tensor]) -> Manifest:
    """Writes `tensors` as weight `version` into `folder`, tensors first, manifest last.

    Raises DiskFullError where there is no room; then the version is not published.
    """
    manifest = _manifest(version, tensors)
    temporary = folder / f".{WEIGHTS_FILE}.tmp"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        faults.point(f"publish:{version}:tensors")
        save_file({name: t.contiguous() for name, t in tensors.items()}, temporary)
        fsync_file(temporary)
    except (OSError, SafetensorError) as error:
        temporary.unlink(missing_ok=True)
        raise disk_error(error, folder / WEIGHTS_FILE) from error
    temporary.replace(folder / WEIGHTS_FILE)
    faults.point(f"publish:{version}:before-manifest")
    write_atomic(folder / _MANIFEST, json.dumps(manifest.__dict__, indent=1).encode())
    return manifest


def read_published(folder: Path, version: int) -> tuple[Manifest, dict[str, Tensor]]:
    """Reads weight `version` from `folder` and checks every tensor against the manifest.

    Raises PublishedWeightsError naming the file, version or tensors that are wrong.
    """
    manifest = read_manifest(folder)
    if manifest.version != version:
        raise PublishedWeightsError(
            f"{folder} holds weight version {manifest.version}, wanted {version}"
        )
    path = folder / WEIGHTS_FILE
    if not path.is_file():
        raise PublishedWeightsError(f"{path} is missing; the version was cleaned up or never whole")
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise PublishedWeightsError(f"{path} is not a whole safetensors file: {error}") from None
    found = _manifest(version, tensors)
    if found != manifest:
        names = sorted(found.tensors.keys() | manifest.tensors.keys())
        wrong = [n for n in names if found.tensors.get(n) != manifest.tensors.get(n)]
        raise PublishedWeightsError(f"{path} is not what its manifest says: {', '.join(wrong)}")
    return manifest, tensors


def read_manifest(folder: Path) -> Manifest:
    """The manifest in `folder`; raises PublishedWeightsError where there is none or it is damaged."""
    path = folder / _MANIFEST
    if not path.is_file():
        raise PublishedWeightsError(f"{folder} has no {_MANIFEST}: not a whole weight version")
    try:
        manifest = Manifest(**json.loads(path.read_text()))
        whole = manifest.digest == _digest(manifest.tensors)
    except (ValueError, TypeError):
        whole = False
    if not whole:
        raise PublishedWeightsError(f"{path} is damaged: it does not match its own digest")
    return manifest
