"""vLLM's arguments: what a user may set, and what is passed on a CPU and on CUDA."""

import dataclasses
import types
from pathlib import Path

import pytest
import torch
from learners import learner
from transformers import AutoConfig

from agent_vllm import VLLMRolloutEngine
from agent_vllm.engines.learner import model_source
from agent_vllm.engines.vllm import check_engine_args, cpu, stepper
from agent_vllm.engines.vllm.model_folder import lasting_folder
from agent_vllm.engines.vllm.options import VLLMOptions


@pytest.mark.parametrize(
    ("name", "value", "way"),
    [
        ("tensor_parallel_size", 2, "Start servers"),
        ("pipeline_parallel_size", 2, "Start servers"),
        ("data_parallel_rank", 0, "Start servers"),
        ("distributed_executor_backend", "mp", "Start servers"),
        ("quantization", "fp8", "Build the engine unquantised"),
        ("speculative_config", {"method": "ngram"}, "Leave it out"),
        ("logprobs_mode", "raw_logprobs", "Rollouts need it as it is"),
        ("max_num_seqs", 8, "Pass `max_num_seqs` to the engine"),
        ("enable_sleep_mode", True, "Pass `sleep_mode` to the engine"),
    ],
)
def test_an_argument_that_can_not_be_obeyed_is_refused_with_the_way_that_exists(
    tokenizer, name, value, way
):
    message = f"`engine_args` must not have the key '{name}', got .*{way}"
    with pytest.raises(ValueError, match=message):
        VLLMRolloutEngine(learner(), tokenizer, engine_args={name: value})


def test_arguments_that_change_nothing_or_are_vllms_own_are_taken():
    alone = {"tensor_parallel_size": 1, "distributed_executor_backend": "uni", "quantization": None}
    check_engine_args({**alone, "max_lora_rank": 64, "block_size": 64}, is_checkpoint=False)


def test_a_checkpoint_may_be_quantised():
    check_engine_args({"quantization": "bitsandbytes"}, is_checkpoint=True)


@pytest.mark.vllm
def test_every_kind_of_parallelism_that_vllm_has_is_known():
    from vllm import EngineArgs

    fields = [field.name for field in dataclasses.fields(EngineArgs)]
    parallel = [
        name for name in fields if "parallel" in name and name != "max_parallel_loading_workers"
    ]
    assert len(parallel) > 10
    for name in parallel:
        with pytest.raises(ValueError, match="vllm-server"):
            check_engine_args({name: 2}, is_checkpoint=False)


# ---- what is passed ----


def options(**changes):
    return VLLMOptions(
        **{
            "dtype": torch.bfloat16, "max_model_len": 512, "max_num_seqs": 64,
            "gpu_memory_utilization": 0.4, "kv_cache_memory_bytes": None, "further": {},
            **changes,
        }
    )  # fmt: skip


EVERYWHERE = {
    "dtype": "bfloat16", "max_model_len": 512, "max_num_seqs": 64, "runner": "generate",
    "skip_tokenizer_init": True, "generation_config": "vllm",
    "logprobs_mode": "processed_logprobs", "enable_prefix_caching": True,
    "disable_log_stats": True, "seed": 0, "enable_sleep_mode": False,
}  # fmt: skip
ON_CUDA = {**EVERYWHERE, "gpu_memory_utilization": 0.4, "max_num_batched_tokens": 8192}


@pytest.mark.parametrize(
    ("changes", "arguments"),
    [
        ({}, {}),
        ({"sleep_mode": True}, {"enable_sleep_mode": True}),
        ({"kv_cache_memory_bytes": 1 << 30}, {"kv_cache_memory_bytes": 1 << 30}),
        # vLLM refuses fewer tokens per step than sequences
        ({"max_num_seqs": 9000}, {"max_num_seqs": 9000, "max_num_batched_tokens": 9000}),
        ({"further": {"enforce_eager": True}}, {"enforce_eager": True}),
    ],
)
def test_the_arguments_on_cuda(changes, arguments):
    made = options(**changes).engine_args(learner().config, on_cpu=False)
    assert made == {**ON_CUDA, **arguments}


def test_the_arguments_on_a_cpu():
    assert options().engine_args(learner().config, on_cpu=True) == {
        **EVERYWHERE, "enforce_eager": True, "block_size": 32, "enable_chunked_prefill": False,
        # 64 sequences of 512 + 2 * 32 tokens of 2 * 8 values in bfloat16
        "kv_cache_memory_bytes": 64 * 576 * 32, "max_num_batched_tokens": 8192,
    }  # fmt: skip


@pytest.mark.vllm
def test_an_adapters_rank_is_rounded_up_to_one_that_vllm_has():
    made = options(lora_rank=12).engine_args(learner().config, on_cpu=False)
    assert made == {**ON_CUDA, "enable_lora": True, "max_loras": 1, "max_lora_rank": 16}


@pytest.mark.vllm
def test_on_cuda_vllm_is_built_on_the_learners_gpu_from_a_folder_that_lasts(
    tokenizer, monkeypatch, set_vllm_variable, tmp_path
):
    import vllm

    config = types.SimpleNamespace(device_config=types.SimpleNamespace(device="cuda"))
    given = {}

    def engine_args(**arguments):
        given.update(arguments)
        return types.SimpleNamespace(
            create_engine_config=lambda context: config, disable_log_stats=True
        )

    monkeypatch.setattr(cpu, "is_cpu", lambda: False)
    set_vllm_variable("VLLM_CACHE_ROOT", str(tmp_path))
    monkeypatch.setattr(vllm, "EngineArgs", engine_args)
    engine = types.SimpleNamespace(from_vllm_config=lambda config, **_: config.device_config)
    monkeypatch.setattr(vllm, "LLMEngine", engine)
    source = model_source(learner(), tokenizer)
    assert stepper._build(source, options(gpu=3)).device == torch.device("cuda", 3)
    assert Path(given.pop("model")).parent == tmp_path / "agent_vllm"
    assert given == {**ON_CUDA, "load_format": "dummy"}


@pytest.mark.vllm
def test_each_config_and_gpu_has_one_folder_in_every_run(set_vllm_variable, tmp_path):
    set_vllm_variable("VLLM_CACHE_ROOT", str(tmp_path))
    config, other = learner().config, learner(num_hidden_layers=2).config
    folders = [lasting_folder(c, gpu) for c, gpu in [(config, 0), (config, 1), (other, 0)]]
    assert len(set(folders)) == 3
    assert lasting_folder(config, None) == folders[0]
    assert len(list((tmp_path / "agent_vllm").iterdir())) == 3
    assert AutoConfig.from_pretrained(folders[2]).num_hidden_layers == 2
