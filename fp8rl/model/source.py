"""Which folder a recipe's model is in: asked here and nowhere else. Imports without torch.

A recipe names a Hugging Face folder (model.path), a model of the hub (model.hub, kept in the hub's own
cache), a GGUF file (model.gguf, converted once and kept under the runs folder), or none of them: the
tiny model, which every run builds in its own folder.
"""

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fp8rl import progress
from fp8rl.files import file_sha256
from fp8rl.model.dims import ModelDims, read_dims
from fp8rl.model.tiny import tiny_dims
from fp8rl.recipe.rules import RecipeError
from fp8rl.recipe.schema import Recipe

PACKAGE = "package:"
RECORD_FILE = "source.json"
# Raise it when a change of code changes what the same file is converted to.
CONVERSION_CODE = 1

_MAGIC = b"GGUF"
# Weights as safetensors only: pickles of a stranger are never loaded.
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "tokenizer.model"]
_EXTRA = "install fp8rl with the extra `models` (pip install 'fp8rl[models]')"


def model_folder(recipe: Recipe) -> Path | None:
    """Hugging Face folder of the recipe's model; None for the tiny one, which has none of its own.

    A GGUF file that was not converted yet is converted now, in a process of its own, and a model of the
    hub downloaded, with a progress note. Raises RecipeError where the file, its package or what reads
    it is missing, where it cannot be converted, and where the hub does not give the model. Whether a
    folder named by model.path is there is for its reader to say.
    """
    model = recipe.model
    if model.hub is not None:
        return _from_hub(model.hub)
    if model.gguf is not None:
        return _converted(gguf_file(model.gguf), Path(recipe.runs_dir).resolve())
    return None if model.path is None else Path(model.path).resolve()


def warm_start_file(recipe: Recipe, runs: Path) -> Path:
    """Where the warm-started weights of the recipe's tiny model are kept, once a run has made them."""
    return runs / ".cache" / "warm_start" / f"{recipe.warm_start_digest()}.safetensors"


def model_dims(recipe: Recipe) -> ModelDims:
    """Dimensions of the recipe's model, before any folder of the tiny one exists.

    Raises RecipeError as `model_folder`, and UnsupportedModelError as `read_dims`.
    """
    folder = model_folder(recipe)
    return tiny_dims(recipe.model.tiny) if folder is None else read_dims(folder)


def describe_model(recipe: Recipe) -> dict[str, Any]:
    """Which model a run starts from, for its record: its kind, and the digest of a GGUF file."""
    folder = model_folder(recipe)
    if folder is None:
        return {"kind": "tiny"}
    if recipe.model.hub is not None:
        return {"kind": "hub", "hub": recipe.model.hub, "folder": str(folder)}
    if recipe.model.gguf is None:
        return {"kind": "path", "folder": str(folder)}
    made_from = json.loads((folder / RECORD_FILE).read_text())
    return {"kind": "gguf", "gguf": recipe.model.gguf, "folder": str(folder), **made_from}


def pinned(recipe: Recipe) -> Recipe:
    """`recipe` with the commit of its hub model in its name: a run that is resumed has the same.

    Raises RecipeError as `model_folder`.
    """
    if recipe.model.hub is None:
        return recipe
    name = recipe.model.hub.partition("@")[0]
    hub = f"{name}@{_from_hub(recipe.model.hub).name}"
    return recipe.model_copy(update={"model": recipe.model.model_copy(update={"hub": hub})})


@cache
def _from_hub(hub: str) -> Path:
    """The folder of a model in the hub's cache, whose name is its commit."""
    import huggingface_hub
    from huggingface_hub import errors

    name, _, revision = hub.partition("@")
    options: dict[str, Any] = {"revision": revision or None, "allow_patterns": _HUB_FILES}
    try:
        try:
            folder = huggingface_hub.snapshot_download(name, local_files_only=True, **options)
        except errors.LocalEntryNotFoundError:
            progress.emit(
                progress.Event("note", f"model.hub: {hub} is not in the cache; downloading it")
            )
            folder = huggingface_hub.snapshot_download(name, **options)
    except errors.HFValidationError as error:
        raise RecipeError(f"model.hub: {hub!r} is no name of a model: {error}") from None
    except (errors.HfHubHTTPError, errors.LocalEntryNotFoundError, OSError) as error:
        raise RecipeError(
            f"model.hub: {hub} is not in the cache ({huggingface_hub.constants.HF_HUB_CACHE}) and "
            f"cannot be downloaded: {str(error).strip().splitlines()[0]}. Check the name, the "
            "connection and HF_HUB_OFFLINE, or name a folder with model.path"
        ) from None
    return Path(folder).resolve()


def gguf_file(name: str) -> Path:
    """The file that model.gguf names: a path, or package:<module>/<file> for one that an installed
    package ships. The package is found without being imported.

    Raises RecipeError saying what is missing and what to install.
    """
    if not name.startswith(PACKAGE):
        path = Path(name).resolve()
        if not path.is_file():
            raise RecipeError(f"model.gguf: no file at {path}")
        return path
    module, _, inside = name.removeprefix(PACKAGE).partition("/")
    if not module.isidentifier() or not inside:
        raise RecipeError(f"model.gguf: {name!r} is not of the form {PACKAGE}<module>/<file>")
    spec = find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        raise RecipeError(
            f"model.gguf: no package {module!r} is installed here. For the model of configs/smollm2 "
            f"{_EXTRA}; for another install the package that ships it, or give a path"
        )
    for folder in spec.submodule_search_locations:
        path = Path(folder) / inside
        if path.is_file():
            return path
    raise RecipeError(f"model.gguf: the installed package {module!r} has no file {inside!r}")


def _converted(file: Path, runs: Path) -> Path:
    """The Hugging Face folder made from `file`, made now where it is not there."""
    digest = _digest(file)
    folder = runs / ".cache" / "models" / digest[:16]
    if not folder.exists():
        _require_converter(file)
        note = f"converting {file.name} to a Hugging Face folder (about 20 s, once): {folder}"
        progress.emit(progress.Event("note", note))
        _convert(file, digest, folder)
    _require_made_from(folder, digest)
    return folder


def _digest(file: Path) -> str:
    """sha256 of `file`, read again only where its size or time has changed."""
    stat = file.stat()
    return _digest_of(file, stat.st_size, stat.st_mtime_ns)


@cache
def _digest_of(file: Path, _size: int, _mtime_ns: int) -> str:
    return file_sha256(file)


def _require_converter(file: Path) -> None:
    with file.open("rb") as content:
        if content.read(len(_MAGIC)) != _MAGIC:
            raise RecipeError(f"model.gguf: {file} is not a GGUF file")
    missing = [name for name in ("accelerate", "gguf") if find_spec(name) is None]
    if missing:
        names = " and ".join(missing)
        raise RecipeError(f"model.gguf: transformers reads GGUF with {names}, not installed: {_EXTRA}")


def _convert(file: Path, digest: str, folder: Path) -> None:
    """Makes `folder` at once and whole; where another process was faster, its folder stays."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    building = folder.parent / f".{folder.name}.{os.getpid()}.{secrets.token_hex(4)}"
    building.mkdir()
    try:
        _run_converter(file, building)
        record = {"file": file.name, "sha256": digest, "code": CONVERSION_CODE}
        record["transformers"] = version("transformers")
        (building / RECORD_FILE).write_text(json.dumps(record, indent=1))
        _flush(building)
        try:
            building.rename(folder)
        except OSError:
            if not folder.exists():
                raise
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _run_converter(file: Path, folder: Path) -> None:
    """In a process of its own: the caller may be the flow, which never imports torch."""
    command = [sys.executable, "-m", "fp8rl.model.gguf", str(file), str(folder)]
    # stderr is for the reason of a failure.
    quiet = {"TQDM_DISABLE": "1", "TRANSFORMERS_VERBOSITY": "error", "TOKENIZERS_PARALLELISM": "false"}
    environment = os.environ | quiet | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode < 0:
        name = signal.Signals(-done.returncode).name
        raise RecipeError(
            f"model.gguf: the conversion of {file} was ended by {name}; it needs memory for the model "
            "in FP32"
        )
    if done.returncode != 0:
        reason = (done.stderr.strip() or "no reason given").splitlines()[-1]
        raise RecipeError(
            f"model.gguf: {file} cannot be converted: {reason} (all of it: python -m fp8rl.model.gguf "
            "FILE FOLDER)"
        )


def _flush(folder: Path) -> None:
    """Makes the files durable before the folder's name is: a crash leaves no half-written one."""
    for path in (*folder.iterdir(), folder):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _require_made_from(folder: Path, digest: str) -> None:
    path = folder / RECORD_FILE
    record = json.loads(path.read_text()) if path.is_file() else {}
    if (record.get("sha256"), record.get("code")) != (digest, CONVERSION_CODE):
        raise RecipeError(
            f"model.gguf: {folder} was not made by this version of fp8rl from this file. Remove it; it "
            "is made anew"
        )
