"""Measure how far an engine's logprobs are from those of its learner."""

import asyncio

import torch
from tiny_tasks import SMALL_KINDS, calculator, get_price, get_weather, make_tasks

from agent_vllm import ChatFormat, Limits, collate, rollout_batch
from agent_vllm.training import logprob_gap, predicted_logprobs

TOLERANCE = 1e-5
TOOLS = [calculator, get_weather, get_price]


def gap(engine, model, prompts=((20, 30, 40), (50,), tuple(range(60, 100)))):
    """Largest distance of a sampled logprob from a plain forward of the learner."""
    gaps = []
    for prompt in map(list, prompts):
        sampled = asyncio.run(engine.generate(prompt, max_new_tokens=12, seed=1))
        ids = torch.tensor([prompt + sampled.token_ids])
        with torch.no_grad():
            logprobs = predicted_logprobs(model.eval()(input_ids=ids).logits, ids)
        gaps.append(logprobs[0, len(prompt) - 1 :] - torch.tensor(sampled.logprobs))
    return max(difference.abs().max().item() for difference in gaps)


def sample(engine, tokenizer, temperature, num_rows=12):
    rows = make_tasks("train", num_rows, kinds=SMALL_KINDS)
    return rollout_batch(
        engine,
        ChatFormat.from_tokenizer(tokenizer),
        [row["prompt"] for row in rows],
        [TOOLS] * len(rows),
        num_generations=2,
        limits=Limits(max_turns=4, max_completion_tokens=200),
        temperature=temperature,
        seed=5,
    )


def distance(model, trajectories, temperature):
    """Largest |engine - learner| over sampled tokens, by the shifted layout of `collate`."""
    batch = collate(trajectories, pad_token_id=0)
    with torch.no_grad():
        logits = model.eval()(batch.input_ids, attention_mask=batch.attention_mask).logits
    learner = predicted_logprobs(logits, batch.input_ids, temperature)
    return logprob_gap(batch.old_per_token_logps, learner, batch.completion_mask).max
