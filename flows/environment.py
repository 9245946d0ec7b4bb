"""The embedded services' settings: set before Prefect is imported, and only where unset.

A Prefect server that the user has configured (PREFECT_API_URL, PREFECT_PROFILE, or a profile in the
Prefect home) is used as it is. Otherwise Prefect starts a server of its own for the time of the
command, whose database is kept in the runs folder.
"""

import os
from pathlib import Path

_QUIET = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DO_NOT_TRACK": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "RAY_USAGE_STATS_ENABLED": "0",
    # A slow machine needs longer than Prefect's 20 seconds for a first database.
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "180",
}


def prefect_is_configured() -> bool:
    """Whether the user has said which Prefect server to use."""
    if {"PREFECT_API_URL", "PREFECT_PROFILE", "PREFECT_HOME"} & os.environ.keys():
        return True
    return (Path.home() / ".prefect" / "profiles.toml").is_file()


def set_environment(runs_dir: str, *, quiet_console: bool = True) -> None:
    """Sets what is unset. quiet_console: Prefect's own log lines go to the server only."""
    for key, value in _QUIET.items():
        os.environ.setdefault(key, value)
    if quiet_console:
        os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "ERROR")
    if not prefect_is_configured():
        home = Path(runs_dir).resolve() / ".prefect"
        home.mkdir(parents=True, exist_ok=True)
        os.environ["PREFECT_HOME"] = str(home)
        # These two stay in ~/.prefect otherwise.
        os.environ["PREFECT_SERVER_MEMO_STORE_PATH"] = str(home / "memo_store.toml")
        os.environ["PREFECT_RESULTS_LOCAL_STORAGE_PATH"] = str(home / "storage")
