"""Whether a service answers, asked as its clients would."""

import os
import re
import socket
from base64 import b64encode

from fp8rl.services.plan import POOL, Service

_TIMEOUT_S = 5.0


def answers(service: Service) -> tuple[bool, str]:
    """Whether it answers now, and what is to be said of it."""
    try:
        if service.name == "worker":
            return True, ""
        if service.name == "ray":
            return _connects(service.url)
        if not service.url.startswith("http"):
            return True, "not a server, so not asked"
        return _http(f"{service.url.rstrip('/')}/health")
    except Exception as error:  # whatever keeps it from answering is what is to be said
        return False, f"{type(error).__name__}: {error}"


def is_polling(api: str) -> tuple[bool, str]:
    """Whether a worker of the pool asks the Prefect server at `api` for work."""
    import requests

    try:
        answer = requests.post(
            f"{api}/work_pools/{POOL}/workers/filter", json={}, timeout=_TIMEOUT_S, headers=_headers()
        )
        answer.raise_for_status()
    except requests.RequestException as error:
        return False, f"Prefect does not say: {error}"
    online = [one["name"] for one in answer.json() if one["status"] == "ONLINE"]
    return bool(online), "" if online else "no worker of the pool is online"


def _headers() -> dict[str, str]:
    auth, key = (os.environ.get(f"PREFECT_API_{name}") for name in ("AUTH_STRING", "KEY"))
    if auth:
        return {"Authorization": f"Basic {b64encode(auth.encode()).decode()}"}
    return {"Authorization": f"Bearer {key}"} if key else {}


def _http(url: str) -> tuple[bool, str]:
    import requests

    try:
        answer = requests.get(url, timeout=_TIMEOUT_S, headers=_headers() if "/api" in url else {})
    except (requests.ConnectionError, requests.Timeout) as error:
        return False, f"no answer ({type(error).__name__})"
    return answer.ok, "" if answer.ok else f"it answers {answer.status_code} {answer.reason}"


def _connects(address: str) -> tuple[bool, str]:
    found = re.fullmatch(r"(?:ray://)?\[?([^\]]+?)\]?:(\d+)", address)
    if found is None:
        return True, "not an address, so not asked"
    try:
        socket.create_connection((found[1], int(found[2])), timeout=_TIMEOUT_S).close()
    except OSError as error:
        return False, f"no answer ({error.strerror or error})"
    return True, ""
