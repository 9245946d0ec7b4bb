"""Whether ports are free, and who listens where they are not."""

import errno
import socket

from fp8rl.services.config import RAY_WORKER_PORTS, UpError


def listener(port: int) -> str | None:
    """Who listens on the TCP `port`, in words; None where that is not to be seen."""
    import psutil

    try:
        connections = psutil.net_connections(kind="tcp")
    except psutil.AccessDenied:
        return None
    for connection in connections:
        if connection.status != psutil.CONN_LISTEN or connection.laddr.port != port:
            continue
        if connection.pid is None:
            return "a process of another user"
        try:
            process = psutil.Process(connection.pid)
            return f"process {process.pid} ({' '.join(process.cmdline())[:120] or process.name()})"
        except psutil.Error:
            return f"process {connection.pid}"
    return None


def is_free(host: str, port: int) -> bool:
    """Whether a server could listen there. Raises UpError where the machine has no such address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as trial:
        # As the servers do: connections that are still closing down do not count.
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind((host, port))
            trial.listen(1)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False
            raise UpError(f"host: nothing can listen on {host}:{port}: {error.strerror}") from None
    return True


def require_free(wanted: dict[str, tuple[str, int]]) -> None:
    """wanted: {settings key: (host, port)}. Raises UpError naming every port that is taken, who has it
    and what to do.
    """
    problems = []
    for key, (host, port) in wanted.items():
        if not is_free(host, port):
            who = listener(port)
            problems.append(
                f"{key}: port {port} is taken{f' by {who}' if who else ''}. Stop that, or choose "
                f"another: fp8rl up {key}={port + 1}"
            )
    if problems:
        raise UpError("\n".join(problems))


def unused(count: int) -> list[int]:
    """So many ports that nobody listens on now, outside those of Ray's workers."""
    found: list[int] = []
    for _ in range(1000):
        with socket.socket() as trial:
            trial.bind(("127.0.0.1", 0))
            port = trial.getsockname()[1]
        if port not in RAY_WORKER_PORTS and port not in found:
            found.append(port)
        if len(found) == count:
            return found
    raise UpError("no free ports were found outside 10002 to 19999; free some, or set ray=false")
