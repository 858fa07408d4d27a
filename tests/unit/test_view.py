"""The viewer's page in a real browser: list, views, keys, themes, a large record."""

import itertools
import re
import statistics
import time

import pytest
from browser import VIEWS, contrast, needs_chromium
from records import (
    NUM_GROUPS,
    NUM_SAMPLES,
    call,
    long_records,
    page_of,
    pick,
    record,
    span,
    turn,
    write,
)

from agent_vllm.inspect.viewer import write_page
from agent_vllm.inspect.viewer.data import read_page_data

pytestmark = needs_chromium

NUM_LONG, NUM_LONG_TOKENS = 1000, 4000


# ---- list ----


def counts(tab):
    tab.page.wait_for_timeout(250)  # the search waits for the end of typing
    while "earching" in (text := tab.page.inner_text("#counts")):
        tab.settle()
    return int(text.split()[0].replace(",", ""))


FILTERS = {
    "mode": ("eval", lambda line: line["mode"] == "eval"),
    "stop_reason": ("answered", lambda line: line["stop_reason"] == "answered"),
    "calls": (
        "some failed or invalid",
        lambda line: any(result.status != "ok" for result in line["tool_results"]),
    ),
    "step_from": ("1", lambda line: line["step"] >= 1),
    "turns_to": ("1", lambda line: len(line["turn_outputs"]) <= 1),
    "reward_from": ("2", lambda line: sum(line["rewards"].values()) >= 2),
}


@pytest.mark.parametrize("name", FILTERS)
def test_a_filter_keeps_what_the_file_says(tab, real, name):
    address, records = real
    value, passes = FILTERS[name]
    tab.open(address)
    tab.page.locator("#filters summary").click()
    field = tab.page.locator(f"[name={name}]")
    field.select_option(value) if name in ("mode", "stop_reason", "calls") else field.fill(value)
    expected = sum(map(passes, records.values()))
    assert 0 < expected < len(records)
    assert counts(tab) == expected
    tab.page.locator("[type=reset]").click()
    assert counts(tab) == len(records)


def test_search_finds_what_stands_in_any_message(tab, real):
    address, records = real
    text = next(iter(records.values()))["messages"][0]["content"][:12]
    tab.open(address)
    tab.press("/")
    tab.page.keyboard.type(text.upper())
    found = [line for line in records.values() if text in str(line["messages"])]
    assert counts(tab) == len(found) < len(records)


def test_the_list_is_in_order_of_reward(tab, real):
    address, records = real
    tab.open(address)
    tab.page.locator("[name=order]").select_option("reward, highest first")
    rewards = sorted((sum(line["rewards"].values()) for line in records.values()), reverse=True)
    shown = [float(text.split()[0]) for text in tab.texts(".row-reward")]
    assert shown == [pytest.approx(reward, rel=1e-2) for reward in rewards[: len(shown)]]


# ---- chat, group, timeline, run ----


def shown_pairs(tab):
    """Each call beside its result: name, arguments, status, result."""
    return [
        tuple(" ".join(part.split()) for part in pair)
        for pair in zip(
            tab.texts(".call h5"),
            tab.texts(".call > :last-child"),
            tab.texts(".result h5"),
            tab.texts(".result > :last-child"),
            strict=True,
        )
    ]


def test_calls_stand_beside_their_results(tab, real):
    address, records = real
    line = pick(records, lambda line: len(line["tool_results"]) > 0)
    tab.open(address, view="chat", id=line["id"])
    tab.page.get_by_text("Dataset row").click()
    (answer,) = tab.texts(".messages + .fold dd, .part + .messages + .fold dd")
    assert answer == str(line["row"]["answer"])
    results = [message["content"] for message in line["messages"] if message["role"] == "tool"]
    statuses = [result.status for result in line["tool_results"]]
    shown = shown_pairs(tab)
    assert [pair[3] for pair in shown] == results
    assert [pair[2].split()[-1] for pair in shown] == statuses


def test_a_result_whose_call_could_not_be_read_stands_alone(tab, tmp_path):
    calls = [call("add", {"a": 1}), call("find", {"id": 2**70})]
    results = [("unknown", "bad", "invalid"), ("add", "3", "ok"), ("find", "x", "failed")]
    line = record(
        messages=[
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": "<call", "tool_calls": calls},
            *({"role": "tool", "name": name, "content": text} for name, text, _ in results),
        ],
        turns=[turn([3], [-0.5], calls=results)],
    )
    tab.open(page_of(write(tmp_path / "r.jsonl", [line])), view="chat")
    assert shown_pairs(tab) == [
        ("call that could not be read", "See the text of the turn.", "result ▲ invalid", "bad"),
        ("call add", '{ "a": 1 }', "result ✓ ok", "3"),
        ("call find", '{ "id": 1180591620717411303424 }', "result ✕ failed", "x"),
    ]


def test_reasoning_and_system_prompt_are_folded(tab, tmp_path):
    line = record()
    line["messages"][0]["role"] = "system"
    line["messages"][3]["reasoning_content"] = "Let me think."
    tab.open(page_of(write(tmp_path / "r.jsonl", [line])), view="chat")
    folded = tab.texts(".messages details:not([open]) > summary")
    assert folded == ["System prompt", "Raw output", "Reasoning"]
    tab.page.get_by_text("Reasoning", exact=True).click()
    assert tab.page.get_by_text("Let me think.").is_visible()


def controls_named(text):
    """Control characters, which an untrained model writes, are spelled out on the page."""
    names = {"\0": "NUL", "\x1b": "ESC", "\r": "CR", "\n": "\n", "\t": "\t"}
    return re.sub(r"[\x00-\x1f\x7f-\x9f]", lambda m: names.get(m[0], f"U+{ord(m[0]):04X}"), text)


def test_a_group_shows_its_samples(tab, real):
    address, records = real
    tab.open(address, view="group", id="train-0-0-17")  # of the step's second rollout
    group = [records[f"train-0-0-{i}"] for i in range(16, 20)]
    assert {(line["rollout"], line["group"]) for line in group} == {(1, 4)}
    answers = [
        [m["content"] for m in line["messages"] if m["role"] == "assistant"][-1] or "(no answer)"
        for line in group
    ]
    assert tab.texts(".sample .answer .text") == list(map(controls_named, answers))
    assert tab.texts(".sample[aria-current] h3 button") == ["Sample 1"]
    rewards = [sum(line["rewards"].values()) for line in group]
    shown = [float(text) for text in tab.texts(".sample .facts > div:first-child dd")]
    assert shown == [pytest.approx(reward, rel=1e-3) for reward in rewards]


def test_what_differs_in_its_key_stands_apart(tab, tmp_path):
    """Rollouts and sessions are batches of their own; ranks too, but they may share a group."""
    time = span("model", "turn", 0, 1)
    keys = [{}, {"rollout": 1}, {"rank": 1}, {"session": 2}, {"mode": "eval"}, {"step": 1}]
    lines = [
        record(f"t{i}-{j}", generation=j, turns=[turn([3], [-0.5], spans=[time])], **key)
        for i, key in enumerate(keys)
        for j in range(2)
    ]
    address = page_of(write(tmp_path / "r.jsonl", lines))
    numbers = []
    for i in range(len(keys)):
        tab.open(address, view="timeline", id=f"t{i}-0")
        num_lines = tab.page.locator(".line").count()
        tab.open(address, view="group", id=f"t{i}-0")
        numbers.append((num_lines, tab.page.locator(".sample").count()))
    assert numbers == [(2, 4), (2, 2), (2, 4), (2, 2), (2, 2), (2, 2)]
    assert set(tab.texts(".row-place")) == {
        f"{batch}group 0, sample {sample}"
        for sample in range(2)
        for batch in (
            "Step 0, train · ", "Step 0, train, rollout 1 · ", "Step 0, train · rank 1, ",
            "Step 0, train, session 2 · ", "Step 0, eval · ", "Step 1, train · ",
        )
    }  # fmt: skip


def test_the_timeline_marks_what_bounds_the_batch(tab, real):
    address, records = real
    tab.open(address, view="timeline", id="train-0-0-0")
    batch = {f"train-0-0-{i}": records[f"train-0-0-{i}"] for i in range(NUM_GROUPS * NUM_SAMPLES)}
    ends = {i: max(span.end_s for span in line["spans"]) for i, line in batch.items()}
    assert tab.page.locator(".line").count() == NUM_GROUPS * NUM_SAMPLES
    assert tab.page.locator(".bar").count() == sum(len(line["spans"]) for line in batch.values())
    last = batch[max(ends, key=ends.get)]
    (critical,) = tab.texts(".line.is-critical .line-name")
    assert critical == f"◆ group {last['group']}, sample {last['generation']}"
    assert "bounds the batch" in tab.page.locator(".line.is-critical").get_attribute("aria-label")


def test_the_runs_table_has_the_files_figures(tab, real):
    address, records = real
    tab.open(address)
    tab.page.get_by_text("The figures as a table").click()
    rows = [text.split("\t") for text in tab.texts("tbody tr")]
    keys = [("1", "eval"), ("0", "train"), ("1", "train")]
    assert sorted(row[:2] for row in rows) == sorted(map(list, keys))
    for step, mode, number, reward, *_ in rows:
        rewards = [
            sum(line["rewards"].values())
            for line in records.values()
            if (str(line["step"]), line["mode"]) == (step, mode)
        ]
        assert int(number) == len(rewards)
        assert float(reward) == pytest.approx(statistics.fmean(rewards), rel=1e-3)


# ---- keyboard ----


def test_keys_do_what_the_help_says(tab, real):
    tab.open(real[0])
    selected = "[role=option][aria-selected=true]"
    positions = []
    for key in "jjk":
        tab.press(key)
        positions.append(tab.page.locator(selected).get_attribute("aria-posinset"))
    assert positions == ["2", "3", "2"]
    pressed = "[data-colouring][aria-pressed=true]"
    shown = []
    for key in ("r", "c", "1", "2", "3", "4", "g", "t"):
        tab.press(key)
        tab.settle()
        (view,) = tab.texts("[role=tab][aria-selected=true]")
        shown.append((view, *(text.split()[0] for text in tab.texts(pressed))))
    assert shown == [
        ("Run",), ("Chat",), ("Tokens", "Mask"), ("Tokens", "Logprob"), ("Tokens", "Gap"),
        ("Tokens", "Advantage"), ("Group",), ("Timeline",),
    ]  # fmt: skip
    tab.press("/")
    tab.page.keyboard.type("jkt?")
    assert tab.page.locator("#search").input_value() == "jkt?"
    tab.press("Escape", "?")
    assert tab.page.locator("#help").is_visible()
    tab.page.locator("#keys-on").uncheck()
    tab.press("Escape", "r")
    tab.settle()
    assert tab.texts("[role=tab][aria-selected=true]") == ["Timeline"]


@pytest.mark.parametrize("view", VIEWS)
def test_the_focus_is_seen_wherever_tab_leads(tab, real, view):
    tab.open(real[0], view=view, id="train-0-0-0")
    outlined = """() => {
      const style = getComputedStyle(document.activeElement);
      return [document.activeElement === document.body, style.outlineStyle, style.outlineWidth];
    }"""
    for _ in range(16):
        tab.press("Tab")
        is_body, style, width = tab.page.evaluate(outlined)
        assert is_body or (style != "none" and float(width.removesuffix("px")) >= 1)


# ---- themes ----

SURFACES = ("bg", "surface", "raised")
SOFT = [(name, f"{name}-soft") for name in ("ok", "failed", "invalid", "accent")]
LEVEL_COLOURS = ["sampled", "accent-soft", *(f"{name}{i}" for name in "lg" for i in range(1, 5))]
LEVEL_COLOURS += ["a1", "a2", "b1", "b2"]
TEXT_PAIRS = [
    *itertools.product(("text", "muted"), SURFACES),
    *itertools.product(("accent", "ok", "failed", "invalid"), ("surface", "bg")),
    *(("text", level) for level in LEVEL_COLOURS),
    *SOFT,
    ("muted", "accent-soft"),
    ("on-accent", "accent"),
]
CONTROL_PAIRS = [("control", surface) for surface in ("bg", "surface")]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_palette_has_enough_contrast(tab, real, theme):
    tab.open(real[0], theme=theme)
    names = sorted({name for pair in TEXT_PAIRS + CONTROL_PAIRS for name in pair})
    colours = tab.page.evaluate(
        """(names) => Object.fromEntries(names.map((name) => {
          const probe = document.body.appendChild(document.createElement("span"));
          probe.style.color = `var(--${name})`;
          return [name, getComputedStyle(probe).color];
        }))""",
        names,
    )
    ratios = {pair: contrast(colours[pair[0]], colours[pair[1]]) for pair in TEXT_PAIRS}
    assert {pair: ratio for pair, ratio in ratios.items() if ratio < 4.5} == {}
    ratios = {pair: contrast(colours[pair[0]], colours[pair[1]]) for pair in CONTROL_PAIRS}
    assert {pair: ratio for pair, ratio in ratios.items() if ratio < 3} == {}


def test_contrast_is_that_of_the_standard():
    assert contrast("rgb(0, 0, 0)", "rgb(255, 255, 255)") == pytest.approx(21)
    assert contrast("rgb(119, 119, 119)", "rgb(255, 255, 255)") == pytest.approx(4.478, abs=1e-3)


def test_the_switch_overrides_the_systems_theme(new_tab, real):
    tab = new_tab(color_scheme="dark")
    tab.open(real[0])
    background = "getComputedStyle(document.body).backgroundColor"
    seen = [tab.page.evaluate(background)]
    for _ in range(3):
        tab.page.locator("#theme").click()
        seen.append(tab.page.evaluate(background))
    dark, light = seen[0], seen[1]
    assert seen == [dark, light, dark, dark]
    assert dark != light
    tab.page.close()


# ---- many long ones ----


def test_a_large_report_opens_and_scrolls(tab, tmp_path, capsys):
    path = write(tmp_path / "r.jsonl", long_records(NUM_LONG, NUM_LONG_TOKENS))
    address = page_of(path)
    size = path.with_suffix(".html").stat().st_size
    start_s = time.perf_counter()
    tab.page.goto(address, wait_until="commit")
    tab.wait_for(".row")
    shown_s = time.perf_counter() - start_s
    tab.page.wait_for_load_state("load")
    loaded_s = time.perf_counter() - start_s
    for key in ("c", "1", "2", "3", "4", "j", "j", "g", "t", "2"):
        tab.press(key)
        tab.settle()
    for top in range(0, 20000, 500):
        tab.page.evaluate(f"main.scrollTop = {top}; list.scrollTop = {4 * top}")
        tab.page.wait_for_timeout(16)
    assert tab.page.locator(".chunk .token").count() == NUM_LONG_TOKENS // 13 * 13
    assert tab.page.locator(".row").count() < 40
    tab.page.locator("#search").fill("question 77")
    assert counts(tab) == 11
    longest_ms = max((task[1] for task in tab.page.evaluate("longTasks")), default=0)
    with capsys.disabled():
        print(
            f"\n{NUM_LONG} x {NUM_LONG_TOKENS}: {size / 1e6:.0f} MB, list after {shown_s:.2f} s, "
            f"loaded after {loaded_s:.2f} s, longest task {longest_ms:.0f} ms"
        )


def test_long_tasks_are_noticed(tab, real):
    tab.open(real[0])
    tab.page.evaluate(
        """() => new Promise((done) => setTimeout(() => {
          const end = performance.now() + 300;
          while (performance.now() < end);
          done();
        }))"""
    )
    tab.settle()
    assert max(task[1] for task in tab.page.evaluate("longTasks")) >= 200


def test_a_report_has_the_newest_and_says_so(tab, tmp_path):
    path = write(tmp_path / "r.jsonl", [record(f"t{i}", generation=i) for i in range(5)])
    write_page(path, tmp_path / "r.html", limit=2)
    tab.open((tmp_path / "r.html").as_uri())
    assert tab.texts("#notes li") == [read_page_data(path, 2).notes[0]]
    assert "sample 4" in tab.texts(".row-place")[0]
    assert len(tab.texts(".row-place")) == 2
