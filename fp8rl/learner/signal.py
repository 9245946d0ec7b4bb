"""From an iteration's rollouts and rewards to what its samples teach: shaped rewards and advantages."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fp8rl.learner.advantage import advantages
from fp8rl.learner.shaping import overlong_filter, overlong_penalty
from fp8rl.recipe.objective import KlUse
from fp8rl.recipe.schema import Recipe


@dataclass(frozen=True)
class Signal:
    """advantages: FP32 [B]. trained: bool [B], false for samples that are left out. metrics: the reward
    step logs raw rewards, these are of the shaped ones."""

    advantages: Tensor
    trained: Tensor
    metrics: dict[str, float]


def learning_signal(
    rollouts: dict[str, list[Any]],
    rewards: dict[str, list[Any]],
    recipe: Recipe,
    kl_reward: Tensor | None = None,
) -> Signal:
    """The advantages of `learner.advantage`, of rewards shaped as `learner.overlong_*` and `learner.kl`
    say: their sum, so that the order does not matter.

    rollouts, rewards: columns of the iteration's tables, row by row of the same samples. A sample that
    overlong_filter leaves out still counts in its group. kl_reward: FP64 [B], given where kl.use is
    reward (`PolicyObjective.kl_reward`) and not otherwise. Raises ValueError where it is not so, and as
    `advantages` does.
    """
    options = recipe.learner
    if (kl_reward is not None) != (options.kl.use is KlUse.REWARD):
        given = "not given" if kl_reward is None else "given"
        raise ValueError(
            f"learner.kl.use={options.kl.use}, and what the KL adds to the rewards is {given}. Pass on "
            "what PolicyObjective.kl_reward returns"
        )
    raw = torch.tensor(rewards["reward"], dtype=torch.float64)
    penalty = overlong_penalty(
        torch.tensor([len(tokens) for tokens in rollouts["tokens"]]),
        longest=recipe.rollout.max_new_tokens,
        buffer=options.overlong_buffer,
        penalty=options.overlong_penalty,
    )
    shaped = raw + penalty
    if kl_reward is not None:
        shaped = shaped + kl_reward
    found = advantages(options.advantage, shaped, torch.tensor(rollouts["prompt_id"]))
    trained = torch.ones(len(raw), dtype=torch.bool)
    if options.overlong_filter:
        trained = overlong_filter(rollouts["finish_reason"])
    metrics = {
        "train/reward_shaped_mean": float(shaped.mean()),
        "train/overlong_filtered": float((~trained).double().mean()),
    }
    if kl_reward is not None:
        metrics["train/kl_reward_mean"] = float(kl_reward.mean())
    return Signal(found.float(), trained, metrics)
