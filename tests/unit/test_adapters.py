"""PEFT learners as weights: merged out of place, or the adapter by itself."""

import copy

import pytest
import torch
from adapted import adapted
from learners import Wrapper, learner, packed_model
from peft import LoHaConfig, PromptTuningConfig, TaskType, get_peft_model

from agent_vllm.engines.learner import LearnerWeights
from agent_vllm.engines.learner.peft import is_tied
from agent_vllm.errors import WeightSyncError

IDS = torch.arange(8)[None]


def state(model):
    """Every tensor of the learner with where it lives, and what its layers think is merged."""
    tensors = {n: (t.data_ptr(), t.clone()) for n, t in model.state_dict().items()}
    return tensors, [getattr(m, "merged_adapters", None) for m in model.modules()]


def same(before, after):
    return (
        before[1] == after[1]
        and before[0].keys() == after[0].keys()
        and all(
            before[0][n][0] == after[0][n][0] and torch.equal(before[0][n][1], after[0][n][1])
            for n in before[0]
        )
    )


def plain_with(weights, like):
    """The plain model on these weights."""
    model = learner(tied=is_tied(like)).to(next(iter(weights.values())).dtype)
    model.load_state_dict(weights)
    return model.eval()


KINDS = {
    "lora": {},
    "rslora": {"use_rslora": True},
    "patterns": {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"v_proj": 7}},
    "dora": {"use_dora": True},
    "embedding": {"target_modules": ["embed_tokens", "q_proj"]},
    "modules_to_save": {"modules_to_save": ["lm_head"]},
    "norm_to_save": {"modules_to_save": ["norm"], "target_modules": ["v_proj"]},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wrap", [lambda m: m, lambda m: Wrapper(torch.compile(m))])
def test_merged_weights_are_the_learners_under_plain_names(kind, wrap):
    model = adapted(learner(), **KINDS[kind])
    if "modules_to_save" in kind or "norm" in kind:
        trained = [
            m.modules_to_save["default"] for m in model.modules() if hasattr(m, "original_module")
        ]
        with torch.no_grad():
            for module in trained:
                module.weight.add_(0.5 * torch.randn_like(module.weight))
    before = state(model)
    weights = {name: tensor.clone() for name, tensor in LearnerWeights(wrap(model)).tensors()}
    assert same(before, state(model))
    assert {n: t.shape for n, t in weights.items()} == LearnerWeights(learner()).shapes
    assert list(LearnerWeights(wrap(model)).shapes) == list(weights)
    expected = model.eval()(IDS).logits
    merged = plain_with(weights, model)(IDS).logits
    torch.testing.assert_close(merged, expected, atol=1e-5, rtol=0)
    base = plain_with(dict(LearnerWeights(learner()).tensors()), learner())(IDS).logits
    assert (base - expected).abs().max() > 1e-4  # the adapter does something


def test_of_several_adapters_the_active_one_counts():
    model = adapted(learner(), modules_to_save=["norm"])
    model.add_adapter("ref", model.peft_config["default"])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".ref." in name:
                parameter.add_(1.0)
    for active in ("default", "ref"):
        model.set_adapter(active)
        weights = {name: tensor.clone() for name, tensor in LearnerWeights(model).tensors()}
        merged = plain_with(weights, model)(IDS).logits
        torch.testing.assert_close(merged, model.eval()(IDS).logits, atol=1e-5, rtol=1e-5)
    with model.disable_adapter():
        weights = dict(LearnerWeights(model).tensors())
        merged = plain_with(weights, model)(IDS).logits
        torch.testing.assert_close(merged, model.eval()(IDS).logits, atol=1e-6, rtol=0)


def test_a_merged_learner_is_taken_as_it_is():
    model = adapted(learner())
    expected = model.eval()(IDS).logits
    model.merge_adapter()
    merged = plain_with(dict(LearnerWeights(model).tensors()), model)(IDS).logits
    torch.testing.assert_close(merged, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_hundred_syncs_leave_the_base_bit_identical(dtype):
    model = adapted(learner().to(dtype))
    before = state(model)
    for _ in range(100):
        for _, tensor in LearnerWeights(model).tensors():
            tensor.sum()
    assert same(before, state(model))


def test_the_check_notices_merging_in_place():
    model = adapted(learner().bfloat16())
    before = state(model)
    model.merge_adapter()
    assert not same(before, state(model))
    model.unmerge_adapter()
    assert not same(before, state(model))  # rounding: bf16 doesn't come back


def test_a_load_that_raises_leaves_the_learner_unmerged():
    model = adapted(learner())
    before = state(model)
    with pytest.raises(RuntimeError, match="full"):
        for name, _ in LearnerWeights(model).tensors():
            if "v_proj" in name:
                raise RuntimeError("the engine's memory is full")
    assert same(before, state(model))


def test_adapters_on_packed_experts_are_merged_too():
    model = packed_model()
    wanted = {"target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj"]}
    model = adapted(model, **wanted)
    before = state(model)
    weights = {name: tensor.clone() for name, tensor in LearnerWeights(model).module_tensors()}
    assert same(before, state(model))
    plain = packed_model()
    plain.load_state_dict(weights)
    expected = model.eval()(IDS).logits
    torch.testing.assert_close(plain.eval()(IDS).logits, expected, atol=1e-6, rtol=0)
    assert (packed_model().eval()(IDS).logits - expected).abs().max() > 1e-5


def test_other_adapters_that_change_weights_are_merged_by_pefts_own_layers():
    config = LoHaConfig(r=2, target_modules=["q_proj"], init_weights=False)
    model = get_peft_model(learner(), config)
    merged = plain_with({k: v.clone() for k, v in LearnerWeights(model).tensors()}, model)(
        IDS
    ).logits
    torch.testing.assert_close(merged, model.eval()(IDS).logits, atol=1e-6, rtol=0)
    assert "which is no LoRA" in LearnerWeights(model).why_not_adapter_only


def test_adapters_that_change_no_weights_are_refused():
    config = PromptTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=2)
    with pytest.raises(WeightSyncError, match=r"PROMPT_TUNING.*Use LoRA"):
        LearnerWeights(get_peft_model(learner(), config)).tensors()


# ---- the adapter by itself ----


def test_an_adapter_alone_has_its_layers_scaling_in_b_and_is_a_copy():
    model = adapted(learner(), rank_pattern={"q_proj": 2}, alpha_pattern={"v_proj": 7})
    tensors, merged = (
        LearnerWeights(Wrapper(model)).adapter_tensors(),
        dict(LearnerWeights(model).tensors()),
    )
    base = dict(LearnerWeights(model).tensors(merged=False))
    assert LearnerWeights(model).adapter_rank == 4
    layers = {name.rsplit(".", 2)[0] for name in tensors}
    assert layers == {name.removesuffix(".weight") for name in merged if "_proj" in name}
    for layer in layers:
        a, b = (tensors[f"{layer}.lora_{part}.weight"] for part in "AB")
        whole = base[f"{layer}.weight"] + b @ a
        torch.testing.assert_close(whole, merged[f"{layer}.weight"], atol=1e-6, rtol=0)
    owned = {p.data_ptr() for p in model.parameters()}
    assert not owned & {t.data_ptr() for t in tensors.values()}


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("dora", "is adapted by Dora"),
        ("embedding", "is a Embedding, no linear layer"),
        ("modules_to_save", "ModulesToSaveWrapper, which is no LoRA"),
    ],
)
def test_what_can_not_be_sent_alone_is_told_by_name(kind, reason):
    model = adapted(learner(), **KINDS[kind])
    assert reason in LearnerWeights(model).why_not_adapter_only
    with pytest.raises(WeightSyncError, match='adapter_sync="merged"'):
        LearnerWeights(model).adapter_tensors()


def test_weights_that_train_beside_the_adapter_are_noticed():
    model = adapted(learner())
    assert LearnerWeights(model).why_not_adapter_only is None
    model.get_base_model().model.norm.weight.requires_grad = True
    assert (
        LearnerWeights(model).why_not_adapter_only
        == "model.norm.weight is trained beside the adapter"
    )
    assert LearnerWeights(learner()).why_not_adapter_only == "it has no adapter"
    merged = copy.deepcopy(adapted(learner()))
    merged.merge_adapter()
    assert "merged or disabled" in LearnerWeights(merged).why_not_adapter_only
