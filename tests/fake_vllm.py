"""A stand-in for `vllm serve` that can be made to go wrong, over real sockets.

It has the routes that the engine calls. What it samples is always the same token, with logprobs
that follow the temperature.
"""

import json
import math
import threading
import time
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from transformers import AutoConfig, AutoTokenizer

from agent_vllm.engines.models import model_sizes

EXTENSION = "agent_vllm.engines.server.worker_extension.X"
TOKEN = 20  # what it samples
LOGITS = {20: 2.0, 21: 1.0, 22: 0.5, 23: -1.0, 24: -2.0}


def logprobs(temperature):
    scaled = {token: logit / temperature for token, logit in LOGITS.items()}
    total = math.log(sum(map(math.exp, scaled.values())))
    return {token: value - total for token, value in scaled.items()}


def completion(body, logprobs=logprobs):
    """As `/inference/v1/generate` answers."""
    params = body["sampling_params"]
    by_token = logprobs(params["temperature"])
    entry = {
        "logprob": by_token[TOKEN],
        "top_logprobs": [
            {"token": f"token_id:{token}", "logprob": value} for token, value in by_token.items()
        ],
    }
    num = params["max_tokens"]
    choice = {
        "token_ids": [TOKEN] * num,
        "logprobs": {"content": [entry] * num},
        "finish_reason": "length",
    }
    return {"choices": [choice], "usage": {"prompt_tokens": len(body["token_ids"])}}


class FakeServer(ThreadingHTTPServer):
    """`answers[path]` is what is sent: a value, a function of the body, a `Status`; `DROP` cuts the
    connection in the middle, `HANG` never answers. `bodies[path]` is what came."""

    daemon_threads = True

    def __init__(self, model_path, port=0):
        super().__init__(("127.0.0.1", port), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.gpu_id = None
        self.key = None  # what vLLM's `--api-key` guards the token routes with
        self.label = "default"  # what its worker calls the weights
        self.sizes = model_sizes(AutoConfig.from_pretrained(model_path))
        self.bodies = {}
        self.is_down = threading.Event()
        tokenizer = AutoTokenizer.from_pretrained(model_path)
        self.config = {
            "model_config": {
                "model": str(model_path),
                "dtype": "torch.float32",
                "max_model_len": 1024,
                "logprobs_mode": "processed_logprobs",
            },
            "parallel_config": {
                "worker_extension_cls": "agent_vllm.engines.server.worker_extension.X"
            },
            "weight_transfer_config": {"backend": "trainer_memory"},
        }
        self.answers = {
            "/version": {"version": "0.31.0"},
            "/server_info": lambda body: {"vllm_config": self.config},
            "/collective_rpc": self.call_worker,
            "/get_world_size": {"world_size": 1},
            "/is_paused": {"is_paused": False},
            "/tokenize": lambda body: {
                "tokens": tokenizer.encode(body["prompt"], add_special_tokens=False)
            },
            "/inference/v1/generate": completion,
            "/reset_prefix_cache": {"success": True},
            **{f"/{name}": {} for name in ("pause", "resume", "abort_requests")},
            "/update_weight_version": {},
            "/start_weight_update": {},
            "/update_weights": lambda body: self.name_weights(None),
            "/finish_weight_update": {},
        }

    def name_weights(self, label):
        self.label = label
        return {}

    def call_worker(self, body):
        """As the methods of the worker extension."""
        match body["method"]:
            case "model_sizes":
                return {"results": [self.sizes]}
            case "weights_name":
                return {"results": [self.label]}
            case "gpu_id":
                return {"results": [self.gpu_id]}
            case "name_weights":
                self.name_weights(*body["args"])
                return {"results": [None]}

    def stop(self):
        """As a process that is killed: its connections end, its port is free."""
        self.is_down.set()
        self.shutdown()
        self.server_close()


class Status:
    def __init__(self, code, text="", *, headers=None, send=None):
        self.code = code
        self.text = text
        self.headers = headers or {}
        self.send = send  # writes the whole answer by itself


HANG, DROP = Status("hang"), Status("drop")


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.answer()

    def do_POST(self):
        self.answer()

    def answer(self):
        path = self.path.split("?")[0]
        size = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(size) or "null")
        self.server.bodies.setdefault(path, []).append(body)
        answer = self.server.answers.get(path, Status(404, "Not Found"))
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if self.server.key is not None and path.startswith("/inference"):
            answer = answer if token == self.server.key else Status(401, f"Unauthorized: {token}")
        if callable(answer):
            answer = answer(body)
        if answer is HANG:
            self.server.is_down.wait()
        if answer in (HANG, DROP) or self.server.is_down.is_set():
            self.close_connection = True
            if answer is DROP:
                self.wfile.write(
                    b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
                    b"Content-Length: 99\r\n\r\n{"
                )
            return
        if not isinstance(answer, Status):
            answer = Status(200, json.dumps(answer))
        if answer.send is not None:
            self.close_connection = True
            with suppress(OSError):  # the client has gone
                answer.send(self.wfile)
            return
        self.send_response(answer.code)
        self.send_header("Content-Length", str(len(answer.text.encode())))
        for name, value in ({"Content-Type": "application/json"} | answer.headers).items():
            self.send_header(name, value)
        self.end_headers()
        with suppress(OSError):
            self.wfile.write(answer.text.encode())

    def log_message(self, *_):
        pass


@contextmanager
def fake_server(model_path, port=0):
    server = FakeServer(model_path, port)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield server
    finally:
        if not server.is_down.is_set():
            server.stop()


def eventually(condition, seconds=10.0):
    """Wait for what another thread does."""
    give_up = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up, "it never came to be"
        time.sleep(0.01)
