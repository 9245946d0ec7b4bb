"""How a bucket's bytes get from the learner's process into the engine's.

The sender turns a payload into a ticket, which travels as the argument of a call; the receiver turns
the ticket into a payload. Both know the sizes from the manifest.
"""

import warnings
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor


class Transport(Protocol):
    """meets: sender and receiver must call at the same time (a collective operation). The steps do not
    do that yet."""

    meets: bool

    def send(self, payload: Tensor) -> Any:
        """The ticket of a payload, uint8 [bytes]."""
        ...

    def receive(self, ticket: Any, size: int) -> Tensor:
        """The payload of `size` bytes that `ticket` stands for; read only."""
        ...


class HostMemory:
    """The ticket is the bytes: as the return value of an actor's method they lie in Ray's object store,
    where the receiver on the same machine reads them without another copy.
    """

    meets = False

    def send(self, payload: Tensor) -> np.ndarray:
        return payload.cpu().numpy()

    def receive(self, ticket: np.ndarray, size: int) -> Tensor:
        with warnings.catch_warnings():
            # Ray's arrays are read only, which torch warns of; nothing writes to a payload.
            warnings.simplefilter("ignore")
            return torch.from_numpy(ticket)


class CudaIpc:
    """Learner and engine on the same GPU: the ticket is a CUDA IPC handle. Not yet run on a GPU.

    The payload lives on the sender until its next `send`, which must come after the receiver is done.
    """

    meets = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._held: Tensor | None = None

    def send(self, payload: Tensor) -> tuple[Any, tuple[Any, ...]]:
        from torch.multiprocessing.reductions import reduce_tensor

        self._held = payload.to(self._device)
        torch.cuda.synchronize(self._device)
        rebuild, arguments = reduce_tensor(self._held)
        return rebuild, arguments

    def receive(self, ticket: tuple[Any, tuple[Any, ...]], size: int) -> Tensor:
        rebuild, arguments = ticket
        payload: Tensor = rebuild(*arguments)
        return payload


class Broadcast:
    """Learner and engine on different GPUs: NCCL broadcasts from rank 0 of `group`, which both joined.

    Not yet run on GPUs; the same code runs over gloo in the tests. The group's own time-out ends a
    wait for a partner that is gone.
    """

    meets = True

    def __init__(self, device: torch.device, group: dist.ProcessGroup | None = None) -> None:
        self._device = device
        self._group = group

    def send(self, payload: Tensor) -> None:
        dist.broadcast(payload.to(self._device), src=0, group=self._group)

    def receive(self, ticket: None, size: int) -> Tensor:
        payload = torch.empty(size, dtype=torch.uint8, device=self._device)
        dist.broadcast(payload, src=0, group=self._group)
        return payload
