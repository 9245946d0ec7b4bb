"""Begins the children of a sweep and waits for their ends: in processes, or as runs of a deployment.

`fp8rl sweep` has each child in a process of its own: what a child holds (Ray, vLLM, memory that it ran
out of) goes with it, and its crash is only its own. A sweep that a Prefect worker runs has them as runs
of the deployment `train/train` instead: then each has its own Retry and Cancel, the work pool says how
many run and on which machine, and they outlive a sweep that is killed.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from uuid import UUID

from prefect import get_client
from prefect.client.base import ServerType
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.deployments import arun_deployment
from prefect.exceptions import ObjectNotFound
from prefect.states import State

from fp8rl import faults
from fp8rl.files import write_atomic
from fp8rl.recipe.load import to_yaml
from fp8rl.recipe.rules import RecipeError
from fp8rl.recipe.schema import Recipe
from fp8rl.sweep.expand import Child
from fp8rl.sweep.look import ChildState
from fp8rl.sweep.plan import Plan

DEPLOYMENT = "train/train"
_POLL_S = 0.5
_SERVER_POLL_S = 3.0
# For what comes after the learner is saved: actors, Ray and records.
_GRACE_S = 60.0


def tagged(recipe: Recipe, tags: dict[str, str]) -> Recipe:
    """The recipe with `tags` for its MLflow run besides its own."""
    tracking = recipe.tracking.model_copy(update={"tags": {**recipe.tracking.tags, **tags}})
    return recipe.model_copy(update={"tracking": tracking})


async def environment_of_children() -> dict[str, str]:
    """What the children's processes have in their environment besides the sweep's own: the embedded
    Prefect server, which the sweep has started and which has no pages."""
    async with get_client() as client:
        if client.server_type is not ServerType.EPHEMERAL:
            return {}
        return {"PREFECT_API_URL": str(client.api_url).rstrip("/"), "PREFECT_UI_URL": ""}


class Processes:
    """Children as processes of this one. tags: of their MLflow runs."""

    def __init__(self, plan: Plan, tags: dict[str, str], environment: dict[str, str]) -> None:
        self._plan, self._tags, self._environment = plan, tags, environment
        self._running: dict[str, tuple[Child, subprocess.Popen[bytes]]] = {}

    def log_of(self, child: Child) -> Path:
        return self._plan.folder / "logs" / f"{child.name}.log"

    async def launch(self, child: Child, state: ChildState) -> str:
        """A `drive.Launch`."""
        log = self.log_of(child)
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            begin = output.tell()
            process = subprocess.Popen(
                [sys.executable, "-m", "flows.child", str(os.getpid()), *self._command(child)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=os.environ | self._environment,
                start_new_session=True,  # Ctrl-C is for the sweep, which tells them
            )
        self._running[child.name] = child, process
        faults.point(f"sweep:{child.name}:begun")
        while process.poll() is None:
            await asyncio.sleep(_POLL_S)
        del self._running[child.name]
        if process.returncode == 0:
            return ""
        said = log.read_bytes()[begin:].decode(errors="replace").strip().splitlines()
        last = said[-1] if said else "it said nothing"
        return f"its process ended with {process.returncode}: {last} ({log})"

    def _command(self, child: Child) -> list[str]:
        run = self._plan.run_of(child)
        if run is None:
            recipe = tagged(child.recipe, self._tags)
            path = self._plan.folder / "recipes" / f"{child.name}.yaml"
            write_atomic(path, to_yaml(recipe).encode())
            return ["run", str(path)]
        command = ["resume", child.name, f"--runs-dir={self._plan.runs}"]
        tags = {**run.recipe.tracking.tags, **self._tags}
        return command if tags == run.recipe.tracking.tags else [*command, _override(tags)]

    def stop(self) -> None:
        """Has all that run end in good order, and waits for it."""
        running = list(self._running.values())
        for _, process in running:
            process.send_signal(signal.SIGTERM)
        for child, process in running:
            try:
                process.wait(child.recipe.checkpoint.grace_s + _GRACE_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


def _override(tags: dict[str, str]) -> str:
    return f"tracking.tags={json.dumps(tags)}"


async def require_deployment() -> None:
    """Raises RecipeError where Prefect has no deployment for the children."""
    async with get_client() as client:
        try:
            await client.read_deployment_by_name(DEPLOYMENT)
        except ObjectNotFound:
            raise RecipeError(
                f"Prefect has no deployment {DEPLOYMENT}, which runs a sweep's children: "
                "prefect --no-prompt deploy --prefect-file infra/prefect.yaml --all"
            ) from None


class DeploymentRuns:
    """Children as runs of the deployment `train/train`. tags: of their MLflow runs.

    A run is asked for with a key made of the sweep, the child and how often it was begun so far: to ask
    again gives the same run, so that a sweep that is killed and started again begins none twice.
    """

    def __init__(self, plan: Plan, tags: dict[str, str]) -> None:
        self._plan, self._tags = plan, tags
        self._running: dict[str, UUID] = {}

    async def launch(self, child: Child, state: ChildState) -> str:
        """A `drive.Launch`."""
        found = await self._ask(child)
        self._running[child.name] = found.id
        async with get_client() as client:
            while not (found.state and found.state.is_final()):
                await asyncio.sleep(_SERVER_POLL_S)
                found = await client.read_flow_run(found.id)
        del self._running[child.name]
        await self._process_ended(child)
        assert found.state is not None
        return f"flow run {found.name}: {found.state.name}: {found.state.message}"

    async def _ask(self, child: Child) -> FlowRun:
        run = self._plan.run_of(child)
        if run is None:
            parameters: dict[str, Any] = {
                "recipe": tagged(child.recipe, self._tags).model_dump(mode="json")
            }
        else:
            parameters = {"resume": child.name}
        # Said here too, since the deployment may have another folder for runs that name none.
        parameters["runs_dir"] = str(self._plan.runs)
        key = f"{self._plan.id}/{child.name}/{len(run.attempts()) if run else 0}"
        asked = time.time()
        while True:
            found = await arun_deployment(
                DEPLOYMENT,
                parameters=parameters,
                timeout=0,
                idempotency_key=key,
                as_subflow=False,
                flow_run_name=child.name,
                tags=["fp8rl", self._plan.name],
            )
            ended = found.end_time.timestamp() if found.end_time else asked
            if not (found.state and found.state.is_final()) or ended > asked:
                return found
            key = f"{key}/{found.id}"  # it ended before it had begun the child: another one

    async def _process_ended(self, child: Child) -> None:
        """Waits until the records say how it ended: a worker's hook may still write them."""
        for _ in range(20):
            run = self._plan.run_of(child)
            if run is None or (run.state().is_over and not run.is_dead_without_a_word()):
                return
            await asyncio.sleep(_POLL_S)

    def stop(self) -> None:
        """Has all that run cancelled."""
        with get_client(sync_client=True) as client:
            for run_id in self._running.values():
                client.set_flow_run_state(run_id, State(type=StateType.CANCELLING))
