"""What can go wrong between learner and engine. Imports without torch, for the flow's sake."""


class SyncError(RuntimeError):
    """Weights that did not arrive as they were published: the text names the tensor and the bucket.

    Sending again can help, and starts from the first bucket.
    """


class ReadBackError(SyncError):
    """The engine does not hold, or not compute with, what it was sent: the text names the tensors."""


class ProofError(RuntimeError):
    """Engine and learner differ by more than the arm's precision explains: the text says how much."""
