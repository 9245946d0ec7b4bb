"""Puts the work pool, its queue and the deployments of infra/prefect.yaml onto a Prefect server."""

import os
import subprocess
import sys
from pathlib import Path

from prefect import get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.exceptions import ObjectNotFound

from flows.asked import ROOT
from fp8rl.services.config import UpError
from fp8rl.services.plan import DEVICE_QUEUE, POOL

PREFECT_FILE = ROOT / "infra" / "prefect.yaml"


async def make_pool() -> str:
    """Makes the work pool and the queue in which training runs wait for each other, where they are not
    there; says what was done. A limit that somebody has changed in the UI stays.
    """
    done = []
    async with get_client() as client:
        try:
            await client.read_work_pool(POOL)
        except ObjectNotFound:
            await client.create_work_pool(WorkPoolCreate(name=POOL, type="process"))
            done.append(f"work pool {POOL} made")
        queues = await client.read_work_queues(work_pool_name=POOL)
        if DEVICE_QUEUE not in [queue.name for queue in queues]:
            await client.create_work_queue(
                name=DEVICE_QUEUE,
                description="Training runs: one at a time, the others wait.",
                work_pool_name=POOL,
                concurrency_limit=1,
            )
            done.append(f"queue {DEVICE_QUEUE} made, one run at a time")
    return "; ".join(done) or f"work pool {POOL} is there already"


def deploy(runs: Path, log: Path) -> list[str]:
    """Deploys all of infra/prefect.yaml, with `runs` as the default runs folder; the names.

    Raises UpError with the end of what Prefect said, which is in `log`.
    """
    with log.open("a") as file:
        done = subprocess.run(
            [
                *(sys.executable, "-m", "prefect", "--no-prompt", "deploy"),
                *("--prefect-file", str(PREFECT_FILE.relative_to(ROOT)), "--all"),
            ],
            cwd=ROOT,
            env={**os.environ, "FP8RL_RUNS_DIR": str(runs)},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    if done.returncode != 0:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
        raise UpError(f"the deployments of {PREFECT_FILE} were not made. The end of {log}:\n{tail}")
    return deployment_names()


def deployment_names() -> list[str]:
    """The deployments of infra/prefect.yaml, as Prefect calls them: flow/deployment."""
    import yaml

    found = yaml.safe_load(PREFECT_FILE.read_text())["deployments"]
    return [f"{one['entrypoint'].rpartition(':')[2]}/{one['name']}" for one in found]
