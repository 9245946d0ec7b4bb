"""MLflow: one run for one training run, with each committed iteration's metrics once.

The run folder is the queue and MLflow shows what is in it. What was pushed is noted after the push, so
a crash in between pushes it again, which changes nothing. While the server is away the queue waits.
"""

import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fp8rl import faults, progress, tracking_server
from fp8rl.files import values_digest
from fp8rl.journal import StepRecord
from fp8rl.recipe.load import flatten, to_yaml
from fp8rl.recipe.schema import Recipe
from fp8rl.tracking_queue import Queue
from fp8rl.tracking_server import RUN_ID_TAG, RUN_TAG, AwayError, Server, TrackingError, tracking_uri

__all__ = ["MLFLOW_STATUS", "RUN_ID_TAG", "RUN_TAG", "Tracker", "TrackingError", "tracking_uri"]

# How MLflow names the ways a run ends.
MLFLOW_STATUS = {
    **{"finished": "FINISHED", "failed": "FAILED"},
    **dict.fromkeys(("cancelled", "stopped", "killed"), "KILLED"),
}
_STATUSES = ("RUNNING", "FINISHED", "FAILED", "KILLED")


class Tracker:
    """The MLflow run of the training run `run`, whose folder is `folder`.

    run_id: the training run's own id, by which its MLflow run is found again. records: gives all
    committed iteration records in order. tags: more tags for the run.
    """

    def __init__(
        self,
        recipe: Recipe,
        *,
        run: str,
        run_id: str,
        folder: Path,
        records: Callable[[], list[StepRecord]],
        tags: dict[str, str],
        create: bool = True,
        params: dict[str, str] | None = None,
        document: tuple[str, str] | None = None,
    ) -> None:
        """create: false never makes an MLflow run, only keeps one up to date. No network is used.

        params, document (an artifact's name and text): for a run that is not of a recipe, in place of
        the recipe's values and of recipe.yaml; `recipe` says where MLflow is.

        Raises ValueError for a run id that cannot stand in a search.
        """
        if "'" in run_id:
            raise ValueError(f"run id {run_id!r} has a quote")
        self.uri = tracking_uri(recipe)
        self._server = Server(self.uri)
        self._recipe, self._run, self._run_id = recipe, run, run_id
        self._records, self._tags, self._create = records, tags, create
        self._params = flatten(recipe) if params is None else params
        self._document = document or ("recipe.yaml", to_yaml(recipe))
        self._queue = Queue(folder / "tracking")
        self._opened = False
        self._opened_in: str | None = None  # the experiment's id
        self._away = False

    @property
    def run_id(self) -> str | None:
        """The MLflow run's id; None as long as there is none."""
        return self._queue.state.mlflow_run

    @property
    def page(self) -> str | None:
        """The run's page in MLflow's UI; None where the URI is a database's, or nobody answered."""
        if self._opened_in is None:
            return None
        return tracking_server.page(self.uri, f"experiments/{self._opened_in}/runs/{self.run_id}")

    # What is wanted.

    def start(self, *, may_be_away: bool) -> None:
        """Finds or makes the MLflow run, and has it running, with the recipe as params and artifact.

        Raises TrackingError where the server is away, unless it may be: then all waits in the folder.
        """
        self._queue.state.tags = dict(self._tags)
        self._queue.want("RUNNING", None, None)
        # Another process, or a person, may have ended the run there since.
        self._queue.state.pushed.pop("status", None)
        self._opened = False
        self._queue.save()
        self._queue.write(*self._document)
        try:
            self._push()
        except AwayError as away:
            if not may_be_away:
                raise TrackingError(
                    f"MLflow at {tracking_server.shown(self.uri)} is away: {away}. Start that server, "
                    "or set tracking.uri (or MLFLOW_TRACKING_URI) to one that is up; with neither "
                    "set, a SQLite file in the runs folder is used"
                ) from away
            self._say_away(away)

    def put_inputs(self, prepared: dict[str, Any]) -> None:
        """Has MLflow show the run's prompts as its data sets. prepared: prepare_data's output.

        Raises as `flush`.
        """
        self._queue.state.inputs = prepared
        self._queue.save()
        self.put_json("data.json", prepared)

    def put_json(self, name: str, content: Any) -> None:
        """Keeps `content` as the artifact `name`, replacing an older one. Raises as `flush`."""
        self.put_text(name, json.dumps(content, indent=1))

    def put_table(self, name: str, columns: dict[str, list[Any]]) -> None:
        """Keeps `columns` as the artifact `name`, which MLflow's page shows as a table.

        Raises ValueError where the name is not of a JSON file or the columns differ in length, else
        as `flush`.
        """
        if not name.endswith(".json"):
            raise ValueError(f"a table's name ends in .json, not {name!r}")
        rows = [[_cell(value) for value in row] for row in zip(*columns.values(), strict=True)]
        self.put_text(name, json.dumps({"columns": list(columns), "data": rows}))

    def put_text(self, name: str, text: str) -> None:
        """Keeps `text` as the artifact `name`, replacing an older one. Raises as `put_bytes`."""
        self.put_bytes(name, text.encode())

    def put_bytes(self, name: str, content: bytes) -> None:
        """Keeps a file's `content` as the artifact `name`, replacing an older one.

        Raises ValueError for a name that is not a plain relative path, else as `flush`.
        """
        self._queue.write(name, content)
        if not self._away:  # else the next flush tries, once for all of them
            self.flush()

    def set_status(self, status: str, reason: str | None = None, ended_ms: int | None = None) -> None:
        """Wants the MLflow run to be RUNNING, FINISHED, FAILED or KILLED; `flush` pushes that.

        ended_ms: when it ended, Unix ms; now where not given. Raises ValueError for another status.
        """
        if status not in _STATUSES:
            raise ValueError(f"status {status!r}; known: {', '.join(_STATUSES)}")
        now = None if status == "RUNNING" else int(time.time() * 1000)
        self._queue.want(status, reason, ended_ms or now)
        self._queue.save()

    def rebuild(self) -> bool:
        """Replaces the MLflow run by a new one with the points of the records as they are now.

        For a run that was taken back: MLflow cannot delete single points. The old MLflow run is
        marked and deleted (its bin keeps it). Returns and raises as `flush`, which goes on with it
        after a crash.
        """
        self._queue.state.rebuild = True
        self._queue.save()
        return self.flush()

    @contextmanager
    def system_metrics(self) -> Iterator[None]:
        """MLflow's own monitor of CPU, memory, disk, network and GPUs, while the block is open; nothing
        where the recipe does not ask for it. It ends early where the server goes away."""
        if not self._recipe.tracking.system_metrics or self.run_id is None or self._away:
            yield
            return
        monitor = tracking_server.system_monitor(self.uri, self.run_id)
        monitor.start()
        try:
            yield
        finally:
            monitor.finish()

    # What is not pushed.

    def flush(self) -> bool:
        """Pushes all that is pending; False where the server is away, and then it stays pending.

        Raises MLflow's own errors where it refuses something (a name, a permission); the status is
        pushed also then. An infinite metric gets no point: a tag and a note name it.
        """
        try:
            self._push()
        except AwayError as away:
            self._say_away(away)
            return False
        return True

    def pending(self) -> str:
        """In words what is not pushed yet; empty where all is. Asks no server."""
        state, what = self._queue.state, []
        if state.mlflow_run is None or state.rebuild:
            what.append("the MLflow run")
        if state.superseded:
            what.append(f"the end of {len(state.superseded)} superseded")
        if not self._queue.has("params", self._params_digest()):
            what.append("params")
        if not self._queue.has("tags", values_digest(self._all_tags())):
            what.append("tags")
        if state.inputs and not self._queue.has("inputs", values_digest(state.inputs)):
            what.append("data sets")
        artifacts = self._queue.pending_artifacts()
        if artifacts:
            what.append(f"artifacts {', '.join(artifacts)}")
        numbers = [record.iteration for record in self._queue.pending_records(self._records())]
        if numbers:
            what.append(f"iterations {numbers[0]} to {numbers[-1]}")
        if not self._queue.has("status", self._queue.status()):
            what.append(f"status {state.status}")
        return ", ".join(what)

    def _say_away(self, away: AwayError) -> None:
        if not self._away:
            self._note(f"is away ({away}); training goes on and it gets the rest when it is back")
        self._away = True

    def _note(self, text: str) -> None:
        progress.emit(progress.Event("note", f"MLflow at {tracking_server.shown(self.uri)} {text}"))

    def _push(self) -> None:
        """Raises AwayError, else as `flush`."""
        with self._server.reached() as client:
            if self._open(client):
                refused = self._push_content(client)
                self._push_status(client)
                if refused is not None:
                    raise refused
        if self._away:
            self._note("is back and has everything")
        self._away = False

    def _open(self, client: Any) -> bool:
        """Finds or makes the MLflow run, once per process; False where there is none, nor to be one."""
        state = self._queue.state
        if self._opened and not state.rebuild:
            return True
        self._opened = False
        experiment = tracking_server.experiment_of(client, self._recipe, create=self._create)
        if state.rebuild and self._create:
            # Noted by id before there is a new one: after a crash none is taken for the other.
            old = tracking_server.runs_of(client, experiment, self._run_id)
            old += [state.mlflow_run] if state.mlflow_run else []
            state.superseded = sorted({*state.superseded, *old})
            state.mlflow_run, state.pushed, state.rebuild = None, {}, False
            self._queue.save()
        if state.mlflow_run is None or not tracking_server.is_active(client, state.mlflow_run):
            found = tracking_server.runs_of(client, experiment, self._run_id)
            mine = next((run for run in found if run not in state.superseded), None)
            if mine is None and not self._create:
                return False
            state.mlflow_run, state.pushed = mine or self._create_run(client, experiment), {}
            self._queue.save()
        for old_run in list(state.superseded):
            tracking_server.retire(client, old_run, state.mlflow_run)
            state.superseded.remove(old_run)
            self._queue.save()
        self._opened, self._opened_in = True, experiment
        return True

    def _create_run(self, client: Any, experiment: str | None) -> str:
        created = client.create_run(experiment, run_name=self._run, tags=self._all_tags())
        faults.point("tracking:created")
        return str(created.info.run_id)

    def _push_content(self, client: Any) -> Exception | None:
        """Pushes all but the status; returns what MLflow, or this, refused. Raises where it is away."""
        try:
            records = self._records()
            if self._queue.is_taken_back(records):
                if not self._create:
                    return None  # the resume that took it back makes the MLflow run anew
                self._queue.state.rebuild = True
                self._queue.save()
                self._open(client)
            run = str(self._queue.state.mlflow_run)
            self._push_description(client, run)
            for record in self._queue.pending_records(records):
                self._push_points(client, run, record)
        except Exception as error:
            if tracking_server.why_away(error) is not None:
                raise
            return error
        return None

    def _push_description(self, client: Any, run: str) -> None:
        """Params, tags, data sets and artifacts."""
        queue, params, tags = self._queue, self._params, self._all_tags()
        if not queue.has("params", values_digest(params)):
            tracking_server.push_params(client, run, params)
            queue.pushed("params", values_digest(params))
        if not queue.has("tags", values_digest(tags)):
            tracking_server.push_tags(client, run, tags)
            queue.pushed("tags", values_digest(tags))
        inputs = queue.state.inputs
        if inputs and not queue.has("inputs", values_digest(inputs)):
            tracking_server.push_inputs(client, run, inputs)
            queue.pushed("inputs", values_digest(inputs))
        for name, digest in queue.pending_artifacts().items():
            tracking_server.push_artifact(client, run, queue.path(name), name, queue.is_table(name))
            queue.pushed_artifact(name, digest)

    def _push_points(self, client: Any, run: str, record: StepRecord) -> None:
        # MLflow would store an infinite value as a huge finite one.
        infinite = sorted(name for name, value in record.metrics.items() if math.isinf(value))
        finite = {name: value for name, value in record.metrics.items() if name not in infinite}
        faults.point(f"tracking:{record.iteration}:before-push")
        tracking_server.push_points(client, run, record.iteration, finite, record.t_ms)
        if infinite:
            names = ", ".join(infinite)
            tag = {f"fp8rl.infinite.{record.iteration:05d}": names}
            tracking_server.push_tags(client, run, tag)
            self._note(f"has no point of iteration {record.iteration} for what is infinite: {names}")
        faults.point(f"tracking:{record.iteration}:after-push")
        self._queue.pushed_record(record)

    def _push_status(self, client: Any) -> None:
        state, status = self._queue.state, self._queue.status()
        if state.mlflow_run is not None and not self._queue.has("status", status):
            tracking_server.push_status(client, state.mlflow_run, *status)
            self._queue.pushed("status", status)

    def _all_tags(self) -> dict[str, str]:
        return {**self._queue.state.tags, RUN_TAG: self._run, RUN_ID_TAG: self._run_id}

    def _params_digest(self) -> str:
        return values_digest(self._params)


def _cell(value: Any) -> Any:
    """JSON has no NaN and no infinity: an empty cell, as pandas writes it."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
