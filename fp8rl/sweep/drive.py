"""Works through the children of a sweep: which one is next, what fits the budget, when to stop.

What it knows of a child it reads from the child's run, so that it may be killed at any moment: the next
start takes what is over as it is and goes on with the rest.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

from fp8rl.recipe.sweep import Sweep
from fp8rl.sweep.expand import Child
from fp8rl.sweep.look import ChildState

_POLL_S = 1.0


class Source(Protocol):
    """Where children come from: a list, or a study that makes them as it goes on."""

    def known(self) -> list[Child]:
        """All children so far."""

    def take(self) -> Child | None:
        """The next child; None where there is none, or none before another one is over."""

    def over(self, child: Child, state: ChildState) -> None:
        """Tells of a child that was taken how it ended."""

    def skipped(self, child: Child) -> None:
        """Tells that a child was taken and not begun."""

    def left(self) -> int:
        """Children that were not made yet."""


class ListSource:
    """The children of a grid or list, in their order."""

    def __init__(self, children: tuple[Child, ...]) -> None:
        self._children, self._next = list(children), 0

    def known(self) -> list[Child]:
        return list(self._children)

    def take(self) -> Child | None:
        self._next += 1
        return self._children[self._next - 1] if self._next <= len(self._children) else None

    def over(self, child: Child, state: ChildState) -> None:
        pass

    def skipped(self, child: Child) -> None:
        pass

    def left(self) -> int:
        return 0


@dataclass
class Tally:
    """How a start of a sweep ended. states: by child. failed: children that have. unmade: children of
    trials that were not asked for. stopped: why no further child was begun; empty where all were."""

    states: dict[str, ChildState] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)
    unmade: int = 0
    stopped: str = ""

    def count(self, *states: str) -> int:
        return sum(state.state in states for state in self.states.values())

    @property
    def open(self) -> list[str]:
        """Children that another start would carry on, or begin."""
        return [name for name, state in self.states.items() if not state.settled]


# Begins or carries on a child and waits for its end; why it came to nothing, where it made no run.
Launch = Callable[[Child, ChildState], Awaitable[str]]


class Drive:
    """One start of a sweep.

    look: a child's state now. launch: see `Launch`. tell: called where something has changed.
    """

    def __init__(
        self,
        sweep: Sweep,
        source: Source,
        *,
        look: Callable[[Child], ChildState],
        launch: Launch,
        tell: Callable[[Tally], Awaitable[None]],
        poll_s: float = _POLL_S,
    ) -> None:
        self._sweep, self._source = sweep, source
        self._look, self._launch, self._tell, self._poll_s = look, launch, tell, poll_s
        self._running: dict[asyncio.Task[ChildState], Child] = {}
        self._failures = 0
        self.tally = Tally()

    async def run(self) -> Tally:
        """Works until no child is left that may be begun. What is running when this is cancelled is
        left to who launched it."""
        self._refresh()
        try:
            while True:
                self._begin()
                self._refresh()
                await self._tell(self.tally)
                if not self._running:
                    break
                done, _ = await asyncio.wait(
                    self._running, timeout=self._poll_s, return_when=asyncio.FIRST_COMPLETED
                )
                for task in done:
                    self._end(self._running.pop(task), task.result())
        finally:
            for task in self._running:
                task.cancel()
        self._name_the_rest()
        await self._tell(self.tally)
        return self.tally

    def _begin(self) -> None:
        limit = self._sweep.failures.limit
        while len(self._running) < self._sweep.parallel:
            if limit is not None and self._failures >= limit:
                self.tally.stopped = f"{self._failures} children failed (failures.limit={limit})"
                return
            child = self._source.take()
            if child is None:
                return
            state = self._look(child)
            if state.settled:
                self.tally.states[child.name] = state
                self._source.over(child, state)
            elif (reason := self._over_budget(child, state)) and state.state != "running":
                self.tally.states[child.name] = replace(state, state="skipped", reason=reason)
                self.tally.stopped = reason
                self._source.skipped(child)
            else:
                self._running[asyncio.create_task(self._work(child))] = child

    async def _work(self, child: Child) -> ChildState:
        state = await self._free(child)
        if state.settled:
            return state
        problem = await self._launch(child, state)
        state = await self._free(child)
        if state.state == "waiting":
            return ChildState("failed", problem or "its process ended before it made a run")
        return state

    async def _free(self, child: Child) -> ChildState:
        """The child's state once no process works on it: a person may have resumed it, or the process
        of an earlier start of the sweep may still be ending."""
        while (state := self._look(child)).state == "running":
            await asyncio.sleep(self._poll_s)
        return state

    def _end(self, child: Child, state: ChildState) -> None:
        self.tally.states[child.name] = state
        self._source.over(child, state)
        if state.is_failed:
            self._failures += 1

    def _refresh(self) -> None:
        """Reads the states of children that are not known yet, or that are running."""
        running = {child.name for child in self._running.values()}
        for child in self._source.known():
            if child.name in running or child.name not in self.tally.states:
                self.tally.states[child.name] = self._look(child)

    def _name_the_rest(self) -> None:
        states = self.tally.states
        for child in self._source.known():
            state, now = states[child.name], self._look(child)
            if state.state == "waiting":
                reason = f"not begun: {self.tally.stopped}"
                states[child.name] = replace(state, state="skipped", reason=reason)
            elif state.state != "skipped" and now.state != "waiting":
                states[child.name] = now  # a person may have carried it on since
        self.tally.failed = [name for name, state in states.items() if state.is_failed]
        self.tally.unmade = self._source.left()

    # The budget.

    def _over_budget(self, child: Child, state: ChildState) -> str:
        """Why the child does not fit the budget; empty where it does."""
        budget, states = self._sweep.budget, self.tally.states
        running = {one.name: one for one in self._running.values()}
        if budget.iterations is not None:
            used = sum(one.iteration for one in states.values())
            kept = sum(
                one.recipe.iterations - states.get(name, ChildState("running")).iteration
                for name, one in running.items()
            )
            left, wanted = budget.iterations - used - kept, child.recipe.iterations - state.iteration
            if wanted > left:
                return f"budget: {wanted} iterations wanted, {left} of {budget.iterations} are left"
        if budget.hours is not None:
            used_s = sum(one.seconds for one in states.values())
            if used_s >= 3600 * budget.hours:
                return f"budget: {used_s / 3600:.2f} of {budget.hours:g} hours are used up"
        return ""
