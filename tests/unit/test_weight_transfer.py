"""Check the trainer's end of a weight update: every tensor once, in parts of bounded size."""

import os
import types

import pytest
import torch
from learners import GatheredParameters

from agent_vllm.engines.learner import LearnerWeights
from agent_vllm.engines.server.weight_transfer import (
    BACKENDS,
    MEMORY_BACKEND,
    MemoryTransfer,
    NcclTransfer,
    _Client,
)


class Servers:
    """Takes what a server would, and reads it as one."""

    def __init__(self, fails_at=None, sizes=None):
        self.parts = []
        self.weights = []
        self.is_complete = False
        self.offsets = {}
        self._fails_at = fails_at
        self._sizes = sizes or {("http://a", 0): 1}

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
        for (url, _), size in self._sizes.items():
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
    servers = Servers(sizes={("http://a", 0): 2, ("http://b", 0): 1})
    _Client(servers).init_weight_transfer_engine({"rank_offset": 1})
    assert servers.offsets == {"http://a": 1, "http://b": 3}


class Group:
    """Stands in for vLLM's end of an NCCL group: reads the weights, and may fail in between."""

    def __init__(self, info, source, log, fails_at):
        self.info = info
        self.source = source
        self.client = None
        self.received = []
        self._log = log
        self._fails_at = fails_at
        if fails_at == "rendezvous":
            raise ConnectionError("nobody came")

    def send_weights(self):
        for index, (name, tensor) in enumerate(self.source):
            if index == self._fails_at:
                raise ConnectionError("gone")
            self.received.append((name, tensor.dtype, tuple(tensor.shape)))
        self._log.append(f"sent by {self.info.master_port}")

    def shutdown(self):
        self._log.append(f"end of {self.info.master_port}")


@pytest.fixture
def nccl_groups(monkeypatch):
    """Make the groups of `NcclTransfer` stand-ins; the value makes them fail at a tensor."""
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    groups = types.SimpleNamespace(log=[], made=[], fails_at=None)

    def make(info, *, client, source):
        groups.made.append(Group(info, source, groups.log, groups.fails_at))
        return groups.made[-1]

    monkeypatch.setattr(WeightTransferTrainerFactory, "trainer_init", make)
    return groups


@pytest.mark.vllm
def test_nccl_declares_what_it_will_send(agent, nccl_groups):
    transfer, weights = NcclTransfer(), LearnerWeights(agent[0])
    num_bytes = transfer.send(weights, Servers())
    group = nccl_groups.made[0]
    declared = [(meta.name, meta.dtype, meta.shape) for meta in group.source.metadata()]
    assert declared == [(n, w.dtype, tuple(w.shape)) for n, w in LearnerWeights(agent[0]).tensors()]
    assert group.received == declared
    assert num_bytes == sum(tensor.nbytes for _, tensor in weights.tensors())


@pytest.mark.vllm
def test_nccl_is_shut_down_once_and_anew_for_other_servers_or_one_that_came_back(
    agent, nccl_groups
):
    transfer, weights = NcclTransfer(), LearnerWeights(agent[0])
    transfer.close()
    for sizes in (
        {("http://a", 0): 1},
        {("http://a", 0): 1},
        {("http://a", 1): 1},  # the same address, another process
        {("http://b", 0): 1},
    ):
        transfer.send(weights, Servers(sizes=sizes))
    transfer.close(), transfer.close()
    ports = [group.info.master_port for group in nccl_groups.made]
    assert len(ports) == 3
    assert nccl_groups.log == [
        f"sent by {ports[0]}", f"sent by {ports[0]}", f"end of {ports[0]}",
        f"sent by {ports[1]}", f"end of {ports[1]}",
        f"sent by {ports[2]}", f"end of {ports[2]}",
    ]  # fmt: skip


@pytest.mark.vllm
@pytest.mark.parametrize("fails_at", ["rendezvous", 0, 2])
def test_a_failed_nccl_send_gathers_the_rest_and_begins_anew(zero3, nccl_groups, fails_at):
    model, _ = zero3
    LearnerWeights(model).join_gathers()
    whole = list(GatheredParameters.log)
    GatheredParameters.log.clear()
    transfer, nccl_groups.fails_at = NcclTransfer(), fails_at
    with pytest.raises(ConnectionError):
        transfer.send(LearnerWeights(model), Servers())
    assert GatheredParameters.log == whole
    nccl_groups.fails_at = None
    transfer.send(LearnerWeights(model), Servers())  # the same servers, another group
    assert nccl_groups.log[-1] == f"sent by {nccl_groups.made[-1].info.master_port}"
    assert len({id(group) for group in nccl_groups.made}) == (1 if fails_at == "rendezvous" else 2)


@pytest.mark.vllm
def test_nccl_announces_an_address_that_others_reach_and_the_port_that_was_asked_for(
    agent, nccl_groups, set_vllm_variable
):
    set_vllm_variable("VLLM_HOST_IP", "10.1.2.3")
    NcclTransfer(51216).send(LearnerWeights(agent[0]), Servers(sizes={("http://a", 0): 2}))
    info = nccl_groups.made[0].info
    assert (info.master_address, info.master_port, info.world_size) == ("10.1.2.3", 51216, 3)


def test_a_port_that_nothing_uses_is_refused():
    with pytest.raises(ValueError, match=r"`group_port` must be None .*`trainer_memory`, got 5"):
        BACKENDS[MEMORY_BACKEND](5)
