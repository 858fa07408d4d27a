"""The learner on prefix trees in the real trainer: a step is that of TRL's rows, or uses them."""

import pytest
import trainers
from peft import LoraConfig
from trainers import TOOLS
from transformers import Qwen3Model, TrainerCallback

from trl_integration.shared_prefix import grouped_order


def alternating_reward(completions, **_):
    return [float(index % 3) for index in range(len(completions))]


class Gradients(TrainerCallback):
    """Keeps the gradients of every optimizer step."""

    def __init__(self):
        self.steps = []

    def on_pre_optimizer_step(self, *_, model, **__):
        grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        self.steps.append({name: grad.clone() for name, grad in grads.items()})


@pytest.fixture
def train(agent_path, tmp_path):
    """Train for a step; return the trainer and the gradients of each step."""
    built = []

    def run(shared_prefix, **changes):
        defaults = {
            "max_steps": 1, "max_turns": 2, "max_completion_length": 60, "tools": TOOLS,
            "reward_funcs": alternating_reward, "max_grad_norm": 0.0,
        }  # fmt: skip
        gradients = Gradients()
        model, tokenizer = trainers.fresh(agent_path)
        agent = changes.pop("model", model), tokenizer
        folder = tmp_path / str(len(built))
        built.append(
            trainers.build(
                agent, folder, "torch", shared_prefix=shared_prefix, callbacks=[gradients],
                **{**defaults, **changes},
            )
        )  # fmt: skip
        built[-1].train()
        return built[-1], gradients.steps

    yield run
    for trainer in built:
        trainer.close()


def logged(trainer, name):
    return [log[name] for log in trainer.state.log_history if name in log]


def distance(a, b):
    """Return the largest difference of two gradients over the largest entry."""
    largest = max(value.abs().max().item() for value in a.values())
    assert largest > 0
    return max((a[name] - b[name]).abs().max().item() for name in a) / largest


SETTINGS = {
    "the defaults": {},
    "sequence ratios": {"importance_sampling_level": "sequence", "loss_type": "grpo"},
    "a reference model": {"beta": 0.1},
    "entropy": {"top_entropy_quantile": 0.5, "entropy_coef": 0.1},
    "recomputed": {"old_logprobs": "recomputed", "num_iterations": 2, "max_steps": 2},
    "truncated ones are masked": {"mask_truncated_completions": True},
    "checkpointing": {"gradient_checkpointing": True},
    "lora": {"peft_config": LoraConfig(r=4, target_modules=["q_proj", "v_proj"])},
    "lora with a reference": {
        "peft_config": LoraConfig(r=4, target_modules=["q_proj", "v_proj"]),
        "beta": 0.1,
    },
    "four micro-batches": {
        "per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, "num_generations": 8,
    },
    "more steps than one per rollout": {
        "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2,
        "steps_per_generation": 4, "max_steps": 2,
    },
}  # fmt: skip
LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")
SETTINGS |= {f"loss {name}": {"loss_type": name} for name in LOSSES}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_step_is_that_of_the_rows(train, name):
    rows, row_grads = train("off", **SETTINGS[name])
    trees, tree_grads = train("on", **SETTINGS[name])
    assert len(row_grads) == len(tree_grads) == trees.args.max_steps
    assert max(map(distance, row_grads, tree_grads)) <= 1e-5
    assert logged(trees, "loss") == pytest.approx(logged(rows, "loss"), abs=5e-6)
    for ledger in ("sampled", "trained", "truncated"):
        metric = f"rollout/{ledger}_tokens"
        assert logged(trees, metric) == logged(rows, metric)
    assert min(logged(trees, "shared_prefix/ratio")) > 1
    assert not logged(rows, "shared_prefix/ratio")


def test_a_seeded_run_has_the_same_rewards(train):
    """Float noise parts the curves in the end; the first steps are the same."""
    settings = {"reward_funcs": [*trainers.REWARDS, length_reward], "max_steps": 4}
    rows, _ = train("off", **settings)
    trees, _ = train("auto", **settings)
    assert len(set(logged(rows, "reward"))) > 1
    assert logged(trees, "reward") == logged(rows, "reward")


def length_reward(completion_ids, **_):
    return [len(ids) / 100 for ids in completion_ids]


def test_an_evaluation_uses_trees_as_well(train):
    trees, _ = train("on", eval_dataset=trainers.rows(4, "test"), per_device_eval_batch_size=8)
    assert trees.evaluate()["eval_shared_prefix/ratio"] > 1


def test_bfloat16_is_near(train):
    rows, row_grads = train("off", bf16=True)
    trees, tree_grads = train("on", bf16=True)
    assert max(map(distance, row_grads, tree_grads)) <= 0.1
    assert logged(trees, "entropy") == pytest.approx(logged(rows, "entropy"), rel=0.02)


# ---- rows instead ----


class KeepsTheTreeToItself(Qwen3Model):
    """Its layers never hear of the tree."""

    def forward(self, *args, prefix_tree=None, **kwargs):
        return super().forward(*args, **kwargs)


@pytest.fixture
def forgetful(agent_path):
    model, _ = trainers.fresh(agent_path)
    model.model.__class__ = KeepsTheTreeToItself
    return {"model": model}


def test_a_first_batch_that_disagrees_is_computed_by_rows_with_a_warning(train, forgetful, capfd):
    _, row_grads = train("off", max_steps=2)
    trees, tree_grads = train("auto", max_steps=2, **forgetful)
    assert max(map(distance, row_grads, tree_grads)) <= 1e-5
    warning = "logprobs on a prefix tree differ from those on rows by"
    assert capfd.readouterr().out.count(warning) == 1
    assert len(logged(trees, "shared_prefix/ratio")) == 1  # of the first batch


def test_a_first_batch_that_disagrees_is_an_error_where_trees_are_demanded(train, forgetful):
    with pytest.raises(ValueError, match=r"must be \"auto\" or \"off\" here, got \"on\": .* nats"):
        train("on", **forgetful)


DROPOUT = {"peft_config": LoraConfig(r=4, target_modules=["q_proj"], lora_dropout=0.05)}
UNSERVED = {
    "dropout is 0.05": DROPOUT,
    "`torch_compile` needs one shape": {"torch_compile": True},
}


def test_what_a_tree_cannot_serve_is_computed_by_rows_and_named(train, capfd):
    trees, _ = train("auto", **DROPOUT)
    line = "once per row: Qwen3ForCausalLM's dropout is 0.05"
    assert capfd.readouterr().out.count(line) == 1
    assert not logged(trees, "shared_prefix/ratio")


@pytest.mark.parametrize("reason", UNSERVED)
def test_what_a_tree_cannot_serve_is_refused_where_trees_are_demanded(train, reason):
    with pytest.raises(ValueError, match='here, got "on"') as error:
        train("on", **UNSERVED[reason])
    assert reason in str(error.value)


def test_an_unknown_choice_is_refused(tmp_path):
    with pytest.raises(ValueError, match="`shared_prefix` must be one of"):
        trainers.config(tmp_path, shared_prefix="yes")


# ---- whole groups ----


def test_groups_are_put_together_and_batches_are_even():
    # two batches of four rows; groups 0 and 2 are long
    groups = [0, 1, 2, 3, 3, 2, 1, 0]
    prompts = [9, 1, 9, 1, 1, 9, 1, 9]
    order = grouped_order(groups, prompts, [2] * 8, num_batches=2)
    assert [groups[row] for row in order] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert sorted(order) == list(range(8))


def test_a_group_larger_than_a_batch_is_cut():
    order = grouped_order([0, 1, 0, 0, 1, 0], [1] * 6, [1] * 6, num_batches=3)
    assert order == [0, 2, 3, 5, 1, 4]
