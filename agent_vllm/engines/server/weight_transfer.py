"""The learner's weights on their way to `vllm serve` processes, by vLLM's weight-transfer routes.

Owns the trainer's end: what is sent, in which parts, over memory (one machine) or NCCL. The
worker's end for memory is `worker_extension.py`; for NCCL it is vLLM's own. Invariant: at most one
part of the weights is held beside the learner's, and every server got all or the update fails.

Sources: `vllm/distributed/weight_transfer/` of vLLM 0.31; the routes are those of its
`HTTPVLLMWeightSyncClient`.
"""

import math
import os
import socket
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, Protocol, TypeVar

import torch
from transformers import PreTrainedModel

from agent_vllm.engines.learner.weights import join_gathers, named_weights
from agent_vllm.engines.vllm.host_state import host_process_kept

T = TypeVar("T")

MEMORY_BACKEND = "trainer_memory"
NCCL_BACKEND = "nccl"
UNFINISHED = "unfinished"  # what a server calls its weights while they are being written
_PART_BYTES = 256 << 20
_ALIGNMENT = 64  # bytes; a view of a tensor must begin at a multiple of its item's size


class Routes(Protocol):
    """The servers that take part, as one: each call returns once all of them have answered."""

    def start(self) -> None: ...

    def update(self, info: dict[str, Any]) -> None: ...

    def init(self, info_of: Callable[[int], dict[str, Any]]) -> None:
        """`info_of` gets the number of workers in the servers before this one."""
        ...

    def sizes(self) -> dict[str, int]:
        """How many workers each server has, by address."""
        ...


class WeightTransfer(Protocol):
    """One way for weights to reach servers."""

    def send(self, model: PreTrainedModel, routes: Routes) -> int:
        """On the process that talks to the servers; returns how many bytes each of them got."""
        ...

    def join(self, model: PreTrainedModel) -> None:
        """On every other one: a sharded learner is gathered by all."""
        ...

    def close(self) -> None: ...


# ---- several learner processes ----


def is_first_rank() -> bool:
    """Whether this process is the one that talks to the servers."""
    return not _is_one_of_many() or torch.distributed.get_rank() == 0


def wait_for_all_ranks() -> None:
    """Until every learner process is here."""
    if _is_one_of_many():
        torch.distributed.barrier()


def from_first_rank(value: T) -> T:
    """The first process's value, in all of them, once all are here."""
    if not _is_one_of_many():
        return value
    box = [value]
    torch.distributed.broadcast_object_list(box, src=0)
    return box[0]


def _is_one_of_many() -> bool:
    is_initialized = torch.distributed.is_available() and torch.distributed.is_initialized()
    return is_initialized and torch.distributed.get_world_size() > 1


# ---- one machine: memory of this process ----


class MemoryTransfer:
    """Parts of the weights in anonymous memory that the servers of this machine read.

    They find it under `/proc/<pid>/fd/`, so nothing has a name that could be left over: it is gone
    with this process, however that ends.

    Args:
        part_bytes: a part is full with the tensor that reaches this size.
    """

    def __init__(self, part_bytes: int = _PART_BYTES) -> None:
        self._part_bytes = part_bytes

    def send(self, model: PreTrainedModel, routes: Routes) -> int:
        num_bytes = 0
        weights = named_weights(model)
        try:
            routes.start()
            for first in weights:
                with _part(first, weights, self._part_bytes) as (info, size):
                    routes.update(info)
                    num_bytes += size
            routes.update({"is_complete": True})
        finally:
            deque(weights, maxlen=0)  # other processes gather what is left, too
        return num_bytes

    def join(self, model: PreTrainedModel) -> None:
        join_gathers(model)

    def close(self) -> None:
        pass


@contextmanager
def _part(
    first: tuple[str, torch.Tensor], others: Iterable[tuple[str, torch.Tensor]], part_bytes: int
) -> Iterator[tuple[dict[str, Any], int]]:
    """`first` and as many more as fill a part: for `/update_weights`, and its bytes."""
    descriptor = os.memfd_create("agent_vllm_weights")
    with open(descriptor, "wb") as file:
        info: dict[str, Any] = {"names": [], "dtypes": [], "shapes": [], "offsets": []}
        name, tensor = first
        while True:
            info["offsets"].append(_append(file, tensor))
            info["names"].append(name)
            info["dtypes"].append(str(tensor.dtype).removeprefix("torch."))
            info["shapes"].append(list(tensor.shape))
            if file.tell() >= part_bytes:
                break
            following = next(iter(others), None)
            if following is None:
                break
            name, tensor = following
        del tensor
        file.flush()
        yield {"path": f"/proc/{os.getpid()}/fd/{descriptor}", **info}, file.tell()


def _append(file: BinaryIO, tensor: torch.Tensor) -> int:
    """Write the tensor's bytes; returns where they begin."""
    file.write(bytes(-file.tell() % _ALIGNMENT))
    offset = file.tell()
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu()
    file.write(flat.numpy().data)
    return offset


# ---- GPUs: NCCL ----


class NcclTransfer:
    """vLLM's own NCCL broadcast, this process at its head and every server's workers behind it.

    Written after vLLM's `NCCLTrainerWeightTransferEngine` and not run yet: it needs GPUs.
    """

    def __init__(self) -> None:
        with host_process_kept():
            from vllm.distributed.weight_transfer import factory, nccl_engine
        self._factory, self._nccl = factory, nccl_engine
        self._engine: Any = None
        self._metadata: list[Any] = []
        self._members: dict[str, int] = {}

    def send(self, model: PreTrainedModel, routes: Routes) -> int:
        source = self._source(model)
        if self._engine is None or self._members != routes.sizes():
            self._members = routes.sizes()
            self._engine = self._rendezvous(source, routes)
        self._engine.source = source
        self._engine.client = _Client(routes)
        self._engine.send_weights()
        return sum(meta.dtype.itemsize * math.prod(meta.shape) for meta in self._metadata)

    def join(self, model: PreTrainedModel) -> None:
        deque(self._source(model), maxlen=0)

    def close(self) -> None:
        if self._engine is not None:
            self._engine.shutdown()

    def _source(self, model: PreTrainedModel) -> Any:
        """The learner as vLLM's `WeightSource`. The first one is gathered once more, for dtypes."""
        meta = self._nccl.ParamMeta
        self._metadata = self._metadata or [
            meta(name, weight.dtype, tuple(weight.shape)) for name, weight in named_weights(model)
        ]
        methods = {
            "metadata": lambda _: self._metadata,
            "__iter__": lambda _: iter(named_weights(model)),
        }
        return type("LearnerSource", (self._nccl.WeightSource,), methods)()

    def _rendezvous(self, source: Any, routes: Routes) -> Any:
        with socket.socket() as free:
            free.bind(("", 0))
            port = free.getsockname()[1]
        info = self._nccl.NCCLTrainerInitInfo(
            master_address=socket.gethostbyname(socket.gethostname()),
            master_port=port,
            world_size=1 + sum(routes.sizes().values()),
            rank=0,
        )
        make = self._factory.WeightTransferTrainerFactory.trainer_init
        return make(info, client=_Client(routes), source=source)


class _Client:
    """vLLM's `VLLMWeightSyncClient` over several servers."""

    def __init__(self, routes: Routes) -> None:
        self._routes = routes

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        first = init_info["rank_offset"]
        self._routes.init(lambda before: {**init_info, "rank_offset": first + before})

    def start_weight_update(self) -> None:
        self._routes.start()

    def update_weights(self, update_info: Any) -> None:
        self._routes.update(update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Ended by whoever began it, with the version's label."""


BACKENDS: dict[str, Callable[[], WeightTransfer]] = {
    MEMORY_BACKEND: MemoryTransfer,
    NCCL_BACKEND: NcclTransfer,
}
