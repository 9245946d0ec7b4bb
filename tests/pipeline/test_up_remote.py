"""`fp8rl up --host 0.0.0.0` with a password, as docs/operate.md says: who may, who may not."""

import httpx
import psutil
import pytest

from fp8rl.runs import Run
from fp8rl.services.up import find_up
from tests.services import Services, listening

pytestmark = [pytest.mark.pipeline, pytest.mark.slow]

AUTH = ("admin", "tell-nobody-7316")
ALL = ("--host", "0.0.0.0")


@pytest.fixture
def services(tmp_path):
    word = ":".join(AUTH)
    environment = {
        "PREFECT_SERVER_API_AUTH_STRING": word,
        "PREFECT_API_AUTH_STRING": word,
        "PREFECT_UI_API_URL": "http://machine.example:4200/api",
    }
    found = Services(tmp_path / "runs", environment, AUTH)
    yield found
    found.close()


def own_addresses():
    """IPv4 addresses of this machine, by which others reach it; its loopback where it has no other."""
    found = [
        one.address
        for of_interface in psutil.net_if_addrs().values()
        for one in of_interface
        if one.family.name == "AF_INET" and not one.address.startswith("127.")
    ]
    return found or ["127.0.0.1"]


def test_others_reach_it_with_the_word_and_with_the_password(services):
    refused = services("up", *services.settings, *ALL)
    assert refused.returncode == 2
    assert "Add --allow-remote if that is meant" in refused.stderr
    assert find_up(services.runs) is None
    assert [port for port in services.ports.values() if listening(port)] == []

    services.up(*ALL, "--allow-remote")
    for name in ("prefect_port", "mlflow_port"):
        assert listening(services.ports[name]) == {"0.0.0.0"}, name
    for address in own_addresses():
        api = f"http://{address}:{services.ports['prefect_port']}/api"
        for auth in (None, (AUTH[0], "a guess")):
            answer = httpx.post(f"{api}/flow_runs/filter", json={}, auth=auth)
            assert answer.status_code == 401, answer.text
        assert httpx.post(f"{api}/flow_runs/filter", json={}, auth=AUTH).json() == []
    page = httpx.get(f"http://127.0.0.1:{services.ports['prefect_port']}/ui-settings").json()
    assert page["api_url"] == services.environment["PREFECT_UI_API_URL"]
    assert page["auth"] == "BASIC"

    assert services("status").returncode == 0
    stranger = Services(services.runs)
    shown = stranger("status")
    assert shown.returncode == 1
    assert "401" in shown.stdout

    flow_run = services.train("behind-a-password")
    assert services.end_of(flow_run)["type"] == "COMPLETED"
    assert Run(services.runs / "behind-a-password").state().state == "finished"
    done = services("down")
    assert done.returncode == 0, done.stdout + done.stderr
    files = [path for path in services.runs.rglob("*") if path.is_file()]
    assert [path for path in files if AUTH[1].encode() in path.read_bytes()] == []
