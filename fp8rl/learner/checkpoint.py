"""What a checkpoint holds of the learner: capturing, writing, loading and restoring it.

Layout, manifest and verification are in fp8rl/checkpoints.py. The files are not the same byte for
byte when the same state is written twice (torch.distributed.checkpoint puts an identifier and its
path into them); the tensors in them are.
"""

import hashlib
import json
import os
import random
import shutil
import sys
import threading
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.utils.serialization import config

from fp8rl import checkpoints, faults, files
from fp8rl.checkpoints import Checkpoint, CheckpointError

_MOMENTS = ("exp_avg", "exp_avg_sq", "step")  # AdamW's state of one parameter


def _model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The trained parameters and persistent buffers themselves, by name."""
    persistent = model.state_dict(keep_vars=True).keys()
    buffers = {name: b for name, b in model.named_buffers() if name in persistent}
    return {**_trained(model), **buffers}


def _trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def capture(model: nn.Module, optimiser: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Copies on the CPU of all that training changes: going on does not change them.

    "model/<name>": each trained parameter and persistent buffer. "optimiser/<name>/<moment>": AdamW's
    exp_avg and exp_avg_sq, in shape and dtype of the parameter, and step, FP32 []; none of them before
    the first step. The learning rate is not held: the learner sets it at each step.
    Raises CheckpointError where the state is not one that `restore` takes.
    """
    tensors = {f"model/{name}": tensor for name, tensor in _model_tensors(model).items()}
    if optimiser.state:
        for name, parameter in _trained(model).items():
            state = optimiser.state.get(parameter, {})
            if sorted(state) != sorted(_MOMENTS):
                found = ", ".join(sorted(state)) or "nothing"
                raise CheckpointError(f"optimiser/{name}: has {found}, needs {', '.join(_MOMENTS)}")
            tensors |= {f"optimiser/{name}/{moment}": state[moment] for moment in _MOMENTS}
    return {name: t.detach().to("cpu", copy=True).contiguous() for name, t in tensors.items()}


def restore(model: nn.Module, optimiser: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Sets model and optimiser, in place, to what `capture` returned, bit for bit.

    Without optimiser tensors the optimiser has no state again, as before its first step.
    Raises CheckpointError naming missing, unknown and unfit tensors; then nothing is changed.
    """
    targets = {f"model/{name}": tensor for name, tensor in _model_tensors(model).items()}
    states: dict[Tensor, dict[str, Tensor]] = {}
    if any(name.startswith("optimiser/") for name in tensors):
        for name, parameter in _trained(model).items():
            state = optimiser.state.get(parameter) or _empty_state(optimiser, parameter)
            targets |= {f"optimiser/{name}/{moment}": state[moment] for moment in _MOMENTS}
            states[parameter] = state
    _require_fit(targets, tensors)
    with torch.no_grad():
        for name, target in targets.items():
            # copy_ counts in the version counter, by which FP8 weights know that they are stale.
            target.copy_(tensors[name])
    optimiser.state.clear()
    optimiser.state.update(states)


def _empty_state(optimiser: torch.optim.Optimizer, parameter: nn.Parameter) -> dict[str, Tensor]:
    # As AdamW makes it: the step count is on the CPU, but for the two variants that want it beside.
    beside = any(group.get("capturable") or group.get("fused") for group in optimiser.param_groups)
    return {
        "step": torch.empty((), dtype=torch.float32, device=parameter.device if beside else "cpu"),
        "exp_avg": torch.empty_like(parameter, requires_grad=False),
        "exp_avg_sq": torch.empty_like(parameter, requires_grad=False),
    }


def _require_fit(targets: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    problems = [f"{name}: missing" for name in targets if name not in tensors]
    problems += [f"{name}: not a tensor of this learner" for name in tensors if name not in targets]
    for name in targets.keys() & tensors.keys():
        wanted, found = targets[name], tensors[name]
        if (wanted.shape, wanted.dtype) != (found.shape, found.dtype):
            is_, needs = (f"{tuple(t.shape)} {t.dtype}" for t in (found, wanted))
            problems.append(f"{name}: is {is_}, needs {needs}")
    if problems:
        lines = "\n  ".join(sorted(problems))
        raise CheckpointError(
            f"the checkpoint does not fit this learner; is the recipe another one?\n  {lines}"
        )


def capture_rng() -> dict[str, Any]:
    """The states of Python's, NumPy's (the global one) and torch's random generators, for JSON."""
    kind, keys, *rest = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": [kind, np.asarray(keys).tolist(), *rest],
        "torch": _hex(torch.get_rng_state()),
        "cuda": [_hex(s) for s in torch.cuda.get_rng_state_all()] if torch.cuda.is_available() else [],
    }


def restore_rng(states: Mapping[str, Any]) -> None:
    """Sets the random generators to what `capture_rng` returned, also after JSON.

    States of CUDA devices that are not here are left out.
    """
    version, keys, gauss = states["python"]
    random.setstate((version, tuple(keys), gauss))
    kind, numbers, *rest = states["numpy"]
    np.random.set_state((kind, np.array(numbers, dtype=np.uint32), *rest))
    torch.set_rng_state(_from_hex(states["torch"]))
    for device in range(min(len(states["cuda"]), torch.cuda.device_count())):
        torch.cuda.set_rng_state(_from_hex(states["cuda"][device]), device)


def _hex(state: Tensor) -> str:
    return state.numpy().tobytes().hex()


def _from_hex(text: str) -> Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)


def weights_digest(tensors: Mapping[str, Tensor]) -> str:
    """Hexadecimal sha256 over names, shapes, dtypes and bytes of `tensors`, in order of the names."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        dtype = str(tensor.dtype).removeprefix("torch.")
        digest.update(json.dumps([name, list(tensor.shape), dtype]).encode())
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()


class CheckpointWriter:
    """Writes one checkpoint at a time, on a thread beside training where it is asked to.

    An error or a kill at any moment leaves other checkpoints as they were and no folder of the final
    name that is not whole. At normal exit Python waits for a write that is under way.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._result: Checkpoint | None = None
        self._error: BaseException | None = None

    def start(
        self,
        folder: Path,
        *,
        tensors: Mapping[str, Tensor],
        state: Mapping[str, Any],
        run_id: str,
        version: int,
        weights_digest: str,
        recipe_digest: str,
        asynchronous: bool,
    ) -> None:
        """Writes the checkpoint of weight `version` to `folder`, which is named after it.

        tensors: what `capture` returned; nobody may change them. state: JSON values, read at once.
        Waits for an earlier write first, and raises its error where nobody has asked for it yet. Not
        asynchronous, it raises this write's own error, as `finish` does.
        """
        if folder.name != f"{version:05d}":
            raise ValueError(f"{folder} is not the folder of weight version {version}")
        content = json.dumps(state, indent=1).encode()
        self.finish()
        write = partial(
            _write,
            folder,
            dict(tensors),
            content,
            run_id=run_id,
            version=version,
            weights_digest=weights_digest,
            recipe_digest=recipe_digest,
        )
        if asynchronous:
            name = f"checkpoint {version}"
            self._thread = threading.Thread(target=self._run, args=(write,), name=name)
            self._thread.start()
        else:
            self._result = write()

    def _run(self, write: Callable[[], Checkpoint]) -> None:
        try:
            if sys.platform == "linux":  # where a priority is of one thread: training goes first
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
            self._result = write()
        except BaseException as error:  # told by `finish`, in the thread that trains
            self._error = error

    @property
    def is_writing(self) -> bool:
        """Whether a write that `start` began is still under way."""
        return self._thread is not None and self._thread.is_alive()

    def finish(self) -> Checkpoint | None:
        """Waits for the write that `start` began; None where there is none since the last call.

        Raises the write's error: files.DiskFullError in words where there was no room.
        """
        if self._thread is not None:
            self._thread.join()
        error, result = self._error, self._result
        self._thread = self._error = self._result = None
        if error is not None:
            raise error
        return result


def _write(
    folder: Path, tensors: dict[str, Tensor], state: bytes, *, version: int, **about: str
) -> Checkpoint:
    building = checkpoints.building_folder(folder)
    try:
        checkpoints.remove_leftovers(folder.parent.parent)
        shutil.rmtree(building, ignore_errors=True)  # of a process that had this one's number
        building.mkdir(parents=True)
        _write_tensors(building / checkpoints.TENSORS, tensors)
        faults.point(f"checkpoint:{version}:middle")
        files.write_atomic(building / checkpoints.STATE, state)
        checkpoints.write_manifest(building, version=version, **about)
        faults.point(f"checkpoint:{version}:before-rename")
        files.put_in_place(building, folder)
    except BaseException as error:
        shutil.rmtree(building, ignore_errors=True)
        if isinstance(error, OSError) and (told := files.disk_error(error, folder)) is not error:
            raise told from error
        raise
    faults.point(f"checkpoint:{version}:written")
    return checkpoints.read_manifest(folder)


def _silence() -> None:
    # Both calls warn of what no_dist asks for. Not catch_warnings: that is not safe beside a thread.
    warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)


def _write_tensors(folder: Path, tensors: dict[str, Tensor]) -> None:
    _silence()
    writer = dcp.FileSystemWriter(folder, sync_files=False)  # files.put_in_place syncs them all
    try:
        # The manifest's sha256 says more than a CRC32, which would take half of the time here.
        # The setting is of this thread only.
        with config.patch({"save.compute_crc32": False}):  # type: ignore[attr-defined]
            dcp.save(dict(tensors), storage_writer=writer, no_dist=True)
    except CheckpointException as error:
        raise _unwrapped(error) from error


def _unwrapped(error: CheckpointException) -> BaseException:
    """What went wrong inside torch.distributed.checkpoint: the OSError, where there is one.

    torch.save covers an OSError with a RuntimeError of its own, so its context is searched too.
    """
    first: BaseException = next((failure for failure, _ in error.failures.values()), error)
    cause: BaseException | None = first
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    return cause or first


def load(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors, on the CPU, and the state of the checkpoint in `folder`.

    The folder is to be verified before (fp8rl.checkpoints.verify): its files are unpickled here.
    Raises CheckpointError where they cannot be read all the same.
    """
    _silence()
    try:
        reader = dcp.FileSystemReader(folder / checkpoints.TENSORS)
        tensors: dict[str, Any] = {
            name: torch.empty(entry.size, dtype=entry.properties.dtype)
            for name, entry in reader.read_metadata().state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        dcp.load(tensors, storage_reader=reader, no_dist=True)
        state = json.loads((folder / checkpoints.STATE).read_bytes())
    except (CheckpointException, OSError, ValueError, RuntimeError, EOFError, UnpicklingError) as error:
        what = _unwrapped(error) if isinstance(error, CheckpointException) else error
        raise CheckpointError(
            f"checkpoint {folder} cannot be read: {what}; resume from an older checkpoint"
        ) from error
    return tensors, state
