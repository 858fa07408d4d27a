"""Every setting of TRL's config is in the table, and the table is what happens."""

import dataclasses
import os
import re
import types

import pytest
import trainers
from accelerate import ParallelismConfig
from paths import ROOT
from transformers import TrainingArguments
from trl import GRPOConfig

import trl_integration
from agent_vllm.testing import ScriptedRolloutEngine
from trl_integration import AgentGRPOConfig
from trl_integration.checks import check_arguments, check_setup
from trl_integration.settings_table import (
    SETTINGS,
    Treatment,
    as_markdown,
    check_settings,
    settings_without_effect,
)


def names(config_class):
    return {field.name for field in dataclasses.fields(config_class)}


def treated(treatment):
    return sorted(name for name, setting in SETTINGS.items() if setting.treatment is treatment)


@pytest.fixture
def args(tmp_path):
    return trainers.config(tmp_path)


def test_every_setting_that_trl_adds_is_in_the_table():
    assert names(GRPOConfig) - names(TrainingArguments) - SETTINGS.keys() == set()


def test_the_table_names_settings_that_exist():
    assert SETTINGS.keys() - names(AgentGRPOConfig) == set()


def test_settings_at_their_defaults_are_neither_refused_nor_reported(args):
    check_settings(args, "vllm")
    assert settings_without_effect(args) == []


@pytest.mark.parametrize("name", treated(Treatment.REFUSED))
def test_a_setting_that_can_not_be_obeyed_is_refused_with_a_remedy(args, name):
    setattr(args, name, "something else")
    message = f"`{name}` must be left at .*, got 'something else'\\. [A-Z].*\\.$"
    with pytest.raises(ValueError, match=message):
        check_settings(args, "vllm")


@pytest.mark.parametrize("name", treated(Treatment.NO_EFFECT))
def test_a_setting_without_effect_is_reported(args, name):
    setattr(args, name, "something else")
    (sentence,) = settings_without_effect(args)
    assert re.match(f"`{name}` has no effect: [A-Z].*\\.$", sentence)


@pytest.mark.parametrize(
    ("name", "value", "obeyed_by", "ignored_by"),
    [
        ("vllm_enable_sleep_mode", True, ["vllm"], ["torch", "vllm-server", None]),
        ("vllm_gpu_memory_utilization", 0.5, ["vllm"], ["torch", "vllm-server", None]),
        ("vllm_max_model_length", 64, ["vllm", "torch", "vllm-server"], [None]),
        ("rollout_engine_kwargs", {"seed": 1}, ["vllm", "torch", "vllm-server"], [None]),
    ],
)
def test_a_setting_of_an_engine_that_is_not_built_is_refused(
    args, tokenizer, name, value, obeyed_by, ignored_by
):
    setattr(args, name, value)
    for engine in obeyed_by:
        check_settings(args, engine)
    for engine in ignored_by:
        with pytest.raises(ValueError, match=f"`{name}` is for an engine that the trainer builds"):
            check_settings(args, engine or ScriptedRolloutEngine(tokenizer, []))


def test_the_page_has_the_table():
    page = (ROOT / "docs" / "settings.md").read_text("utf-8")
    assert as_markdown() in page


def test_engine_arguments_are_refused_before_anything_is_built(args):
    args.rollout_engine_kwargs = {"engine_args": {"tensor_parallel_size": 2}}
    with pytest.raises(ValueError, match="'tensor_parallel_size', got 2"):
        check_arguments(args, None, "vllm", {})


@pytest.mark.parametrize("split", [{"model_init_kwargs": {"device_map": "auto"}}, {}])
def test_several_gpus_in_one_process_are_refused_unless_the_model_is_split(args, split):
    args._n_gpu = 2  # as transformers counts the visible ones
    args.model_init_kwargs = split.get("model_init_kwargs")
    if split:
        check_arguments(args, "a/model", "torch", {})
    else:
        with pytest.raises(ValueError, match=r"got 2\. Set CUDA_VISIBLE_DEVICES=0"):
            check_arguments(args, "a/model", "torch", {})


@pytest.mark.parametrize(
    ("num_processes", "deadline_s", "is_warned"),
    [(2, None, True), (2, 7200.0, True), (2, 600.0, False), (1, None, False)],
)
def test_a_rollout_longer_than_the_others_wait_is_warned_of(
    args, num_processes, deadline_s, is_warned
):
    printed = []
    args.deadline_s = deadline_s
    accelerator = types.SimpleNamespace(
        state=None, num_processes=num_processes, print=printed.append
    )
    check_setup(
        types.SimpleNamespace(
            _is_vlm=False, accelerator=accelerator, args=args, top_p=1.0, top_k=0, min_p=None
        )
    )
    assert ["`ddp_timeout` = 1800 s" in line for line in printed] == [True] * is_warned


def test_trl_is_imported_without_leaving_vllms_changes_behind(monkeypatch):
    """TRL imports vLLM where it is installed, and vLLM edits the environment."""

    def import_module(name):
        os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
        assert os.environ["VLLM_LOGGING_LEVEL"]
        return types.SimpleNamespace(AgentGRPOConfig=name)

    before = dict(os.environ)
    monkeypatch.setattr(trl_integration.importlib, "import_module", import_module)
    monkeypatch.delitem(vars(trl_integration), "AgentGRPOConfig")
    assert trl_integration.AgentGRPOConfig == "trl_integration.config"
    assert dict(os.environ) == before


def test_a_learner_split_over_ranks_is_refused():
    accelerator = types.SimpleNamespace(state=None, parallelism_config=ParallelismConfig(tp_size=2))
    with pytest.raises(ValueError, match="`tp_size` of the learner must be 1, got 2"):
        check_setup(types.SimpleNamespace(_is_vlm=False, accelerator=accelerator))
