"""What the live views of the terminal share: redrawn while a block is open, fed by progress events."""

from contextlib import AbstractContextManager
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from fp8rl import progress


class LiveDisplay(AbstractContextManager["LiveDisplay"]):
    """Shows what `_draw` gives, with a bar, while its block is open. In a terminal it redraws; where
    output goes to a file it prints the title, and the subclass its lines. unit: of what the bar counts.
    first: what it says before any event.
    """

    def __init__(
        self, console: Console, title: str, unit: str = "", first: str = "Prefect starts"
    ) -> None:
        self.console, self.title = console, title
        self.bar = Progress(
            TextColumn("{task.description:<34}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            *([TextColumn(unit)] if unit else []),
            TimeElapsedColumn(),
            console=console,
        )
        self._task = self.bar.add_task(first, total=None)
        self._live = Live(self._draw(), console=console, refresh_per_second=4, transient=False)
        self._listening = progress.listening(self._on_event)

    def __enter__(self) -> "LiveDisplay":
        self._listening.__enter__()
        if self.console.is_terminal:
            self._live.__enter__()
        else:
            self.console.print(self.title)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._listening.__exit__(kind, error, trace)
        if self.console.is_terminal:
            self._live.update(self._draw())
            self._live.__exit__(kind, error, trace)

    def _on_event(self, event: progress.Event) -> None:
        raise NotImplementedError

    def _draw(self) -> Group:
        raise NotImplementedError
