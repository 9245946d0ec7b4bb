"""The points of a layer at which engine and learner are compared, and what was seen there."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import Tensor

# In the order in which a layer computes them. residual: the stream at its beginning; residual_mid:
# after attention was added.
LAYER_POINTS = (
    "residual",
    "input_norm",
    "q",
    "k",
    "v",
    "q_rotated",
    "k_rotated",
    "attention",
    "o_proj",
    "residual_mid",
    "post_norm",
    "gate",
    "up",
    "activation",
    "down_proj",
)
# After the last layer, whose number they carry.
FINAL_POINTS = ("final_norm", "logprob")
ALL_POINTS = LAYER_POINTS + FINAL_POINTS


class ParityError(RuntimeError):
    """Engine and learner cannot be compared: the text says why."""


@dataclass
class Seen:
    """What one side made of `sequences` (token ids): [tokens, features] in the side's own dtype, tokens
    of all sequences one after the other, by (layer, point); heads are side by side. logprob is FP32
    [tokens - sequences], of every token but the first of each sequence, at temperature 1."""

    sequences: list[list[int]]
    points: dict[tuple[int, str], Tensor] = field(default_factory=dict)

    @property
    def lengths(self) -> list[int]:
        return [len(tokens) for tokens in self.sequences]

    def __getitem__(self, key: tuple[int, str]) -> Tensor:
        if key not in self.points:
            raise ParityError(f"layer {key[0]}: nothing was seen of {key[1]}")
        return self.points[key]

    def ordered(self, layers: int) -> Iterator[tuple[int, str]]:
        """All points of a model of `layers`, in the order in which it computes them."""
        for layer in range(layers):
            yield from ((layer, point) for point in LAYER_POINTS)
        yield from ((layers - 1, point) for point in FINAL_POINTS)
