"""Reaching MLflow: whether it is there, and calls that may be made twice.

Every call here can be repeated after a crash and changes nothing the second time. MLflow and what it
needs are imported on first use: the flow process must answer at once.
"""

import fcntl
import json
import logging
import os
import re
import socket
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from fp8rl import faults
from fp8rl.files import fsync_folder
from fp8rl.recipe.schema import Recipe

RUN_TAG = "fp8rl.run"
RUN_ID_TAG = "fp8rl.run_id"
REASON_TAG = "fp8rl.reason"
DRIFT_TAG = "fp8rl.recipe_drift"
SUPERSEDED_TAG = "fp8rl.superseded_by"
_TABLES_TAG = "mlflow.loggedArtifacts"  # MLflow's page shows the artifacts named in it as tables
_PARAM_LIMIT = 6000
_TAG_LIMIT = 5000
_NAME_LIMIT, _DIGEST_LIMIT, _SOURCE_LIMIT = 500, 36, 60_000  # of a data set
_PORTS = {"postgresql": 5432, "mysql": 3306, "mssql": 1433}

# By default MLflow tries for minutes where nobody answers.
_SETTINGS = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_HTTP_REQUEST_BACKOFF_JITTER": "0",
}


class TrackingError(RuntimeError):
    """MLflow cannot be used as it is configured."""


class AwayError(TrackingError):
    """The tracking server or its database does not answer now; the message says why."""


def tracking_uri(recipe: Recipe) -> str:
    """The recipe's URI, else MLFLOW_TRACKING_URI, else SQLite in the runs folder."""
    configured = recipe.tracking.uri or os.environ.get("MLFLOW_TRACKING_URI")
    return configured or f"sqlite:///{Path(recipe.runs_dir).resolve() / 'mlflow.db'}"


def shown(uri: str) -> str:
    """`uri` without its password."""
    return re.sub(r"(://[^/@:]*):[^/@]*@", r"\1:***@", uri)


def page(uri: str, path: str) -> str | None:
    """The address of a page of MLflow's UI, without a password; None where `uri` is a database's.

    With the pages about training around it: those about agents, MLflow's default, are empty.
    """
    if not uri.startswith("http"):
        return None
    return f"{shown(uri).rstrip('/')}/#/{path}?workflowType=machine_learning"


# Whether it is there.


class Server:
    """The tracking server (or the SQLite file) at `uri`. Making one does not touch the network."""

    def __init__(self, uri: str) -> None:
        self.uri = uri
        self._client: Any = None

    @contextmanager
    def reached(self) -> Iterator[Any]:
        """MLflow's client, after one cheap try whether anybody answers.

        Raises AwayError, at once or from inside the block, where that is not so; other errors are
        left as they are. An absent SQLite file is made, but only before the first use of it.
        """
        self._probe()
        try:
            if self._client is None:
                self._client = self._connect()
            yield self._client
        except Exception as error:
            reason = why_away(error)
            if reason is None:
                raise
            raise AwayError(reason) from error

    def _database(self) -> Path | None:
        path = self.uri.partition("?")[0].removeprefix("sqlite:///")
        return Path(path) if path != self.uri and path else None

    def _probe(self) -> None:
        parts = urlsplit(self.uri)
        database = self._database()
        if database is not None:
            if database.exists():
                _probe_sqlite(database)
            elif self._client is not None:
                raise AwayError(f"{database} is gone")
        elif parts.scheme in ("http", "https"):
            _probe_http(self.uri)
        elif parts.hostname and parts.scheme.partition("+")[0] in _PORTS:
            # MLflow's own tries would take most of an hour.
            address = (parts.hostname, parts.port or _PORTS[parts.scheme.partition("+")[0]])
            try:
                socket.create_connection(address, timeout=2.0).close()
            except OSError as error:
                raise AwayError(str(error)) from error

    def _connect(self) -> Any:
        for key, value in _SETTINGS.items():
            os.environ.setdefault(key, value)
        from mlflow import MlflowClient

        for noisy in ("mlflow", "alembic"):  # they report the making of a database line by line
            logging.getLogger(noisy).setLevel(logging.WARNING)
        # It logs with a traceback what it raises as well.
        logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)
        database = self._database()
        if database is not None and not database.exists():
            _make_database(database)
        return MlflowClient(self.uri)


def _make_database(path: Path) -> None:
    """Makes MLflow's SQLite file beside and renames it: one half made could never be opened again."""
    from mlflow import MlflowClient

    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(f".{path.name}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # runs that start together make one
        if path.exists():
            return
        building = path.with_name(f".{path.name}.new")
        for leftover in path.parent.glob(f"{building.name}*"):
            leftover.unlink()
        MlflowClient(f"sqlite:///{building}")
        faults.point("tracking:database")
        building.rename(path)
        fsync_folder(path.parent)


def _probe_sqlite(path: Path) -> None:
    """Whether the file can be written to within a second; MLflow itself would wait 20 s for a lock."""
    uri = f"file:{quote(str(path.absolute()))}?mode=rw"
    try:
        with closing(sqlite3.connect(uri, uri=True, timeout=1.0, isolation_level=None)) as database:
            database.execute("BEGIN IMMEDIATE")
            database.execute("ROLLBACK")
    except sqlite3.Error as error:
        if _is_busy(error):
            raise AwayError(f"{path}: {error}") from error
        raise TrackingError(f"MLflow's database {path} cannot be used: {error}") from error


def _is_busy(error: BaseException) -> bool:
    return any(text in str(error) for text in ("is locked", "unable to open"))


def _probe_http(uri: str) -> None:
    import requests

    try:
        answer = requests.get(f"{uri.rstrip('/')}/health", timeout=(2.0, 3.0), allow_redirects=False)
    except requests.exceptions.SSLError:
        return  # somebody is there; the first call says what is wrong with the certificate
    except (requests.ConnectionError, requests.Timeout) as error:
        raise AwayError(_in_short(error)) from error
    except requests.RequestException:
        return  # not a URL: MLflow says so
    if answer.status_code >= 500:
        raise AwayError(f"it answers {answer.status_code} {answer.reason}")


def _in_short(error: BaseException) -> str:
    """The innermost cause: the outer ones quote each other."""
    return str(_causes(error)[-1]) or type(error).__name__


def _causes(error: BaseException) -> list[BaseException]:
    found: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in found:
        found.append(cause)
        cause = cause.__cause__ or cause.__context__
    return found


def why_away(error: BaseException) -> str | None:
    """In words, where `error` says that the server is away now; None where it is another error.

    Away: no connection, no answer in time, an answer of 5xx, "too many requests", a locked SQLite
    file. Not away: refused names, permissions, certificates, an address where no MLflow is.
    """
    for depth, cause in enumerate(_causes(error)):
        verdict = _is_away(cause, wrapped=depth > 0)
        if verdict is not None:
            return _in_short(error) if verdict else None
    return None


def _is_away(error: BaseException, wrapped: bool) -> bool | None:
    """Whether this link of the chain says away; None where it does not say."""
    import requests
    from mlflow.exceptions import MlflowException, RestException
    from sqlalchemy.exc import OperationalError

    if isinstance(error, OperationalError):
        return _is_busy(error) if isinstance(error.orig, sqlite3.Error) else True
    if isinstance(error, requests.exceptions.SSLError):
        return False
    if isinstance(error, (requests.ConnectionError, requests.Timeout)):
        return True
    if isinstance(error, (requests.exceptions.RetryError, requests.exceptions.ChunkedEncodingError)):
        return True  # too many 5xx or 429; an answer that broke off
    if isinstance(error, requests.HTTPError) and error.response is not None:
        return bool(error.response.status_code >= 500)
    if isinstance(error, RestException):
        return bool(error.get_http_status_code() >= 500)
    if isinstance(error, MlflowException) and re.search(r"failed with error code 5\d\d", str(error)):
        return True
    # Wrapped by MLflow or a client of an artifact store: a bare one is not from the network.
    if wrapped and isinstance(error, (ConnectionError, TimeoutError, socket.gaierror)):
        return True
    return None


# Calls that may be made twice. `client` is MLflow's, `run` the id of an MLflow run.


def experiment_of(client: Any, recipe: Recipe, *, create: bool) -> str | None:
    """The id of the recipe's experiment; None where there is none and `create` is false. With SQLite
    the artifacts of a new one are in the runs folder."""
    from mlflow.exceptions import MlflowException

    name = recipe.tracking.experiment
    found = client.get_experiment_by_name(name)
    if found is None and create:
        local = tracking_uri(recipe).startswith("sqlite:")
        place = (Path(recipe.runs_dir).resolve() / "mlartifacts").as_uri() if local else None
        try:
            return str(client.create_experiment(name, artifact_location=place))
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        found = client.get_experiment_by_name(name)  # another run made it at the same time
    return None if found is None else str(found.experiment_id)


def runs_of(client: Any, experiment_id: str | None, run_id: str) -> list[str]:
    """The MLflow runs of the training run `run_id` that are not deleted, the newest first."""
    if experiment_id is None:
        return []
    found = client.search_runs([experiment_id], f"tags.`{RUN_ID_TAG}` = '{run_id}'")
    return [str(run.info.run_id) for run in found if SUPERSEDED_TAG not in run.data.tags]


def is_active(client: Any, run: str) -> bool:
    """Whether the server has the run, and nobody deleted it."""
    from mlflow.exceptions import MlflowException

    try:
        return bool(client.get_run(run).info.lifecycle_stage == "active")
    except MlflowException as error:
        if error.error_code == "RESOURCE_DOES_NOT_EXIST":
            return False
        raise


def push_params(client: Any, run: str, params: dict[str, str]) -> None:
    """Logs the params that the run does not have; those that differ go into a tag of their own."""
    from mlflow.entities import Param

    there = client.get_run(run).data.params
    wanted = {key: value[:_PARAM_LIMIT] for key, value in params.items()}
    new = [Param(key, value) for key, value in wanted.items() if key not in there]
    client.log_batch(run, params=new)
    drift = [
        f"{key}: {there[key]} -> {value}"
        for key, value in wanted.items()
        if there.get(key, value) != value
    ]
    if drift:  # MLflow does not let a param be changed
        client.set_tag(run, DRIFT_TAG, "\n".join(drift)[:_TAG_LIMIT])


def push_tags(client: Any, run: str, tags: dict[str, str]) -> None:
    """Sets the tags; others are left as they are."""
    from mlflow.entities import RunTag

    client.log_batch(run, tags=[RunTag(key, value[:_TAG_LIMIT]) for key, value in tags.items()])


def push_inputs(client: Any, run: str, prepared: dict[str, Any]) -> None:
    """Logs the prompts of both splits as data sets, by prepare_data's output; those that the run has
    are not logged again."""
    from mlflow.entities import Dataset, DatasetInput, InputTag

    there = {one.dataset.digest for one in client.get_run(run).inputs.dataset_inputs}
    wanted = []
    for split, context in (("train", "training"), ("val", "validation")):
        digest = prepared[split]["fingerprint"][:_DIGEST_LIMIT]
        name = " + ".join(dict.fromkeys(one["source"] for one in prepared["sources"]))
        profile = json.dumps({"num_rows": prepared[split]["prompts"]})
        source = json.dumps(prepared["sources"])
        data = Dataset(name[:_NAME_LIMIT], digest, "fp8rl", source[:_SOURCE_LIMIT], profile=profile)
        if digest not in there:
            wanted.append(DatasetInput(data, [InputTag("mlflow.data.context", context)]))
    if wanted:
        client.log_inputs(run, wanted)


def push_artifact(client: Any, run: str, path: Path, name: str, is_table: bool) -> None:
    """Stores the file as the artifact `name`, replacing an older one."""
    client.log_artifact(run, str(path), name.rpartition("/")[0] or None)
    if is_table:
        shown_as = json.loads(client.get_run(run).data.tags.get(_TABLES_TAG, "[]"))
        entry = {"path": name, "type": "table"}
        if entry not in shown_as:
            client.set_tag(run, _TABLES_TAG, json.dumps([*shown_as, entry]))


def push_points(client: Any, run: str, step: int, metrics: dict[str, float], t_ms: int) -> None:
    """Logs `metrics` at `step`. All of a point is its key in MLflow, so a second time adds nothing.

    MLflow's client splits what is more than one request may hold.
    """
    from mlflow.entities import Metric

    points = [Metric(name, float(value), t_ms, step) for name, value in metrics.items()]
    client.log_batch(run, metrics=points)


def system_monitor(uri: str, run: str) -> Any:
    """MLflow's monitor of this machine, which logs system/... metrics after those that the run has."""
    from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

    for noisy in ("mlflow.system_metrics", "mlflow.utils.autologging_utils"):
        logging.getLogger(noisy).setLevel(logging.CRITICAL)
    return SystemMetricsMonitor(run, resume_logging=True, tracking_uri=uri)


def push_status(client: Any, run: str, status: str, reason: str | None, ended_ms: int | None) -> None:
    """Sets the run's status, end (Unix ms; none while it runs) and the tag with the reason."""
    from mlflow.entities import RunStatus

    if reason:
        client.set_tag(run, REASON_TAG, reason[:_TAG_LIMIT])
    elif REASON_TAG in client.get_run(run).data.tags:
        client.delete_tag(run, REASON_TAG)
    if status == "RUNNING":
        # A zero is no end to MLflow; the client itself has no call that takes an end away.
        client._tracking_client.store.update_run_info(run, RunStatus.RUNNING, 0, None)
    else:
        client.set_terminated(run, status, ended_ms)


def retire(client: Any, run: str, successor: str) -> None:
    """Deletes (MLflow keeps it in its bin) a run whose points another one has anew."""
    if is_active(client, run):
        client.set_tag(run, SUPERSEDED_TAG, successor)
        client.set_terminated(run, "KILLED")
        faults.point("tracking:retire")
        client.delete_run(run)
