"""The exchange between ranks by torch.distributed: tree nodes to the owners of their tensors, and the owners' weights to all."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from everlong.trainer.gradient_sum import Gradient, GradientSum
from everlong.trainer.ranks.ranks import OwnedGradient, nodes_of, owned, shares

T = TypeVar("T")

EXCHANGE_TIMEOUT_S = 1800.0
"""How long a rank waits for the others: longer than one takes for its share of a batch. One that ended is noticed at once."""


class RankLost(RuntimeError):
    """An exchange broke: another rank is gone, or too slow."""


class RankGroup:
    """One rank's end; a `Ranks`. A process belongs to one group at a time."""

    def __init__(self, rank: int, size: int, meeting_place: Path) -> None:
        """`meeting_place` is a file that is not there yet, in a folder that nobody else can write."""
        self.rank, self.size, self._meeting_place = rank, size, meeting_place

    def join(self) -> None:
        """Waits until all ranks are there, who then need the meeting place no more."""
        with _exchanging(), _loopback():
            dist.init_process_group(
                "gloo",
                store=dist.FileStore(str(self._meeting_place), self.size),
                rank=self.rank,
                world_size=self.size,
                timeout=timedelta(seconds=EXCHANGE_TIMEOUT_S),
            )
            dist.barrier()

    def close(self) -> None:
        """Waits for nobody."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def together(self, name: str, argument: object) -> AbstractContextManager[None]:
        """A follower was told already."""
        return nullcontext()

    def share(self, num_micro_batches: int) -> range:
        return shares(num_micro_batches, self.size)[self.rank]

    def gather(self, value: T) -> list[T]:
        found: list[Any] = [None] * self.size
        with _exchanging():
            dist.all_gather_object(found, value)
        return found

    def sum(
        self, gradients: GradientSum, present: Sequence[bool], owners: Sequence[int], shapes: Sequence[torch.Size]
    ) -> OwnedGradient | None:
        nodes = [_nodes_with_gradient(share, present) for share in shares(len(present), self.size)]
        if not any(nodes):
            return None
        with _exchanging():
            arriving = self._exchange(gradients, nodes, owners, shapes)
        own_layout = [shape for shape, owner in zip(shapes, owners, strict=True) if owner == self.rank]
        total = GradientSum()
        for rank, share in enumerate(shares(len(present), self.size)):
            for level, index in nodes_of(share):
                total.push(index, self._part(gradients, arriving, rank, (level, index), owners, own_layout), level)
        parts = iter(total.close(len(present)) or ())
        return [next(parts) if owner == self.rank else None for owner in owners]

    def spread(self, tensors: Sequence[Tensor], owners: Sequence[int]) -> None:
        for rank in range(self.size):
            mine = [tensor for tensor, owner in zip(tensors, owners, strict=True) if owner == rank]
            for dtype in sorted({tensor.dtype for tensor in mine}, key=str):
                same = [tensor for tensor in mine if tensor.dtype == dtype]
                flat = torch.cat([tensor.detach().reshape(-1) for tensor in same])
                with _exchanging():
                    dist.broadcast(flat, src=rank)
                if rank != self.rank:
                    _unpack(flat, same)

    def collect(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        layouts = self.gather([(name, tensor.shape, tensor.dtype) for name, tensor in tensors.items()])
        found = dict(tensors)
        with _exchanging():
            if self.rank:
                for tensor in tensors.values():
                    dist.send(tensor.detach().reshape(-1).contiguous(), dst=0)
                return found
            for rank, layout in enumerate(layouts):
                for name, shape, dtype in layout if rank else ():
                    flat = torch.empty(math.prod(shape), dtype=dtype)
                    dist.recv(flat, src=rank)
                    found[name] = flat.view(shape)
        return found

    def _exchange(
        self,
        gradients: GradientSum,
        nodes: Sequence[Sequence[tuple[int, int]]],
        owners: Sequence[int],
        shapes: Sequence[torch.Size],
    ) -> dict[tuple[int, int], Tensor]:
        """Every node's tensors to their owners, as one message per node and owner; returns what came here."""
        counts = [
            sum(shape.numel() for shape, o in zip(shapes, owners, strict=True) if o == r) for r in range(self.size)
        ]
        operations: list[dist.P2POp] = []
        arriving: dict[tuple[int, int], Tensor] = {}
        for rank in range(self.size):
            if rank == self.rank:
                continue
            if counts[self.rank]:
                for tag, node in enumerate(nodes[rank]):
                    arriving[node] = torch.empty(counts[self.rank])
                    operations.append(dist.P2POp(dist.irecv, arriving[node], rank, tag=tag))
            if counts[rank]:
                for tag, node in enumerate(nodes[self.rank]):
                    gradient = gradients.nodes[node]
                    assert gradient is not None
                    flat = torch.cat([part.reshape(-1) for part in owned(gradient, owners, rank)])
                    operations.append(dist.P2POp(dist.isend, flat, rank, tag=tag))
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()
        return arriving

    def _part(
        self,
        gradients: GradientSum,
        arriving: Mapping[tuple[int, int], Tensor],
        rank: int,
        node: tuple[int, int],
        owners: Sequence[int],
        layout: Sequence[torch.Size],
    ) -> Gradient | None:
        """A node's gradient of the tensors that are owned here."""
        if rank == self.rank:
            gradient = gradients.nodes[node]
            return None if gradient is None else owned(gradient, owners, self.rank)
        if node not in arriving:
            return None
        parts = arriving[node].split([shape.numel() for shape in layout])
        return [part.view(shape) for part, shape in zip(parts, layout, strict=True)]


@contextmanager
def _exchanging() -> Generator[None]:
    """Raises RankLost for what torch raises where a rank is gone."""
    try:
        yield
    except RuntimeError as error:
        raise RankLost(f"the exchange between the trainer's ranks broke: {error}") from error


@contextmanager
def _loopback() -> Generator[None]:
    """Ranks of one machine listen where nobody outside of it can reach them."""
    name = "GLOO_SOCKET_IFNAME"
    given = os.environ.get(name)
    os.environ[name] = given or ("lo0" if sys.platform == "darwin" else "lo")
    try:
        yield
    finally:
        if given is None:
            del os.environ[name]


def _nodes_with_gradient(share: range, present: Sequence[bool]) -> list[tuple[int, int]]:
    return [(level, index) for level, index in nodes_of(share) if any(present[index << level : (index + 1) << level])]


def _unpack(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    with torch.no_grad():
        for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(part.view(tensor.shape))
