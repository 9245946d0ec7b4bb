"""`fp8rl up database=postgresql://...` with a real PostgreSQL: its tables are there, the password is in
no file."""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from fp8rl.runs import Run
from fp8rl.services.ports import unused
from fp8rl.services.up import find_up
from tests.compare import point_faults
from tests.services import listening, services_of

pytestmark = [pytest.mark.pipeline, pytest.mark.slow]

USER, PASSWORD = "keeper", "tell-nobody-7316"
# PostgreSQL refuses to be root's. This one is on every Linux.
SERVER_USER = {"user": "nobody"} if os.getuid() == 0 else {}


def programs() -> Path | None:
    """The folder of PostgreSQL's programs; Debian has them outside PATH."""
    found = shutil.which("initdb")
    if found is not None:
        return Path(found).resolve().parent
    return max(Path("/usr/lib/postgresql").glob("*/bin"), default=None)


@pytest.fixture(scope="module")
def postgres():
    """The address of a PostgreSQL of its own, with the two databases that docs/operate.md asks for."""
    bin_ = programs()
    if bin_ is None:
        pytest.skip("PostgreSQL's programs (initdb, pg_ctl) are not installed")
    psycopg2 = pytest.importorskip("psycopg2", reason="the extra postgres is not installed")
    pytest.importorskip("asyncpg", reason="the extra postgres is not installed")
    (port,) = unused(1)
    with tempfile.TemporaryDirectory(
        prefix="fp8rl-pg-"
    ) as name:  # not under pytest's, which are closed
        folder = Path(name)
        (folder / "password").write_text(PASSWORD)
        if SERVER_USER:
            for path in (folder, folder / "password"):
                shutil.chown(path, **SERVER_USER)

        def call(program, *words):
            command = [str(bin_ / program), "-D", str(folder / "data"), *words]
            with (folder / "said.log").open("a") as log:
                done = subprocess.run(command, stdout=log, stderr=log, cwd=folder, **SERVER_USER)
            assert done.returncode == 0, (folder / "said.log").read_text()

        call("initdb", "-U", USER, "-A", "scram-sha-256", f"--pwfile={folder / 'password'}")
        options = f"-p {port} -h 127.0.0.1 -k {folder}"
        call("pg_ctl", "-w", "-l", str(folder / "server.log"), "-o", options, "start")
        try:
            address = f"postgresql://{USER}:{PASSWORD}@127.0.0.1:{port}"
            connection = psycopg2.connect(f"{address}/postgres")
            connection.autocommit = True
            for database in ("fp8rl_prefect", "fp8rl_mlflow"):
                connection.cursor().execute(f"create database {database}")
            connection.close()
            yield address
        finally:
            call("pg_ctl", "-w", "-m", "immediate", "stop")


def asked(address, database, query):
    import psycopg2

    connection = psycopg2.connect(f"{address}/{database}")
    try:
        cursor = connection.cursor()
        cursor.execute(query)
        return cursor.fetchall()
    finally:
        connection.close()


def test_prefect_and_mlflow_keep_their_tables_in_postgresql(postgres, tmp_path, monkeypatch):
    runs = tmp_path / "runs"
    with services_of(runs, f"database={postgres}") as services:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", services.mlflow)
        flow_run = services.train("stored")
        assert services.end_of(flow_run)["type"] == "COMPLETED"
        shown = services("status")
        assert shown.returncode == 0, shown.stdout
        run = Run(runs / "stored")
        assert run.state().state == "finished"
        assert point_faults(run) == ([], [])

        query = f"select name, state_type::text from flow_run where id = '{flow_run}'"
        assert asked(postgres, "fp8rl_prefect", query) == [("stored", "COMPLETED")]
        query = "select run_uuid, status from runs where name = 'stored'"
        ((mlflow_run, status),) = asked(postgres, "fp8rl_mlflow", query)
        assert status == "FINISHED"
        query = (
            f"select step, value from metrics where run_uuid = '{mlflow_run}' and key = 'val/accuracy'"
        )
        points = {r.iteration: r.metrics["val/accuracy"] for r in run.journal.iterations()}
        assert dict(asked(postgres, "fp8rl_mlflow", query)) == points

        done = services("down")
        assert done.returncode == 0, done.stdout + done.stderr
        assert find_up(runs) is None
        assert [port for port in services.ports.values() if listening(port)] == []
    # Neither has a database of its own beside it.
    assert [*runs.rglob("*.db"), *runs.rglob("*.sqlite")] == []
    files = [path for path in runs.rglob("*") if path.is_file()]
    assert runs / ".up" / "logs" / "prefect.log" in files
    assert [path for path in files if PASSWORD.encode() in path.read_bytes()] == []
