"""`fp8rl up`: its settings, ports and states, with supervisord but with small programs for servers. The
real servers: tests/pipeline/test_up.py.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time

import psutil
import pytest
from typer.testing import CliRunner

from flows.cli import app
from flows.cli_up import require_word
from flows.environment import set_environment
from fp8rl import turns
from fp8rl.lock import RunLock, process_start
from fp8rl.services.config import UpConfig, UpError, load_config
from fp8rl.services.databases import require_reachable
from fp8rl.services.plan import Service, make_plan, public
from fp8rl.services.ports import is_free, require_free, unused
from fp8rl.services.program import MARKER, SERVICE, alone
from fp8rl.services.supervisor import Program, start, write_config
from fp8rl.services.up import Up, find_up, one_at_a_time, services_to_use, state_folder
from fp8rl.sweep.plan import PLAN, sweep_folder, sweeps_at_work

SECRET = "postgresql://me:hunter2@127.0.0.1:1"
HEALTHY = """
import http.server, sys
class Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Answers).serve_forever()
"""


# Settings.


def test_what_is_shipped_is_the_default():
    from flows.asked import ROOT

    assert load_config(ROOT / "infra" / "up.yaml", []) == UpConfig()


def test_by_default_only_this_machine_reaches_it(tmp_path):
    assert UpConfig().is_loopback
    plan = make_plan(UpConfig(), tmp_path, tmp_path / ".up", tmp_path, {})
    for program in plan.programs:
        if "--host" in program.command:
            assert program.command[program.command.index("--host") + 1] == "127.0.0.1"
    assert [p.name for p in plan.programs if "--host" in p.command] == ["prefect", "mlflow"]
    ray = next(program for program in plan.programs if program.name == "ray")
    assert ray.environment["RAY_AUTH_MODE"] == "token"  # its ports are open on all addresses


def test_prefects_pages_call_the_address_that_they_came_from(tmp_path, monkeypatch):
    def environment():
        plan = make_plan(UpConfig(prefect_port=4300), tmp_path, tmp_path / ".up", tmp_path, {})
        return next(one for one in plan.programs if one.name == "prefect").environment

    for name in ("PREFECT_UI_API_URL", "PREFECT_UI_URL"):
        monkeypatch.delenv(name, raising=False)
    assert environment()["PREFECT_UI_API_URL"] == "/api"
    assert environment()["PREFECT_UI_URL"] == "http://127.0.0.1:4300"
    monkeypatch.setenv("PREFECT_UI_API_URL", "https://proxy/prefect/api")  # inherited by the server
    assert "PREFECT_UI_API_URL" not in environment()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["prefect_prot=1"], "unknown key 'prefect_prot'; known are host"),
        (["prefect_port=80"], r"prefect_port: .*1024 \(got 80\)"),
        (["prefect_port=5000"], "prefect_port and mlflow_port are the same port 5000"),
        (["ray_port=10500"], "ray_port: 10500 is one of Ray's workers'"),
        (["host=localhost"], "'localhost' is no IP address"),
        (["database=mysql://x"], "only postgresql://"),
        (["database=postgresql://h/name"], "leave the database's name out"),
        (["prefect_port"], "write it as key=value"),
    ],
)
def test_bad_settings_are_named(words, said):
    with pytest.raises(UpError, match=said):
        load_config(None, words)


def test_a_bad_file_is_named(tmp_path):
    for text in ("[1]", "a: b: c", "prefect_port: x"):
        (tmp_path / "up.yaml").write_text(text)
        with pytest.raises(UpError, match=r"up\.yaml"):
            load_config(tmp_path / "up.yaml", [])


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.7"])
def test_another_host_needs_the_word(tmp_path, host):
    done = CliRunner().invoke(app, ["up", "--host", host, "--runs-dir", str(tmp_path)])
    assert done.exit_code == 2
    assert "--allow-remote" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_with_the_word_it_warns_where_prefect_asks_for_no_password(monkeypatch, capsys):
    monkeypatch.delenv("PREFECT_SERVER_API_AUTH_STRING", raising=False)
    require_word(UpConfig(host="0.0.0.0"), allow_remote=True)
    assert "Prefect asks for no password" in capsys.readouterr().out
    monkeypatch.setenv("PREFECT_SERVER_API_AUTH_STRING", "admin:x")
    require_word(UpConfig(host="0.0.0.0"), allow_remote=True)
    require_word(UpConfig(), allow_remote=False)
    assert capsys.readouterr().out == ""


def test_no_password_is_written_down(tmp_path):
    config = load_config(None, [f"database={SECRET}"])
    plan = make_plan(config, tmp_path, tmp_path / ".up", tmp_path, {})
    file = write_config(tmp_path / ".up", tmp_path, plan.programs, tmp_path)
    assert "hunter2" not in file.read_text() + json.dumps(plan.record()) + json.dumps(public(config))
    given = plan.inherited
    assert given["PREFECT_SERVER_DATABASE_CONNECTION_URL"].startswith(
        "postgresql+asyncpg://me:hunter2@"
    )
    assert given["MLFLOW_BACKEND_STORE_URI"].endswith("/fp8rl_mlflow")
    with pytest.raises(UpError) as error:
        load_config(None, ["database=mysql://me:hunter2@h"])
    assert "hunter2" not in str(error.value)


def test_a_database_that_cannot_be_used_is_named():
    pytest.importorskip("psycopg2", reason="the extra postgres")
    with pytest.raises(UpError, match="fp8rl_prefect cannot be used") as error:
        require_reachable(UpConfig(database=SECRET), prefect=True, mlflow=True)
    assert "hunter2" not in str(error.value)


def test_a_driver_that_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "psycopg2", None)
    with pytest.raises(UpError, match=r"driver psycopg2.*\[postgres\]"):
        require_reachable(UpConfig(database=SECRET), prefect=True, mlflow=True)


def test_servers_of_yours_are_not_started(tmp_path):
    yours = {"prefect": ("http://p:1/api", "PREFECT_API_URL"), "ray": ("h:2", "RAY_ADDRESS")}
    plan = make_plan(UpConfig(), tmp_path, tmp_path / ".up", tmp_path, yours)
    assert [program.name for program in plan.programs] == ["mlflow", "worker"]
    assert plan.environment["PREFECT_API_URL"] == "http://p:1/api"
    assert plan.environment["RAY_ADDRESS"] == "h:2"
    assert not {"PREFECT_HOME", "RAY_AUTH_MODE"} & plan.environment.keys()
    assert list(plan.ports(UpConfig())) == ["mlflow_port"]
    assert plan.services[0] == Service("prefect", "http://p:1/api", False, "PREFECT_API_URL")


# Ports.


def test_a_port_that_is_taken_is_named_with_who_has_it():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert not is_free("127.0.0.1", port)
        said = rf"mlflow_port: port {port} is taken by process {os.getpid()} .*mlflow_port={port + 1}"
        with pytest.raises(UpError, match=said):
            require_free({"mlflow_port": ("127.0.0.1", port)})
    require_free({"mlflow_port": ("127.0.0.1", port)})


def test_an_address_of_another_machine_is_refused():
    with pytest.raises(UpError, match=r"nothing can listen on 192\.0\.2\.77"):
        is_free("192.0.2.77", 4200)


# States. The folder's path is longer than a socket's may be.


@pytest.fixture
def runs(tmp_path):
    folder = tmp_path / ("long-" * 20)
    folder.mkdir()
    return folder


@pytest.fixture
def started(runs, tmp_path_factory):
    """Starts programs as `up` does, and records them. The ends are killed whatever happens."""
    found = []

    def begin(programs, services):
        runtime, folder = tmp_path_factory.mktemp("rt"), state_folder(runs)
        identity = f"test-{os.getpid()}-{len(found)}"
        file = write_config(folder, runtime, programs, runs)
        pid = start(file, {**os.environ, MARKER: identity})
        record = {
            **{"id": identity, "started": time.time(), "pid": pid, "pid_started": process_start(pid)},
            **{"runtime": str(runtime), "config": public(UpConfig())},
            "services": [vars(service) for service in services],
            "environment": {"PREFECT_API_URL": services[0].url, turns.VARIABLE: "x"},
        }
        (folder / "up.json").write_text(json.dumps(record))
        found.append(Up(folder, record))
        return found[-1]

    yield begin
    for up in found:
        for process in up.processes():
            process.kill()


def until(look):
    end = time.monotonic() + 60
    while not look():
        assert time.monotonic() < end
        time.sleep(0.1)


def answering(runs):
    (port,) = unused(1)
    (runs / "server.py").write_text(HEALTHY)
    program = Program("prefect", [sys.executable, str(runs / "server.py"), str(port)], 10)
    return program, Service("prefect", f"http://127.0.0.1:{port}/api")


def test_services_are_found_used_restarted_and_stopped(runs, started, monkeypatch):
    program, service = answering(runs)
    up = started([program], [service])
    up.wait_until(["prefect"], 60, lambda _: None)
    (process,) = [p for p in up.processes() if p.pid != up.supervisor_pid]

    for name in ("PREFECT_API_URL", "PREFECT_HOME", "PREFECT_PROFILE", turns.VARIABLE):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    assert "(fp8rl up)" in set_environment(str(runs))
    assert os.environ["PREFECT_API_URL"] == service.url
    monkeypatch.setenv("PREFECT_API_URL", "http://mine/api")  # a word of the user stands above it
    assert set_environment(str(runs)) == "yours (PREFECT_API_URL=http://mine/api)"
    assert os.environ["PREFECT_API_URL"] == "http://mine/api"

    process.send_signal(signal.SIGKILL)
    process.wait(10)
    up.wait_until(["prefect"], 60, lambda _: None)
    (again,) = [p for p in up.processes() if p.pid != up.supervisor_pid]
    assert again.pid != process.pid

    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    done = CliRunner().invoke(app, ["down", "--runs-dir", str(runs)])
    assert done.exit_code == 0, done.output
    assert up.processes() == []
    assert not psutil.pid_exists(again.pid)
    assert bystander.poll() is None  # nothing else is stopped
    bystander.kill()
    assert find_up(runs) is None
    assert services_to_use(runs) is None
    assert (up.folder / "logs" / "prefect.log").is_file()
    assert "no services are up" in CliRunner().invoke(app, ["down", "--runs-dir", str(runs)]).output


# As Prefect's: it begins the next run when one has ended, and kills what runs when it is stopped.
WORKER = """
import signal, subprocess, sys
def stop(*_):
    run.kill()
    sys.exit()
signal.signal(signal.SIGTERM, stop)
for number in range(100):
    run = subprocess.Popen([sys.executable, "run.py", str(number)])
    run.wait()
"""
FLOW_RUN = """
import pathlib, signal, sys, time
def end(*_):
    time.sleep(1)
    pathlib.Path(f"{sys.argv[1]}.saved").touch()
    sys.exit()
signal.signal(signal.SIGTERM, end)
pathlib.Path(f"{sys.argv[1]}.begun").touch()
time.sleep(600)
"""


def test_what_the_worker_runs_ends_in_good_order_and_nothing_is_begun_meanwhile(runs, started):
    (runs / "worker.py").write_text(WORKER)
    (runs / "run.py").write_text(FLOW_RUN)
    up = started(
        [Program("worker", [sys.executable, str(runs / "worker.py")], 90)],
        [Service("prefect", "http://127.0.0.1:1/api"), Service("worker", "pool")],
    )
    until(lambda: (runs / "0.begun").exists())
    up.stop(lambda _: None)
    assert (runs / "0.saved").exists()
    assert not (runs / "1.begun").exists()
    assert up.processes() == []


def test_a_server_that_is_killed_starts_again_though_its_own_processes_hold_the_port(runs, started):
    program, service = answering(runs)
    (runs / "parent.py").write_text("import subprocess, sys; subprocess.run(sys.argv[1:])")
    command = alone([sys.executable, str(runs / "parent.py"), *program.command])
    up = started([Program("prefect", command, 10, environment={SERVICE: "prefect"})], [service])
    up.wait_until(["prefect"], 60, lambda _: None)
    parent, left = psutil.Process(up.supervisor_pid).children(recursive=True)
    parent.kill()
    until(lambda: up.supervisor.pid_of("prefect") not in (None, parent.pid))
    up.wait_until(["prefect"], 60, lambda _: None)
    until(lambda: not left.is_running())
    up.wait_until(["prefect"], 60, lambda _: None)
    assert len(psutil.Process(up.supervisor_pid).children(recursive=True)) == 2


def test_runs_do_not_begin_on_services_that_are_not_healthy(runs, started):
    (port,) = unused(1)
    deaf = Program(
        "prefect", [sys.executable, "-c", "import time; print('deaf', flush=True); time.sleep(60)"], 10
    )
    up = started([deaf], [Service("prefect", f"http://127.0.0.1:{port}/api")])
    with pytest.raises(UpError, match=r"(?s)prefect is (starting|not healthy).*prefect.log"):
        up.wait_until(["prefect"], 4, lambda _: None)
    with pytest.raises(UpError, match="is not healthy: prefect is not healthy no answer"):
        services_to_use(runs)
    assert CliRunner().invoke(app, ["status", "--runs-dir", str(runs)]).exit_code == 1


def test_a_program_that_ends_at_once_fails_with_its_last_words(started):
    broken = Program("prefect", [sys.executable, "-c", "raise SystemExit('no such table')"], 10)
    up = started([broken], [Service("prefect", "http://127.0.0.1:1/api")])
    with pytest.raises(UpError, match=r"(?s)prefect is failed: .*no such table"):
        up.wait_until(["prefect"], 120, lambda _: None)


def test_what_is_left_of_a_machine_that_went_down_is_no_up(runs):
    folder = state_folder(runs)
    folder.mkdir()
    gone = subprocess.Popen(["true"])
    gone.wait()
    record = {
        **{"id": "x", "started": 0.0, "pid": gone.pid, "pid_started": 1.0, "runtime": str(runs / "rt")},
        **{"config": {}, "services": [vars(Service("prefect", "http://127.0.0.1:1/api"))]},
        "environment": {},
    }
    (folder / "up.json").write_text(json.dumps(record))
    assert services_to_use(runs) is None
    shown = CliRunner().invoke(app, ["status", "--runs-dir", str(runs)])
    assert shown.exit_code == 1
    assert "supervisord is gone" in shown.output
    assert CliRunner().invoke(app, ["down", "--runs-dir", str(runs)]).exit_code == 0
    assert find_up(runs) is None


def test_a_damaged_record_is_named(runs):
    state_folder(runs).mkdir()
    (state_folder(runs) / "up.json").write_text("{")
    with pytest.raises(UpError, match=r"up\.json is damaged"):
        find_up(runs)


def test_a_sweep_between_two_children_is_at_work(runs, started):
    program, service = answering(runs)
    up = started([program], [service])
    folder = sweep_folder(runs, "nightly")
    folder.mkdir(parents=True)
    (folder / PLAN).touch()
    lock = RunLock(folder)
    refused = CliRunner().invoke(app, ["down", "--runs-dir", str(runs)])
    assert refused.exit_code == 2
    assert "sweeps are at work: nightly" in refused.output
    assert up.is_alive()
    done = CliRunner().invoke(app, ["down", "--force", "--runs-dir", str(runs)])
    assert done.exit_code == 0
    assert "sweep nightly: to carry on: Retry" in done.output
    lock.release()
    assert sweeps_at_work(runs) == []


def test_two_at_once_are_kept_apart(runs):
    with one_at_a_time(runs), pytest.raises(UpError, match="at work"), one_at_a_time(runs):
        pass
