"""Recorded rollouts for tests of what reads them: real ones, hostile ones, many long ones."""

import json
import random

import torch
from tiny_tasks import SMALL_KINDS, calculator, get_price, get_weather, make_tasks

from agent_vllm import ChatFormat, Limits, TorchRolloutEngine, rollout_batch
from agent_vllm.inspect.viewer import write_page
from agent_vllm.record import read_rollouts
from agent_vllm.training import predicted_logprobs
from trl_integration.recording import RecordedRollout, TrainingRecord

TOOLS = [calculator, get_weather, get_price]
NUM_GROUPS, NUM_SAMPLES = 3, 4
ROLLOUTS = ((0, "train"), (0, "train"), (1, "train"), (1, "eval"))


def write(path, lines):
    """One JSON line each; text is written as it is."""
    path.write_text(
        "".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines)
    )
    return path


def read(path):
    """Records by id."""
    return {record["id"]: record for record in read_rollouts(path)}


def page_of(path):
    output = path.with_suffix(".html")
    write_page(path, output)
    return output.as_uri()


def pick(records, wanted):
    return next(line for line in records.values() if wanted(line))


def short_with_calls(records):
    """The shortest in which a turn follows a call."""
    lines = [line for line in records.values() if len(line.turns) > 1]
    return min(lines, key=lambda line: len(line["completion_ids"]))


def record(record_id="t0", **fields):
    """A line with a turn that calls a tool, its result and an answer; `fields` differ."""
    messages = [
        {"role": "user", "content": "1 + 2?"},
        {"role": "assistant", "content": "", "tool_calls": [call("add", {"a": 1, "b": 2})]},
        {"role": "tool", "name": "add", "content": "3"},
        {"role": "assistant", "content": "It is 3."},
    ]
    return {
        "schema": 3,
        "id": record_id,
        "session": 1,
        "time": 1.0,
        "mode": "train",
        **dict.fromkeys(("step", "rank", "rollout", "group", "generation"), 0),
        **dict.fromkeys(("seed", "temperature", "max_model_len", "started", "error", "thinking")),
        "tools": [],
        "rewards": {"right": 1.0},
        "advantage": 0.5,
        "trained": True,
        "learner_logprobs": None,
        "row": {},
        "stop_reason": "answered",
        "messages": messages,
        "num_prompt_messages": 1,
        "prompt_ids": [1, 2],
        "turns": [
            turn([3, 4], [-0.5, -0.25], "<call>", calls=[("add", "3", "ok")], suffix=[5]),
            turn([6, 7], [-2.0, -0.125], "It is 3."),
        ],
        "token_texts": {str(i): f"t{i} " for i in range(1, 8)},
        **fields,
    }


def turn(token_ids, logprobs, text="", *, calls=(), suffix=None, spans=()):
    """A turn of a line; calls are (name, content, status), spans the model's, then the calls'."""
    results = [dict(zip(("name", "content", "status"), result, strict=True)) for result in calls]
    span, *call_spans = [*spans, *[None] * (1 + len(results) - len(spans))]
    return {
        "segment": {"token_ids": token_ids, "logprobs": logprobs, "policy_version": 0},
        "text": text,
        "span": span,
        "calls": [
            {"call": {"name": r["name"], "arguments": None}, "result": r, "span": call_span}
            for r, call_span in zip(results, call_spans, strict=True)
        ],
        "suffix": suffix and {"token_ids": suffix},
    }


def span(kind, name, start_s, end_s):
    return {"kind": kind, "name": name, "start_s": start_s, "end_s": end_s}


def call(name, arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


# ---- real ones ----


def record_real(folder, model, tokenizer):
    """As a trainer records: two rollouts of a step, one of the next, an evaluation. The file."""
    record = TrainingRecord(folder, 0, tokenizer, None)
    with TorchRolloutEngine(model, tokenizer) as engine:
        chat = ChatFormat.from_tokenizer(tokenizer)
        for seed, (step, mode) in enumerate(ROLLOUTS):
            rows = make_tasks("train", NUM_GROUPS, seed=seed, kinds=SMALL_KINDS)
            trajectories = rollout_batch(
                engine,
                chat,
                [row["prompt"] for row in rows],
                [TOOLS] * NUM_GROUPS,
                num_generations=NUM_SAMPLES,
                limits=Limits(max_turns=3, max_completion_tokens=90),
                temperature=1.3,
                seed=seed,
            )
            learner = _learner_logprobs(model, trajectories)
            rollout = _recorded_rollout(trajectories, rows, step, mode, seed)
            if mode == "eval":
                record.write(rollout, learner)
            else:
                record.amend(mode, record.write(rollout), learner)
    record.close()
    return folder / "rollouts.jsonl"


def _learner_logprobs(model, trajectories):
    """`[B, C]`, as the trainer has them."""
    rows = []
    for t in trajectories:
        ids = torch.tensor([t.prompt_ids + t.completion_ids])
        with torch.no_grad():
            logits = model.eval()(ids).logits
        rows.append(predicted_logprobs(logits, ids, temperature=1.3)[0, len(t.prompt_ids) - 1 :])
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def _recorded_rollout(trajectories, rows, step, mode, seed):
    samples = range(len(trajectories))
    return RecordedRollout(
        trajectories=trajectories,
        rows=[{"answer": rows[i // NUM_SAMPLES]["answer"]} for i in samples],
        tools=[[tool.__name__ for tool in TOOLS]] * len(samples),
        rewards=[{"short": 1 / len(t.completion_ids), "turns": t.num_turns} for t in trajectories],
        advantages=[(-1) ** i * 0.75 * (i % 3) for i in samples],
        trained=[mode == "train"] * len(samples),
        mode=mode,
        step=step,
        rank=0,
        num_generations=NUM_SAMPLES,
        num_processes=1,
        seed=seed,
        started=1.0,
        temperature=1.3,
        max_model_len=512,
    )


# ---- hostile ones ----

EVIL = (
    "</script><script>window.ran = 1</script><!--<script>"
    "<img src=x onerror='window.ran = 2'><style>*{display:none}</style> javascript:window.ran=3 "
    "\u202eright to left\u2066 \u2028 \u0000 \u001b[31m \ud83d lone ]]> &lt; {{style}} "
)


def hostile_record(record_id):
    """The same text in every field that takes any, and numbers that JSON does not have."""
    message = {"role": EVIL, "name": EVIL, "content": EVIL, "reasoning_content": EVIL}
    answer = {**message, "role": "assistant", "tool_calls": [call(EVIL, {EVIL: 2**70})]}
    return record(
        record_id,
        mode=EVIL,
        error=EVIL,
        seed=2**70,
        time=1e300,
        row={EVIL: EVIL, "__proto__": [EVIL]},
        tools=[EVIL],
        rewards={EVIL: float("nan"), "__proto__": 1.0},
        messages=[message, {**message, "role": "user"}, answer, {**message, "role": "tool"}],
        num_prompt_messages=2,
        token_texts={"1": EVIL, "2": "\ud83d", "3": "", "4": "\n\t ", "5": "\u202e"},
        turns=[
            turn([3, 4], [-0.5, -0.25], EVIL * 2, calls=[(EVIL, EVIL, "failed")], suffix=[5]),
            turn([6, 7], [-2.0, -0.125], EVIL, spans=[span("model", EVIL, 0.0, 1.0)]),
        ],
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
    turns = [
        turn(
            ids,
            [-rng.expovariate(2) for _ in ids],
            f"<turn>{text}",
            calls=[("search", result, rng.choice(["ok", "ok", "failed"]))],
            suffix=result_ids,
            spans=[
                span("model", f"turn {j}", 2 * j, 2 * j + 0.9),
                span("tool", "search", 2 * j + 1, 2 * j + 1.9),
            ][: rng.randint(0, 2)],
        )
        for j, (ids, result_ids, text, result) in enumerate(
            zip(parts[1::2], parts[2::2], texts[1::2], texts[2::2], strict=True)
        )
    ]
    logprobs = [x for t in turns for x in t["segment"]["logprobs"] + [0.0] * length]
    messages = [{"role": "user", "content": f"question {i} {texts[0]}"}]
    for text, result in zip(texts[1::2], texts[2::2], strict=True):
        messages += [
            {
                "role": "assistant",
                "content": text,
                "tool_calls": [call("search", {"text": text[:60]})],
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
        turns=turns,
        learner_logprobs=[logprob + rng.gauss(0, 0.01) if logprob else 0.0 for logprob in logprobs],
        token_texts={str(token): vocabulary[token] for part in parts for token in part},
    )
