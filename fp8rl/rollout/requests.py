"""What is asked of a rollout engine, and what it answers: tokens in, tokens out."""

from dataclasses import dataclass

from fp8rl.data.seeds import seed_of


@dataclass(frozen=True)
class Request:
    """One sequence to generate. seed is ignored where temperature is 0 (greedy)."""

    prompt: list[int]
    seed: int


@dataclass(frozen=True)
class Completion:
    """tokens: without the prompt, the end token included where it came. logprobs: of each sampled
    token, in nats, after temperature; empty for greedy answers. finish: "stop" or "length".
    """

    tokens: list[int]
    logprobs: list[float]
    finish: str


def requests_for(
    prompts: list[list[int]], ids: list[int], samples: int, *, run_seed: int, iteration: int
) -> list[Request]:
    """`samples` requests of each prompt, in order; seeds from (run seed, iteration, prompt, sample)."""
    return [
        Request(prompt, seed_of(run_seed, iteration, prompt_id, sample))
        for prompt, prompt_id in zip(prompts, ids, strict=True)
        for sample in range(samples)
    ]
