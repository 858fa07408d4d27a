"""Recorded rollouts for tests of what reads them: real ones, hostile ones, many long ones."""

import json
import random

import torch
from tiny_tasks import SMALL_KINDS, calculator, get_price, get_weather, make_tasks

from agent_vllm import ChatFormat, Limits, TorchRolloutEngine, rollout_batch
from agent_vllm.inspect.record import trajectory_record
from agent_vllm.inspect.view import write_report
from agent_vllm.logprobs import predicted_logprobs

TOOLS = [calculator, get_weather, get_price]
NUM_GROUPS, NUM_SAMPLES = 3, 4


def write(path, lines):
    """One JSON line each; text is written as it is."""
    path.write_text(
        "".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines)
    )
    return path


def read(path):
    """Records by id, amendments left out."""
    lines = map(json.loads, path.read_text().splitlines())
    return {line["id"]: line for line in lines if "id" in line}


def report_of(path):
    output = path.with_suffix(".html")
    write_report(path, output)
    return output.as_uri()


def pick(records, wanted):
    return next(line for line in records.values() if wanted(line))


def calls_a_tool(line):
    return len(line["turn_outputs"]) > 1 and len(line["completion_ids"]) < 60


def record(record_id="t0", **fields):
    """A trajectory with a turn that calls a tool, its result and an answer."""
    return {
        "schema": 2,
        "id": record_id,
        "step": 0,
        "mode": "train",
        "group": 0,
        "generation": 0,
        "rewards": {"right": 1.0},
        "advantage": 0.5,
        "trained": True,
        "stop_reason": "answered",
        "messages": [
            {"role": "user", "content": "1 + 2?"},
            {"role": "assistant", "content": "", "tool_calls": [call("add", {"a": 1, "b": 2})]},
            {"role": "tool", "name": "add", "content": "3"},
            {"role": "assistant", "content": "It is 3."},
        ],
        "num_prompt_messages": 1,
        "prompt_ids": [1, 2],
        "completion_ids": [3, 4, 5, 6, 7],
        "completion_mask": [1, 1, 0, 1, 1],  # call, end, result, answer, end
        "logprobs": [-0.5, -0.25, 0.0, -2.0, -0.125],
        "token_texts": {str(i): f"t{i} " for i in range(1, 8)},
        "turn_outputs": ["<call>", "It is 3."],
        "tool_results": [{"name": "add", "content": "3", "status": "ok"}],
        **fields,
    }


def call(name, arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


# ---- real ones ----


def real_records(model, tokenizer):
    """Two train steps and an evaluation of the tiny agent, with the learner's own logprobs."""
    with TorchRolloutEngine(model, tokenizer) as engine:
        for step, mode in ((0, "train"), (1, "train"), (1, "eval")):
            rows = make_tasks("train", NUM_GROUPS, seed=step, kinds=SMALL_KINDS)
            trajectories = rollout_batch(
                engine,
                ChatFormat.from_tokenizer(tokenizer),
                [row["prompt"] for row in rows],
                [TOOLS] * NUM_GROUPS,
                num_generations=NUM_SAMPLES,
                limits=Limits(max_turns=3, max_completion_tokens=90),
                temperature=1.3,
                seed=step,
            )
            for i, trajectory in enumerate(trajectories):
                yield _real_record(trajectory, i, step, mode, model, tokenizer)


def _real_record(trajectory, i, step, mode, model, tokenizer):
    ids = trajectory.prompt_ids + trajectory.completion_ids
    with torch.no_grad():
        logits = model.eval()(torch.tensor([ids])).logits
    learner = predicted_logprobs(logits, torch.tensor([ids]), temperature=1.3)[0].tolist()
    learner = learner[len(trajectory.prompt_ids) - 1 :]
    pairs = zip(learner, trajectory.completion_mask, strict=True)
    return {
        **trajectory_record(trajectory),
        "schema": 2,
        "id": f"{mode}-{step}-{i}",
        "step": step,
        "mode": mode,
        "rank": 0,
        "group": i // NUM_SAMPLES,
        "generation": i % NUM_SAMPLES,
        "seed": 5 + i,
        "temperature": 1.3,
        "tools": [tool.__name__ for tool in TOOLS],
        "rewards": {"short": 1.0 / len(trajectory.completion_ids), "turns": trajectory.num_turns},
        "advantage": (-1) ** i * 0.75 * (i % 3),
        "trained": mode == "train",
        "learner_logprobs": [value if bit else None for value, bit in pairs],
        "token_texts": {str(token): tokenizer.decode([token]) for token in set(ids)},
        "time": 1.0 * i,
    }


# ---- hostile ones ----

EVIL = (
    "</script><script>window.ran = 1</script><!--<script>"
    "<img src=x onerror='window.ran = 2'><style>*{display:none}</style> javascript:window.ran=3 "
    "\u202eright to left\u2066 \u2028 \u0000 \u001b[31m \ud83d lone ]]> &lt; {{style}} "
)


def hostile_record(record_id):
    """The same text in every field that is text, and numbers that JSON does not have."""
    message = {"role": EVIL, "name": EVIL, "content": EVIL, "reasoning_content": EVIL}
    turn = {**message, "role": "assistant", "tool_calls": [call(EVIL, {EVIL: 2**70})]}
    return record(
        record_id,
        mode=EVIL,
        stop_reason=EVIL,
        error=EVIL,
        seed=2**70,
        time=EVIL,
        tools=[EVIL],
        rewards={EVIL: float("nan"), "__proto__": 1.0},
        messages=[message, {**message, "role": "user"}, turn, {**message, "role": "tool"}],
        num_prompt_messages=2,
        token_texts={"1": EVIL, "2": "\ud83d", "3": "", "4": "\n\t ", "5": "\u202e"},
        turn_outputs=[EVIL * 2],
        tool_results=[{"name": EVIL, "content": EVIL, "status": "constructor"}],
        spans=[{"kind": EVIL, "name": EVIL, "start_s": 0.0, "end_s": 1.0}],
    )


# ---- many long ones ----


def long_records(num_trajectories, num_tokens, seed=0):
    """Six turns and six results each, with words of a vocabulary as large as a model's."""
    rng = random.Random(seed)
    vocabulary = [
        " " + "".join(rng.choices("etaoinshrdlu", k=rng.randint(1, 7))) for _ in range(30000)
    ]
    vocabulary[::17] = ["\n"] * len(vocabulary[::17])
    for i in range(num_trajectories):
        yield _long_record(i, num_tokens, vocabulary, rng)


def _long_record(i, num_tokens, vocabulary, rng):
    length = num_tokens // 13
    parts = [
        [min(int(rng.paretovariate(0.6) * 10), 29999) for _ in range(length)] for _ in range(13)
    ]
    texts = ["".join(vocabulary[token] for token in part) for part in parts]
    mask = ([1] * length + [0] * length) * 6
    logprobs = [-rng.expovariate(2) if bit else 0.0 for bit in mask]
    messages = [{"role": "user", "content": f"question {i} {texts[0]}"}]
    for turn, result in zip(texts[1::2], texts[2::2], strict=True):
        messages += [
            {
                "role": "assistant",
                "content": turn,
                "tool_calls": [call("search", {"text": turn[:60]})],
            },
            {"role": "tool", "name": "search", "content": result},
        ]
    return record(
        f"t{i}",
        step=i // 64,
        group=i % 64 // 8,
        generation=i % 8,
        rewards={"right": rng.random()},
        advantage=rng.gauss(0, 1),
        messages=messages,
        prompt_ids=parts[0],
        completion_ids=[token for part in parts[1:] for token in part],
        completion_mask=mask,
        logprobs=logprobs,
        learner_logprobs=[logprob + rng.gauss(0, 0.01) if logprob else 0.0 for logprob in logprobs],
        token_texts={str(token): vocabulary[token] for part in parts for token in part},
        turn_outputs=[f"<turn>{text}" for text in texts[1::2]],
        tool_results=[
            {"name": "search", "content": text, "status": rng.choice(["ok", "ok", "failed"])}
            for text in texts[2::2]
        ],
        spans=[
            {
                "kind": "tool" if j % 2 else "model",
                "name": f"span {j}",
                "start_s": j,
                "end_s": j + 0.9,
            }
            for j in range(rng.randint(2, 12))
        ],
    )
