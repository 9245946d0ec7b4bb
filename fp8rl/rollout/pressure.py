"""How full the KV cache was during a rollout, and what that cost. Imports without vLLM and torch.

A sequence that finds no free block throws another one out of the cache (a preemption), whose keys and
values are computed again later: that is where a cache of half-sized values pays.

What is relied on in vLLM 0.32, and held by tests/contract/test_kv_pressure.py: with log_stats on,
LLMEngine.step calls logger_manager.record once after each scheduler step, with SchedulerStats
(kv_cache_usage, num_running_reqs, num_waiting_reqs, num_skipped_waiting_reqs, prefix_cache_stats) and
IterationStats (num_preempted_reqs, finished_requests with num_generation_tokens and decode_time).
vLLM's own manager is replaced: it would feed Prometheus metrics, of which a process has one set however
many engines it holds, and write a line to the log every few seconds.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

# Response lengths, in tokens, that end a bin; one more bin is open.
BIN_ENDS = (16, 64, 256, 1024, 4096)


def bin_name(length: int) -> str:
    """The bin of a response of `length` tokens: "1-16", "17-64", ..., "4097-"."""
    index = bisect_left(BIN_ENDS, length)
    first = BIN_ENDS[index - 1] + 1 if index else 1
    return f"{first}-{BIN_ENDS[index] if index < len(BIN_ENDS) else ''}"


@dataclass
class Decoding:
    """tokens: of some sequences, each without its first. seconds: from each one's first token to its
    last, added up; what a sequence waited while it was preempted is in it."""

    tokens: int = 0
    seconds: float = 0.0


@dataclass
class Pressure:
    """Of one or more calls of `Engine.generate`. All but `decoding`'s seconds is the same for the same
    requests.

    capacity_tokens: blocks of the KV cache times tokens of a block, as vLLM counts its cache (one block
    it keeps for itself). peak_use: greatest share of its blocks in use, 0 to 1, looked at when a step
    has ended and the sequences that ended in it have given theirs back. preemptions: how often a
    sequence was thrown out. steps: of the scheduler; running and waiting: sequences, after each step,
    added up over the steps, and the most of them. prefix_queries, prefix_hits: prompt tokens looked up
    in the prefix cache and found there, preempted sequences left out. decoding: by `bin_name`.
    """

    capacity_tokens: int
    peak_use: float = 0.0
    preemptions: int = 0
    steps: int = 0
    running: int = 0
    running_max: int = 0
    waiting: int = 0
    waiting_max: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    decoding: dict[str, Decoding] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_dict(values: dict[str, Any]) -> "Pressure":
        """Reads what `to_dict` wrote; raises TypeError where fields are missing or unknown."""
        decoding = {name: Decoding(**value) for name, value in values["decoding"].items()}
        return Pressure(**values | {"decoding": decoding})

    def metrics(self) -> dict[str, float]:
        """Metrics for tracking: counts under kv/, and under perf/ the speed of generation.

        perf/sequence_tokens_per_sec/<bin>: tokens after the first over the time from first to last
        token, both added up over the bin's sequences. It is how fast one sequence of that length grows
        beside the others, without its prompt and the queue before it, and not what the engine puts out
        in all. A bin without a sequence of two tokens has none.
        """
        values = {
            "kv/capacity_tokens": self.capacity_tokens,
            "kv/peak_use": self.peak_use,
            "kv/preemptions": self.preemptions,
            "kv/running_mean": self.running / self.steps,
            "kv/running_max": self.running_max,
            "kv/waiting_mean": self.waiting / self.steps,
            "kv/waiting_max": self.waiting_max,
            "kv/prefix_queries": self.prefix_queries,
            "kv/prefix_hits": self.prefix_hits,
        }
        speeds = {
            f"perf/sequence_tokens_per_sec/{name}": part.tokens / part.seconds
            for name, part in sorted(self.decoding.items())
        }
        return {name: float(value) for name, value in (values | speeds).items()}


def combine(parts: Sequence[Pressure]) -> Pressure:
    """One for all `parts`, whichever engine process each came from.

    The capacity is the smallest: that is the engine where pressure begins.
    """
    both = Pressure(min(part.capacity_tokens for part in parts))
    for part in parts:
        both.peak_use = max(both.peak_use, part.peak_use)
        both.running_max = max(both.running_max, part.running_max)
        both.waiting_max = max(both.waiting_max, part.waiting_max)
        for name in ("preemptions", "steps", "running", "waiting", "prefix_queries", "prefix_hits"):
            setattr(both, name, getattr(both, name) + getattr(part, name))
        for name, decoding in part.decoding.items():
            into = both.decoding.setdefault(name, Decoding())
            into.tokens += decoding.tokens
            into.seconds += decoding.seconds
    return both


class PressureGauge:
    """Stands in the place of vLLM's logger manager of the engine `llm`, and adds up what it is told."""

    def __init__(self, llm: Any) -> None:
        engine = llm.llm_engine
        if engine.logger_manager is None:
            raise ValueError("vLLM was started without its statistics: pass disable_log_stats=False")
        cache = engine.vllm_config.cache_config
        self.capacity_tokens: int = cache.num_gpu_blocks * cache.block_size
        self.pressure = Pressure(self.capacity_tokens)
        engine.logger_manager = self

    def start(self) -> None:
        """Begins anew at zero."""
        self.pressure = Pressure(self.capacity_tokens)

    # What vLLM calls.

    def record(self, scheduler_stats: Any, iteration_stats: Any, **_: Any) -> None:
        """After each step. iteration_stats: None where the step brought no tokens."""
        total, prefix = self.pressure, scheduler_stats.prefix_cache_stats
        running = scheduler_stats.num_running_reqs
        waiting = scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs
        total.steps += 1
        total.peak_use = max(total.peak_use, scheduler_stats.kv_cache_usage)
        total.running += running
        total.running_max = max(total.running_max, running)
        total.waiting += waiting
        total.waiting_max = max(total.waiting_max, waiting)
        total.prefix_queries += prefix.queries
        total.prefix_hits += prefix.hits
        if iteration_stats is None:
            return
        # A preemption is reported with the sequence's next token, so all are in when all have ended.
        total.preemptions += iteration_stats.num_preempted_reqs
        for done in iteration_stats.finished_requests:
            if done.num_generation_tokens > 1:
                part = total.decoding.setdefault(bin_name(done.num_generation_tokens), Decoding())
                part.tokens += done.num_generation_tokens - 1
                part.seconds += done.decode_time

    def log(self) -> None:
        """Would write a line every few seconds."""

    def record_sleep_state(self, *_: Any, **__: Any) -> None:
        """Would tell Prometheus."""
