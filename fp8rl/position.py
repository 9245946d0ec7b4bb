"""Where a run stands: which iteration and weights come next, and whether its journal can be gone on
from. What can be put right without losing anything is; the rest is refused with what to do.
"""

from dataclasses import dataclass
from pathlib import Path

from fp8rl import checkpoints
from fp8rl.identity import restore_identity
from fp8rl.journal import ITERATION, Journal, JournalError
from fp8rl.report import PUBLISHING, STEPS
from fp8rl.rewind import files_named_by, place, rewind, set_aside
from fp8rl.runs import Run

# Steps that come before the first iteration, recorded in the iteration that the run starts from.
PREPARATION = ("prepare_data", "warm_start")


@dataclass(frozen=True)
class Position:
    """iteration: the first that is not whole. version: of the weights after the last committed train
    step, which the learner must hold to go on. checkpoint: the version of the newest whole checkpoint
    up to it; None where the learner starts from the run's initial weights.
    """

    iteration: int
    version: int
    checkpoint: int | None

    @property
    def replay(self) -> int:
        """How many training steps are repeated over journalled rollouts."""
        return self.version - (self.checkpoint or 0)


def steps_of(number: int, origin: int) -> tuple[str, ...]:
    """The steps that iteration `number` needs, in order; that which the run starts from trains none."""
    return STEPS if number > origin else PUBLISHING


def first_open_iteration(journal: Journal, origin: int) -> int:
    """The first iteration without a record of its own."""
    return _first_open(set(journal.steps()), origin)


def _first_open(there: set[tuple[int, str]], origin: int) -> int:
    number = origin
    while (number, ITERATION) in there:
        number += 1
    return number


def settle(run: Run) -> tuple[Position, list[str]]:
    """Where `run` stands, after damage that costs nothing was put right; and notes on all damage.

    Put right: a damaged step of the iteration in work (it and what followed it in that iteration are
    set aside and done again), a damaged record of a whole iteration (made again from its steps), a
    damaged checkpoint (set aside; an older one and more replay take its place), run.json and
    recipe.yaml (written again). Raises JournalError, naming the file and the command, where going on
    would lose whole iterations; then nothing was changed. The caller holds the run's lock.
    """
    plan = _Plan(run)
    position = plan.make()
    plan.carry_out()
    return position, plan.notes


class _Plan:
    """What `settle` is to do. Made by reading alone, so that a refusal leaves everything as it is.

    there: records as they will be.
    """

    def __init__(self, run: Run) -> None:
        self.run, self.journal, self.origin = run, run.journal, run.origin
        self.there = set(run.journal.steps())
        self.notes: list[str] = []
        self._aside: list[Path] = []
        self._back_to: tuple[int, str] | None = None

    def make(self) -> Position:
        self._look_at_what_can_be_made_again()
        last = max([self.origin, *(number for number, _ in self.there)])
        for number in range(self.origin, last + 1):
            if (number, ITERATION) not in self.there:
                self._look_at_open(number, is_last=number == last)
        version = max([self.origin, *(number for number, step in self.there if step == "train")])
        checkpoint = self._newest_checkpoint(version)
        for number in range(max(checkpoint or 0, self.origin) + 1, version + 1):
            for step in ("rollout", "reward", "train"):
                self._require(number, step, "training is replayed over it")
        iteration = _first_open(self.there, self.origin)
        for number in range(iteration, max(iteration, last) + 1):
            if (number, ITERATION) not in self.there:
                self._require_before(number)
        return Position(iteration, version, checkpoint)

    def carry_out(self) -> None:
        if self._back_to is not None:
            rewind(self.run, *self._back_to)
        set_aside(self.run.folder, [path for path in dict.fromkeys(self._aside) if path.exists()])
        written_again = (restore_identity(self.run.folder), self.run.restore_recipe_file())
        self.notes += [note for note in written_again if note is not None]

    def _drop(self, number: int, step: str, note: str) -> None:
        """The record of one step is to be set aside, with the files beside it that it names."""
        self.there.discard((number, step))
        self._aside.append(self.journal.record_path(number, step))
        self._aside += files_named_by(self.journal, number, step)
        self.notes.append(note)

    def _look_at_what_can_be_made_again(self) -> None:
        for number, step in sorted(self.there):
            if step == ITERATION and (fault := self.journal.fault(number, step)):
                self._drop(number, step, f"{fault}; it is made again from its steps")
            if "." in step and (fault := self.journal.fault(number, step)):  # a chunk of a rollout
                is_held = (number, "rollout") in self.there
                what = "the rollout holds it" if is_held else "it is generated again"
                self._drop(number, step, f"{fault}; {what}")
        # Functions of the recipe: made again, and compared by what reads them.
        for step in PREPARATION:
            if (self.origin, step) in self.there:
                if fault := self.journal.fault(self.origin, step):
                    self._drop(self.origin, step, f"{fault}; it is made again")
            elif any(s not in PREPARATION for _, s in self.there):
                self.notes.append(f"{self._missing(self.origin, step)}; it is made again")

    def _look_at_open(self, number: int, *, is_last: bool) -> None:
        there = [step for n, step in self.there if n == number]
        for step in steps_of(number, self.origin):
            fault = None
            if step in there:
                fault = self.journal.fault(number, step)
            elif not is_last or any(place(s) > place(step) for s in there):
                fault = self._missing(number, step)
            if fault is None:
                continue
            if not is_last:
                raise self._lost(number, step, fault)
            self._back_to = (number, step)
            self.there = {(n, s) for n, s in self.there if (n, place(s)) < (number, place(step))}
            self.notes.append(f"{fault}; iteration {number} is done again from its step {step}")
            return
        if "evaluate" in there and (fault := self.journal.fault(number, "evaluate")):
            self._drop(number, "evaluate", f"{fault}; it is done again")
        if not is_last and not self.journal.is_committed(number, ITERATION):
            self.notes.append(f"{self._missing(number, ITERATION)}; it is made again from its steps")

    def _missing(self, number: int, step: str) -> str:
        return f"{self.journal.record_path(number, step)} is missing, and later steps are there"

    def _newest_checkpoint(self, version: int) -> int | None:
        """Version of the newest whole checkpoint up to `version`; those passed over are set aside."""
        folder = checkpoints.checkpoints_folder(self.run.folder)
        passed_over: list[str] = []
        for number in reversed(checkpoints.listing(self.run.folder)):
            fault = self._checkpoint_fault(number, version)
            if fault is None:
                return number
            if not (number > version and self._back_to is not None):  # that goes with the steps
                passed_over.append(fault)
                self.notes.append(f"{fault}; it is set aside")
                self._aside.append(checkpoints.checkpoint_folder(self.run.folder, number))
        if self.origin == 0:
            return None
        parent = self.run.about["parent"]["run"]
        raise JournalError(
            f"{folder}: the checkpoint of version {self.origin} that this run was forked from is "
            f"missing or damaged, and there is no later one. {' '.join(passed_over)} Nothing was "
            f"changed. `fp8rl resume {parent} --fork NEW_NAME --at {self.origin}` forks again"
        )

    def _checkpoint_fault(self, number: int, version: int) -> str | None:
        folder = checkpoints.checkpoint_folder(self.run.folder, number)
        if number > version:
            return f"checkpoint {folder} is of a train step that is not committed"
        try:
            found = checkpoints.verify(folder, self.run.id)
        except checkpoints.CheckpointError as error:
            return str(error)
        step = "warm_start" if number == self.origin else "train"
        if (number, step) not in self.there or self.journal.fault(number, step, record_only=True):
            return None  # not needed where no training is replayed from there
        recorded = self.journal.record(number, step).output["weights"]
        if found.weights_digest != recorded:
            return f"checkpoint {folder} holds other weights than {step} recorded"
        return None

    def _require_before(self, number: int) -> None:
        """What the steps of `number` come from has to be there, whole or made again before them."""
        before = number - 1
        if before < self.origin or (before, ITERATION) not in self.there:
            return
        for step in PUBLISHING:
            # The engine reads its files; once it has sampled, their digests in the record do.
            record_only = (number, "rollout") in self.there
            self._require(before, step, "the engine loads what it says", record_only=record_only)
        if before > self.origin:
            self._require(before, "train", "the next steps come from it")
            if self.run.recipe.rollout.max_draws > 1:
                why = "the next prompts come after its"
                self._require(before, "rollout", why, record_only=True)

    def _require(self, number: int, step: str, why: str, *, record_only: bool = False) -> None:
        if fault := self.journal.fault(number, step, record_only=record_only):
            raise self._lost(number, step, f"{fault}; {why}")

    def _lost(self, number: int, step: str, fault: str) -> JournalError:
        return JournalError(
            f"{fault}. Nothing was changed. `fp8rl resume {self.run.name} --from-step {step}@{number}` "
            "sets aside that step and all that came after it, and does it again from there"
        )


def damaged_files(run: Run) -> list[str]:
    """What is wrong with each record and file of the journal, one line for each; empty if nothing."""
    faults = (run.journal.fault(number, step) for number, step in run.journal.steps())
    return [fault for fault in faults if fault is not None]


def uncommitted_files(run: Run) -> list[Path]:
    """Files in the step folders that no record names: of steps that never ended.

    None of a folder with a damaged record, which may have named them.
    """
    journal = run.journal
    named: set[Path] = set()
    unclear: set[Path] = set()
    for number, step in journal.steps():
        if journal.fault(number, step, record_only=True):
            unclear.add(journal.step_folder(number))
        else:
            named |= {run.folder / name for name in journal.record(number, step).files}
    files = {path for path in run.folder.glob("iterations/*/[!.]*") if path.is_file()}
    return sorted(path for path in files - named if path.parent not in unclear)
