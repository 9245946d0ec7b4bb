"""The live view of a run in Prefect: a Markdown artifact, brought up to date after every iteration."""

from uuid import UUID

from prefect.artifacts import acreate_markdown_artifact
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import ArtifactUpdate

from fp8rl.context import RunContext
from fp8rl.glance import markdown
from fp8rl.tracking import Tracker


class LiveArtifact:
    """The artifact `key` of this flow run: the last iterations, sparklines, links."""

    def __init__(self, context: RunContext, tracker: Tracker, key: str) -> None:
        self._context, self._tracker, self._key = context, tracker, key
        self._id: UUID | None = None

    async def update(self) -> None:
        """Shows what is committed by now."""
        context = self._context
        url = self._tracker.page
        text = markdown(
            context.journal.iterations(),
            context.recipe.iterations,
            {"this run in MLflow": url} if url else {},
        )
        if self._id is None:
            what = f"Run {context.run}: its last iterations, brought up to date after each"
            self._id = await acreate_markdown_artifact(text, key=self._key, description=what)
            return
        async with get_client() as client:
            await client.update_artifact(artifact_id=self._id, artifact=ArtifactUpdate(data=text))
