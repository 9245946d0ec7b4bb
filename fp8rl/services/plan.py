"""Which services there will be, what starts each of them, and what the runs that use them are told."""

import os
import secrets
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fp8rl import turns
from fp8rl.services import databases
from fp8rl.services.config import UpConfig
from fp8rl.services.program import SERVICE, alone
from fp8rl.services.supervisor import Program

POOL = "fp8rl"
# Training runs wait for each other in this queue of the pool; flows that only start others do not.
DEVICE_QUEUE = "devices"
RAY_OBJECT_STORE_BYTES = 200 * 2**20

# The order in which they start; they stop in the opposite one.
_PRIORITY = {"prefect": 10, "mlflow": 20, "ray": 30, "worker": 90}


@dataclass(frozen=True)
class Service:
    """url: where it is. own: started here; otherwise the user's, named by an environment variable or a
    Prefect profile, and left alone.
    """

    name: str
    url: str
    own: bool = True
    said_by: str = ""

    @property
    def page(self) -> str:
        """The address for a browser, where it has one."""
        return self.url.removesuffix("/api") if self.name in ("prefect", "mlflow") else ""


@dataclass(frozen=True)
class Plan:
    """environment: what runs and the worker are given, without secrets. inherited: what supervisord is
    given and no file holds, passwords of databases among it.
    """

    services: list[Service]
    programs: list[Program]
    environment: dict[str, str]
    inherited: dict[str, str]

    def own(self, name: str) -> bool:
        return any(service.own for service in self.services if service.name == name)

    def ports(self, config: UpConfig) -> dict[str, tuple[str, int]]:
        """{settings key: (host, port)} of what will listen."""
        found = {}
        for service in self.services:
            if service.own and service.name in ("prefect", "mlflow"):
                key = f"{service.name}_port"
                found[key] = (config.host, getattr(config, key))
            elif service.own and service.name == "ray":
                found["ray_port"] = ("0.0.0.0", config.ray_port)
        return found

    def record(self) -> dict[str, Any]:
        """What status and runs need to know of it."""
        services = [asdict(service) for service in self.services]
        return {"services": services, "environment": self.environment}


def make_plan(
    config: UpConfig, runs: Path, folder: Path, runtime: Path, yours: dict[str, tuple[str, str]]
) -> Plan:
    """The services in the state folder `folder` of the runs folder `runs`.

    runtime: a folder with a short path for sockets. yours: {service: (url, what named it)} of those
    that are not to be started.
    """
    python, at = [sys.executable, "-m"], config.reached_at
    services, programs = [], []
    environment = {turns.VARIABLE: str(folder / "devices.lock")}
    inherited: dict[str, str] = {}

    def add(name: str, url: str, command: list[str], own_environment: dict[str, str]) -> None:
        if name in yours:
            services.append(Service(name, *_named(yours[name])))
            return
        services.append(Service(name, url))
        own = {**own_environment, SERVICE: name}
        programs.append(Program(name, alone(command), _PRIORITY[name], environment=own))

    home = folder / "prefect"
    of_prefect = {
        "PREFECT_HOME": str(home),
        # These two stay in ~/.prefect otherwise.
        "PREFECT_SERVER_MEMO_STORE_PATH": str(home / "memo_store.toml"),
        "PREFECT_RESULTS_LOCAL_STORAGE_PATH": str(home / "storage"),
    }
    # The UI calls the address that it came from, by whatever port or tunnel; links in messages of
    # automations lead to this one. Prefect's own defaults name port 4200, whichever it listens at.
    of_ui = {"PREFECT_UI_API_URL": "/api", "PREFECT_UI_URL": f"http://{at}:{config.prefect_port}"}
    of_ui = {key: value for key, value in of_ui.items() if key not in os.environ}
    command = ["prefect", "server", "start", "--host", config.host, "--port", str(config.prefect_port)]
    add("prefect", f"http://{at}:{config.prefect_port}/api", python + command, of_prefect | of_ui)
    if "prefect" not in yours:
        environment |= of_prefect
        if (url := databases.prefect_url(config)) is not None:
            inherited["PREFECT_SERVER_DATABASE_CONNECTION_URL"] = url
    environment["PREFECT_API_URL"] = services[-1].url

    command = ["mlflow", "server", "--host", config.host, "--port", str(config.mlflow_port)]
    # Its jobs, of which nothing here needs any, would be ten more processes.
    artifacts = runs / "mlartifacts"
    options = ["--workers", "1", "--artifacts-destination", str(artifacts)]
    # As files, not through the server: runs of the same experiment go on when it is down.
    options += ["--default-artifact-root", artifacts.as_uri()]
    if config.mlflow_allowed_hosts:
        options += ["--allowed-hosts", ",".join(config.mlflow_allowed_hosts)]
    quiet = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    add("mlflow", f"http://{at}:{config.mlflow_port}", python + command + options, quiet)
    if "mlflow" not in yours:
        # The file that runs without an `up` write to: all of them are to be seen.
        sqlite = f"sqlite:///{runs / 'mlflow.db'}"
        inherited["MLFLOW_BACKEND_STORE_URI"] = databases.mlflow_url(config) or sqlite
    environment["MLFLOW_TRACKING_URI"] = services[-1].url

    if config.ray or "ray" in yours:
        token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(folder / "ray_token")}
        add("ray", f"127.0.0.1:{config.ray_port}", _ray_command(config, runtime), token)
        if "ray" not in yours:
            environment |= token
        environment["RAY_ADDRESS"] = services[-1].url

    command = ["prefect", "worker", "start", "--pool", POOL, "--type", "process"]
    services.append(Service("worker", f"pool {POOL}"))
    worker = Program(
        "worker",
        python + command,
        _PRIORITY["worker"],
        autostart=False,
        environment=dict(environment),
    )
    return Plan(services, [*programs, worker], environment, inherited)


def _named(one: tuple[str, str]) -> tuple[str, bool, str]:
    url, said_by = one
    return url, False, said_by


def _ray_command(config: UpConfig, runtime: Path) -> list[str]:
    from fp8rl.services.ports import unused

    client, agent = unused(2)
    # Its ports are open on all addresses, whichever is named: hence the token.
    return [
        *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"),
        *("--port", str(config.ray_port), "--temp-dir", str(runtime / "ray")),
        *("--num-cpus", str(len(os.sched_getaffinity(0)))),
        *("--object-store-memory", str(RAY_OBJECT_STORE_BYTES)),
        *("--include-dashboard", "false", "--disable-usage-stats"),
        # Two that are fixed otherwise, and so taken where another Ray is up.
        *("--ray-client-server-port", str(client), "--dashboard-agent-listen-port", str(agent)),
    ]


def write_token(folder: Path) -> None:
    """Writes the secret that Ray asks of whoever connects, for its owner's eyes."""
    path = folder / "ray_token"
    path.touch(mode=0o600)
    path.write_text(secrets.token_hex(32))


def public(config: UpConfig) -> dict[str, Any]:
    """The settings as JSON, with a word in place of the database's URL."""
    values = config.model_dump(mode="json")
    return values | {"database": None if config.database is None else "postgresql"}
