"""Both engines behind one interface: tensors, requests, seeds, weights, faults."""

import asyncio
import contextlib
import io
import itertools
import math
import os
import random
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from learners import learner
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from agent_vllm import ChatFormat, TorchRolloutEngine, VLLMRolloutEngine, create_rollout_engine
from agent_vllm.engines.learner import LearnerWeights
from agent_vllm.engines.request import GenerationRequest, check_completion
from agent_vllm.engines.vllm import cpu, stepper
from agent_vllm.engines.vllm import engine as vllm_module
from agent_vllm.engines.vllm.stepper import _completion_of
from agent_vllm.errors import (
    EngineBusyError,
    EngineError,
    EngineUnavailableError,
    InvalidRequestError,
    UnsupportedModelError,
    WeightSyncError,
)
from agent_vllm.training import predicted_logprobs
from agent_vllm.types import Completion

ENGINES = ["torch", pytest.param("vllm", marks=pytest.mark.vllm)]


@pytest.fixture(params=ENGINES)
def loaded(request, agent):
    """An engine on the small agent's weights, and the learner it holds."""
    model, tokenizer = agent
    if request.param == "torch":
        with TorchRolloutEngine(model, tokenizer) as engine:
            yield engine, model
    else:
        engine = request.getfixturevalue("vllm_engine")
        engine.update_policy(model)
        yield engine, model


def prompts(num_rows=3, width=12, side="left"):
    """Random ids of uneven lengths, padded on one side."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(10, 300, (num_rows, width), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(num_rows):
        padding = slice(0, row * 3) if side == "left" else slice(width - row * 3, width)
        mask[row, padding], ids[row, padding] = 0, 0
    return ids, mask


def learner_logprobs(model, prompt, token_ids, temperature):
    ids = torch.tensor([prompt + token_ids])
    with torch.no_grad():
        logits = model.eval()(input_ids=ids).logits
    return predicted_logprobs(logits, ids, temperature)[0, len(prompt) - 1 :]


def greedy(engine, num_tokens=12):
    return engine.rollout(*prompts(), 1, num_tokens, temperature=0).completion_ids.tolist()


# ---- the tensor interface ----


@pytest.mark.parametrize("side", ["left", "right"])
def test_rollout_gives_each_prompt_its_rows_and_exact_logprobs(loaded, side):
    engine, model = loaded
    ids, mask = prompts(side=side)
    result = engine.rollout(ids, mask, num_generations=4, max_new_tokens=20, temperature=0.8)
    longest = result.completion_ids.shape[1]
    assert result.output_ids.shape == (12, 12 + longest)
    assert result.per_token_logps.dtype == torch.float32
    assert result.prompt_lens.tolist() == [12] * 4 + [9] * 4 + [6] * 4
    assert len(result.completions) == 12
    assert torch.equal(result.output_ids[:, :12], ids.repeat_interleave(4, dim=0))
    for row in range(12):
        length = int(result.completion_mask[row].sum())
        assert result.completion_mask[row].tolist() == [1] * length + [0] * (longest - length)
        assert not result.per_token_logps[row, length:].any()
        prompt = ids[row // 4][mask[row // 4].bool()].tolist()
        sampled = result.completion_ids[row, :length].tolist()
        learner = learner_logprobs(model, prompt, sampled, 0.8)
        torch.testing.assert_close(result.per_token_logps[row, :length], learner, atol=1e-5, rtol=0)


def test_samples_of_one_prompt_differ(loaded):
    ids, mask = prompts(num_rows=1)
    rows = loaded[0].rollout(ids, mask, 8, 20, temperature=1.0).completion_ids.tolist()
    assert len({tuple(row) for row in rows}) > 1


def test_the_end_token_is_kept_with_its_logprob_and_ends_the_row(loaded):
    engine, _ = loaded
    chat = ChatFormat.from_tokenizer(engine.tokenizer)
    ids = torch.tensor([chat.prompt_ids([{"role": "user", "content": "Hello, I am Anna!"}])])
    result = engine.rollout(ids, torch.ones_like(ids), 16, 60, temperature=1.0)
    ended = 0
    for row in range(16):
        length = int(result.completion_mask[row].sum())
        sampled = result.completion_ids[row, :length].tolist()
        assert engine.eos_token_ids[0] not in sampled[:-1]
        assert sampled[-1] == engine.eos_token_ids[0] or length == 60
        ended += sampled[-1] == engine.eos_token_ids[0]
    assert ended > 0


def test_rollout_works_inside_a_running_event_loop(loaded):
    async def notebook():
        return loaded[0].rollout(*prompts(), 2, 4)

    assert asyncio.run(notebook()).completion_ids.shape[0] == 6


def test_rollout_refuses_shapes_that_differ(loaded):
    ids, mask = prompts()
    with pytest.raises(InvalidRequestError, match=r"must both be \[B, P\]"):
        loaded[0].rollout(ids, mask[:, 1:], 1, 4)


# ---- single sequences ----


def generate_all(engine, requests):
    async def gather():
        return await asyncio.gather(
            *(engine.generate(**request) for request in requests), return_exceptions=True
        )

    return asyncio.run(gather())


def test_a_seed_decides_the_tokens_whatever_runs_beside(loaded):
    engine, _ = loaded
    request = {"prompt_ids": [20, 30, 40], "max_new_tokens": 16, "seed": 7}
    others = [{"prompt_ids": [50 + i] * (i + 1), "max_new_tokens": 8} for i in range(9)]
    alone = generate_all(engine, [request])[0]
    beside = generate_all(engine, [*others, request])[-1]
    other_seed = generate_all(engine, [{**request, "seed": 8}])[0]
    assert alone.token_ids == beside.token_ids
    assert alone.token_ids != other_seed.token_ids


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt_ids": []}, "at least one token"),
        ({"prompt_ids": [1, 10**6]}, "Token id 1000000 is out of the engine's vocabulary"),
        ({"prompt_ids": [1, -1]}, "Token id -1 is out"),
        ({"prompt_ids": ["a"]}, "must be a list of ints"),
        ({"prompt_ids": [20] * 1024}, "none is left to sample"),
        ({"max_new_tokens": 0}, "`max_new_tokens` must be 1 or more, got 0"),
        ({"temperature": -1.0}, "`temperature` must be"),
        ({"temperature": 0.001}, "`temperature` must be"),
        ({"top_p": 0.0}, "`top_p` must be"),
        ({"top_k": -1}, "`top_k` must be"),
        ({"min_p": 2.0}, "`min_p` must be"),
    ],
)
def test_requests_that_no_engine_can_serve_are_refused_alone(loaded, change, message):
    good = {"prompt_ids": [20, 30], "max_new_tokens": 3, "seed": 0}
    failed, served = generate_all(loaded[0], [{**good, **change}, good])
    assert isinstance(failed, InvalidRequestError)
    assert message in str(failed)
    assert len(served.token_ids) <= 3


def test_a_prompt_that_leaves_one_token_gets_one(loaded):
    engine, _ = loaded
    prompt = [20] * (engine.max_model_len - 1)
    (completion,) = generate_all(engine, [{"prompt_ids": prompt, "max_new_tokens": 50}])
    assert len(completion.token_ids) == 1


def test_a_prompt_that_fills_the_context_is_read_from_its_first_token(loaded):
    engine, model = loaded
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(10, 300, (engine.max_model_len - 2,), generator=generator).tolist()
    request = {"prompt_ids": prompt, "max_new_tokens": 2, "seed": 0, "temperature": 1.0}
    (completion,) = generate_all(engine, [request])
    learner = learner_logprobs(model, prompt, completion.token_ids, 1.0)
    torch.testing.assert_close(torch.tensor(completion.logprobs), learner, atol=1e-4, rtol=0)
    without_first = learner_logprobs(model, prompt[1:], completion.token_ids, 1.0)
    assert (learner - without_first).abs().max() > 1e-4


def test_logprobs_are_of_the_distribution_sampled_from(loaded):
    engine, model = loaded
    base = {"prompt_ids": [20, 30, 40], "max_new_tokens": 8, "seed": 3, "temperature": 0.5}
    plain, cut = generate_all(engine, [base, {**base, "top_k": 2}])
    learner = learner_logprobs(model, [20, 30, 40], plain.token_ids, 0.5)
    torch.testing.assert_close(torch.tensor(plain.logprobs), learner, atol=1e-5, rtol=0)
    full = learner_logprobs(model, [20, 30, 40], cut.token_ids, 0.5)
    assert all(a >= b - 1e-5 for a, b in zip(cut.logprobs, full.tolist(), strict=True))


FILTERS = {"top_p": 0.6, "top_k": 5, "min_p": 0.1}


@pytest.mark.vllm
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_filters_keep_the_same_tokens_in_both_engines(agent, vllm_engine, temperature):
    """All filters alone, in pairs and together, mixed in one batch with greedy rows."""
    model, tokenizer = agent
    _flatten(model)
    vllm_engine.update_policy(model)
    subsets = [c for n in range(4) for c in itertools.combinations(FILTERS, n)]
    rows = [
        {"prompt_ids": [20 + seed, 30, 40], "max_new_tokens": 12, "seed": seed,
         "temperature": temperature, **{name: FILTERS[name] for name in names}}
        for seed in range(4) for names in subsets
    ]  # fmt: skip
    rows.append({"prompt_ids": [20], "max_new_tokens": 4, "temperature": 0.5, "seed": 0})
    with TorchRolloutEngine(model, tokenizer) as engine:
        ours, theirs = generate_all(engine, rows), generate_all(vllm_engine, rows)
    assert [c.token_ids for c in ours] == [c.token_ids for c in theirs]
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(
            torch.tensor(a.logprobs), torch.tensor(b.logprobs), atol=1e-5, rtol=0
        )


@torch.no_grad()
def _flatten(model):
    """Make the distributions flat, so that each filter cuts off something else."""
    model.get_output_embeddings().weight.mul_(0.3)


def test_greedy_ignores_filters(loaded):
    engine, _ = loaded
    request = {"prompt_ids": [20, 30, 40], "max_new_tokens": 6, "temperature": 0.0}
    plain, filtered = generate_all(engine, [request, {**request, **FILTERS}])
    assert plain.logprobs == pytest.approx(filtered.logprobs, abs=1e-6)
    assert filtered.logprobs[0] < 0.0


def test_greedy_takes_the_likeliest_token_and_reports_temperature_one(loaded):
    engine, model = loaded
    (completion,) = generate_all(
        engine, [{"prompt_ids": [20, 30, 40], "max_new_tokens": 6, "temperature": 0.0}]
    )
    learner = learner_logprobs(model, [20, 30, 40], completion.token_ids, 1.0)
    torch.testing.assert_close(torch.tensor(completion.logprobs), learner, atol=1e-5, rtol=0)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[20, 30, 40]])).logits
    assert completion.token_ids[0] == logits[0, -1].argmax().item()


def test_the_learner_keeps_its_mode(loaded):
    engine, model = loaded
    model.train()
    model.model.layers[0].eval()
    engine.rollout(*prompts(), 1, 4)
    assert model.training and not model.model.layers[0].training and model.model.layers[1].training


# ---- weights ----


def test_an_update_moves_the_engine_to_the_learner(loaded):
    engine, model = loaded
    before, version = greedy(engine), engine.policy_version
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.manual_seed(1)) * 0.1)
    assert engine.update_policy(model) == version + 1
    assert greedy(engine) != before
    (completion,) = generate_all(engine, [{"prompt_ids": [20, 30], "max_new_tokens": 8}])
    assert completion.policy_version == version + 1
    learner = learner_logprobs(model, [20, 30], completion.token_ids, 1.0)
    torch.testing.assert_close(torch.tensor(completion.logprobs), learner, atol=1e-5, rtol=0)


def test_an_update_only_reads_the_learner(loaded):
    engine, model = loaded
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def state():
        return [
            (name, id(p), p.dtype, p.requires_grad, p.data_ptr(), p.detach().clone())
            for name, p in model.named_parameters()
        ]

    before = state()
    engine.update_policy(model)
    for old, new in zip(before, state(), strict=True):
        assert old[:5] == new[:5]
        assert torch.equal(old[5], new[5])
    assert model.lm_head.weight is model.model.embed_tokens.weight
    in_optimizer = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert in_optimizer == {entry[1] for entry in before}


def other_model(**changes):
    config = Qwen3Config(
        vocab_size=400, hidden_size=64, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, head_dim=32, max_position_embeddings=128,
    )  # fmt: skip
    config.update(changes)
    torch.manual_seed(0)
    return Qwen3ForCausalLM(config).float()


def test_weights_that_do_not_fit_are_named(loaded):
    engine, model = loaded
    version = engine.policy_version
    with pytest.raises(WeightSyncError, match=r"model\.layers\.1\."):
        engine.update_policy(other_model())
    assert engine.policy_version == version
    engine.update_policy(model)  # else it refuses requests


def test_after_a_failed_update_requests_are_refused_until_one_succeeds(loaded, monkeypatch):
    """Half of the weights are new when it fails; nothing may be sampled from such a mixture."""
    engine, model = loaded
    request = {"prompt_ids": [20, 30, 40], "max_new_tokens": 8, "seed": 0}
    version = engine.policy_version
    sharded = isinstance(engine, TorchRolloutEngine)  # else it only takes the module over
    tensors = LearnerWeights.module_tensors if sharded else LearnerWeights.tensors

    def half_of_them(weights, *args, **options):
        yield from itertools.islice(tensors(weights, *args, **options), len(weights.meta) // 2)
        raise ConnectionError("the learner is gone")

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    with monkeypatch.context() as patch:
        patch.setattr(LearnerWeights, "is_sharded", sharded)
        patch.setattr(LearnerWeights, tensors.__name__, half_of_them)
        with pytest.raises(ConnectionError):
            engine.update_policy(model)
    (refused,) = generate_all(engine, [request])
    assert type(refused) is EngineError
    assert "until a weight update succeeds" in str(refused)
    assert "ConnectionError: the learner is gone" in str(refused)
    assert engine.policy_version == version and engine.death is None

    engine.update_policy(model)
    (served,) = generate_all(engine, [request])
    learner = learner_logprobs(model, [20, 30, 40], served.token_ids, 1.0)
    torch.testing.assert_close(torch.tensor(served.logprobs), learner, atol=1e-5, rtol=0)


def test_an_update_waits_for_an_idle_engine(loaded):
    engine, model = loaded

    async def update_in_flight():
        task = asyncio.create_task(engine.generate([20, 30], max_new_tokens=200, seed=0))
        await asyncio.sleep(0)
        try:
            with pytest.raises(EngineBusyError, match="in flight"):
                engine.update_policy(model)
        finally:
            await task

    asyncio.run(update_in_flight())


@pytest.mark.parametrize("name", ENGINES)
def test_an_untied_head_is_updated_too(name, agent):
    _, tokenizer = agent
    model = other_model(tie_word_embeddings=False, vocab_size=len(tokenizer))
    with create_rollout_engine(name, model, tokenizer) as engine:
        with torch.no_grad():
            model.lm_head.weight.mul_(3.0)
        engine.update_policy(model)
        (completion,) = generate_all(engine, [{"prompt_ids": [20, 30], "max_new_tokens": 8}])
    learner = learner_logprobs(model, [20, 30], completion.token_ids, 1.0)
    torch.testing.assert_close(torch.tensor(completion.logprobs), learner, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_from_a_path_is_the_one_from_the_model(name, agent_path, agent):
    model, tokenizer = agent
    with create_rollout_engine(name, agent_path) as from_path:
        ours = greedy(from_path)
    with TorchRolloutEngine(model, tokenizer) as reference:
        assert ours == greedy(reference)


# ---- faults ----


def test_a_failing_step_fails_who_was_in_it_and_the_engine_goes_on(loaded, monkeypatch):
    engine, _ = loaded
    target = engine._stepper if isinstance(engine, VLLMRolloutEngine) else engine._batch
    with monkeypatch.context() as patch:
        patch.setattr(target, "step", lambda: (_ for _ in ()).throw(RuntimeError("out of memory")))
        outcomes = generate_all(engine, [{"prompt_ids": [20], "max_new_tokens": 4}] * 3)
    assert [type(outcome) for outcome in outcomes] == [EngineError] * 3
    assert "out of memory" in str(outcomes[0])
    (served,) = generate_all(engine, [{"prompt_ids": [20, 30], "max_new_tokens": 4, "seed": 0}])
    assert len(served.token_ids) >= 1


def test_a_cancelled_request_leaves_the_engine(loaded):
    engine, model = loaded

    async def cancel():
        task = asyncio.create_task(engine.generate([20, 30], max_new_tokens=900, seed=0))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return await engine.generate([20, 30], max_new_tokens=4, seed=0)

    assert len(asyncio.run(cancel()).token_ids) >= 1
    engine.update_policy(model)  # nothing is left in flight


def test_a_closed_engine_says_so(agent):
    engine = TorchRolloutEngine(*agent)
    engine.close()
    engine.close()
    (outcome,) = generate_all(engine, [{"prompt_ids": [20], "max_new_tokens": 4}])
    assert isinstance(outcome, EngineError) and "closed" in str(outcome)


def test_an_unknown_engine_is_refused_by_name(agent):
    with pytest.raises(ValueError, match=r"must be one of .*'torch', 'vllm'.*, got 'sglang'"):
        create_rollout_engine("sglang", *agent)


def test_without_vllm_the_error_names_the_extra(agent, monkeypatch):
    monkeypatch.setattr(vllm_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EngineUnavailableError, match=r"agent-vllm\[cpu\]"):
        VLLMRolloutEngine(*agent)


class UnknownForCausalLM(Qwen3ForCausalLM):
    """An architecture that vLLM has never heard of."""


@pytest.mark.vllm
def test_a_model_that_vllm_does_not_know_is_refused_with_the_remedy(agent):
    model = UnknownForCausalLM(other_model().config)
    with pytest.raises(UnsupportedModelError, match=r"UnknownForCausalLM.*torch engine"):
        VLLMRolloutEngine(model, agent[1])


def test_a_tokenizer_goes_with_a_model_object(agent):
    with pytest.raises(ValueError, match="`tokenizer` must be given"):
        TorchRolloutEngine(agent[0])


# ---- the host process ----


@pytest.mark.vllm
def test_vllm_leaves_the_host_process_as_it_was(agent):
    model, tokenizer = agent

    def state():
        return (
            torch.get_rng_state().tolist(),
            random.getstate(),
            np.random.get_state()[1].tolist(),
            dict(os.environ),
            torch.set_num_threads,
            torch.get_num_threads(),
        )

    before = state()
    with VLLMRolloutEngine(model, tokenizer) as engine:
        assert state() == before
        engine.rollout(*prompts(), 2, 8)
        engine.update_policy(model)
        assert state() == before


@pytest.mark.vllm
def test_the_device_of_the_config_is_the_gpu_that_vllm_takes():
    """Check what a rank's engine relies on to share its learner's GPU; there is none here."""
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    config = SimpleNamespace(device_config=SimpleNamespace(device=torch.device("cuda", 1)))
    assert UniProcExecutor._distributed_args(SimpleNamespace(vllm_config=config))[1:] == (0, 1)


@pytest.mark.vllm
def test_the_first_sync_is_checked_against_the_learner(agent, monkeypatch):
    """A tied head that stays old, as when the alias is left out, is noticed at once."""
    model, tokenizer = agent
    load_into = stepper.load_into

    def without_alias(llm, weights):
        load_into(llm, ((k, v) for k, v in weights if k != "lm_head.weight"))

    monkeypatch.setattr(cpu, "UNPACKED_LIMIT", 0)  # else the head has no copy of its own
    monkeypatch.setattr(stepper, "load_into", without_alias)
    with pytest.raises(WeightSyncError, match="away from the learner's"):
        VLLMRolloutEngine(model, tokenizer)


@pytest.mark.vllm
def test_a_refused_cache_reset_is_an_error(agent, vllm_engine, monkeypatch):
    model, _ = agent
    with monkeypatch.context() as patch:
        patch.setattr(vllm_engine._stepper._llm, "reset_prefix_cache", lambda: False)
        with pytest.raises(WeightSyncError, match="prefix cache"):
            vllm_engine.update_policy(model)
    vllm_engine.update_policy(model)  # else it refuses requests


@pytest.mark.vllm
def test_a_saved_learner_loads_into_transformers_and_vllm(agent, tmp_path):
    model, tokenizer = agent
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    with VLLMRolloutEngine(tmp_path) as engine, TorchRolloutEngine(again, tokenizer) as reference:
        assert greedy(engine) == greedy(reference)
    assert AutoTokenizer.from_pretrained(tmp_path).chat_template == tokenizer.chat_template


def test_a_sampled_id_beyond_the_vocabulary_is_an_engine_error(scripted, tokenizer):
    engine = scripted([[5, len(tokenizer)]])
    with pytest.raises(EngineError, match="sampled an id"):
        asyncio.run(engine.generate([1], max_new_tokens=4))


@pytest.mark.parametrize(
    ("token_ids", "logprobs", "message"),
    [
        ([], [], "sampled 0 tokens where 1 to 4 were asked for"),
        ([5] * 5, [-0.5] * 5, "sampled 5 tokens where 1 to 4"),
        ([5, 6], [-0.5, 0.25], "gave logprob 0.25 for token 1 of 2"),
        ([5, 6], [-math.inf, -0.5], "gave logprob -inf for token 0 of 2"),
        ([5, 6], [-0.5, math.nan], "gave logprob nan for token 1 of 2"),
    ],
)
def test_a_completion_that_cannot_be_trained_on_is_refused(token_ids, logprobs, message):
    request = GenerationRequest(prompt_ids=[1], max_new_tokens=4, seed=0)
    completion = Completion(
        token_ids=token_ids, logprobs=logprobs, finish_reason="stop", policy_version=0
    )
    with pytest.raises(EngineError, match=message):
        check_completion(completion, request, vocab_size=10)


def test_a_certain_token_may_have_a_rounded_logprob():
    request = GenerationRequest(prompt_ids=[1], max_new_tokens=4, seed=0)
    completion = Completion(
        token_ids=[5, 6], logprobs=[0.0, 1e-7], finish_reason="stop", policy_version=0
    )
    check_completion(completion, request, vocab_size=10)


# ---- what vLLM may hand back ----


def vllm_output(**changes):
    sample = {"token_ids": [5, 6], "finish_reason": "stop"}
    sample["logprobs"] = SimpleNamespace(logprobs=changes.pop("logprobs", [-0.5, -0.5]))
    if changes.pop("no_logprobs", False):
        sample["logprobs"] = None
    return SimpleNamespace(
        prompt_token_ids=changes.pop("prompt", [1]), outputs=[SimpleNamespace(**sample | changes)]
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"no_logprobs": True}, "no logprobs"),
        ({"finish_reason": None}, "finish_reason None"),
        ({"finish_reason": "abort"}, "finish_reason 'abort'"),
        ({"logprobs": [-0.5]}, "inconsistent completion"),
        ({"prompt": [1, 2]}, "changed the prompt"),
    ],
)
def test_what_vllm_left_unfinished_is_an_engine_error(changes, message):
    request = GenerationRequest(prompt_ids=[1], max_new_tokens=4, seed=0)
    assert _completion_of(vllm_output(), request, 3).token_ids == [5, 6]
    outcome = _completion_of(vllm_output(**changes), request, 3)
    assert isinstance(outcome, EngineError) and message in str(outcome)


@pytest.mark.vllm
def test_preempted_requests_come_back_whole(agent, monkeypatch):
    """A cache of 12 blocks, two sequences long: of eight, some are evicted and start again."""
    model, tokenizer = agent
    with VLLMRolloutEngine(
        model, tokenizer, max_model_len=160, kv_cache_memory_bytes=12 << 15
    ) as engine:
        scheduler = engine._stepper._llm.engine_core.engine_core.scheduler
        preempted, preempt = [], scheduler._preempt_request
        monkeypatch.setattr(
            scheduler, "_preempt_request", lambda *a, **k: (preempted.append(1), preempt(*a, **k))
        )
        ids = torch.tensor([[20, 30, 40]])
        result = engine.rollout(ids, torch.ones_like(ids), 8, 150, temperature=1.0)
    assert preempted
    learner = predicted_logprobs(model(input_ids=result.output_ids).logits, result.output_ids)
    distance = (learner[:, 2:] - result.per_token_logps) * result.completion_mask
    assert distance.abs().max() <= 1e-5
    assert result.completion_mask.sum(1).min() >= 1


@pytest.mark.vllm
def test_a_head_size_that_vllms_cpu_attention_lacks_is_refused_by_name(tokenizer):
    model = learner(head_dim=16, vocab_size=len(tokenizer))
    with pytest.raises(UnsupportedModelError, match=r"size of \[32, 64.*got 16.*torch engine"):
        VLLMRolloutEngine(model, tokenizer, max_model_len=64)


@pytest.mark.vllm
def test_vllm_starts_where_stdout_has_no_file_descriptor_and_takes_a_dtype_by_name(tokenizer):
    model = learner(head_dim=32, hidden_size=64, intermediate_size=64, vocab_size=len(tokenizer))
    captured = io.StringIO()  # as in notebook services
    with (
        contextlib.redirect_stdout(captured),
        VLLMRolloutEngine(model, tokenizer, dtype="float32", max_model_len=64) as engine,
    ):
        assert sys.stdout is captured
        completion = asyncio.run(engine.generate([5, 6], max_new_tokens=2))
    assert len(completion.token_ids) == 2


@pytest.mark.parametrize("dtype", ["float33", "int8", torch.float8_e4m3fn])
def test_a_dtype_that_no_learner_can_feed_is_refused_by_name(tokenizer, dtype):
    message = rf"`dtype` must be one of \['float32', 'bfloat16', 'float16'\], got {dtype!r}"
    with pytest.raises(ValueError, match=message):
        VLLMRolloutEngine(learner(), tokenizer, dtype=dtype, max_model_len=64)
