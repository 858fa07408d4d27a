"""vLLM's arguments: what a user may set, and what is passed on a CPU and on CUDA."""

import dataclasses

import pytest
from learners import learner

from agent_vllm import VLLMRolloutEngine
from agent_vllm.engines.vllm import check_engine_args


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
