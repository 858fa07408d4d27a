"""An engine whose logprobs are too far from the learner's, in the real trainer: its tokens are not
trained, and the run says why."""

import copy
import math

import pytest
import torch
from trainers import TOOLS
from transformers import TrainerCallback

from agent_vllm import TorchRolloutEngine
from agent_vllm.errors import RunCheckError
from agent_vllm.record import read_rollouts
from trl_integration.logprob_gap import max_mean_gap


class ForgetfulEngine(TorchRolloutEngine):
    """Keeps the weights that it was built with."""

    def _load_weights(self, model):
        pass


class SpoiledEngine(TorchRolloutEngine):
    """Reports one logprob per sequence that is not the model's."""

    async def _sample(self, request):
        completion = await super()._sample(request)
        completion.logprobs[0] -= 8.7
        return completion


def alternating_reward(completions, **_):
    return [float(index % 2) for index in range(len(completions))]


@pytest.fixture
def make_trainer(new_trainer):
    def make(engine, **changes):
        defaults = {
            "max_steps": 3, "max_turns": 1, "tools": TOOLS, "reward_funcs": alternating_reward,
            "lr_scheduler_type": "constant", "learning_rate": 2e-3, "record_rollouts": True,
        }  # fmt: skip
        return new_trainer(engine, **{**defaults, **changes})

    return make


def parameters(model):
    return torch.cat([p.detach().flatten().clone() for p in model.parameters()])


def logged(trainer, name):
    return [log[name] for log in trainer.state.log_history if name in log]


def tokens(trainer, name):
    return logged(trainer, f"rollout/{name}_tokens")


def trained_rows(trainer, step):
    records = read_rollouts(f"{trainer.args.output_dir}/rollouts.jsonl")
    return [record["trained"] for record in records if record["step"] == step]


def test_an_engine_that_forgets_to_load_weights_is_noticed_and_not_trained_on(
    make_trainer, agent, capfd
):
    model, tokenizer = agent
    engine = ForgetfulEngine(copy.deepcopy(model), tokenizer)
    trainer = make_trainer(engine)
    trainer.train(), engine.close()
    gaps = logged(trainer, "sampling/logprob_gap/mean")
    assert gaps[0] < 1e-4 and gaps[1] > 0.01  # right until the learner has moved
    assert tokens(trainer, "mismatched") == [0.0, *tokens(trainer, "sampled")[1:]]
    assert tokens(trainer, "trained") == [tokens(trainer, "sampled")[0], 0.0, 0.0]
    assert logged(trainer, "grad_norm")[1:] == [0.0, 0.0]
    assert [trained_rows(trainer, step) for step in range(3)] == [[True] * 8, *[[False] * 8] * 2]
    printed = capfd.readouterr().out
    told = f"The engine's logprobs are {gaps[1]:.3g} nats from the learner's on average"
    assert printed.count("Warning: The engine's logprobs are") == printed.count(told) == 1


def test_a_step_without_trained_tokens_leaves_the_weights_as_they_are(make_trainer, agent):
    """Momentum and weight decay would move them."""
    engine = ForgetfulEngine(copy.deepcopy(agent[0]), agent[1])
    seen = []

    class Look(TrainerCallback):
        def on_step_end(self, args, state, control, model, **_):
            seen.append(parameters(model))

    trainer = make_trainer(engine, weight_decay=0.1, callbacks=[Look()])
    before = parameters(trainer.model)
    trainer.train(), engine.close()
    assert not torch.equal(before, seen[0])
    assert torch.equal(seen[0], seen[1]) and torch.equal(seen[1], seen[2])


def test_one_spoiled_token_is_enough_and_the_run_can_stop(make_trainer, agent):
    engine = SpoiledEngine(*agent)
    trainer = make_trainer(engine, on_warning="stop")
    before = parameters(trainer.model)
    with pytest.raises(RunCheckError, match=r"8.7 at worst.*`rollout/mismatched_tokens`"):
        trainer.train()
    engine.close()
    assert torch.equal(before, parameters(trainer.model))


def test_the_rest_of_a_rollout_is_not_trained_when_a_part_of_it_is_wrong(make_trainer, agent):
    """Two micro-batches in a step; the second one's logprobs are spoiled."""
    trainer = make_trainer(
        "torch", max_steps=1, per_device_train_batch_size=4, gradient_accumulation_steps=2
    )
    compute_loss, losses = trainer._compute_loss, []

    def spoil_the_second(model, inputs):
        if losses:
            inputs["sampling_per_token_logps"] = inputs["sampling_per_token_logps"] - 1.0
        losses.append(compute_loss(model, inputs))
        return losses[-1]

    trainer._compute_loss = spoil_the_second
    trainer.train()
    (trained,), (mismatched,) = tokens(trainer, "trained"), tokens(trainer, "mismatched")
    assert trained > 0 and mismatched > 0 and trained + mismatched == tokens(trainer, "sampled")[0]
    assert losses[0] != 0.0 and losses[1] == 0.0
    assert sorted(trained_rows(trainer, 0)) == [False] * 4 + [True] * 4


@pytest.mark.parametrize("settings", [{"max_logprob_gap": math.inf}, {"top_p": 0.9}])
def test_without_a_bound_everything_is_trained(make_trainer, agent, settings):
    engine = SpoiledEngine(*agent)
    trainer = make_trainer(engine, max_steps=1, **settings)
    trainer.train(), engine.close()
    assert tokens(trainer, "mismatched") == [0.0]
    assert tokens(trainer, "trained") == tokens(trainer, "sampled")


def test_the_bound_is_that_of_the_coarsest_dtype():
    exact, coarse = max_mean_gap(torch.float32), max_mean_gap(torch.bfloat16)
    assert exact < 0.04 < coarse
    assert max_mean_gap(torch.float32, torch.float32) == exact
    for other in (torch.bfloat16, torch.float16, None):
        assert max_mean_gap(torch.float32, other) == coarse
