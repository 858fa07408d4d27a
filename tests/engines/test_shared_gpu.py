"""What an engine does on the GPU that it shares with its learner: a stand-in for `torch.cuda`."""

import contextlib
import threading

import pytest
import torch
from learners import learner
from vllm_stand_in import StandIn

from agent_vllm import VLLMRolloutEngine
from agent_vllm.engines.driver import StepDriver
from agent_vllm.engines.gpu import gpu_of
from agent_vllm.engines.vllm import cpu, host_state, stepper
from agent_vllm.engines.vllm import engine as vllm_engine
from agent_vllm.engines.vllm.host_state import host_process_kept, random_state_kept

THIRD = 3  # the learner's GPU


class Cuda:
    """Notes each call with its thread; each thread begins on GPU 0, as in torch."""

    def __init__(self, monkeypatch):
        self.calls = []
        self._local = threading.local()
        for name in ("synchronize", "set_device", "current_device"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
        monkeypatch.setattr(
            torch.random, "fork_rng", lambda devices: contextlib.nullcontext(self.note(*devices))
        )

    def note(self, *call):
        self.calls.append((threading.current_thread().name, *call))

    def set_device(self, gpu):
        self._local.gpu = gpu
        self.note("set_device", gpu)

    def current_device(self):
        return getattr(self._local, "gpu", 0)

    def synchronize(self, gpu):
        self.note("synchronize", gpu)


@pytest.fixture
def cuda(monkeypatch):
    cuda = Cuda(monkeypatch)
    cuda.set_device(THIRD)
    cuda.calls.clear()
    return cuda


@pytest.mark.vllm
def test_the_engines_thread_uses_the_learners_gpu_and_neither_overtakes_the_other(
    cuda, tokenizer, monkeypatch
):
    monkeypatch.setattr(cpu, "is_cpu", lambda: False)
    monkeypatch.setattr(stepper, "_build", lambda source, options: cuda.note("build") or llm)
    monkeypatch.setattr(vllm_engine, "check_against_learner", lambda *_, **__: None)
    llm = StandIn()
    llm.calls = NotedCalls(cuda)
    with VLLMRolloutEngine(learner(), tokenizer):
        pass
    driver, learners = "vllm rollout engine", threading.current_thread().name
    order = [call for call in cuda.calls if len(call) > 2 or call[1] in ("build", "load")]
    assert order == [
        (driver, "set_device", THIRD),
        (driver, "build"),
        (learners, "synchronize", THIRD),  # the optimizer's kernels
        (driver, "load"),
        (driver, "synchronize", THIRD),  # the copies
    ]
    assert {call[1] for call in cuda.calls if isinstance(call[1], int)} == {THIRD}


class NotedCalls(list):
    """The stand-in's calls, in the order of all others."""

    def __init__(self, cuda):
        self._cuda = cuda

    def append(self, call):
        self._cuda.note(call)


def test_the_learners_own_generator_is_kept_on_the_drivers_thread(cuda):
    driver = StepDriver("test", gpu=THIRD)

    def step():
        with random_state_kept():
            pass

    driver.call(step)
    driver.close()
    assert cuda.calls == [("test", "set_device", THIRD), ("test", THIRD)]


def test_without_cuda_there_is_no_gpu_to_share():
    assert gpu_of(learner()) is None
    assert gpu_of("a/path") is None


@pytest.mark.parametrize("set_by", ["nobody", "all backends at once", "each backend"])
def test_the_learners_matmul_precision_is_kept(set_by):
    def state():
        with contextlib.suppress(RuntimeError):  # it was set for each backend
            return matmul.fp32_precision, torch.get_float32_matmul_precision()
        return matmul.fp32_precision

    matmul = torch.backends.cuda.matmul
    with host_state._matmul_precision_kept():
        if set_by == "all backends at once":
            torch.set_float32_matmul_precision("high")
        elif set_by == "each backend":
            matmul.fp32_precision = "tf32"
        before = state()
        with host_process_kept():
            torch.set_float32_matmul_precision("highest")  # as vLLM's worker does
        assert state() == before


@pytest.mark.vllm
def test_a_closed_engine_holds_no_adapter(tokenizer, monkeypatch):
    """It would hold vLLM's model, whose memory the next engine needs."""
    monkeypatch.setattr(cpu, "is_cpu", lambda: False)
    monkeypatch.setattr(stepper, "_build", lambda source, options: StandIn())
    monkeypatch.setattr(vllm_engine, "check_against_learner", lambda *_, **__: None)
    with VLLMRolloutEngine(learner(), tokenizer) as engine:
        engine._stepper.adapter = object()
    assert engine._stepper.adapter is None
