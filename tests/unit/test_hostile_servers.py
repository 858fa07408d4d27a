"""Servers that answer anything, over real sockets: each answer ends its own request alone."""

import asyncio
import gzip
import logging
import threading

import pytest
from fake_vllm import TOKEN, Status, completion, eventually, fake_server

from agent_vllm import create_rollout_engine
from agent_vllm.engines.server.address import server_url
from agent_vllm.errors import EngineDeadError, EngineError, VLLMServerError

GENERATE, RPC = "/inference/v1/generate", "/collective_rpc"
MARKED = 37  # the prompt of the request that gets the hostile answer


@pytest.fixture(scope="module")
def server(agent_path):
    with fake_server(agent_path) as server:
        yield server


@pytest.fixture(scope="module")
def shared_engine(agent_path, server):
    with create_rollout_engine(
        "vllm-server", agent_path, base_urls=[server.url], request_timeout_s=1.5
    ) as engine:
        yield engine


@pytest.fixture
def engine(shared_engine, server):
    answers = dict(server.answers)
    yield shared_engine
    server.answers = answers


def changed(*path, value):
    """A completion with one part of it replaced, or left out."""

    def answer(body):
        whole = completion(body)
        part = whole
        for key in path[:-1]:
            part = part[key]
        if value is LEFT_OUT:
            del part[path[-1]]
        else:
            part[path[-1]] = value
        return whole

    return answer


LEFT_OUT = object()
CHOICE = ("choices", 0)
IDS = (*CHOICE, "token_ids")
CONTENT = (*CHOICE, "logprobs", "content")


def text(content, **headers):
    return lambda body: Status(200, content, headers=headers)


def endless(wfile):
    wfile.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n")
    wfile.write(b'{"choices": "')
    while True:
        wfile.write(b"x" * (1 << 16))


def drip(wfile):
    wfile.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n")
    while True:
        wfile.write(b" ")
        wfile.flush()
        threading.Event().wait(0.05)


def raw(content):
    return lambda body: Status(200, send=lambda wfile: wfile.write(content))


OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"

HOSTILE = {
    "ids as strings": changed(*IDS, value=["20", "20", "20"]),
    "ids as floats": changed(*IDS, value=[20.0, 20.0, 20.0]),
    "ids as booleans": changed(*IDS, value=[True, True, True]),
    "nested ids": changed(*IDS, value=[[20], [20], [20]]),
    "ids as one text": changed(*IDS, value="20"),
    "no ids": changed(*IDS, value=None),
    "ids left out": changed(*IDS, value=LEFT_OUT),
    "negative ids": changed(*IDS, value=[-1, 20, 20]),
    "ids out of the vocabulary": changed(*IDS, value=[20, 20, 10**6]),
    "ids of 400 digits": changed(*IDS, value=[20, 20, 10**400]),
    "fewer ids than logprobs": changed(*IDS, value=[20]),
    "more tokens than were asked for": lambda body: completion(
        {**body, "sampling_params": {**body["sampling_params"], "max_tokens": 9}}
    ),
    "logprobs as strings": changed(*CONTENT, value=[{"logprob": "-1"}] * 3),
    "logprobs that are no number": changed(*CONTENT, value=[{"logprob": float("nan")}] * 3),
    "infinite logprobs": changed(*CONTENT, value=[{"logprob": float("-inf")}] * 3),
    "positive logprobs": changed(*CONTENT, value=[{"logprob": 0.5}] * 3),
    "logprobs left out": changed(*CONTENT, value=[{}] * 3),
    "logprobs of 1e308": changed(*CONTENT, value=[{"logprob": 1e308}] * 3),
    "content as an object": changed(*CONTENT, value={"logprob": -1}),
    "no logprobs": changed(*CHOICE, "logprobs", value=None),
    "another finish reason": changed(*CHOICE, "finish_reason", value="tool_calls"),
    "no finish reason": changed(*CHOICE, "finish_reason", value=None),
    "no usage": changed("usage", value=None),
    "usage left out": changed("usage", value=LEFT_OUT),
    "another prompt": changed("usage", "prompt_tokens", value=1),
    "counts as text": changed("usage", "prompt_tokens", value="2"),
    "no choices": changed("choices", value=[]),
    "two choices": lambda body: {**completion(body), "choices": completion(body)["choices"] * 2},
    "choices as an object": changed("choices", value={"0": {}}),
    "a list": lambda body: [],
    "null": lambda body: None,
    "200,000 brackets": text("[" * 200_000),
    "200,000 brackets in a field": text('{"choices": ' + "[" * 200_000),
    "cut JSON": text('{"choices": [{"token'),
    "no JSON": text("<html>hello</html>"),
    "nothing": text(""),
    "bytes that are no text": raw(OK + b"Content-Length: 4\r\n\r\n\xff\xfe\x00{"),
    "another content type": text("{}", **{"Content-Type": "text/html"}),
    "a gzip bomb": raw(
        OK
        + b"Content-Encoding: gzip\r\nConnection: close\r\n\r\n"
        + gzip.compress(b'{"choices": "' + b"x" * (64 << 20))
    ),
    "an endless answer": lambda body: Status(200, send=endless),
    "a slow drip": lambda body: Status(200, send=drip),
    "an endless header": raw(b"HTTP/1.1 200 OK\r\nX-A: " + b"x" * (1 << 20)),
    "no HTTP": raw(b"SSH-2.0-OpenSSH_9.6\r\n"),
    "a redirect": lambda body: Status(307, headers={"Location": "http://127.0.0.1:9/elsewhere"}),
    "an error with escape codes": lambda body: Status(400, "\x1b[2Jgone"),
    "an error without end": lambda body: Status(400, "x" * (1 << 22)),
    "an empty success": lambda body: Status(204),
}


def to_marked(answer):
    return lambda body: answer(body) if body["token_ids"][0] == MARKED else completion(body)


async def three_rows(engine):
    prompts = [[20, 30], [MARKED, 30], [21, 30]]
    rows = [engine.generate(prompt, max_new_tokens=3) for prompt in prompts]
    return await asyncio.gather(*rows, return_exceptions=True)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_answer_ends_its_own_request_alone(engine, server, name):
    server.answers[GENERATE] = to_marked(HOSTILE[name])
    first, wrong, last = asyncio.run(three_rows(engine))
    assert [first.token_ids, last.token_ids] == [[TOKEN] * 3] * 2
    assert isinstance(wrong, EngineError) and not isinstance(wrong, EngineDeadError)
    told = str(wrong)
    if name != "positive logprobs":  # the check that all engines share
        assert f"POST {server.url}{GENERATE}: " in told
    assert len(told) < 1500 and told.isprintable()


def test_what_is_wrong_with_an_answer_is_told(engine, server):
    said = {}
    for name in ("ids as strings", "a redirect", "an endless answer", "a gzip bomb", "no usage"):
        server.answers[GENERATE] = to_marked(HOSTILE[name])
        said[name] = str(asyncio.run(three_rows(engine))[1])
    assert (
        "choices.0.token_ids.0: Input should be a valid integer, got '20'" in said["ids as strings"]
    )
    assert "a redirect to http://127.0.0.1:9/elsewhere, which is not followed" in said["a redirect"]
    assert "the answer is longer than 1060864 bytes" in said["an endless answer"]
    assert "compressed (gzip), unasked" in said["a gzip bomb"]
    assert "usage: Input should be an object, got None" in said["no usage"]


NONSENSE = {
    "a list": [],
    "no results": {"results": []},
    "a number": {"results": [5]},
    "a long name": {"results": ["x" * 5000]},
    "another form": {"weight_version": "default"},
    "text": Status(200, "so-so"),
}


@pytest.mark.parametrize("name", NONSENSE)
def test_tokens_are_dropped_if_the_server_talks_nonsense_of_its_weights(engine, server, name):
    server.answers[RPC] = NONSENSE[name]
    with pytest.raises(EngineError, match=rf"POST {server.url}{RPC}: "):
        asyncio.run(engine.generate([20, 30], max_new_tokens=3))
    server.answers[RPC] = server.call_worker
    assert asyncio.run(engine.generate([20, 30], max_new_tokens=3)).token_ids == [TOKEN] * 3


def test_the_watch_goes_on_after_nonsense_and_logs_it_once(agent_path, caplog):
    with (
        fake_server(agent_path) as server,
        create_rollout_engine(
            "vllm-server", agent_path, base_urls=[server.url], health_interval_s=0.02
        ) as engine,
        caplog.at_level(logging.WARNING),
    ):
        released = threading.Event()
        server.answers[GENERATE] = lambda body: released.wait(10) and completion(body)
        server.answers[RPC] = []
        server.bodies.clear()

        async def wait():
            task = asyncio.create_task(engine.generate([20], max_new_tokens=3))
            looks = lambda: len(server.bodies.get(RPC, []))  # noqa: E731
            await asyncio.to_thread(eventually, lambda: looks() > 3)
            server.answers[RPC] = server.call_worker
            before = looks()
            await asyncio.to_thread(eventually, lambda: looks() > before + 3)
            released.set()
            return await task

        assert asyncio.run(wait()).token_ids == [TOKEN] * 3
    assert [f"A look at {server.url} failed" in m for m in caplog.messages] == [True]


# ---- at start ----

AT_START = {
    "/version": [[], {"version": 31}, {"version": "new"}, {"version": "9" * 2000}, {}],
    "/server_info": [[], {"vllm_config": None}, {"vllm_config": {"model_config": {}}}],
    "/get_world_size": [{"world_size": 0}, {"world_size": "1"}, {"world_size": True}, {}],
    "/is_paused": [{"is_paused": "no"}, {"is_paused": None}, []],
    "/tokenize": [{"tokens": "1"}, {"tokens": [1.5]}, {"tokens": None}, []],
    RPC: [[], {"results": []}, {"results": "x"}, {"results": [[]]}],
    GENERATE: [[], {"choices": []}, {"choices": [{}], "usage": {}}],
}


@pytest.mark.parametrize("path", AT_START)
def test_nonsense_of_any_route_is_named_at_start(engine, agent_path, server, path):
    for answer in AT_START[path]:
        server.answers[path] = answer
        with pytest.raises(VLLMServerError, match=rf"^{server.url} (doesn't answer|has another)"):
            create_rollout_engine("vllm-server", agent_path, base_urls=[server.url])


def test_a_dtype_that_is_none_is_refused(engine, agent_path, server, monkeypatch):
    monkeypatch.setitem(server.config["model_config"], "dtype", "torch.load")
    with pytest.raises(VLLMServerError, match=r"vllm_config.model_config.dtype: .*must be one of"):
        create_rollout_engine("vllm-server", agent_path, base_urls=[server.url])


# ---- addresses ----


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("http://127.0.0.1:8000/", "http://127.0.0.1:8000"),
        ("http://127.0.0.1:8000/v1", "http://127.0.0.1:8000"),
        ("http://127.0.0.1:8000/v1/", "http://127.0.0.1:8000"),
        ("127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("node2:8000/v1", "http://node2:8000"),
        (" http://Node2:8000 ", "http://node2:8000"),
        ("https://gateway/agents/v1", "https://gateway/agents"),
        ("http://[::1]:8000", "http://[::1]:8000"),
    ],
)
def test_an_address_is_read_as_it_is_meant(given, meant):
    assert server_url(given) == meant


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("node2", "neither a scheme nor a port"),
        ("ftp://node2:8000", "scheme ftp"),
        ("http://", "names no host"),
        ("http://node2:port", "can't be read"),
        ("http://node2:8000?model=a", "after `\\?`"),
        ("http://node 2:8000", "names no host"),
        (8000, "is no text"),
    ],
)
def test_an_address_that_means_nothing_is_refused(given, said):
    with pytest.raises(ValueError, match=rf"`base_urls` must be addresses such as .*{said}"):
        server_url(given)


def test_two_ways_to_write_one_server_are_refused(agent_path):
    with pytest.raises(ValueError, match="name each server once"):
        urls = ["http://127.0.0.1:1/v1", "127.0.0.1:1"]
        create_rollout_engine("vllm-server", agent_path, base_urls=urls)


# ---- keys ----

KEY = "sk-very-secret"


@pytest.fixture
def guarded(agent_path):
    with fake_server(agent_path) as server:
        server.key = KEY
        yield server


@pytest.mark.parametrize("how", ["argument", "environment"])
def test_the_key_is_sent_and_never_shown(agent_path, guarded, monkeypatch, caplog, how):
    options: dict = {"api_key": KEY} if how == "argument" else {}
    if how == "environment":
        monkeypatch.setenv("VLLM_API_KEY", KEY)
    with (
        create_rollout_engine(
            "vllm-server", agent_path, base_urls=[guarded.url], **options
        ) as engine,
        caplog.at_level(logging.DEBUG),
    ):
        assert asyncio.run(engine.generate([20, 30], max_new_tokens=3)).token_ids == [TOKEN] * 3
        guarded.answers[GENERATE] = Status(400, f"who are you, Bearer {KEY}?")
        with pytest.raises(EngineError, match=r"400 who are you, Bearer \*\*\*") as refused:
            asyncio.run(engine.generate([20, 30], max_new_tokens=3))
        guarded.stop()
        with pytest.raises(EngineError) as gone:
            asyncio.run(engine.generate([20, 30], max_new_tokens=3))
        shown = [repr(engine), repr(refused.value), repr(gone.value), repr(gone.value.__cause__)]
        assert not [text for text in [*shown, caplog.text] if KEY in text]


@pytest.mark.parametrize(
    ("key", "said"), [(None, "wants an API key"), ("sk-old", "refuses the API")]
)
def test_a_missing_or_wrong_key_is_named_with_the_remedy(
    agent_path, guarded, monkeypatch, key, said
):
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    with pytest.raises(VLLMServerError, match=rf"401: the server {said}.*VLLM_API_KEY") as refused:
        create_rollout_engine("vllm-server", agent_path, base_urls=[guarded.url], api_key=key)
    assert "sk-old" not in str(refused.value) and "another model" not in str(refused.value)


def test_a_key_that_is_no_header_is_refused_unseen(agent_path):
    with pytest.raises(ValueError, match=r"`api_key` .*must be one line of ASCII") as refused:
        create_rollout_engine("vllm-server", agent_path, base_urls=["a:1"], api_key=f"{KEY}\n")
    assert KEY not in str(refused.value)


def test_credentials_in_an_address_are_refused_unseen():
    for url in (f"http://me:{KEY}@node2:8000", f"me:{KEY}@node2:8000", f"http://{KEY}@node2:x"):
        with pytest.raises(ValueError) as refused:
            server_url(url)
        assert KEY not in str(refused.value)
    with pytest.raises(ValueError, match=r"must not hold credentials.*api_key="):
        server_url("http://me:secret@node2:8000")
