"""The viewer in a real browser: every token as the file has it, and text that stays text."""

import json
import math

import pytest
from browser import VIEWS, needs_chromium
from fakes import sampled, trajectory
from records import EVIL, hostile_record, page_of, record, short_with_calls, turn, write

from agent_vllm.record import RolloutRecorder, redact_secrets
from agent_vllm.record.schema import to_json

pytestmark = needs_chromium


def shown_tokens(tab):
    """The details of every token, read one by one with the keyboard."""
    tab.page.locator(".tokens [tabindex='0']").focus()
    shown = []
    for _ in range(tab.page.locator(".chunk .token").count()):
        names, values = tab.texts("#token-details dt"), tab.texts("#token-details dd")
        shown.append(dict(zip(names, values, strict=True)))
        tab.press("ArrowRight")
    return shown


def expected_tokens(line):
    """The same from the file."""
    ids = line["prompt_ids"] + line["completion_ids"]
    num_prompt = len(line["prompt_ids"])
    for i, token in enumerate(ids):
        column = i - num_prompt
        mask = None if column < 0 else line["completion_mask"][column]
        sampled = {}
        if mask:
            engine, learner = line["logprobs"][column], line["learner_logprobs"][column]
            sampled = {"logprob": engine, "learner's logprob": learner}
        yield {"id": token, "position": i + 1, "mask": mask} | sampled


def as_expected(shown):
    """Shown details in the file's terms; numbers have six digits."""
    masks = {"prompt": None, "1, sampled": 1, "0, written": 0}
    token = {
        "id": int(shown["id"]),
        "position": int(shown["position"].split(" of ")[0]),
        "mask": masks[shown["mask"]],
    }
    for name in ("logprob", "learner's logprob"):
        if name in shown:
            token[name] = pytest.approx(float(shown[name].replace("\u2212", "-")), rel=1e-5)
    return token


def test_every_token_is_shown_with_the_files_mask_and_numbers(tab, real):
    address, records = real
    line = short_with_calls(records)
    tab.open(address, view="tokens", id=line["id"])
    shown = [as_expected(token) for token in shown_tokens(tab)]
    assert shown == list(expected_tokens(line))
    texts = [line["token_texts"][str(t)] for t in line["prompt_ids"] + line["completion_ids"]]
    assert tab.page.locator(".tokens .chunk").all_text_contents() != []
    joined = "".join(tab.page.locator(".chunk .token").all_text_contents())
    marks = str.maketrans({" ": "·", "\n": "↵"})
    assert joined.replace("\n", "") == "".join(texts).translate(marks)


def test_the_comparison_notices_a_wrong_mask_and_a_wrong_number(tab, real, tmp_path):
    line = short_with_calls(real[1])
    other = json.loads(to_json(line.model_dump(by_alias=True)))
    for part in other["turns"]:
        part["segment"]["logprobs"] = [x - 1e-3 for x in part["segment"]["logprobs"]]
    first = other["turns"][0]  # its last token is written by the template now
    first["segment"]["logprobs"].pop()
    first["suffix"]["token_ids"].insert(0, first["segment"]["token_ids"].pop())
    tab.open(page_of(write(tmp_path / "r.jsonl", [other])), view="tokens")
    pairs = list(zip(map(as_expected, shown_tokens(tab)), expected_tokens(line), strict=True))
    differ = {shown["position"] for shown, expected in pairs if shown != expected}
    first = len(line["prompt_ids"]) + 1
    sampled = [i for i, bit in enumerate(line["completion_mask"]) if bit]
    assert differ == {first + i for i in sampled}


LEVELS = {
    "1": lambda token: (
        "none" if token["mask"] is None else ["observed", "sampled"][token["mask"]]
    ),
    "2": lambda token: (
        f"l{[p <= math.exp(token['logprob']) for p in (0.9, 0.5, 0.2, 0.05, 0)].index(True)}"
    ),
    "3": lambda token: (
        f"g{[abs(token['gap']) <= most for most in (0.001, 0.01, 0.1, 0.5, 99)].index(True)}"
    ),
    "4": lambda token: (
        "a2" if token["advantage"] >= 1
        else "a1" if token["advantage"] > 0
        else "a0" if token["advantage"] == 0
        else "b1" if token["advantage"] > -1
        else "b2"
    ),
}  # fmt: skip


@pytest.mark.parametrize("key", LEVELS)
def test_every_token_has_the_level_of_its_figures(tab, tmp_path, key):
    logprobs = [-0.01, -0.5, -1.2, -2.5, -5.0, -0.3]
    gaps = [0.0005, -0.005, 0.05, -0.3, 0.7, 0.0]
    lines = [
        record(
            f"t{i}",
            turns=[turn(list(range(6)), logprobs)],
            learner_logprobs=[x + gap for x, gap in zip(logprobs, gaps, strict=True)],
            advantage=advantage,
        )
        for i, advantage in enumerate((1.5, 0.5, 0, -0.5, -1))
    ]
    address = page_of(write(tmp_path / "r.jsonl", lines))
    for line in lines:
        tab.open(address, id=line["id"], view="tokens")
        tab.press(key)
        classes = tab.page.evaluate(
            "[...document.querySelectorAll('.chunk .token')].map(t => t.className)"
        )
        tokens = [
            {"mask": 1, "logprob": x, "gap": gap, "advantage": line["advantage"]}
            for x, gap in zip(logprobs, gaps, strict=True)
        ]
        expected = ["none", "none"] + [LEVELS[key](token) for token in tokens]
        assert classes == [f"token level-{name}" for name in expected]
        assert sum(map(int, tab.texts(".legend b"))) == len(expected)


def test_a_token_shows_its_details_under_the_pointer(tab, real):
    address, records = real
    line = short_with_calls(records)
    tab.open(address, view="tokens", id=line["id"])
    tab.page.locator(".chunk .token").nth(3).hover()
    assert tab.texts("#token-details dd")[0] == str(line["prompt_ids"][3])


# ---- hostile records ----


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    path = tmp_path_factory.mktemp("hostile") / "<b>name<b>\u202e.jsonl"
    return page_of(write(path, [record("t0"), hostile_record(EVIL), hostile_record("<i>")]))


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("width", [1280, 390])
def test_what_a_record_says_never_runs(tab, hostile, view, width):
    tab.page.set_viewport_size({"width": width, "height": 800})
    tab.open(hostile, view=view, id="%3Ci%3E")
    for summary in tab.page.locator("#panel summary").all():
        summary.click()
    tab.settle()
    assert tab.page.evaluate(
        "[window.ran, document.querySelectorAll('a:not(.skip), img').length]"
    ) == [None, 0]
    assert tab.page.evaluate("document.documentElement.scrollWidth") <= width
    assert tab.page.locator("#panel").is_visible()
    text = tab.page.locator("body").text_content()
    assert "<img src=x onerror='window.ran = 2'>" in text
    assert not set("\u202e\u2066\u2028\u0000\u001b") & set(tab.page.locator("#panel").inner_text())


def named(*names):
    """Unseen characters as the tokens show them."""
    return [f"\u2039{name}\u203a" for name in names]


def test_unseen_characters_are_named(tab, hostile):
    tab.open(hostile, view="tokens", id="%3Ci%3E")
    shown = tab.page.locator(".chunk .token").all_text_contents()
    surrogate, empty, override = named("U+D83D", "empty", "RLO")
    assert shown[1:5] == [surrogate, empty, "↵\n⇥·", override]
    assert shown[6] == "#7"  # the record has no text for it
    assert [name for name in named("RLO", "LRI", "LS", "NUL", "ESC") if name not in shown[0]] == []


def test_the_policy_lets_nothing_else_run(tab, hostile):
    tab.open(hostile)
    tab.page.evaluate(
        """() => {
          const script = document.createElement("script");
          script.textContent = "window.ran = 4";
          document.body.append(script);
          document.body.insertAdjacentHTML("beforeend", "<p style='color: red'>x</p>");
          fetch("https://example.org/").catch(() => { window.refused = true; });
        }"""
    )
    tab.settle()
    assert tab.page.evaluate("[window.ran, window.refused]") == [None, True]
    assert len(tab.problems) >= 3
    assert all("Content Security Policy" in problem for problem in tab.problems)
    tab.problems.clear()


def test_a_redacted_token_is_shown_as_such(tab, tmp_path):
    path = tmp_path / "r.jsonl"
    with RolloutRecorder(path, redact=redact_secrets("sk-1")) as recorder:
        secret = [{"role": "user", "content": "sk-1"}]
        recorder.write(trajectory([1], sampled(2), messages=secret, num_prompt_messages=1))
    tab.open(page_of(path), view="tokens")
    assert tab.texts(".chunk .token") == ["[redacted]"] * 2
    assert [token["id"] for token in shown_tokens(tab)] == ["-1"] * 2
