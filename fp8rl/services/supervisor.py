"""supervisord: starts the services in the background, restarts those that die, keeps their logs.

Its socket is in a folder of its own under the system's temporary folder, since the path of a socket has
at most 107 characters and a runs folder may have more. Only its owner may open it.
"""

import configparser
import shlex
import subprocess
import sys
import time
import xmlrpc.client
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fp8rl.services.config import UpError

SOCKET = "supervisor.sock"
_LOG_BYTES, _LOG_BACKUPS = 20 * 2**20, 3


@dataclass(frozen=True)
class Program:
    """A program to keep up. stop_s: how long it may take to end before it is killed. autostart: with
    supervisord; otherwise when asked. environment: beside what supervisord itself inherits.
    """

    name: str
    command: list[str]
    priority: int
    stop_s: int = 20
    autostart: bool = True
    environment: dict[str, str] = field(default_factory=dict)


def write_config(folder: Path, runtime: Path, programs: list[Program], directory: Path) -> Path:
    """Writes supervisord.conf into `folder`; programs run in `directory`, logs go to folder/logs."""
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    config = configparser.RawConfigParser()
    config["unix_http_server"] = {"file": _literal(runtime / SOCKET), "chmod": "0700"}
    config["supervisord"] = {
        "pidfile": _literal(folder / "supervisord.pid"),
        "logfile": _literal(folder / "logs" / "supervisord.log"),
        "childlogdir": _literal(folder / "logs"),
        "directory": _literal(directory),
    }
    factory = "supervisor.rpcinterface:make_main_rpcinterface"
    config["rpcinterface:supervisor"] = {"supervisor.rpcinterface_factory": factory}
    for program in programs:
        config[f"program:{program.name}"] = {
            "command": _literal(shlex.join(program.command)),
            "environment": ",".join(
                f'{key}="{_literal(value)}"' for key, value in program.environment.items()
            ),
            "priority": str(program.priority),  # the lowest starts first and stops last
            "autostart": str(program.autostart).lower(),
            "autorestart": "true",
            "startsecs": "3",
            "startretries": "2",
            "stopasgroup": "true",
            "killasgroup": "true",
            "stopwaitsecs": str(program.stop_s),
            "redirect_stderr": "true",
            "stdout_logfile": _literal(log_of(folder, program.name)),
            "stdout_logfile_maxbytes": str(_LOG_BYTES),
            "stdout_logfile_backups": str(_LOG_BACKUPS),
        }
    path = folder / "supervisord.conf"
    with path.open("w") as file:
        config.write(file)
    return path


def _literal(value: object) -> str:
    return str(value).replace("%", "%%")  # supervisord expands %(name)s


def log_of(folder: Path, name: str) -> Path:
    """The log file of a program."""
    return folder / "logs" / f"{name}.log"


def start(config: Path, environment: dict[str, str]) -> int:
    """Starts supervisord in the background; its process id. Raises UpError with what it said."""
    pidfile = config.parent / "supervisord.pid"
    pidfile.unlink(missing_ok=True)
    done = subprocess.run(
        [sys.executable, "-m", "supervisor.supervisord", "--configuration", str(config)],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    end = time.monotonic() + 30
    while done.returncode == 0 and time.monotonic() < end:
        try:
            return int(pidfile.read_text())
        except (FileNotFoundError, ValueError):
            time.sleep(0.1)
    raise UpError(f"supervisord did not start: {done.stdout.strip()}. See {config.parent / 'logs'}")


class Supervisor:
    """The supervisord whose socket is in the folder `runtime`."""

    def __init__(self, runtime: Path) -> None:
        self._socket = runtime / SOCKET

    def _call(self, method: str, *words: Any) -> Any:
        from supervisor.xmlrpc import SupervisorTransport

        transport = SupervisorTransport(None, None, serverurl=f"unix://{self._socket}")
        proxy = xmlrpc.client.ServerProxy("http://127.0.0.1", transport=transport)
        try:
            return getattr(proxy.supervisor, method)(*words)
        finally:
            transport.close()

    def answers(self) -> bool:
        """Whether supervisord can be talked to."""
        try:
            return bool(self._call("getState"))
        except (OSError, xmlrpc.client.Error):
            return False

    def states(self) -> dict[str, tuple[str, str]]:
        """{program: (RUNNING, STARTING, BACKOFF, FATAL, STOPPED, EXITED..., what it says of it)}."""
        found = self._call("getAllProcessInfo")
        return {one["name"]: (one["statename"], one["description"]) for one in found}

    def start_program(self, name: str) -> None:
        """Has a program started, without waiting for it."""
        self._call("startProcess", name, False)

    def pid_of(self, name: str) -> int | None:
        """The process id of a program; None where it does not run."""
        pids = {one["name"]: int(one["pid"]) for one in self._call("getAllProcessInfo")}
        return pids.get(name) or None

    def stop_program(self, name: str, wait: bool = True) -> None:
        """Stops a program that runs; wait: until it has ended."""
        if self.states().get(name, ("", ""))[0] in ("RUNNING", "STARTING", "BACKOFF"):
            self._call("stopProcess", name, wait)

    def shut_down(self) -> None:
        """Has it stop all programs, in order, and then end. Does not wait."""
        self._call("shutdown")
