"""The pinned behaviours: decisions that a user's training depends on. Changing one needs a line in
CHANGELOG.md.

Tokens
 1. A sampled token is trained, the end token of every turn included; nothing else is.
 2. Where the sampled end is not the template's own, the template's is written behind it, untrained.
 3. `collate` puts a token's mask and logprob in the column before the token.

Endings
 4. `max_turns=0` never asks the model: it is a limit, not "unset", and not a truncation.
 5. Calls of the last allowed turn are run; their results close the trajectory, with no header.
 6. Calls after the last allowed tool round are neither run nor answered.
 7. Nothing of a turn that was cut by length is run, however whole its call looks.
 8. The completion limit counts observations; the model is never asked for zero tokens.
 9. Results that leave no room for another token stay out of the ids and of the messages alike.
10. Of a context and a completion limit that are both reached, the context is named.
11. Truncated endings can be left out of the loss; running out of turns or valid calls is not one.
12. A trajectory that the engine or its user failed is never trained, but keeps its place in the
    batch.

Tools
13. Calls in the thinking block are thoughts.
14. One malformed call does not keep the others of its turn from running.
15. A string is shown as it is, any other value as JSON, trouble as `{"error": ...}`.
16. Leaving `arguments` out is an error for a tool that takes any; an empty object is an answer.
17. A result that was cut is cut in the messages too; `tool_results` keeps the whole.
18. Of several calls, a final one that succeeds ends the episode after all of them have run.

Rows
19. Trajectories come prompt-major, in the rows' order.
20. Each generation draws its own thinking switch and seeds, from its row and number alone.
21. A row's `tools`: None is all of the trainer's, an empty list is none.
"""

import pytest
from fakes import (
    ADD,
    END,
    NUM_ADD,
    PAD,
    add,
    by_prompt,
    call,
    ids_of,
    sampled,
    shout,
    tail,
    trajectory,
    user,
)

from agent_vllm.chat import ChatFormat
from agent_vllm.errors import EngineError
from agent_vllm.rollout import rollout_batch, rollout_single
from agent_vllm.settings import Limits
from agent_vllm.tools import Tool, as_tool, select_tools, tools_by_name
from agent_vllm.training import collate
from agent_vllm.types import StopReason
from trl_integration.fields import exclusion, to_trl


@pytest.fixture
def tell(chat, scripted):
    """One trajectory from its turns."""

    def run(*turns, tools=(add, shout), max_model_len=4096, **limits):
        engine = scripted(list(turns), max_model_len=max_model_len)
        return rollout_single(engine, chat, user(), list(tools), limits=Limits(**limits))

    return run


def test_01_sampled_tokens_are_trained(tell):
    t = tell(ADD, "3")
    trained = [i for i, bit in zip(t.completion_ids, t.completion_mask, strict=True) if bit]
    assert trained == t.segments[0].token_ids + t.segments[2].token_ids
    assert (t.segments[0].token_ids[-1], t.segments[2].token_ids[-1]) == (END, END)


def test_02_the_templates_end_follows_another_end(tokenizer, scripted):
    chat = ChatFormat.from_tokenizer(tokenizer, eos_token_ids=[PAD])
    engine = scripted([[*ids_of(tokenizer, ADD), PAD], "3"], eos_token_ids=[PAD])
    t = rollout_single(engine, chat, user(), [add])
    around = slice(NUM_ADD - 1, NUM_ADD + 1)
    # columns:                                                   sampled, written
    assert (t.completion_ids[around], t.completion_mask[around]) == ([PAD, END], [1, 0])


def test_03_columns_are_shifted():
    batch = collate([trajectory([1, 2], sampled(3))], PAD)
    # columns:                                2  3
    assert batch.completion_mask.tolist() == [[0, 1]]


def test_04_zero_turns(tell):
    t = tell(ADD, max_turns=0)
    assert (t.segments, t.stop_reason.is_truncated) == ([], False)


def test_05_calls_of_the_last_turn_are_run(tell):
    assert tail_of(tell(ADD, max_turns=1)) == "tool"


def test_06_calls_after_the_last_round_are_not(tell):
    assert tail_of(tell(ADD, max_tool_rounds=1)) == "assistant"


def tail_of(t):
    """The role of the last message, which is also what the ids end with."""
    assert t.segments[-1].is_sampled == (t.messages[-1]["role"] == "assistant")
    return t.messages[-1]["role"]


def test_07_a_cut_turn_runs_nothing(tell):
    t = tell(ADD + "x", max_new_tokens=NUM_ADD)
    assert (t.stop_reason, t.tool_results) == (StopReason.TURN_LENGTH, [])


def test_08_the_completion_limit_counts_observations(tell):
    t = tell(ADD, "x" * 99, max_completion_tokens=NUM_ADD + 30)
    assert len(t.completion_ids) == NUM_ADD + 30
    assert t.stop_reason == StopReason.COMPLETION_BUDGET


def test_09_results_without_room_stay_out(tell):
    t = tell(ADD, max_completion_tokens=NUM_ADD + 3)
    assert [len(segment.token_ids) for segment in t.segments] == [NUM_ADD]
    assert [m["role"] for m in t.completion_messages] == ["assistant"]
    assert [r.content for r in t.tool_results] == ["3"]


def test_10_the_context_is_named_first(tell):
    room = 40
    num_prompt = len(tell("ok").prompt_ids)
    t = tell("x" * 99, max_model_len=num_prompt + room, max_completion_tokens=room)
    assert t.stop_reason == StopReason.CONTEXT_FULL


def test_11_running_out_of_turns_is_trained(tell):
    cut, turns, calls = (
        tell("x" * 9, max_new_tokens=5),
        tell(ADD, max_turns=1),
        tell(call("nope"), max_invalid_calls=1),
    )
    rows = [cut, turns, calls]
    fields = to_trl(rows, PAD, [exclusion(t, mask_truncated=True) for t in rows])
    assert [any(mask) for mask in fields.tool_mask] == [False, True, True]


def test_12_a_failed_row_keeps_its_place_and_is_not_trained(chat, scripted):
    script = by_prompt(chat, one=[ADD, *[EngineError("lost")] * 2], two=["ok"])
    rows = rollout_batch(scripted(script), chat, [user("one"), user("two")], [[add]] * 2)
    assert [t.messages[0]["content"] for t in rows] == ["one", "two"]
    fields = to_trl(rows, PAD, list(map(exclusion, rows)))
    assert list(map(sum, fields.tool_mask)) == [0, len("ok") + 1]


def test_13_calls_in_thoughts_are_not_run(tell):
    t = tell(f"<think>{ADD}</think>three")
    assert (t.stop_reason, t.tool_results) == (StopReason.ANSWERED, [])


def test_14_a_malformed_call_stands_alone(tell):
    t = tell("<tool_call>{oops</tool_call>" + ADD, "ok")
    assert [r.status for r in t.tool_results] == ["invalid", "ok"]


def test_15_text_of_results(tell):
    t = tell(ADD + call("shout", text="x") + call("nope"), "ok")
    assert [r.content for r in t.tool_results] == [
        "3",
        "X",
        '{"error": "Unknown tool \'nope\'. Available tools: add, shout."}',
    ]


def test_16_no_arguments_is_not_an_empty_object(tell):
    def greet(name: str = "you") -> str:
        """
        Greet.

        Args:
            name: whom
        """
        return f"hi {name}"

    left_out = '<tool_call>{"name": "greet"}</tool_call>'
    t = tell(left_out + call("greet"), "ok", tools=[greet])
    assert [(r.status, "hi you" in r.content) for r in t.tool_results] == [
        ("invalid", False),
        ("ok", True),
    ]


def test_17_a_cut_result_is_cut_in_the_messages(tell):
    t = tell(call("shout", text="x" * 200), "ok", max_tool_result_tokens=30)
    assert t.tool_results[0].content == "X" * 200
    assert t.messages[2]["content"] == "X" * 9 + "\n[... 191 tokens cut]"


def test_18_all_calls_of_the_final_turn_are_run(tell, chat):
    final = Tool(schema=as_tool(shout).schema, function=shout, ends_episode=True)
    t = tell(call("shout", text="x") + ADD, tools=[final, add])
    assert t.stop_reason == StopReason.ENVIRONMENT_DONE
    assert tail(chat, t).endswith("tool\nX<|im_end|>\n<|im_start|>tool\n3<|im_end|>\n")


def test_19_prompt_major(chat, scripted):
    rows = rollout_batch(scripted(["ok"]), chat, [user("a"), user("b")], num_generations=2)
    assert [t.messages[0]["content"] for t in rows] == ["a", "a", "b", "b"]


def test_20_a_sample_does_not_depend_on_the_batch_around_it(chat, scripted):
    def draws(*rows):
        engine = scripted(lambda request: engine.encode_turn(str(request.seed)))
        trajectories = rollout_batch(
            engine, chat, rows, num_generations=4, seed=3, thinking_ratio=0.5
        )
        return [(t.thinking, t.turn_outputs) for t in trajectories]

    alone, beside = draws(user("a")), draws(user("a"), user("b"))
    assert alone == beside[:4]
    assert len({outputs[0] for _, outputs in beside}) == 8


def test_21_none_and_an_empty_list_of_tools():
    tools = tools_by_name([add, shout])
    assert [tool.name for tool in select_tools(None, tools)] == ["add", "shout"]
    assert select_tools([], tools) == []
