"""The manifest of a weight version: each tensor with its format, its scales' name, and its digest.

Imports without torch.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from math import prod
from pathlib import Path

from fp8rl.files import sha256, write_atomic

MANIFEST = "manifest.json"
SCALE_SUFFIX = "_scale_inv"
SCALE_FORMAT = "scale"
ITEM_SIZES = {"float8_e4m3fn": 1, "bfloat16": 2, "float32": 4}


class PublishedWeightsError(ValueError):
    """Published weights that are incomplete or not what their manifest says."""


@dataclass(frozen=True)
class Spec:
    """A tensor that is to be published.

    dtype: torch's name of it. format: of the precision plan ("bf16", "fp8_block", ...), or "scale".
    scale: name of the tensor that holds its descales; None for what has none.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    format: str
    scale: str | None = None

    @property
    def size(self) -> int:
        """Bytes."""
        return prod(self.shape) * ITEM_SIZES[self.dtype]


@dataclass(frozen=True)
class Entry(Spec):
    """A tensor that is published. sha256: of its bytes."""

    sha256: str = ""


@dataclass(frozen=True)
class Manifest:
    """version: assigned by the learner, once all of it was written. tensors: in the order in which
    they are stored and sent.
    """

    version: int
    tensors: dict[str, Entry]

    @cached_property
    def digest(self) -> str:
        """sha256 over all entries, in order."""
        return sha256(json.dumps(self._entries()).encode())

    @property
    def size(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.size for entry in self.tensors.values())

    def require_pairs(self) -> None:
        """Raises PublishedWeightsError naming FP8 tensors without scales, and scales of nothing."""
        wanted = {e.scale: e.name for e in self.tensors.values() if e.format.startswith("fp8")}
        scales = {e.name for e in self.tensors.values() if e.format == SCALE_FORMAT}
        problems = [
            f"{name}: its scales are missing ({scale})"
            for scale, name in wanted.items()
            if scale not in scales
        ]
        problems += [f"{name}: scales of no tensor" for name in sorted(scales - wanted.keys())]
        if problems:
            raise PublishedWeightsError("the manifest is not whole:\n  " + "\n  ".join(problems))

    def _entries(self) -> list[dict[str, object]]:
        return [asdict(entry) for entry in self.tensors.values()]

    def to_json(self) -> str:
        values = {"version": self.version, "digest": self.digest, "tensors": self._entries()}
        return json.dumps(values, indent=1)

    @staticmethod
    def from_json(text: str) -> "Manifest":
        """Reads what `to_json` wrote; raises ValueError where it does not match its own digest."""
        try:
            values = json.loads(text)
            entries = [Entry(**e | {"shape": tuple(e["shape"])}) for e in values["tensors"]]
            manifest = Manifest(int(values["version"]), {entry.name: entry for entry in entries})
            whole = manifest.digest == values["digest"] and len(entries) == len(manifest.tensors)
        except (ValueError, TypeError, KeyError, AttributeError):
            whole = False
        if not whole:
            raise ValueError("it does not match its own digest")
        return manifest


def manifest_of(version: int, specs: Mapping[str, Spec], digests: Mapping[str, str]) -> Manifest:
    """The manifest of tensors whose bytes have these digests."""
    entries = {n: Entry(**vars(spec), sha256=digests[n]) for n, spec in specs.items()}
    return Manifest(version, entries)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Writes it into `folder`, which makes it a version. Raises DiskFullError."""
    write_atomic(folder / MANIFEST, manifest.to_json().encode())


def read_manifest(folder: Path) -> Manifest:
    """The manifest in `folder`; raises PublishedWeightsError where there is none or it is damaged."""
    path = folder / MANIFEST
    if not path.is_file():
        raise PublishedWeightsError(f"{folder} has no {MANIFEST}: not a whole weight version")
    try:
        return Manifest.from_json(path.read_text())
    except ValueError as error:
        raise PublishedWeightsError(f"{path} is damaged: {error}") from None
