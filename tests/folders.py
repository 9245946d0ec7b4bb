"""Run folders as a training run leaves them, made in a second by the real journal, published weights
and checkpoints: a small torch module takes the place of the engines.
"""

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save_file

from fp8rl import checkpoints
from fp8rl.context import RunContext
from fp8rl.data.cursor import cursor_inputs, first_batch
from fp8rl.files import file_sha256
from fp8rl.journal import ITERATION, MODEL_FILE, StepRecord
from fp8rl.learner.checkpoint import CheckpointWriter, capture, weights_digest
from fp8rl.lock import Owner, RunLock
from fp8rl.model.kv_scales import KvScales, LayerScales
from fp8rl.recipe.load import with_overrides
from fp8rl.recipe.schema import Recipe
from fp8rl.retention import KEPT_VERSIONS
from fp8rl.rollout.pressure import Pressure
from fp8rl.runs import Run, State
from fp8rl.tables import to_parquet
from tasks.inputs import file_digest, masters_digest, prompts_digest, weights_inputs
from tests.models import publish

CHUNKS = 2
DRAWS = 2  # of each iteration, where the recipe asks for dynamic sampling
MACHINE = {"cpu": "a cpu", "cores": 2, "python": "3.11", "packages": {"torch": "2"}}


def small_recipe(*overrides: str) -> Recipe:
    """FP8 rollout and KV cache, four iterations, on two threads."""
    given = ("precision.rollout=fp8", "precision.kv_cache=fp8", "iterations=4", "evaluate.every=2")
    settled = ("threads=2", "precision.backend=reference", "arm=small")
    return with_overrides(Recipe(), [*given, *settled, *overrides])


def about(recipe: Recipe) -> dict:
    """What a run's run.json says besides, as flows/opening.py has it."""
    return {"arm": recipe.arm, "model": {"kind": "tiny"}, "started": "2026-01-02T03:04:05+00:00"}


def this_attempt(flow_run: str = "flow-1") -> dict:
    owner = Owner.this_process()
    at = {"host": owner.host, "pid": owner.pid, "started": time.time()}
    return {**at, "prefect_flow_run": flow_run, "machine": MACHINE, "backends": {}, "environment": {}}


class Folder:
    """A run that is being written: `advance` commits steps until told to stop."""

    def __init__(self, runs: Path, name: str, recipe: Recipe, seed: int = 0) -> None:
        self.recipe = recipe.model_copy(update={"name": name, "runs_dir": str(runs)})
        self.run, self.lock = Run.create(runs, name, self.recipe, about(self.recipe))
        self.attempt = self.run.begin_attempt(this_attempt())
        self.journal, self.seed = self.run.journal, seed
        self.context = RunContext(
            run=name, folder=self.run.folder, model_dir=self.run.folder / "model", recipe=self.recipe
        )
        torch.manual_seed(seed)
        self.model = torch.nn.Linear(8, 8)
        self.optimiser = torch.optim.AdamW(self.model.parameters(), lr=0.1)

    def _commit(self, step, iteration, files=None, written=(), **fields) -> None:
        given = fields.pop("inputs", {})
        inputs = {"recipe": self.recipe.step_digest(), **given}
        record = StepRecord(step, iteration, 0.5, inputs=inputs, **fields)
        self.journal.commit(record, files or {}, written)

    def _sampling(self, version: int, split: str) -> dict:
        """What samples of weight `version` come from."""
        prompts = prompts_digest(self.context, split)
        cursor = cursor_inputs(self.context, version + 1) if split == "train" else {}
        return {**weights_inputs(self.context, version), "prompts": prompts, **cursor}

    def prepare_data(self, n: int) -> None:
        data = self.context.data_dir
        data.mkdir()
        for split in ("train", "val"):
            table = to_parquet({"id": [0, 1], "question": [f"{split} {self.seed}", "b"]})
            (data / f"{split}.parquet").write_bytes(table)
        written = tuple(sorted(data.glob("*.parquet")))
        self._commit("prepare_data", n, written=written, output={"train": {"size": 2}})

    def warm_start(self, n: int) -> None:
        path = self.context.model_dir / MODEL_FILE
        path.parent.mkdir()
        save_file({k: v.detach() for k, v in self.model.state_dict().items()}, path)
        self._commit("warm_start", n, written=(path,), output={"weights": file_sha256(path)})

    def chunk(self, n: int, number: int) -> None:
        rows = [[self.seed, n, number], [n, number]]
        columns = {"tokens": rows, "logprobs": [[-0.5] * len(row) for row in rows]}
        inputs = self._sampling(n - 1, "train")
        name = f"rollout.{number:04d}"
        output = {"pressure": Pressure(2048, steps=3).to_dict()}
        self._commit(name, n, {f"{name}.parquet": to_parquet(columns)}, inputs=inputs, output=output)

    def rollout(self, n: int) -> None:
        table = to_parquet({"prompt_id": [0, 1], "seed": [self.seed, n]})
        inputs = self._sampling(n - 1, "train")
        names = ("elements", "k_saturated", "v_saturated", "k_underflow", "v_underflow")
        kv = {name: [100 // (place + 1)] for place, name in enumerate(names)}
        output = {"kv": kv}
        if self.recipe.rollout.max_draws > 1:
            output["next_batch"] = first_batch(self.context, n) + DRAWS
        self._commit("rollout", n, {"rollouts.parquet": table}, inputs=inputs, output=output)

    def forget_chunks(self, n: int) -> None:
        for number in range(CHUNKS):
            self.journal.forget(n, f"rollout.{number:04d}")

    def reward(self, n: int) -> None:
        table = to_parquet({"prompt_id": [0, 1], "reward": [float(n), float(self.seed)]})
        inputs = {"rollouts": file_digest(self.context, n, "rollout", "rollouts.parquet")}
        metrics = {"train/reward_mean": 0.5}
        self._commit("reward", n, {"rewards.parquet": table}, inputs=inputs, metrics=metrics)

    def train(self, n: int) -> None:
        generator = torch.Generator().manual_seed(100 * self.seed + n)
        for parameter in self.model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        self.optimiser.step()
        inputs = {"weight_version": n - 1, "weights": masters_digest(self.context, n - 1)}
        inputs["rollouts"] = file_digest(self.context, n, "rollout", "rollouts.parquet")
        inputs["rewards"] = file_digest(self.context, n, "reward", "rewards.parquet")
        output = {"weight_version": n, "weights": self.weights(), "tokens": 8, "micro_batch": 4}
        self._commit("train", n, inputs=inputs, output=output, metrics={"train/loss": 0.1})

    def weights(self) -> str:
        """Digest of the masters, as the train step records it."""
        tensors = capture(self.model, self.optimiser)
        return weights_digest({k: v for k, v in tensors.items() if k.startswith("model/")})

    def requantize(self, n: int) -> None:
        tensors = {k: v.detach().bfloat16() for k, v in self.model.state_dict().items()}
        manifest = publish(self.journal.weights_folder(n), n, tensors)
        self.journal.drop_weights_before(n - KEPT_VERSIONS + 1)
        inputs = {"weight_version": n, "weights": masters_digest(self.context, n)}
        output = {"weight_version": n, "digest": manifest.digest}
        self._commit("requantize", n, inputs=inputs, output=output)

    def recalibrate_kv(self, n: int) -> None:
        scales = KvScales(n, (LayerScales(0.1, 0.2 + self.seed / 7, 0.3 + n / 9),), 5, "rollouts")
        inputs = {"weight_version": n, "weights": masters_digest(self.context, n)}
        files = {"kv_scales.json": scales.to_json().encode()}
        self._commit("recalibrate_kv", n, files, inputs=inputs, metrics={"kv/tokens": 5.0})

    def evaluate(self, n: int) -> None:
        table = to_parquet({"prompt_id": [0], "text": [f"{self.seed} {n}"]})
        inputs = self._sampling(n, "val")
        metrics = {"val/accuracy": n / 10}
        self._commit("evaluate", n, {"evaluation.parquet": table}, inputs=inputs, metrics=metrics)

    def end_iteration(self, n: int) -> None:
        records = [self.journal.record(i, step) for i, step in self.journal.steps() if i == n]
        metrics = {k: v for record in records for k, v in record.metrics.items()}
        self._commit(ITERATION, n, metrics=metrics)

    def checkpoint(self, version: int) -> None:
        """The checkpoint of the weights that are held, by the real writer."""
        CheckpointWriter().start(
            checkpoints.checkpoint_folder(self.run.folder, version),
            tensors=capture(self.model, self.optimiser),
            state={
                "run": self.run.name,
                "seed": self.seed,
                "next_iteration": version + 1,
                "next_batch": first_batch(self.context, version + 1),
            },
            run_id=self.run.id,
            version=version,
            weights_digest=self.weights(),
            recipe_digest=self.recipe.step_digest(),
            asynchronous=False,
        )

    def _plan(self):
        yield from ((0, "prepare_data", self.prepare_data), (0, "warm_start", self.warm_start))
        for n in range(self.recipe.iterations + 1):
            if n > 0:
                for c in range(CHUNKS):
                    yield n, f"rollout.{c:04d}", lambda n, c=c: self.chunk(n, c)
                yield n, "rollout", self.rollout
                yield n, "forget", self.forget_chunks
                yield from ((n, "reward", self.reward), (n, "train", self.train))
            yield from ((n, "requantize", self.requantize), (n, "recalibrate_kv", self.recalibrate_kv))
            if n % self.recipe.evaluate.every == 0 or n == self.recipe.iterations:
                yield n, "evaluate", self.evaluate
            yield n, ITERATION, self.end_iteration

    def advance(self, until: tuple[int, str], saved: tuple[int, ...] = ()) -> None:
        """Commits every step up to and with `until`, (iteration, step), from the beginning.

        saved: iterations after whose record a checkpoint is written.
        """
        for n, name, do in self._plan():
            do(n)
            if name == ITERATION and n in saved:
                self.checkpoint(n)
            if (n, name) == until:
                return
        raise ValueError(f"no step {until}")


def make_run(
    runs: Path,
    name: str = "r",
    *,
    until: tuple[int, str] = (4, ITERATION),
    saved: tuple[int, ...] = (1, 2),
    overrides: tuple[str, ...] = (),
    seed: int = 0,
    state: str = "stopped",
) -> Run:
    """A run that got as far as `until`, with the checkpoints `saved`; nobody holds its lock.

    state: how its attempt ended; "running" leaves it as after a kill.
    """
    folder = Folder(runs, name, small_recipe(f"seed={seed}", *overrides), seed)
    folder.advance(until, saved)
    if state != "running":
        folder.run.end_attempt(folder.attempt, State(state))
    folder.lock.release()
    return folder.run


def copy_of(run: Run, runs: Path) -> Run:
    """The same run in another runs folder. Its files are links: to be replaced, not written to."""
    return Run(Path(shutil.copytree(run.folder, runs / run.name, copy_function=os.link)))


def files_in(run: Run) -> dict[str, bytes]:
    """Content of every file of a run by its path, but the lock's."""
    return {
        path.relative_to(run.folder).as_posix(): path.read_bytes()
        for path in sorted(run.folder.rglob("*"))
        if path.is_file() and path.name not in ("lock.json", ".lock")
    }


def replace_file(path: Path, content: bytes | None) -> None:
    """Gives `path` other content, or deletes it (None); links to the old file keep the old content."""
    path.unlink(missing_ok=True)
    if content is not None:
        path.write_bytes(content)


def flipped(content: bytes) -> bytes:
    """With one bit in the middle turned over."""
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


@contextmanager
def held(run: Run) -> Iterator[RunLock]:
    """The run's lock, given up at the end."""
    lock = RunLock(run.folder)
    try:
        yield lock
    finally:
        lock.release()
