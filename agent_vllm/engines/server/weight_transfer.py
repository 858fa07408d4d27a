"""Send the learner's weights to `vllm serve` processes by vLLM's weight-transfer routes.

Owns the trainer's end: what is sent and in which parts, over memory (one machine) or NCCL. The
worker's end for memory is `worker_extension.py`; for NCCL it is vLLM's own. Invariant: at most one
part of the weights is held beside the learner's, and every server gets all or the update fails.

Sources: `vllm/distributed/weight_transfer/` of vLLM 0.31; the routes are those of its
`HTTPVLLMWeightSyncClient`.
"""

import os
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from typing import Any, BinaryIO, Protocol, TypeVar

import torch

from agent_vllm.engines.learner import LearnerWeights
from agent_vllm.engines.vllm.host_state import host_process_kept

T = TypeVar("T")
ServerProcess = tuple[str, int]  # address, and how often a server came back there

MEMORY_BACKEND = "trainer_memory"
NCCL_BACKEND = "nccl"
STARTED = "default"  # vLLM's name for the weights that a server was started with
UNFINISHED = "unfinished"  # the name of weights that are being written
_PART_BYTES = 256 << 20
_ALIGNMENT = 64  # bytes; a view of a tensor must begin at a multiple of its item's size


class Routes(Protocol):
    """Call all servers that take part. Each call returns when all of them have answered."""

    def start(self) -> None: ...

    def update(self, info: dict[str, Any]) -> None: ...

    def init(self, info_of: Callable[[int], dict[str, Any]]) -> None:
        """Set the transfer up; `info_of` takes the number of workers in earlier servers."""
        ...

    def sizes(self) -> dict[ServerProcess, int]:
        """Return the number of workers per server."""
        ...


class WeightTransfer(Protocol):
    """Define one way to send weights to servers."""

    def send(self, weights: LearnerWeights, routes: Routes) -> int:
        """Send the weights, on the first rank. Return how many bytes each server got."""
        ...

    def join(self, weights: LearnerWeights) -> None:
        """Take part in gathering a sharded learner, on every other rank."""
        ...

    def close(self) -> None:
        """Free connections and groups. Closing twice is fine."""
        ...


# ---- several learner processes ----


def is_first_rank() -> bool:
    """Return whether this process is the one that talks to the servers."""
    return not _is_one_of_many() or torch.distributed.get_rank() == 0


def wait_for_all_ranks() -> None:
    """Wait until every learner process is here."""
    if _is_one_of_many():
        torch.distributed.barrier()


def from_first_rank(value: T) -> T:
    """Return the first process's value in every process, when all are here."""
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
    """Put parts of the weights into anonymous memory that servers on this machine read.

    They open it under `/proc/<pid>/fd/`, so no file is left over, however this process ends.

    Args:
        part_bytes: a part ends with the tensor that reaches this size.
    """

    def __init__(self, part_bytes: int = _PART_BYTES) -> None:
        self._part_bytes = part_bytes

    def send(self, weights: LearnerWeights, routes: Routes) -> int:
        num_bytes = 0
        with closing(weights.tensors()) as tensors:
            routes.start()
            for first in tensors:
                with _part(first, tensors, self._part_bytes) as (info, size):
                    routes.update(info)
                    num_bytes += size
            routes.update({"is_complete": True})
        return num_bytes

    def join(self, weights: LearnerWeights) -> None:
        weights.join_gathers()

    def close(self) -> None:
        pass


@contextmanager
def _part(
    first: tuple[str, torch.Tensor], others: Iterable[tuple[str, torch.Tensor]], part_bytes: int
) -> Iterator[tuple[dict[str, Any], int]]:
    """Write `first` and as many more as fill a part; yield `/update_weights`' info and the size."""
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
    """Write the tensor's bytes and return their offset."""
    file.write(bytes(-file.tell() % _ALIGNMENT))
    offset = file.tell()
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu()
    file.write(flat.numpy().data)
    return offset


# ---- GPUs: NCCL ----


class NcclTransfer:
    """Broadcast with vLLM's own NCCL engine from this process to every server's workers.

    Written after vLLM's `NCCLTrainerWeightTransferEngine`. Experimental: not run, as it needs GPUs.
    """

    def __init__(self, group_port: int | None = None) -> None:
        with host_process_kept():
            from vllm.distributed.weight_transfer import factory, nccl_engine
            from vllm.utils.network_utils import get_ip
        self._factory, self._nccl, self._get_ip = factory, nccl_engine, get_ip
        self._group_port = group_port
        self._engine: Any = None
        self._members: dict[ServerProcess, int] = {}

    def send(self, weights: LearnerWeights, routes: Routes) -> int:
        with closing(weights.tensors()) as tensors:  # closing gathers what was not sent
            source = self._source(weights, tensors)
            try:
                if self._engine is None or self._members != routes.sizes():
                    self.close()
                    self._members = routes.sizes()
                    self._engine = self._rendezvous(source, routes)
                self._engine.source = source
                self._engine.client = _Client(routes)
                self._engine.send_weights()
            except BaseException:
                self.close()  # the group may hold a dead process, on which the next send would wait
                raise
        return sum(tensor.nbytes for tensor in weights.meta.values())

    def join(self, weights: LearnerWeights) -> None:
        weights.join_gathers()

    def close(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.shutdown()

    def _source(self, weights: LearnerWeights, tensors: Iterable[tuple[str, torch.Tensor]]) -> Any:
        """Return the learner's weights as vLLM's `WeightSource`."""
        metadata = [
            self._nccl.ParamMeta(name, tensor.dtype, tuple(tensor.shape))
            for name, tensor in weights.meta.items()
        ]
        methods = {"metadata": lambda _: metadata, "__iter__": lambda _: iter(tensors)}
        return type("LearnerSource", (self._nccl.WeightSource,), methods)()

    def _rendezvous(self, source: Any, routes: Routes) -> Any:
        info = self._nccl.NCCLTrainerInitInfo(
            master_address=self._get_ip(),  # what other machines reach; VLLM_HOST_IP overrides it
            master_port=self._group_port or _free_port(),
            world_size=1 + sum(routes.sizes().values()),
            rank=0,
        )
        make = self._factory.WeightTransferTrainerFactory.trainer_init
        return make(info, client=_Client(routes), source=source)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("", 0))
        return free.getsockname()[1]


class _Client:
    """Act as vLLM's `VLLMWeightSyncClient` for several servers."""

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
        """Do nothing: the engine ends the update, with the version's label."""


def _memory_transfer(group_port: int | None) -> MemoryTransfer:
    if group_port is not None:
        raise ValueError(
            f"`group_port` must be None for servers that use `{MEMORY_BACKEND}`, got {group_port}: "
            "nothing connects to it. Leave it out."
        )
    return MemoryTransfer()


# the backends of servers; each gets the port for a rendezvous
BACKENDS: dict[str, Callable[[int | None], WeightTransfer]] = {
    MEMORY_BACKEND: _memory_transfer,
    NCCL_BACKEND: NcclTransfer,
}
