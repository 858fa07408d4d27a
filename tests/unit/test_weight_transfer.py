"""Check the trainer's end of a weight update: every tensor once, in parts of bounded size."""

import os

import pytest
import torch
from learners import GatheredParameters

from agent_vllm.engines.learner import LearnerWeights
from agent_vllm.engines.server.weight_transfer import MemoryTransfer, NcclTransfer, _Client


class Servers:
    """Takes what a server would, and reads it as one."""

    def __init__(self, fails_at=None, sizes=None):
        self.parts = []
        self.weights = []
        self.is_complete = False
        self.offsets = {}
        self._fails_at = fails_at
        self._sizes = sizes or {"http://a": 1}

    def start(self):
        assert not self.parts
        if self._fails_at == "start":
            raise ConnectionError("gone")

    def update(self, info):
        if len(self.parts) == self._fails_at:
            raise ConnectionError("gone")
        if info.get("is_complete"):
            self.is_complete = True
            return
        with open(info["path"], "rb") as file:
            content = bytearray(file.read())
        self.parts.append(len(content))
        entries = zip(info["names"], info["dtypes"], info["shapes"], info["offsets"], strict=True)
        for name, dtype, shape, offset in entries:
            count = torch.Size(shape).numel()
            flat = torch.frombuffer(
                content, dtype=getattr(torch, dtype), count=count, offset=offset
            )
            self.weights.append((name, flat.view(shape)))

    def init(self, info_of):
        before = 0
        for url, size in self._sizes.items():
            self.offsets[url] = info_of(before)["rank_offset"]
            before += size

    def sizes(self):
        return self._sizes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("part_bytes", [1, 300_000, 1 << 30])
def test_every_weight_is_sent_once_as_it_is_in_parts(agent, dtype, part_bytes):
    model = agent[0].to(dtype)
    servers = Servers()
    MemoryTransfer(part_bytes).send(LearnerWeights(model), servers)
    expected = list(LearnerWeights(model).tensors())
    assert [name for name, _ in servers.weights] == [name for name, _ in expected]
    assert all(
        torch.equal(got, weight)
        for (_, got), (_, weight) in zip(servers.weights, expected, strict=True)
    )
    largest = max(weight.nbytes for _, weight in expected)
    assert max(servers.parts) <= min(part_bytes, sum(servers.parts)) + largest + 64
    assert servers.is_complete


@pytest.mark.parametrize("fails_at", ["start", 2])
def test_a_failed_update_gathers_the_rest_and_leaves_no_memory(zero3, fails_at):
    """Other learner processes take part in gathering each weight: nobody may be left waiting."""
    model, _ = zero3
    LearnerWeights(model).join_gathers()
    whole = list(GatheredParameters.log)
    GatheredParameters.log.clear()
    before = os.listdir("/proc/self/fd")
    with pytest.raises(ConnectionError):
        MemoryTransfer(part_bytes=1).send(LearnerWeights(model), Servers(fails_at=fails_at))
    assert GatheredParameters.log == whole
    assert os.listdir("/proc/self/fd") == before


def test_servers_get_ranks_of_their_own_behind_the_learner():
    servers = Servers(sizes={"http://a": 2, "http://b": 1})
    _Client(servers).init_weight_transfer_engine({"rank_offset": 1})
    assert servers.offsets == {"http://a": 1, "http://b": 3}


@pytest.mark.vllm
def test_nccl_declares_what_it_will_send(agent):
    source = NcclTransfer()._source(LearnerWeights(agent[0]))
    declared = [(meta.name, meta.dtype, meta.shape) for meta in source.metadata()]
    assert declared == [(n, w.dtype, tuple(w.shape)) for n, w in LearnerWeights(agent[0]).tensors()]
    assert [name for name, _ in source] == [name for name, _, _ in declared]


@pytest.mark.vllm
def test_nccl_is_shut_down_once_and_anew_for_other_servers(agent, monkeypatch):
    ended = []

    class Engine:
        def __init__(self, number):
            self.number = number

        def send_weights(self):
            pass

        def shutdown(self):
            ended.append(self.number)

    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    numbers = iter(range(9))
    monkeypatch.setattr(
        WeightTransferTrainerFactory, "trainer_init", lambda *_, **__: Engine(next(numbers))
    )
    transfer, weights = NcclTransfer(), LearnerWeights(agent[0])
    transfer.close()
    transfer.send(weights, Servers())
    num_bytes = transfer.send(weights, Servers())
    assert num_bytes == sum(tensor.nbytes for _, tensor in weights.tensors())
    assert ended == []
    transfer.send(weights, Servers(sizes={"http://b": 1}))
    assert ended == [0]
    transfer.close()
    transfer.close()
    assert ended == [0, 1]
