"""What `fp8rl up` starts, and where it listens: typed, from infra/up.yaml and key=value words."""

import ipaddress
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import Field, ValidationError, model_validator

from fp8rl.recipe.base import PositiveFloat, Section

Port = Annotated[int, Field(ge=1024, le=65535)]
# Ray's workers take ports of this range for themselves.
RAY_WORKER_PORTS = range(10002, 20000)


class UpError(RuntimeError):
    """The services cannot be started, used or stopped as asked; the message says what to do."""


class UpConfig(Section):
    """The services of one machine."""

    host: str = "127.0.0.1"
    """Address that Prefect and MLflow listen on. Another than a loopback one needs --allow-remote."""
    prefect_port: Port = 4200
    """Of the Prefect server and its UI."""
    mlflow_port: Port = 5000
    """Of the MLflow server and its UI."""
    ray_port: Port = 6379
    """Of the Ray head, outside 10002 to 19999."""
    ray: bool = True
    """Start a Ray head. False: each run starts a small Ray of its own, and ends it."""
    database: str | None = None
    """PostgreSQL in place of SQLite: postgresql://user:password@host:5432, without a database's name.
    The databases fp8rl_prefect and fp8rl_mlflow must be there."""
    mlflow_allowed_hosts: tuple[str, ...] = ()
    """Names by which browsers may reach MLflow, for example mlflow.lab.example:5000. Empty: MLflow's
    own, which are localhost and private addresses."""
    start_timeout_s: PositiveFloat = 300.0
    """A service that does not answer by then has failed."""

    @model_validator(mode="after")
    def _fits(self) -> "UpConfig":
        ports = {"prefect_port": self.prefect_port, "mlflow_port": self.mlflow_port}
        ports |= {"ray_port": self.ray_port} if self.ray else {}
        for key, port in ports.items():
            same = [other for other, taken in ports.items() if taken == port]
            if len(same) > 1:
                raise ValueError(f"{' and '.join(same)} are the same port {port}. Change one")
            if key == "ray_port" and port in RAY_WORKER_PORTS:
                raise ValueError(f"ray_port: {port} is one of Ray's workers' (10002 to 19999)")
        try:
            ipaddress.ip_address(self.host)
        except ValueError:
            raise ValueError(
                f"host: {self.host!r} is no IP address, such as 127.0.0.1 or 0.0.0.0"
            ) from None
        if self.database is not None and not self.database.startswith("postgresql://"):
            raise ValueError("database: only postgresql://user:password@host:port is known here")
        if self.database is not None and self.database.rstrip("/").count("/") > 2:
            raise ValueError("database: leave the database's name out; there are two of fixed names")
        return self

    @property
    def is_loopback(self) -> bool:
        return ipaddress.ip_address(self.host).is_loopback

    @property
    def reached_at(self) -> str:
        """The host by which this machine reaches what listens on `host`."""
        address = ipaddress.ip_address(self.host)
        if address.is_unspecified:
            return "127.0.0.1" if address.version == 4 else "[::1]"
        return self.host if address.version == 4 else f"[{self.host}]"

    def database_url(self, name: str) -> str | None:
        """The URL of the database `name`; None with SQLite."""
        return None if self.database is None else f"{self.database.rstrip('/')}/{name}"


def load_config(path: Path | None, words: list[str], host: str | None = None) -> UpConfig:
    """The settings of the file at `path`, with `words` (key=value) and `host` on top.

    Raises UpError naming file, key and value.
    """
    values: dict[str, Any] = {}
    if path is not None:
        try:
            read = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise UpError(f"{path}: not readable as YAML: {error}") from None
        if read is not None and not isinstance(read, dict):
            raise UpError(f"{path}: it is a mapping of keys to values")
        values = dict(read or {})
    for word in words:
        key, separator, text = word.partition("=")
        if not separator or not key:
            raise UpError(f"{word!r}: write it as key=value, for example prefect_port=4300")
        try:
            values[key] = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise UpError(f"{word!r}: the value is not readable: {error}") from None
    if host is not None:
        values["host"] = host
    try:
        return UpConfig.model_validate(values)
    except ValidationError as error:
        raise UpError("\n".join(_explain(item, path) for item in error.errors())) from None


def _explain(item: Any, path: Path | None) -> str:
    key = ".".join(map(str, item["loc"]))
    where = "the command line" if path is None else f"{path} or the command line"
    if item["type"] == "extra_forbidden":
        return f"{where}: unknown key {key!r}; known are {', '.join(UpConfig.model_fields)}"
    message = item["msg"].removeprefix("Value error, ")
    # A database's URL holds a password.
    got = f" (got {item['input']!r})" if key and key != "database" else ""
    return f"{where}: {key + ': ' if key else ''}{message}{got}"
