"""A bar over what a measuring command does; where output goes to a file, a line for each part."""

import time

from rich.console import Console, Group

from flows.live import LiveDisplay
from fp8rl import progress


class MeasuringView(LiveDisplay):
    """Shows "phase" events while its block is open: a bar from each part's first to its last."""

    def __init__(self, console: Console, title: str) -> None:
        self._total = -1
        super().__init__(console, title, first="model and engine start")

    def _on_event(self, event: progress.Event) -> None:
        if event.kind == "note":
            self.console.print(event.text, soft_wrap=True, highlight=False)
        if event.kind != "phase":
            return
        self.bar.update(
            self._task, description=event.text, completed=event.done, total=event.total or None
        )
        if self.console.is_terminal:
            self._live.update(self._draw())
        elif event.done == 0 or event.total != self._total:
            text = f"{time.strftime('%H:%M:%S')} {event.text} (0/{event.total})"
            self.console.print(text, highlight=False)
        self._total = event.total

    def _draw(self) -> Group:
        return Group(self.bar)
