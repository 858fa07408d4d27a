"""The doctor: what passes on real parts, and for every check a bad input that it finds."""

import dataclasses
import itertools
import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from fakes import CHATML, END, add, chatml_tokenizer, shout, trl_template
from families import tokenizer_of
from hermes import RESPONSE_TEMPLATE
from paths import ROOT
from transformers import Qwen3ForCausalLM

from agent_vllm import TorchRolloutEngine, collate
from agent_vllm.chat import ChatFormat, ResponseTemplateParser, parse_hermes
from agent_vllm.cli import main
from agent_vllm.errors import EngineError
from agent_vllm.inspect import doctor
from agent_vllm.inspect.doctor import engine_checks, template_checks
from agent_vllm.inspect.doctor.findings import Check, Finding, Report, show_ids
from agent_vllm.inspect.doctor.subject import SubjectState, load_tools
from agent_vllm.settings import SamplingParams
from agent_vllm.testing import ScriptedRolloutEngine
from agent_vllm.tools import Tool, as_tool
from agent_vllm.training import shift
from agent_vllm.types import ParsedTurn

TEMPLATE_NAMES = [check.name for check in template_checks.TEMPLATE_CHECKS]
MODEL_NAMES = [check.name for check in engine_checks.MODEL_CHECKS]
ENGINE_NAMES = [check.name for check in engine_checks.ENGINE_CHECKS]


def template_report(template=CHATML, tokenizer=None, **options):
    """Template checks alone; no model is there."""
    tokenizer = tokenizer or chatml_tokenizer(template)
    return doctor.examine("no-model", tokenizer, engines=[], **{"tools": [add, shout], **options})


def failures(report):
    return {finding.name: finding.evidence for finding in report.findings if is_bad(finding)}


def is_bad(finding):
    return finding.status == "fail"


def statuses(report):
    return {finding.name: finding.status for finding in report.findings}


def one(report, name):
    return next(finding for finding in report.findings if finding.name == name)


# ---- the list of checks ----


def raises(_):
    raise ValueError("spoilt")


def raises_our_own(_):
    raise EngineError("spoilt. Mend it.")


def test_a_check_whose_needs_failed_is_skipped_and_an_error_is_a_finding():
    fine = Finding(status="pass", evidence="fine")
    checks = [
        Check(name="a", find=raises, remedy="mend it"),
        Check(name="b", find=lambda _: fine, needs=("a",)),
        Check(name="c", find=lambda _: fine, needs=("b",)),
        Check(name="d", find=lambda _: fine),
        Check(name="e", find=raises_our_own, remedy="not said twice"),
    ]
    report = Report()
    report.run(checks, None, suffix=" (x)")
    assert report.as_dict() == {
        "passed": False,
        "findings": [
            {"status": status, "evidence": evidence, "remedy": remedy, "name": f"{name} (x)"}
            for name, status, evidence, remedy in [
                ("a", "fail", "ValueError: spoilt", "mend it"),
                ("b", "skipped", "Not run: needs a (x).", ""),
                ("c", "skipped", "Not run: needs b (x).", ""),
                ("d", "pass", "fine", ""),
                ("e", "fail", "spoilt. Mend it.", ""),
            ]
        ],
    }


def test_ids_around_a_spot(tokenizer):
    ids = tokenizer.convert_tokens_to_ids(list("0123456"))
    assert show_ids(tokenizer, ids, 1) == (
        f"{ids[0]} '0', [{ids[1]} '1'], {ids[2]} '2', {ids[3]} '3', {ids[4]} '4', {ids[5]} '5'"
    )


# ---- template checks ----


def test_a_good_template_passes():
    assert statuses(template_report()) == dict.fromkeys(TEMPLATE_NAMES, "pass")


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "qwen3_5_think", "glm4moe", "llama3_1"])
def test_templates_of_known_families_have_no_failure(name):
    assert failures(template_report(trl_template(name))) == {}


def test_an_unknown_model():
    report = doctor.examine("/no/such/folder")
    assert list(failures(report)) == ["tokenizer"]
    assert "/no/such/folder" in one(report, "tokenizer").evidence
    assert one(report, "template extends").status == "skipped"
    assert one(report, "engine (torch)").status == "skipped"


LAST_ONLY = CHATML.replace(
    "</tool_call>{% endfor %}",
    "</tool_call>{% endfor %}{% if loop.last and message.role == 'assistant' %}<done>{% endif %}",
)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (None, "has no chat template"),
        ("{% if %}", "The chat template has an error"),
        ("{{ raise_exception('no') }}", "does not support tools"),
        (LAST_ONLY, "it renders earlier turns differently once a tool turn follows"),
    ],
)
def test_a_template_that_cannot_be_used(template, reason):
    report = template_report(template)
    assert list(failures(report)) == ["template extends"]
    assert reason in one(report, "template extends").evidence
    after = TEMPLATE_NAMES[TEMPLATE_NAMES.index("template extends") + 1 :]
    assert {statuses(report)[name] for name in after} == {"skipped"}


def test_where_a_template_rewrites_a_turn():
    evidence = one(template_report(LAST_ONLY), "template extends").evidence
    assert "</tool_call><done><|im_end|>" in evidence
    assert "becomes" in evidence


def test_a_parser_that_nobody_knows():
    report = template_report(parser="nonsense")
    assert "`parser` must be a callable or a known name" in failures(report)["template extends"]


def test_the_training_variant_is_named():
    finding = one(template_report(trl_template("qwen3")), "template extends")
    assert finding.status == "note"
    assert "TRL's training variant is used" in finding.evidence


def test_tools_that_the_prompt_does_not_show():
    report = template_report(CHATML.replace("{{ tool.function | tojson }}", ""))
    assert "doesn't name add, shout" in failures(report)["tools in the prompt"]


def reads_nothing(turn):
    return ParsedTurn(message={"role": "assistant", "content": ""}, calls=[])


def test_a_parser_that_reads_nothing():
    report = template_report(parser=reads_nothing)
    found = failures(report)["calls parse back"]
    assert "`add` can't be called" in found and "and read as no call" in found
    assert statuses(report)["end token"] == "skipped"


def reads_one_call(turn):
    return replace(parsed := parse_hermes(turn), calls=parsed.calls[:1])


def test_a_parser_that_reads_one_of_two_calls():
    assert list(failures(template_report(parser=reads_one_call))) == ["calls parse back"]


def reads_good_calls_only(turn):
    parsed = parse_hermes(turn)
    return parsed if all(c.error is None for c in parsed.calls) else reads_nothing(turn)


def test_a_malformed_call_that_is_taken_for_an_answer():
    report = template_report(parser=reads_good_calls_only)
    assert "is read as an answer" in failures(report)["malformed call"]


def test_an_end_that_the_template_writes_twice():
    report = template_report(CHATML.replace("<|im_end|>", "<|im_end|><|im_end|>"))
    assert "trained [2, 2] times" in failures(report)["end token"]


def fields_of(chat):
    return {field.name: getattr(chat, field.name) for field in dataclasses.fields(chat)}


class DoublesTheEnd(ChatFormat):
    def suffix_ids(self, *args, **kwargs):
        return [END, *super().suffix_ids(*args, **kwargs)]


def state_of(chat):
    state = SubjectState(
        source="no-model",
        given_tokenizer=chat.tokenizer,
        tool_source=[add],
        prompts=[[{"role": "user", "content": "hi"}]],
        parser=None,
    )
    state.tokenizer, state.chat, state.tools = chat.tokenizer, chat, load_tools([add])
    return state


def test_an_end_that_the_suffix_writes_again(chat):
    finding = template_checks.find_end_token(state_of(DoublesTheEnd(**fields_of(chat))))
    assert finding.status == "fail"
    assert "written twice" in finding.evidence
    assert template_checks.find_end_token(state_of(chat)).status == "pass"


def test_an_end_that_is_not_the_tokenizers():
    tokenizer = chatml_tokenizer()
    tokenizer.eos_token = "<|endoftext|>"
    tokenizer.pad_token = "<think>"
    finding = one(template_report(tokenizer=tokenizer), "end token")
    assert finding.status == "note"
    assert "0 '<|endoftext|>', 2 '<|im_end|>'" in finding.evidence


def padded_tokenizer(pad_token):
    tokenizer = chatml_tokenizer()
    tokenizer.pad_token = pad_token
    return tokenizer


@pytest.mark.parametrize(
    ("pad_token", "evidence"),
    [("<|im_end|>", "is an end token too. Fine here"), (None, "has no pad token")],
)
def test_a_pad_token_that_is_none_of_its_own(pad_token, evidence):
    finding = one(template_report(tokenizer=padded_tokenizer(pad_token)), "padding")
    assert finding.status == "note"
    assert evidence in finding.evidence


def masks_by_pad_id(trajectories, pad_token_id):
    batch = collate(trajectories, pad_token_id)
    real = batch.input_ids != pad_token_id
    return replace(batch, completion_mask=batch.completion_mask * real[:, 1:])


def test_padding_told_by_ids(monkeypatch):
    monkeypatch.setattr(template_checks, "collate", masks_by_pad_id)
    report = template_report(tokenizer=padded_tokenizer("<|im_end|>"))
    assert list(failures(report)) == ["padding"]


STRIPS = CHATML.replace(
    "{{ message.content or '' }}", "{{ (message.content or '').split('</think>')[-1] }}"
)
PREFILLS = CHATML.replace("<|im_start|>assistant\n", "<|im_start|>assistant\n<think>\n").replace(
    "{{ message.content or '' }}",
    "{% if message.role == 'assistant' %}<think>\n\n</think>\n\n{% endif %}{{ message.content }}",
)


@pytest.mark.parametrize(
    ("template", "evidence"),
    [
        (STRIPS, "The template strips earlier thinking. Fine here: the next turn's ids keep"),
        (PREFILLS, "The prompt opens the block. Fine here: the next turn's ids keep"),
    ],
)
def test_thinking_that_a_template_strips_or_opens(template, evidence):
    finding = one(template_report(template), "thinking kept")
    assert finding.status == "note"
    assert finding.evidence.startswith(evidence)


def reads_drafts(turn):
    return parse_hermes(replace(turn, text=turn.text.replace("<think>", "")))


def test_a_parser_that_runs_what_was_only_thought_of():
    report = template_report(parser=reads_drafts)
    assert list(failures(report)) == ["thinking kept"]


def test_a_response_template_that_does_not_know_of_thinking():
    tokenizer = chatml_tokenizer(STRIPS)
    tokenizer.response_template = RESPONSE_TEMPLATE
    parser = ResponseTemplateParser(RESPONSE_TEMPLATE)
    report = template_report(tokenizer=tokenizer, parser=parser)
    assert list(failures(report)) == ["thinking kept"]
    assert failures(template_report(tokenizer=tokenizer)) == {}  # another parser is found


def reads_no_call_after_thinking(turn):
    return parse_hermes(replace(turn, text=turn.text.replace("</think>", "")))


def test_a_parser_that_loses_a_call_after_thinking():
    report = template_report(parser=reads_no_call_after_thinking)
    assert "1 turns" in failures(report)["thinking kept"]


def test_control_text_that_becomes_control_tokens(chat):
    assert template_checks.find_control_text(state_of(chat)).status == "pass"
    finding = template_checks.find_control_text(state_of(replace(chat, escape_tool_results=False)))
    assert finding.status == "fail"
    assert "can forge 7 control tokens" in finding.evidence


# ---- tools ----

TOOL_FILE = '''
from math import floor

def search(query: str, limit: int) -> str:
    """
    Search.

    Args:
        query: for what
        limit: how many
    """
    raise AssertionError("the doctor runs no tool")

def _private(): ...
'''


def test_a_file_of_tools(tmp_path):
    path = tmp_path / "my_tools.py"
    path.write_text(TOOL_FILE)
    report = template_report(tools=path)
    assert failures(report) == {}
    assert one(report, "tools").evidence == "search. They are not run here."


def test_a_tool_that_the_family_can_not_call():
    function = {"name": "get-weather", "parameters": {"type": "object", "properties": {}}}
    dashed = Tool(schema={"type": "function", "function": function}, function=print)
    report = template_report(tokenizer=tokenizer_of("lfm2_2_5"), tools=[dashed])
    assert "`get-weather` can't be called" in failures(report)["calls parse back"]


def test_a_tool_that_ends_the_episode():
    last = replace(as_tool(add), ends_episode=True)
    assert failures(template_report(tools=[last])) == {}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("raise SystemExit(3)", "ends the process when it is imported (exit 3)"),
        ("def f(x): ...", "Tool `f` can't be described"),
        ("x = 1", "at least one tool, got none"),
        (None, "FileNotFoundError"),
    ],
)
def test_a_file_that_is_no_tools(tmp_path, text, reason):
    path = tmp_path / "my_tools.py"
    if text is not None:
        path.write_text(text)
    report = template_report(tools=path)
    assert list(failures(report)) == ["tools"]
    assert reason in one(report, "tools").evidence


# ---- models and engines ----


def report_on(agent, engine, **options):
    with engine:
        return doctor.examine(*agent, engines=[engine], **options)


def engine_failures(agent, kind, **options):
    """Names of the checks that fail with an engine of that class."""
    report = report_on(agent, kind(*agent), **options)
    return [finding.name.split(" (")[0] for finding in report.findings if is_bad(finding)]


def untied(model):
    config = type(model.config).from_dict({**model.config.to_dict(), "tie_word_embeddings": False})
    other = Qwen3ForCausalLM(config)
    other.load_state_dict(model.state_dict())
    return other


@pytest.mark.parametrize("head", ["tied", "untied"])
def test_the_torch_engine_passes(agent, head):
    model, tokenizer = agent
    model = model if head == "tied" else untied(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    report = report_on((model, tokenizer), TorchRolloutEngine(model, tokenizer))
    assert failures(report) == {}
    name = "tied head" if head == "tied" else "head"
    assert one(report, "weights follow (TorchRolloutEngine)").evidence.startswith(f"{name}: ")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_pad_token_that_is_the_end_changes_nothing(agent):
    model, tokenizer = agent
    tokenizer.pad_token = tokenizer.eos_token
    report = report_on((model, tokenizer), TorchRolloutEngine(model, tokenizer))
    assert failures(report) == {}
    assert statuses(report)["padding"] == "note"


@pytest.mark.vllm
def test_the_vllm_engine_passes_and_is_left_with_the_models_weights(agent, vllm_engine):
    report = doctor.examine(*agent, engines=[vllm_engine])
    assert failures(report) == {}
    assert [f.name for f in report.findings][-len(ENGINE_NAMES) :] == [
        f"{name} (VLLMRolloutEngine)" for name in ENGINE_NAMES
    ]
    assert failures(doctor.examine(*agent, engines=[vllm_engine])) == {}


def test_an_unknown_model_with_a_tokenizer(tokenizer):
    report = doctor.examine("/no/such/folder", tokenizer)
    assert list(failures(report)) == ["model"]
    assert statuses(report)["engine (torch)"] == "skipped"


def test_a_model_without_its_tokenizer(agent):
    assert list(failures(doctor.examine(agent[0]))) == ["tokenizer"]


def test_a_tokenizer_with_more_tokens_than_embeddings(agent):
    model, tokenizer = agent
    tokenizer.add_tokens(["<search>"])
    report = doctor.examine(model, tokenizer)
    assert (
        "highest id is 884 ('<search>'), the embedding has 884 rows"
        in (failures(report)["vocabulary"])
    )
    assert statuses(report)["engine (torch)"] == "skipped"


def test_an_engine_that_is_not_there(agent):
    report = doctor.examine(*agent, engines=["other"])
    assert "must be one of" in failures(report)["engine (other)"]


def test_an_engine_that_fails(agent):
    engine = ScriptedRolloutEngine(agent[1], lambda _: EngineError("no memory"))
    report = report_on(agent, engine)
    assert (
        "8 of 8 trajectories failed: no memory"
        in (failures(report)["engine (ScriptedRolloutEngine)"])
    )


class OtherLogprobs(TorchRolloutEngine):
    async def _sample(self, request):
        completion = await super()._sample(request)
        return replace(completion, logprobs=[value - 0.01 for value in completion.logprobs])


def test_logprobs_of_another_distribution(agent):
    assert engine_failures(agent, OtherLogprobs) == ["logprobs"]
    assert engine_failures(agent, OtherLogprobs, tolerance=0.02) == []


class IgnoresTemperature(TorchRolloutEngine):
    async def _sample(self, request):
        return await super()._sample(replace(request, sampling=SamplingParams()))


def test_an_engine_that_ignores_the_temperature(agent):
    assert engine_failures(agent, IgnoresTemperature) == ["logprobs"]


class AlwaysTheSame(TorchRolloutEngine):
    async def _sample(self, request):
        return await super()._sample(replace(request, seed=7))


def test_an_engine_that_gives_every_sample_alike(agent):
    assert engine_failures(agent, AlwaysTheSame) == ["samples differ"]


def test_a_model_that_is_sure_of_itself_may_repeat_itself(agent):
    model, tokenizer = agent
    with torch.no_grad():
        model.model.norm.weight.mul_(30)  # logits thirty times as far apart
    finding = one(
        report_on(agent, AlwaysTheSame(model, tokenizer), tolerance=0.1),
        "samples differ (AlwaysTheSame)",
    )
    assert (finding.status, finding.evidence[:6]) == ("note", "[1, 1]")


class IgnoresSeeds(TorchRolloutEngine):
    seeds = itertools.count()

    async def _sample(self, request):
        return await super()._sample(replace(request, seed=next(self.seeds)))


def test_an_engine_that_ignores_seeds(agent):
    assert engine_failures(agent, IgnoresSeeds) == ["same seed"]


class KeepsItsWeights(TorchRolloutEngine):
    def _load_weights(self, model):
        pass


def test_an_engine_that_ignores_syncs(agent):
    assert engine_failures(agent, KeepsItsWeights) == ["weights follow"]


class KeepsItsHead(TorchRolloutEngine):
    """Change a tied head as in an engine that holds it apart and does not load it."""

    def _load_weights(self, model):
        kept = self._batch.model.lm_head.weight.detach().clone()
        mixed = untied(model)
        with torch.no_grad():
            mixed.lm_head.weight.copy_(kept)
        self._batch.model = mixed


def test_an_engine_whose_head_stays_old(agent):
    assert engine_failures(agent, KeepsItsHead) == ["weights follow"]


def shifts_wrongly(trajectories, pad_token_id):
    batch = collate(trajectories, pad_token_id)
    return replace(
        batch,
        completion_mask=torch.cat([batch.completion_mask[:, 1:], batch.completion_mask[:, :1]], 1),
        old_per_token_logps=shift(
            torch.cat([torch.zeros(len(trajectories), 2), batch.old_per_token_logps[:, :-1]], 1)
        ),
    )


def test_a_shift_that_is_one_off(agent, monkeypatch):
    monkeypatch.setattr(engine_checks, "collate", shifts_wrongly)
    report = report_on(agent, TorchRolloutEngine(*agent))
    finding = one(report, "mask and shift (TorchRolloutEngine)")
    assert finding.status == "fail"
    assert finding.evidence.startswith("Row 0, column ")
    assert statuses(report)["logprobs (TorchRolloutEngine)"] == "skipped"


class LateLogprobs(TorchRolloutEngine):
    async def _sample(self, request):
        completion = await super()._sample(request)
        return replace(completion, logprobs=[-9.0, *completion.logprobs[:-1]])


def test_logprobs_that_belong_to_the_token_beside(agent):
    assert engine_failures(agent, LateLogprobs) == ["mask and shift"]


def test_a_bfloat16_model_is_held_to_its_own_tolerance(agent):
    model, tokenizer = agent
    model.to(torch.bfloat16)
    report = report_on(agent, TorchRolloutEngine(model, tokenizer))
    assert failures(report) == {}
    evidence = one(report, "logprobs (TorchRolloutEngine)").evidence
    assert "(at most 2 and 0.1 are allowed in torch.bfloat16)" in evidence


# ---- the command ----


@pytest.mark.e2e
def test_the_command(agent_path):
    """The whole of it once, in a process of its own."""
    process = subprocess.run(
        [sys.executable, "-m", "agent_vllm", "doctor", agent_path, "--engine", "torch", "--json"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert process.returncode == 0, process.stderr
    report = json.loads(process.stdout)
    assert report["passed"] is True
    assert [finding["name"] for finding in report["findings"]] == [
        *TEMPLATE_NAMES,
        *MODEL_NAMES,
        *(f"{name} (torch)" for name in ENGINE_NAMES),
    ]
    assert {finding["status"] for finding in report["findings"]} == {"pass", "note"}


def test_a_failure_is_exit_status_1(capsys):
    assert main(["doctor", "/no/such/folder"]) == 1
    assert "-> Give a folder with a tokenizer" in capsys.readouterr().out


def test_without_engines_a_tokenizer_is_enough(tmp_path, capsys):
    chatml_tokenizer().save_pretrained(tmp_path)
    assert main(["doctor", str(tmp_path), "--no-engines", "--prompt", "hi"]) == 0
    assert "model" not in capsys.readouterr().out.split()


def test_a_prompt_is_needed(tokenizer):
    with pytest.raises(ValueError, match="`prompts` must hold at least one"):
        doctor.examine("no-model", tokenizer, prompts=[])
