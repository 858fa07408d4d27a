"""One of two gloo processes with an FSDP2 learner; `test_sharded.py` starts both.

`python sharded_learner.py RANK DIRECTORY ENGINES`: for each engine, and a learner trained whole or
by LoRA, trains a step, syncs, samples on this rank alone and writes what it found to
`DIRECTORY/RANK.json`. A plain copy of the model is trained by the same step beside it.
"""

import asyncio
import copy
import json
import sys
import weakref
from contextlib import closing
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
from adapted import adapted
from fakes import chatml_tokenizer
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from agent_vllm import create_rollout_engine
from agent_vllm.engines.learner import LearnerWeights, plain_model
from agent_vllm.training import predicted_logprobs

IDS = torch.arange(10, 26).view(2, 8)


def small_model(vocab_size):
    torch.manual_seed(0)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=vocab_size, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=1, head_dim=32, max_position_embeddings=256,
            tie_word_embeddings=True, attn_implementation="sdpa",
        )
    )  # fmt: skip


def shard(model):
    """FSDP2 on each layer and on the rest, a checkpoint wrapper around each layer."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plain = plain_model(model)
    for layer in plain.model.layers:
        fully_shard(layer, mesh=mesh)
    for index, layer in enumerate(plain.model.layers):
        plain.model.layers[index] = checkpoint_wrapper(layer)
    fully_shard(plain, mesh=mesh)
    return model


def train_a_step(*models):
    for model in models:
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        model(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()
        model.zero_grad()


def gap(engine, model, prompt):
    sampled = asyncio.run(engine.generate(prompt, max_new_tokens=8, seed=1))
    ids = torch.tensor([prompt + sampled.token_ids])
    with torch.no_grad():
        logprobs = predicted_logprobs(model(input_ids=ids).logits, ids)[0, len(prompt) - 1 :]
    return (logprobs - torch.tensor(sampled.logprobs)).abs().max().item()


class Gathers:
    """Counts what is gathered, and the most bytes of it that were alive at one time."""

    def __enter__(self):
        self.number, self.live, self.peak = 0, 0, 0
        self._full_tensor = DTensor.full_tensor

        def full_tensor(tensor, **kwargs):
            whole = self._full_tensor(tensor, **kwargs)
            self.number += 1
            self._change(whole.nbytes)
            weakref.finalize(whole, self._change, -whole.nbytes)
            return whole

        DTensor.full_tensor = full_tensor
        return self

    def _change(self, num_bytes):
        self.live += num_bytes
        self.peak = max(self.peak, self.live)

    def __exit__(self, *_):
        DTensor.full_tensor = self._full_tensor


def report(rank, engine_name, is_adapted):
    tokenizer = chatml_tokenizer()
    model = small_model(len(tokenizer))
    model = adapted(model) if is_adapted else model
    plain = copy.deepcopy(model)
    model = shard(model)
    found = {"gaps": []}
    with create_rollout_engine(engine_name, model, tokenizer) as engine:
        train_a_step(model, plain)
        with torch.no_grad():
            model(input_ids=IDS)  # leaves the root unsharded
        with Gathers() as gathers:
            names = LearnerWeights(model).shapes
        found["num_gathered_for_shapes"] = gathers.number
        found["same_names"] = list(names.items()) == list(LearnerWeights(plain).shapes.items())
        engine.update_policy(model)
        if rank == 0:  # a rollout on one rank alone: nobody else takes part
            found["gaps"] = [gap(engine, plain, [20, 30, 40]), gap(engine, plain, [50])]
            found["stale"] = gap(engine, small_model(len(tokenizer)), [50])
        dist.barrier()
        train_a_step(model, plain)  # the learner still trains after a sync
        engine.update_policy(model)
        found["gaps"].append(gap(engine, plain, [60, 61 + rank]))
    found["largest_difference"] = max(
        (ours - theirs).abs().max().item()
        for (_, ours), (_, theirs) in zip(
            LearnerWeights(model).tensors(), LearnerWeights(plain).tensors(), strict=True
        )
    )
    with Gathers() as gathers:
        LearnerWeights(model).join_gathers()  # a reader that keeps nothing
    found["peak_bytes"] = gathers.peak
    found["largest_bytes"] = max(tensor.nbytes for _, tensor in LearnerWeights(plain).tensors())
    found["stops_early"] = stops_early(rank, model)
    return found


def stops_early(rank, model):
    """One rank fails at its third tensor, the other needs no values: nobody hangs."""
    if rank == 0:
        with closing(LearnerWeights(model).tensors()) as weights:
            return [name for name, _ in islice(weights, 3)]
    LearnerWeights(model).join_gathers()
    return None


if __name__ == "__main__":
    rank, directory, engines = sys.argv[1:]
    dist.init_process_group(
        "gloo", init_method=f"file://{directory}/store", rank=int(rank), world_size=2
    )
    found = {
        f"{engine} {trained}": report(int(rank), engine, trained == "lora")
        for engine in engines.split()
        for trained in ("whole", "lora")
    }
    Path(directory, f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
