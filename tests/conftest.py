"""Fixtures of all tests: one tiny agent per machine, one vLLM engine per worker, real trainers."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "0")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

import importlib.util
import signal

import pytest
import trainers
from browser import browser
from fakes import chatml_tokenizer
from learners import zero3_and_whole
from records import page_of, read, record_real
from tiny_agent import tiny_agent_path
from transformers import AutoModelForCausalLM, AutoTokenizer

from agent_vllm.chat import ChatFormat
from agent_vllm.testing import ScriptedRolloutEngine

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # started in the background by a shell
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Groups that take longest; they start first, so that no worker waits for another in the end.
LONGEST = ("vllm", "test_server_engine.py", "test_ranks.py", "browser", "test_trainer.py")


@pytest.hookimpl(tryfirst=True)  # xdist reads the groups in its own hook
def pytest_collection_modifyitems(items):
    """Skip vLLM's tests on a laptop without vLLM; say which tests share a worker."""
    if importlib.util.find_spec("vllm") is None and not os.environ.get("CI"):
        for item in items:
            if "vllm" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="vLLM is not installed"))
    for item in items:
        item.add_marker(pytest.mark.xdist_group(group_of(item)))
    items.sort(key=lambda item: rank(group_of(item)))  # else in their order


def rank(group):
    return LONGEST.index(group) if group in LONGEST else len(LONGEST)


def group_of(item):
    """Return the tests' common worker: what is costly to build is built once."""
    if "new_tab" in item.fixturenames:
        return "browser"
    if "vllm" in item.keywords and "e2e" not in item.keywords:
        return "vllm"
    return item.path.name  # fixtures of a module


@pytest.fixture(scope="session")
def tokenizer():
    """ChatML over single characters: every id can be read off a test's text."""
    return chatml_tokenizer()


@pytest.fixture(scope="session")
def chat(tokenizer):
    return ChatFormat.from_tokenizer(tokenizer)


@pytest.fixture
def scripted(tokenizer):
    """Makes an engine from turns or a script."""
    return lambda turns, **options: ScriptedRolloutEngine(tokenizer, turns, **options)


@pytest.fixture(scope="session")
def agent_path():
    """The small tiny agent, trained once."""
    return tiny_agent_path("small")


@pytest.fixture
def agent(agent_path):
    """A fresh copy of the small agent: model and tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(agent_path, dtype="float32")
    return model, AutoTokenizer.from_pretrained(agent_path)


@pytest.fixture
def set_vllm_variable():
    """Set environment variables that vLLM reads; a process with an engine has cached them."""
    from vllm import envs

    was_cached = envs._is_envs_cache_enabled()
    envs.disable_envs_cache()
    with pytest.MonkeyPatch.context() as patch:
        yield patch.setenv
    if was_cached:
        envs.enable_envs_cache()


@pytest.fixture
def zero3(monkeypatch):
    return zero3_and_whole(monkeypatch)


@pytest.fixture(scope="session")
def vllm_engine(agent_path):
    """The real vLLM on this machine; tests that change its weights put their own in first."""
    from agent_vllm import VLLMRolloutEngine

    tokenizer = AutoTokenizer.from_pretrained(agent_path)
    model = AutoModelForCausalLM.from_pretrained(agent_path, dtype="float32")
    with VLLMRolloutEngine(model, tokenizer) as engine:
        yield engine


@pytest.fixture
def new_trainer(agent, tmp_path, request):
    """Build real trainers on the small agent; they are closed after the test.

    The engine is "torch", "vllm" (the shared one), "own vllm" or an engine; other arguments are
    those of `trainers.build`.
    """
    built = []

    def new(engine="torch", **changes):
        if engine == "vllm":
            engine = request.getfixturevalue("vllm_engine")
        elif engine == "own vllm":
            engine = "vllm"
        built.append(trainers.build(agent, tmp_path / "out", engine, **changes))
        return built[-1]

    yield new
    for trainer in built:
        trainer.close()


@pytest.fixture(scope="module")
def new_tab():
    with browser() as new_tab:
        yield new_tab


@pytest.fixture
def tab(new_tab):
    """A tab on which nothing may go wrong, and which may ask nobody for anything."""
    tab = new_tab(viewport={"width": 1280, "height": 800})
    yield tab
    tab.page.close()
    assert tab.problems == []
    assert [url for url in tab.requests if not url.startswith(("file:", "about:", "data:"))] == []


@pytest.fixture(scope="session")
def real(agent_path, tmp_path_factory):
    """A report of real rollouts: its address and its records."""
    model = AutoModelForCausalLM.from_pretrained(agent_path, dtype="float32")
    tokenizer = AutoTokenizer.from_pretrained(agent_path)
    path = record_real(tmp_path_factory.mktemp("real"), model, tokenizer)
    return page_of(path), read(path)
