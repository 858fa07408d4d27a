"""A prefix tree of rows: each distinct prediction once; a model computes what it does on rows."""

import random

import pytest
import torch
from learners import learner, packed_model
from peft import LoraConfig, get_peft_model
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Mamba2Config,
    Mamba2ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from agent_vllm.training import (
    TREE_ATTENTION,
    PrefixTree,
    predicted_logprobs,
    reason_against_tree,
    tree_inputs,
    tree_logprobs,
    use_tree_attention,
)

LONGEST_ROW = 64
LR, LEFT, RIGHT = ("both", "left", "right")


def padded(rows, side=RIGHT):
    """Pad rows with id 9, which is a token as well; `both` moves each row by its number."""
    width = max(map(len, rows)) + (len(rows) if side == LR else 0)
    ids, mask = torch.full((len(rows), width), 9), torch.zeros(len(rows), width, dtype=torch.long)
    for number, row in enumerate(rows):
        first = {LR: number, LEFT: width - len(row), RIGHT: 0}[side]
        ids[number, first : first + len(row)] = torch.tensor(row, dtype=torch.long)
        mask[number, first : first + len(row)] = 1
    return ids, mask


def random_rows(seed):
    """Rows that branch from each other at random places, with few ids: much is shared by chance."""
    rand = random.Random(seed)
    rows = [[rand.randrange(3) for _ in range(rand.randint(1, 12))]]
    for _ in range(rand.randrange(8)):
        kept = rand.choice(rows)[: rand.randint(0, 12)]
        own = [rand.randrange(12) for _ in range(rand.randint(0, 6))]
        rows.append(kept + own or [0])
    return rows


SHAPES = {
    "one prompt": [[1, 2, 3, 4, *own] for own in ([5, 6, 7], [5, 8], [6, 6, 6, 6])],
    "shared turns": [[1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 5, 8, 7, 7], [1, 2, 3, 4, 4], [1, 2, 3]],
    "groups of one": [[1, 2, 3, 4], [2, 3, 4], [3, 4, 4, 4, 5]],
    "all equal": [[1, 2, 3, 4]] * 4,
    "a row that is a prefix of another": [[1, 2, 3], [1, 2, 3, 4, 5], [1, 2]],
    "empty completions": [[1, 2], [1, 2], [1, 2, 3], [1]],
    "a single row": [[4, 3, 2, 1]],
    "random 1": random_rows(1),
    "random 2": random_rows(2),
}


# ---- the tree alone ----


def test_a_tree_as_it_is_drawn():
    A, B, C, D, E, F = range(6)
    tree = PrefixTree.of_rows(*padded([[A, B, C, D], [A, B, C, E], [A, B, F]]))
    assert tree.input_ids.tolist() == [[A, B, C, C, B]]
    assert tree.next_ids.tolist() == [[B, C, D, E, F]]
    assert tree.position_ids.tolist() == [[0, 1, 2, 2, 1]]
    # B C D / B C E / B F and padding
    assert tree.positions[tree.is_real].tolist() == [0, 1, 2, 0, 1, 3, 0, 4]
    assert [branch.runs for branch in tree.branches] == [
        (slice(0, 3),),
        (slice(0, 2), slice(3, 4)),
        (slice(0, 1), slice(4, 5)),
    ]


@pytest.mark.parametrize("side", [LEFT, RIGHT, LR])
def test_every_distinct_prediction_has_one_position_and_its_own_path(side):
    for seed in range(1000):
        rows = random_rows(seed)
        tree = PrefixTree.of_rows(*padded(rows, side))
        distinct = {tuple(row[: i + 1]) for row in rows for i in range(1, len(row))}
        assert tree.num_tokens == len(distinct)
        assert tree.num_row_tokens == sum(map(len, rows))
        seen_by = paths(tree)
        for row, positions, is_real in zip(rows, tree.positions, tree.is_real, strict=True):
            for i, position in enumerate(positions[is_real].tolist()):
                assert tree.next_ids[0, position] == row[i + 1]
                assert tree.position_ids[0, position] == i
                assert tree.input_ids[0, seen_by[position]].tolist() == row[: i + 1]


def paths(tree):
    """Return the positions that each position sees, in order, itself last."""
    found = {}
    for branch in tree.branches:
        path = [position for run in branch.runs for position in range(run.start, run.stop)]
        first = len(path) - branch.num_positions
        found |= {path[i]: path[: i + 1] for i in range(first, len(path))}
    return found


def test_a_label_is_given_where_any_row_is_scored():
    ids, mask = padded([[1, 2, 3, 4], [1, 2, 3, 5]])
    tree = PrefixTree.of_rows(ids, mask)
    is_scored = torch.tensor([[False, False, True], [False, True, True]])
    assert tree.labels(is_scored).tolist() == [[-100, 3, 4, 5]]
    assert tree.labels(torch.zeros_like(is_scored)).tolist() == [[-100] * 4]


def test_a_gap_in_a_row_is_refused():
    with pytest.raises(ValueError, match="got a gap"):
        PrefixTree.of_rows(torch.ones(1, 4).long(), torch.tensor([[1, 0, 1, 1]]))


# ---- a model on it ----


def llama():
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2,
        )
    )  # fmt: skip


def qwen3():
    return learner(num_hidden_layers=2)


def lora():
    torch.manual_seed(0)
    config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return get_peft_model(qwen3(), config)


def checkpointed():
    model = qwen3().train()
    model.gradient_checkpointing_enable()
    return model


MODELS = {
    "qwen3": qwen3, "llama": llama, "moe": packed_model, "lora": lora,
    "checkpointed": checkpointed,
}  # fmt: skip


def weights(ids, mask):
    """Weigh each prediction, as advantages and masks do."""
    rand = torch.Generator().manual_seed(0)
    return torch.randn(ids[:, 1:].shape, generator=rand) * (mask[:, 1:] * mask[:, :-1])


def step(model, logprobs, ids, mask):
    """Return the loss, the logprobs of real predictions and all gradients."""
    model.zero_grad()
    loss = (logprobs * weights(ids, mask)).sum() / len(ids)
    loss.backward()
    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return loss.item(), logprobs.detach() * (mask[:, 1:] * mask[:, :-1]), grads


def compare(model, ids, mask, temperature=1.0, tolerance=1e-6):
    logits = model(input_ids=ids, attention_mask=mask).logits
    loss, rows, row_grads = step(model, predicted_logprobs(logits, ids, temperature), ids, mask)
    use_tree_attention(model, LONGEST_ROW)
    tree = PrefixTree.of_rows(ids, mask)
    tree_loss, logprobs, grads = step(model, tree_logprobs(model, tree, temperature), ids, mask)
    assert abs(loss - tree_loss) <= tolerance * max(1.0, abs(loss))
    assert (rows - logprobs).abs().max() <= 10 * tolerance
    largest = max(grad.abs().max() for grad in row_grads)
    assert len(grads) == len(row_grads) > 0
    for grad, row_grad in zip(grads, row_grads, strict=True):
        assert (grad - row_grad).abs().max() <= tolerance * largest


@pytest.mark.parametrize("side", [LEFT, RIGHT])
@pytest.mark.parametrize("rows", SHAPES.values(), ids=SHAPES)
def test_loss_and_gradients_are_those_of_the_rows(rows, side):
    compare(qwen3(), *padded(rows, side), temperature=0.7)


@pytest.mark.parametrize("name", MODELS)
def test_models_of_several_kinds(name):
    compare(MODELS[name](), *padded(random_rows(3), LEFT))


def test_random_rows_on_a_model():
    for seed in range(4, 24):
        compare(llama(), *padded(random_rows(seed), RIGHT))


def test_bfloat16_is_as_near_as_its_rounding():
    ids, mask = padded(random_rows(3))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        compare(llama(), ids, mask, tolerance=0.02)


def test_rows_are_computed_as_before():
    ids, mask = padded(random_rows(3), LEFT)
    model = qwen3().eval()
    before = model(input_ids=ids, attention_mask=mask).logits
    use_tree_attention(model, LONGEST_ROW)
    assert torch.equal(model(input_ids=ids, attention_mask=mask).logits, before)
    arguments = {"max_new_tokens": 4, "do_sample": False, "attention_mask": mask[:1]}
    generated = model.generate(ids[:1], **arguments)
    model.set_attn_implementation("sdpa")
    assert torch.equal(model.generate(ids[:1], **arguments), generated)


def test_the_attention_is_not_saved(tmp_path):
    model = qwen3()
    use_tree_attention(model, LONGEST_ROW)
    model.save_pretrained(tmp_path)
    assert TREE_ATTENTION not in (tmp_path / "config.json").read_text()


def test_no_mask_of_the_packed_row_is_built():
    tree = PrefixTree.of_rows(*padded(SHAPES["one prompt"]))
    assert tree_inputs(tree)["attention_mask"].numel() == 1


# ---- what a tree can't serve ----


def eager():
    return learner(attn_implementation="eager")


def gpt2():
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=32, n_embd=16, n_layer=1, n_head=2, attn_pdrop=0.0)
    )


def mamba():
    return Mamba2ForCausalLM(
        Mamba2Config(vocab_size=32, hidden_size=16, num_hidden_layers=1, num_heads=4, head_dim=8)
    )


def linear_attention():
    return Qwen3NextForCausalLM(
        Qwen3NextConfig(
            vocab_size=32, hidden_size=16, intermediate_size=16, moe_intermediate_size=8,
            num_hidden_layers=1, num_experts=2, num_experts_per_tok=1,
            layer_types=["linear_attention"],
        )
    )  # fmt: skip


def with_dropout():
    config = LoraConfig(r=2, target_modules=["q_proj"], lora_dropout=0.05)
    return get_peft_model(learner(), config)


def rope(**parameters):
    return learner(rope_parameters={"rope_theta": 10000.0, **parameters})


REFUSED = {
    'attention is "eager"': eager,
    "positions are not rotary": gpt2,
    "sliding window (8) is shorter than a row may be (64)": lambda: learner(
        sliding_window=8, use_sliding_window=True, max_window_layers=0
    ),
    "layers are not all of plain attention (recurrent)": mamba,
    "layers are not all of plain attention (linear_attention)": linear_attention,
    "dropout is 0.1": lambda: learner(attention_dropout=0.1),
    "dropout is 0.05": with_dropout,
    "rotary positions depend on the longest row": lambda: rope(rope_type="dynamic", factor=2.0),
    "positions are not counted": lambda: rope(rope_type="default", mrope_section=[1, 1, 2]),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_a_tree_cannot_serve_is_refused_by_name(reason):
    with pytest.raises(ValueError, match="prefix tree can serve") as error:
        use_tree_attention(REFUSED[reason](), LONGEST_ROW)
    assert f"whose {reason}" in str(error.value)


def test_what_it_serves_has_no_reason():
    wide = learner(sliding_window=LONGEST_ROW, use_sliding_window=True, max_window_layers=0)
    for model in [*(build() for build in MODELS.values()), wide]:
        assert reason_against_tree(model, LONGEST_ROW) is None
