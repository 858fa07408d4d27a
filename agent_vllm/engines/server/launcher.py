"""Start one vLLM server that `VLLMServerRolloutEngine` can use. Everything after `--` goes to vLLM.

Owns the command line and the environment. This process becomes vLLM's own server.
"""

import argparse
import json
import os
import shlex
import socket
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from agent_vllm.engines.models import context_length, to_dtype
from agent_vllm.engines.server.address import is_loopback
from agent_vllm.engines.server.weight_transfer import MEMORY_BACKEND, NCCL_BACKEND
from agent_vllm.engines.vllm.options import VLLMOptions
from agent_vllm.errors import VLLMServerError

DESCRIPTION = (
    "Start one vLLM server that rollouts can use. Everything after `--` goes to vLLM as it is."
)
_EXTENSION = "agent_vllm.engines.server.worker_extension.WorkerExtension"
_CPU_ENVIRONMENT = {
    # OpenMP threads that spin while they wait slow each other down tenfold on shared cores.
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "GOMP_SPINCOUNT": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else each server takes the same cores for itself
}

_OPEN = (
    "Warning: this server listens on {host}. Whoever reaches its port can replace its weights and "
    "run its workers' methods, with or without an API key: vLLM guards the token routes only. Let "
    "a firewall admit the learner's machines alone."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="path or id; what the learner starts from")
    parser.add_argument("--host", default="127.0.0.1", help="default: %(default)s")
    parser.add_argument("--port", type=int, default=8000, help="default: %(default)s")
    parser.add_argument("--dtype", help="of the weights; default: the checkpoint's")
    parser.add_argument("--max-model-len", type=int, help="default: the model's own context")
    parser.add_argument("--max-num-seqs", type=int, default=128, help="default: %(default)s")
    parser.add_argument(
        "--gpu-memory-utilization",
        type=float,
        help="share of the GPU; default: 0.9, or 0.3 with --same-gpu",
    )
    parser.add_argument(
        "--same-gpu",
        action="store_true",
        help="share the learner's GPU: weights come through memory (not run on a GPU yet)",
    )
    parser.add_argument(
        "--api-key", help="that engines must send; default: VLLM_API_KEY of the environment"
    )


def run(args: argparse.Namespace) -> int:
    check_port(args.host, args.port)
    command = serve_command(
        args.model,
        host=args.host,
        port=args.port,
        dtype=args.dtype,
        max_model_len=args.max_model_len,
        max_num_seqs=args.max_num_seqs,
        gpu_memory_utilization=args.gpu_memory_utilization,
        same_gpu=args.same_gpu,
        vllm_args=args.rest,
    )
    host = _last(command, "--host")
    if not is_loopback(host):
        print(_OPEN.format(host=host), file=sys.stderr)
    print(shlex.join(command), flush=True)
    os.execve(command[0], command, serve_environment(os.environ, args.api_key))  # noqa: S606


def check_port(host: str, port: int) -> None:
    """Check that the port is free, before a model is loaded.

    Raises:
        VLLMServerError: the port is in use.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise VLLMServerError(
                f"Port {port} of {host} can't be used: {error.strerror}. Is a server running there "
                "already? Pick another with `--port`."
            ) from error


def serve_command(
    model: str | Path,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    dtype: str | None = None,
    max_model_len: int | None = None,
    max_num_seqs: int = 128,
    gpu_memory_utilization: float | None = None,
    same_gpu: bool = False,
    vllm_args: Sequence[str] = (),
) -> list[str]:
    """Return the server's command line. Later arguments win, so `vllm_args` can change any.

    Args:
        gpu_memory_utilization: default is 0.9, or 0.3 on the learner's GPU.
        same_gpu: the learner uses the same GPU, where NCCL can't connect the two.

    Raises:
        VLLMServerError: `vllm_args` hold an API key, which everyone on the machine could read.
    """
    if _last(vllm_args, "--api-key"):
        raise VLLMServerError(
            "`--api-key` must not stand after `--`, where it would be printed and visible in the "
            "list of processes. Set VLLM_API_KEY, or give it before `--`."
        )
    config = AutoConfig.from_pretrained(model)
    on_cpu = not torch.cuda.is_available()
    options = VLLMOptions(
        dtype=to_dtype(dtype or config.dtype or "float32"),
        max_model_len=max_model_len or context_length(config),
        max_num_seqs=max_num_seqs,
        gpu_memory_utilization=gpu_memory_utilization or (0.3 if same_gpu else 0.9),
        kv_cache_memory_bytes=None,
        further={},
    )
    backend = MEMORY_BACKEND if on_cpu or same_gpu else NCCL_BACKEND
    arguments = options.engine_args(config, on_cpu=on_cpu) | {
        "host": host,
        "port": port,
        "skip_tokenizer_init": False,  # it checks ids and finds stop strings
        "enable_scale_out": True,  # token ids in, token ids out
        "enable_prompt_tokens_details": True,
        "worker_extension_cls": _EXTENSION,
        "weight_transfer_config": {"backend": backend},
        "disable_uvicorn_access_log": True,
    }
    return [*_vllm_serve(str(model)), *_flags(arguments), *vllm_args]


def serve_environment(environment: Mapping[str, str], api_key: str | None = None) -> dict[str, str]:
    """Return the server's environment: it accepts weights and finds this package.

    Args:
        api_key: what engines must send; vLLM reads it from here.
    """
    package = str(Path(__file__).parents[3])
    paths = [package, *filter(None, [environment.get("PYTHONPATH")])]
    defaults = {} if torch.cuda.is_available() else _CPU_ENVIRONMENT
    return {
        **defaults,
        **environment,
        **({"VLLM_API_KEY": api_key} if api_key else {}),
        "VLLM_SERVER_DEV_MODE": "1",
        "PYTHONPATH": os.pathsep.join(paths),
    }


def _vllm_serve(model: str) -> list[str]:
    try:
        version("vllm")
    except PackageNotFoundError:  # the CPU build's own name, on which its `vllm` stumbles
        module = "vllm.entrypoints.launchers.api_server.entry"
        return [sys.executable, "-m", module, "--model", model]
    return [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", model]


def _last(command: Sequence[str], flag: str) -> str:
    """Return the value that a flag has in the end, or nothing."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(flag, dest="value", default="")
    return parser.parse_known_args(command)[0].value


def _flags(arguments: Mapping[str, Any]) -> list[str]:
    flags: list[str] = []
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            flags += [f"--{flag}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return flags
