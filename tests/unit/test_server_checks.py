"""Check that whatever is wrong with a vLLM server is an error before anything is sampled."""

import socket

import pytest
from fake_vllm import Status, completion, fake_server, logprobs
from tokenizers import AddedToken
from transformers import AutoTokenizer

from agent_vllm import create_rollout_engine
from agent_vllm.cli import main
from agent_vllm.engines.server import launcher
from agent_vllm.engines.server.launcher import check_port, serve_command, serve_environment
from agent_vllm.errors import VLLMServerError


@pytest.fixture
def server(agent_path):
    with fake_server(agent_path) as server:
        yield server


@pytest.fixture
def other(agent_path):
    with fake_server(agent_path) as server:
        yield server


def build(agent_path, *servers, **options):
    urls = [server.url for server in servers]
    return create_rollout_engine("vllm-server", agent_path, base_urls=urls, **options)


def test_a_server_that_is_as_it_should_be_passes(agent_path, server, other):
    with build(agent_path, server, other) as engine:
        assert engine.max_model_len == 1024


def raw(temperature):
    return logprobs(1.0)


def processed_logits(temperature):
    return {token: value + 3 for token, value in logprobs(temperature).items()}


WRONG = {
    "version": ("/version", {"version": "0.30.2"}, r"runs vLLM 0\.30\.2; the engine needs"),
    "no development routes": ("/server_info", Status(404), "Set VLLM_SERVER_DEV_MODE=1"),
    "no token routes": ("/inference/v1/generate", Status(404), "enable-scale-out"),
    "a smaller vocabulary": (
        "/inference/v1/generate",
        Status(400, "Token id 402 is out of vocabulary"),
        "refuses the model's last token id",
    ),
    "another tokenizer": ("/tokenize", {"tokens": [1, 2, 3]}, "another tokenizer.*from token 0 on"),
    "no tokenizer": ("/tokenize", Status(404), "without `--skip-tokenizer-init`"),
    "something else": ("/version", Status(200, "<html>"), "Does something else listen"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_server_is_refused(agent_path, server, what):
    path, answer, message = WRONG[what]
    server.answers[path] = answer
    with pytest.raises(VLLMServerError, match=message):
        build(agent_path, server)


def test_another_model_is_refused(agent_path, server):
    server.sizes = {"model_type": "llama", "vocab_size": 7}
    with pytest.raises(VLLMServerError, match=r"serves another model.*'vocab_size': 7"):
        build(agent_path, server)


@pytest.mark.parametrize("extension", [None, "somebody.elses.Extension"])
def test_a_server_without_our_worker_extension_is_refused(agent_path, server, extension):
    server.config["parallel_config"]["worker_extension_cls"] = extension
    with pytest.raises(VLLMServerError, match=f"worker extension.*got .*{extension}"):
        build(agent_path, server)


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logits"])
def test_another_logprobs_mode_is_refused(agent_path, server, mode):
    server.config["model_config"]["logprobs_mode"] = mode
    with pytest.raises(VLLMServerError, match=f"--logprobs-mode {mode}"):
        build(agent_path, server)


@pytest.mark.parametrize("given", [raw, processed_logits])
def test_the_logprobs_themselves_are_probed(agent_path, server, given):
    server.answers["/inference/v1/generate"] = lambda body: completion(body, given)
    with pytest.raises(VLLMServerError, match="not those of the distribution that is sampled"):
        build(agent_path, server)


def test_a_token_that_was_added_here_alone_is_refused(agent_path, server):
    tokenizer = AutoTokenizer.from_pretrained(agent_path)
    tokenizer.add_tokens([AddedToken("<search>", special=True)])
    with pytest.raises(VLLMServerError, match="another tokenizer"):
        create_rollout_engine("vllm-server", agent_path, tokenizer, base_urls=[server.url])


def test_a_server_without_weight_transfer_is_refused(agent_path, server):
    server.config["weight_transfer_config"] = None
    with pytest.raises(VLLMServerError, match=r"weight-transfer backend of .*got None"):
        build(agent_path, server)


def test_a_shorter_context_is_refused(agent_path, server):
    with pytest.raises(VLLMServerError, match=r"--max-model-len 1024.*asked for 2048"):
        build(agent_path, server, max_model_len=2048)


def test_an_unreachable_server_is_named(agent_path, server):
    server.stop()
    with pytest.raises(VLLMServerError, match=rf"{server.url} can't be reached.*Is it running"):
        build(agent_path, server)


@pytest.mark.parametrize(
    ("section", "name", "value"),
    [("model_config", "dtype", "torch.bfloat16"), ("model_config", "max_model_len", 2048)],
)
def test_servers_that_disagree_are_refused(agent_path, server, other, section, name, value):
    other.config[section][name] = value
    with pytest.raises(VLLMServerError, match=f"disagree on `{name}`.*{other.url}"):
        build(agent_path, server, other)


def test_servers_with_different_weights_are_refused(agent_path, server, other):
    other.answers["/inference/v1/generate"] = lambda body: completion(
        body, lambda temperature: logprobs(temperature * 0.9)
    )
    with pytest.raises(VLLMServerError, match="disagree on `probe`"):
        build(agent_path, server, other)


def test_a_server_that_a_dead_trainer_left_paused_goes_on(agent_path, server):
    server.answers["/is_paused"] = {"is_paused": True}
    with build(agent_path, server):
        assert len(server.bodies["/resume"]) == 1


def test_a_half_written_server_is_refused_where_no_weights_follow(agent_path, server):
    server.label = "unfinished"
    with pytest.raises(VLLMServerError, match="middle of a weight update"):
        build(agent_path, server)


@pytest.mark.parametrize("urls", [[], "http://127.0.0.1:1", ["http://a", "http://a"]])
def test_addresses_are_a_list_of_different_ones(agent_path, urls):
    with pytest.raises(ValueError, match="`base_urls` must"):
        create_rollout_engine("vllm-server", agent_path, base_urls=urls)


def test_how_requests_are_treated_in_an_update_is_one_of_two(agent_path):
    with pytest.raises(ValueError, match="`in_flight` must be"):
        create_rollout_engine(
            "vllm-server", agent_path, base_urls=["http://127.0.0.1:1"], in_flight="keep"
        )


# ---- the launcher ----


def test_a_port_in_use_is_refused_at_once():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(VLLMServerError, match=f"Port {port} of 127.0.0.1 can't be used"):
            check_port("127.0.0.1", port)
    check_port("127.0.0.1", port)


def test_the_launcher_sets_all_that_is_checked(agent_path):
    command = serve_command(agent_path, port=8765, vllm_args=["--seed", "3"])
    text = " ".join(command)
    for wanted in (
        "--port 8765",
        "--logprobs-mode processed_logprobs",
        "--enable-scale-out",
        "--no-skip-tokenizer-init",
        "--generation-config vllm",
        "--worker-extension-cls agent_vllm.engines.server.worker_extension.WorkerExtension",
    ):
        assert wanted in text
    assert command[-2:] == ["--seed", "3"]
    environment = serve_environment({"OMP_NUM_THREADS": "2"})
    assert environment["VLLM_SERVER_DEV_MODE"] == "1" and environment["OMP_NUM_THREADS"] == "2"


@pytest.fixture
def serve(agent_path, monkeypatch, capsys):
    """Run `agent-vllm serve` up to the moment when it becomes vLLM."""

    def serve(*words):
        became = []
        monkeypatch.setattr("os.execve", lambda *call: became.append(call[1:]))
        main(["serve", str(agent_path), "--port", "0", *words])
        ((command, environment),) = became
        return command, environment, capsys.readouterr()

    return serve


def test_what_stands_behind_two_dashes_goes_to_vllm_as_it_is(serve):
    command, _, printed = serve("--", "--tensor-parallel-size", "2", "--", "--seed=3")
    assert command[-4:] == ["--tensor-parallel-size", "2", "--", "--seed=3"]
    assert printed.err == ""


@pytest.mark.parametrize(
    ("words", "host"),
    [
        (["--host", "0.0.0.0"], "0.0.0.0"),
        (["--host", "10.0.0.5"], "10.0.0.5"),
        (["--", "--host=::"], "::"),
    ],
)
def test_an_open_host_warns_that_weights_can_be_replaced(serve, monkeypatch, words, host):
    monkeypatch.setattr(launcher, "check_port", lambda host, port: None)
    assert f"Warning: this server listens on {host}. Whoever" in serve(*words)[2].err


@pytest.mark.parametrize("words", [[], ["--host", "localhost"], ["--host", "127.0.0.1"]])
def test_a_closed_host_does_not(serve, words):
    assert serve(*words)[2].err == ""


def test_a_key_goes_into_the_environment_and_is_not_printed(serve):
    command, environment, printed = serve("--api-key", "sk-1")
    assert environment["VLLM_API_KEY"] == "sk-1"
    assert not [word for word in command if "sk-1" in word] and "sk-1" not in str(printed)
    assert "VLLM_API_KEY" not in serve_environment({})


def test_a_key_behind_two_dashes_would_be_visible_and_is_refused(serve):
    with pytest.raises(SystemExit, match=r"`--api-key` must not stand after `--`") as refused:
        serve("--", "--api-key", "sk-1")
    assert "sk-1" not in str(refused.value)


def test_on_the_learners_gpu_weights_come_through_memory(agent_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    commands = [" ".join(serve_command(agent_path, same_gpu=same)) for same in (False, True)]
    assert ['{"backend": "nccl"}' in text for text in commands] == [True, False]
    assert ['{"backend": "trainer_memory"}' in text for text in commands] == [False, True]
    assert ["--gpu-memory-utilization 0.3" in text for text in commands] == [False, True]


@pytest.mark.vllm
@pytest.mark.parametrize(("theirs", "is_refused"), [("GPU-1", True), ("GPU-2", False)])
def test_a_server_on_the_learners_gpu_is_refused_with_nccl(
    agent_path, server, monkeypatch, theirs, is_refused
):
    server.config["weight_transfer_config"] = {"backend": "nccl"}
    server.gpu_id = theirs
    monkeypatch.setattr("agent_vllm.engines.server.handshake.own_gpu_id", lambda: "GPU-1")
    if is_refused:
        with pytest.raises(VLLMServerError, match=r"on the learner's own GPU.*--same-gpu"):
            build(agent_path, server)
    else:
        build(agent_path, server).close()
