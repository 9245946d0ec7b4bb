"""The embedded services' settings: set before Prefect is imported, and only where unset.

A Prefect server that the user has configured (PREFECT_API_URL, PREFECT_PROFILE, or a profile in the
Prefect home) is used as it is, and the services of `fp8rl up` where they are up. Otherwise Prefect
starts a server of its own for the time of the command, whose database is kept in the runs folder.
"""

import os
from pathlib import Path

from fp8rl.lock import is_alive, process_start
from fp8rl.services.up import services_to_use

_QUIET = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DO_NOT_TRACK": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Prefect's own log lines go to the server only: the terminal has the live view.
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "ERROR",
    # A slow machine needs longer than Prefect's 20 seconds for a first database.
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "180",
}

_CHOOSE_PREFECT = ("PREFECT_API_URL", "PREFECT_PROFILE", "PREFECT_HOME")


def embedded_home(runs_dir: str) -> Path:
    """Where the embedded Prefect server keeps its database and settings."""
    return Path(runs_dir).resolve() / ".prefect"


def configured_prefect() -> str | None:
    """How the user has said which Prefect server to use; None where it is the embedded one."""
    for name in _CHOOSE_PREFECT:
        if name in os.environ:
            return f"{name}={os.environ[name]}"
    profiles = Path.home() / ".prefect" / "profiles.toml"
    return str(profiles) if profiles.is_file() else None


def set_quiet() -> None:
    """Sets what keeps Prefect, Ray and MLflow from calling home, where it is unset."""
    for key, value in _QUIET.items():
        os.environ.setdefault(key, value)


def set_environment(runs_dir: str) -> str:
    """Sets what is unset; returns in words which Prefect is used.

    Where `fp8rl up` has services up for the runs folder, they are the ones. A server that an
    environment variable names is used all the same. Raises UpError where they are not healthy.
    """
    set_quiet()
    up = services_to_use(Path(runs_dir))
    chosen = [name for name in _CHOOSE_PREFECT if name in os.environ]
    if up is not None:
        for key, value in up.environment.items():
            if not (chosen and key.startswith("PREFECT_")):
                os.environ.setdefault(key, value)
        if not chosen:
            return f"{up.service('prefect').url} (fp8rl up)"
    configured = configured_prefect()
    if configured is not None:
        return f"yours ({configured})"
    _mark_owner()
    home = embedded_home(runs_dir)
    home.mkdir(parents=True, exist_ok=True)
    os.environ["PREFECT_HOME"] = str(home)
    # These two stay in ~/.prefect otherwise.
    os.environ["PREFECT_SERVER_MEMO_STORE_PATH"] = str(home / "memo_store.toml")
    os.environ["PREFECT_RESULTS_LOCAL_STORAGE_PATH"] = str(home / "storage")
    return f"embedded, in {home}"


# Which process started an embedded server: inherited by it, read when that process is gone.
_OWNER = "FP8RL_OWNER"


def _mark_owner() -> None:
    pid = os.getpid()
    os.environ[_OWNER] = f"{pid}:{process_start(pid)}"


def stop_leftover_servers(runs_dir: str) -> list[int]:
    """Stops embedded Prefect servers of this runs folder whose command was killed; their process ids.

    Two servers on one SQLite file would wait for each other's locks.
    """
    import psutil

    home = str(embedded_home(runs_dir))
    stopped = []
    for process in psutil.process_iter(["cmdline"]):
        if not any("prefect.server" in word for word in process.info["cmdline"] or []):
            continue
        try:
            environment = process.environ()
            pid, _, started = environment.get(_OWNER, "").partition(":")
            if environment.get("PREFECT_HOME") != home or not pid or is_alive(int(pid), float(started)):
                continue
            process.terminate()
            psutil.wait_procs([process], timeout=10)
            if process.is_running():
                process.kill()
            stopped.append(process.pid)
        except (psutil.NoSuchProcess, psutil.AccessDenied, ValueError):
            continue
    return stopped
