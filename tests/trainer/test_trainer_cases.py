"""Masks, lengths and ratios of multi-turn rows in the real TRL trainer."""

import gc
import itertools
import math
import tracemalloc
import weakref

import pytest
import torch
from datasets import Dataset
from fakes import ids_of
from stress.faults import Fault, FaultyEngine
from tiny_tasks import correct_reward
from trainers import TOOLS, rows
from transformers import AutoModelForCausalLM

from agent_vllm import StopReason, TorchRolloutEngine
from agent_vllm.errors import EngineError
from agent_vllm.testing import ScriptedRolloutEngine
from trl_integration import AgentGRPOTrainer

ANSWER = "Yes."
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "1 + 2"}}\n</tool_call>'


@pytest.fixture
def make_trainer(new_trainer):
    """A trainer on the small agent, its rollouts by an engine."""

    def make(engine, **changes):
        trainer = new_trainer(
            engine,
            reward_funcs=correct_reward,
            tools=TOOLS,
            train_dataset=rows(8),
            **{"per_device_train_batch_size": 4, "max_completion_length": 150, **changes},
        )
        trainer.current_gradient_accumulation_steps = 1
        return trainer

    return make


@pytest.fixture
def story(agent):
    """An engine for four rows: an answer, a call and an answer, and both without their end."""
    tokenizer = agent[1]
    end = tokenizer.eos_token_id
    answer = ids_of(tokenizer, ANSWER)
    call, other_call = ids_of(tokenizer, CALL), ids_of(tokenizer, CALL.replace("1", "3"))
    first = itertools.cycle([[*answer, end], [*call, end], answer, [*other_call, end]])

    def script(request):
        text = tokenizer.decode(request.prompt_ids)
        if CALL in text:
            return [*answer, end]
        return answer if CALL.replace("1", "3") in text else next(first)

    return ScriptedRolloutEngine(tokenizer, script, max_model_len=1024)


@pytest.fixture
def cap(agent):
    """Tokens that a call fits in with its end, but no result."""
    return len(ids_of(agent[1], CALL)) + 1 + 2


def scored(trainer):
    """Return what TRL trains on, from one prompt's four rows."""
    trainer.model.train()
    return trainer._generate_and_score_completions([rows(1)[0]] * 4)


def trained(inputs):
    return inputs["completion_mask"] * inputs["tool_mask"]


def loss_of(trainer, inputs, **changes):
    advantages = torch.tensor([1.0, -1.0, 0.5, -0.5])
    return trainer._compute_loss(trainer.model, {**inputs, "advantages": advantages, **changes})


def test_a_cut_row_is_out_of_every_mask_and_others_are_whole(make_trainer, story):
    trainer = make_trainer(story, mask_truncated_completions=True)
    inputs = scored(trainer)
    reasons = [t.stop_reason for t in trainer.trajectories]
    assert [reason.is_truncated for reason in reasons] == [False, False, True, True]
    for row, t in enumerate(trainer.trajectories):
        mask = t.completion_mask if not reasons[row].is_truncated else [0] * len(t.completion_ids)
        assert trained(inputs)[row, : len(mask)].tolist() == mask
        assert not trained(inputs)[row, len(mask) :].any()


def test_only_trained_tokens_are_counted_in_the_loss(make_trainer, story):
    """The denominator is what was sampled, and a longer observation does not thin the loss."""
    # tokens behind a row's padding, which no rollout has, are for rows only
    trainer = make_trainer(story, loss_type="dapo", shared_prefix="off")
    inputs = scored(trainer)
    num_sampled = sum(t.num_sampled_tokens for t in trainer.trajectories)
    assert sum(len(t.completion_ids) for t in trainer.trajectories) > num_sampled
    assert int(inputs["num_items_in_batch"]) == num_sampled
    wider = {
        name: torch.nn.functional.pad(inputs[name], (0, 50), value=value)
        for name, value in {
            "completion_ids": 0,
            "completion_mask": 1,  # as if 50 more tokens had been observed
            "tool_mask": 0,
            "old_per_token_logps": 0.0,
            "sampling_per_token_logps": 0.0,
        }.items()
    }
    with torch.no_grad():
        assert loss_of(trainer, inputs).item() != 0.0
        torch.testing.assert_close(loss_of(trainer, inputs), loss_of(trainer, inputs, **wider))


def test_no_gradient_reaches_what_predicts_an_observation(make_trainer, story):
    """Through TRL's own loss: position t - 1 has a gradient exactly where token t was sampled."""
    trainer = make_trainer(story, shared_prefix="off")  # a row per trajectory
    inputs = scored(trainer)
    seen = []

    def keep(_, __, output):  # a position's last hidden state is read by its own logits only
        output.last_hidden_state.retain_grad()
        seen.append(output.last_hidden_state)

    handle = trainer.model.model.register_forward_hook(keep)
    loss_of(trainer, inputs, old_per_token_logps=None).backward()  # the ratio is 1, never clipped
    handle.remove()
    num_columns = inputs["completion_ids"].shape[1]
    has_gradient = torch.cat([hidden.grad.abs().sum(-1) > 0 for hidden in seen])
    assert has_gradient[:, -num_columns - 1 : -1].long().tolist() == trained(inputs).tolist()


def test_kl_of_observations_stays_out(make_trainer, story):
    trainer = make_trainer(story, beta=0.1)
    inputs = scored(trainer)
    reference, mask = inputs["ref_per_token_logps"], trained(inputs)
    with torch.no_grad():
        plain = loss_of(trainer, inputs)
        elsewhere = loss_of(trainer, inputs, ref_per_token_logps=reference - 9.0 * (1 - mask))
        inside = loss_of(trainer, inputs, ref_per_token_logps=reference - 9.0 * mask)
    assert elsewhere.item() == plain.item()
    assert inside.item() > plain.item() + 0.1


@pytest.mark.parametrize("mode", ["token_truncate", "sequence_truncate"])
def test_observations_stay_out_of_the_ratio(make_trainer, agent, mode):
    """Engine and learner agree: the ratio is 1, however long the observations are."""
    trainer = make_trainer(
        TorchRolloutEngine(*agent),
        old_logprobs="recomputed",
        vllm_importance_sampling_mode=mode,
    )
    inputs = scored(trainer)
    assert any(t.num_turns > 1 for t in trainer.trajectories)
    ratio = inputs["importance_sampling_ratio"]
    torch.testing.assert_close(ratio, torch.ones_like(ratio), atol=1e-2, rtol=0)
    assert not (inputs["sampling_per_token_logps"] * (1 - trained(inputs))).any()


@pytest.mark.parametrize("mask_truncated", [False, True])
def test_lengths_count_sampled_tokens_cut_rows_too(make_trainer, story, mask_truncated):
    trainer = make_trainer(story, mask_truncated_completions=mask_truncated)
    scored(trainer)
    lengths = [t.num_sampled_tokens for t in trainer.trajectories]
    metrics = trainer._metrics["train"]
    assert metrics["completions/mean_length"] == [pytest.approx(sum(lengths) / 4)]
    assert metrics["completions/min_length"] == [min(lengths)]
    assert metrics["completions/max_length"] == [max(lengths)]
    assert metrics["completions/max_terminated_length"] == [max(lengths[:2])]


def test_every_list_of_tokens_has_one_shape(make_trainer, story, cap):
    trainer = make_trainer(story, max_completion_length=cap, beta=0.1)
    inputs = scored(trainer)
    assert trainer.trajectories[1].stop_reason is StopReason.COMPLETION_BUDGET
    shape = inputs["completion_ids"].shape
    assert shape == (4, cap - 2)
    for name in (
        "completion_mask",
        "tool_mask",
        "old_per_token_logps",
        "sampling_per_token_logps",
        "ref_per_token_logps",
    ):
        assert inputs[name].shape == shape, name


def test_the_evaluation_batch_may_be_the_larger_one(make_trainer, agent):
    tokenizer = agent[1]

    def script(request):
        called = CALL in tokenizer.decode(request.prompt_ids)
        return [*ids_of(tokenizer, ANSWER if called else CALL), tokenizer.eos_token_id]

    trainer = make_trainer(
        ScriptedRolloutEngine(tokenizer, script, max_model_len=1024),
        eval_dataset=rows(8, "test"),
        per_device_train_batch_size=2,
        num_generations=2,
        per_device_eval_batch_size=8,
        num_generations_eval=1,
    )
    trainer.evaluate()
    results = [[result.content for result in t.tool_results] for t in trainer.trajectories]
    assert results == [["3"]] * 8


def test_the_cap_holds_and_what_it_cut_is_counted(make_trainer, story, cap):
    trainer = make_trainer(story, max_completion_length=cap)
    scored(trainer)
    lengths = [len(t.completion_ids) for t in trainer.trajectories]
    assert max(lengths) == cap - 2
    cut = [t.stop_reason.is_truncated for t in trainer.trajectories]
    assert cut == [False, True, True, True]
    assert trainer._metrics["train"]["completions/clipped_ratio"] == [0.75]


# ---- what the engine says of its tokens ----


@pytest.mark.parametrize("fault", [Fault.NAN_LOGPROB, Fault.MISSING_LOGPROBS])
def test_a_row_without_finite_logprobs_is_left_out_and_counted(make_trainer, story, fault):
    def spoiled(request):  # one conversation, however often it is asked for
        return fault if CALL in story.tokenizer.decode(request.prompt_ids) else None

    trainer = make_trainer(SpoiledEngine(story, spoiled))
    inputs = scored(trainer)
    reasons = [t.stop_reason for t in trainer.trajectories]
    assert reasons.count(StopReason.ENGINE_ERROR) == 1
    assert not trained(inputs)[reasons.index(StopReason.ENGINE_ERROR)].any()
    assert trainer._metrics["train"]["rollout/stop_reason/engine_error"] == [0.25]
    assert trainer._metrics["train"]["rollout/failed_tokens"] == [
        len(ids_of(story.tokenizer, CALL)) + 1
    ]
    loss = loss_of(trainer, inputs)
    loss.backward()
    assert math.isfinite(loss.item())
    assert all(p.grad.isfinite().all() for p in trainer.model.parameters())


class SpoiledEngine(FaultyEngine):
    """Faults by request."""

    def __init__(self, engine, fault_of):
        super().__init__(engine, [])
        self._chosen = fault_of

    def _fault_of(self, request):
        return self._chosen(request)


class FixedDistance(AgentGRPOTrainer):
    """A learner that gives every token, observed ones too, the logprob -0.49."""

    def _get_per_token_logps_and_entropies(self, model, ids, mask, num_columns, **kwargs):
        return torch.full((len(ids), num_columns), -0.49), None, None


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"mode": "sequence_truncate", "clip_max": 1e9}, math.exp(4)),
        ({"mode": "sequence_truncate", "clip_max": 3.0}, 3.0),
        ({"mode": "sequence_mask", "clip_max": 3.0}, 0.0),
        ({"mode": "token_truncate", "clip_max": 3.0}, math.exp(0.01)),
    ],
)
def test_a_sequences_ratio_is_the_product_over_its_sampled_tokens(
    make_trainer, agent, settings, expected
):
    """400 sampled tokens, each 0.01 more likely to the learner, around an observation."""
    tokenizer = agent[1]
    call = [*ids_of(tokenizer, CALL), tokenizer.eos_token_id]
    answer = [ids_of(tokenizer, "yes")[0]] * (400 - len(call) - 1) + [tokenizer.eos_token_id]

    def script(request):
        return answer if CALL in tokenizer.decode(request.prompt_ids) else call

    trainer = make_trainer(
        ScriptedRolloutEngine(tokenizer, script, max_model_len=1024),
        trainer_class=FixedDistance,
        max_completion_length=600,
        old_logprobs="recomputed",
        **{f"vllm_importance_sampling_{name}": value for name, value in settings.items()},
    )
    inputs = scored(trainer)
    assert {t.num_sampled_tokens for t in trainer.trajectories} == {400}
    ratio = inputs["importance_sampling_ratio"]
    if ratio.shape[1] > 1:
        ratio = ratio[trained(inputs).bool()]
    torch.testing.assert_close(ratio, torch.full_like(ratio, expected), rtol=1e-4, atol=0)
    metrics = trainer._metrics["train"]
    assert metrics["sampling/importance_sampling_ratio/mean"] == [pytest.approx(expected, rel=1e-4)]
    assert metrics["sampling/sampling_logp_difference/mean"] == [pytest.approx(0.01, rel=1e-4)]


def test_an_engine_without_logprobs_stops_the_run_at_the_first_batch(make_trainer, story):
    trainer = make_trainer(SpoiledEngine(story, lambda _: Fault.MISSING_LOGPROBS))
    with pytest.raises(EngineError, match=r"failed all 4.*gave logprob None for token 0"):
        scored(trainer)


# ---- logs and memory ----


def test_the_completions_table_shows_calls_and_results(
    make_trainer, story, capsys, tmp_path, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "200")
    trainer = make_trainer(story, log_completions=True, max_steps=1, logging_steps=1)
    trainer.train()
    printed = capsys.readouterr().out
    assert all(text in printed for text in ("calculator", "1 + 2", ANSWER))
    (table,) = (tmp_path / "out" / "completions").glob("*.parquet")
    kept = Dataset.from_parquet(str(table), cache_dir=str(tmp_path))["completion"]
    calls = [m["tool_calls"] for row in kept for m in row if m.get("tool_calls")]
    results = [m["content"] for row in kept for m in row if m["role"] == "tool"]
    assert len(calls) == 2 and results == ["3", "5"]


def test_rollouts_leave_nothing_in_memory(make_trainer, agent):
    tokenizer = agent[1]

    def script(request):
        called = CALL in tokenizer.decode(request.prompt_ids)
        return [*ids_of(tokenizer, ANSWER if called else CALL), tokenizer.eos_token_id]

    engine = ScriptedRolloutEngine(tokenizer, script, max_model_len=1024)
    trainer = make_trainer(engine, record_rollouts=True)

    def roll_out(num_rollouts):
        for _ in range(num_rollouts):
            scored(trainer)
            trainer._metrics["train"].clear()  # as TRL's log does
            engine.requests.clear()
        gc.collect()
        return tracemalloc.get_traced_memory()[0], len(gc.get_objects())

    tracemalloc.start()
    try:
        seen = [roll_out(10), roll_out(25), roll_out(25)]
    finally:
        tracemalloc.stop()
    # what is kept grows each time; a cache that happens to fill grows once
    grown_bytes, grown_objects = (
        min(second - first, third - second) for first, second, third in zip(*seen, strict=True)
    )
    assert grown_bytes < 100 * 400  # of 100 trajectories, each has 800 bytes of ids
    assert grown_objects < 100 * 10  # and more than 50 objects


@pytest.mark.parametrize("name", ["torch", pytest.param("vllm", marks=pytest.mark.vllm)])
def test_an_engine_keeps_no_tensor_of_an_earlier_learner(agent, agent_path, name, request):
    engine = (
        TorchRolloutEngine(*agent) if name == "torch" else request.getfixturevalue("vllm_engine")
    )
    learner = AutoModelForCausalLM.from_pretrained(agent_path, dtype="float32")
    engine.update_policy(learner)
    tensors = [weakref.ref(parameter) for parameter in learner.parameters()]
    del learner
    engine.update_policy(agent[0])
    gc.collect()
    assert [tensor() for tensor in tensors] == [None] * len(tensors)
