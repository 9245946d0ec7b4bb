"""What to do about runs whose process is gone: the server shows them as Running for ever otherwise."""

from datetime import timedelta
from uuid import UUID

from prefect import get_client
from prefect.automations import AutomationCore, ChangeFlowRunState, EventTrigger, Posture
from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterDeploymentId,
    FlowRunFilterParentFlowRunId,
    FlowRunFilterState,
    FlowRunFilterStateType,
    TaskRunFilter,
    TaskRunFilterFlowRunId,
    TaskRunFilterState,
    TaskRunFilterStateType,
)
from prefect.client.schemas.objects import TERMINAL_STATES, FlowRun, StateType
from prefect.exceptions import ObjectNotFound
from prefect.states import Crashed

NAME = "fp8rl: runs that stopped answering"
# The tag of the deployments in infra/prefect.yaml; only their runs are watched.
TAG = "fp8rl"


def _wanted(within_s: float) -> AutomationCore:
    return AutomationCore(
        name=NAME,
        description=f"Marks a run tagged {TAG} as Crashed after {within_s:g} s without a heartbeat.",
        tags=[TAG],
        trigger=EventTrigger(
            posture=Posture.Proactive,
            after={"prefect.flow-run.heartbeat"},
            # Any event of the run counts, so that one which has just ended is not taken for dead.
            expect={"prefect.flow-run.*"},
            match={"prefect.resource.id": "prefect.flow-run.*"},
            match_related={
                "prefect.resource.id": f"prefect.tag.{TAG}",
                "prefect.resource.role": "tag",
            },
            for_each={"prefect.resource.id"},
            threshold=1,
            within=timedelta(seconds=within_s),
        ),
        actions=[
            ChangeFlowRunState(
                state=StateType.CRASHED,
                message=f"No heartbeat for {within_s:g} s: the run's process or its machine is gone.",
            )
        ],
    )


async def install_zombie_automation(within_s: float = 90.0) -> str:
    """Creates the automation that marks silent runs as Crashed, or updates it; says what was done.

    `within_s` should be three heartbeats (PREFECT_FLOWS_HEARTBEAT_FREQUENCY of the deployment).
    """
    wanted = _wanted(within_s)
    async with get_client() as client:
        found = await client.read_automations_by_name(NAME)
        if not found:
            await client.create_automation(wanted)
            return f"automation created: {NAME!r} ({within_s:g} s)"
        # Someone may have switched it off in the UI; that is theirs to decide.
        wanted.enabled = found[0].enabled
        off = "" if wanted.enabled else ", switched off in the UI"
        if AutomationCore(**found[0].model_dump(exclude={"id"})) == wanted:
            # An update would make the server forget which runs it is waiting for.
            return f"automation is there already: {NAME!r} ({within_s:g} s{off})"
        await client.update_automation(found[0].id, wanted)
    return f"automation updated: {NAME!r} ({within_s:g} s{off})"


async def mark_crashed(flow_run_id: str, message: str) -> bool:
    """Marks a run whose process is gone as Crashed, with its subflow runs and task runs.

    Call it only when that process is known to be gone. A worker, or the automation, marks the run
    alone: then what was running inside it is marked. False where the run is unknown to this server or
    ended in another way.
    """
    try:
        run_id = UUID(flow_run_id)
    except ValueError:
        return False
    async with get_client() as client:
        try:
            run = await client.read_flow_run(run_id)
        except ObjectNotFound:
            return False
        if run.state is not None and run.state.is_final() and not run.state.is_crashed():
            return False
        await _crash(client, run, message)
    return True


async def _crash(client: PrefectClient, run: FlowRun, message: str) -> None:
    # The run itself comes last: a call that was interrupted can be repeated.
    unfinished = [kind for kind in StateType if kind not in TERMINAL_STATES]
    tasks = TaskRunFilter(
        flow_run_id=TaskRunFilterFlowRunId(any_=[run.id]),
        state=TaskRunFilterState(type=TaskRunFilterStateType(any_=unfinished), name=None),
    )
    for task_run in await client.read_task_runs(task_run_filter=tasks):
        await client.set_task_run_state(task_run.id, Crashed(message=message), force=True)
    # A child run with a deployment lives in a process of its own. One that the automation has marked
    # may hold task runs that it has not.
    children = FlowRunFilter(
        parent_flow_run_id=FlowRunFilterParentFlowRunId(any_=[run.id]),
        deployment_id=FlowRunFilterDeploymentId(is_null_=True),
        state=FlowRunFilterState(type=FlowRunFilterStateType(any_=[*unfinished, StateType.CRASHED])),
    )
    for child in await client.read_flow_runs(flow_run_filter=children):
        await _crash(client, child, message)
    if run.state is None or not run.state.is_final():
        await client.set_flow_run_state(run.id, Crashed(message=message), force=True)
