"""Real `vllm serve` processes for tests, as `agent-vllm serve` starts them."""

import os
import signal
import socket
import subprocess
import time
import urllib.request
from contextlib import contextmanager

import psutil

from agent_vllm.engines.server.launcher import serve_command, serve_environment

START_S = 600.0  # a quiet machine takes 20


class RealServer:
    """One server in a process group of its own."""

    def __init__(self, model_path, log_path):
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log_path = log_path
        self._command = serve_command(model_path, port=self.port, dtype="float32", max_num_seqs=32)
        self.start()

    def start(self):
        environment = serve_environment(os.environ) | {"VLLM_LOGGING_LEVEL": "WARNING"}
        with open(self.log_path, "w") as log:
            self.process = subprocess.Popen(
                self._command, env=environment, stdout=log, stderr=log, start_new_session=True
            )

    def wait_until_ready(self):
        give_up = time.monotonic() + START_S
        while True:
            assert self.process.poll() is None, self.log_path.read_text()[-3000:]
            assert time.monotonic() < give_up, self.log_path.read_text()[-3000:]
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=5).close()
                return
            except OSError:
                time.sleep(0.2)

    def kill(self):
        """SIGKILL for all of it, as a machine that is gone."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def processes(self):
        return left_in_group(self.process.pid)


def left_in_group(group):
    """Processes of it that run; one that ended may not have been waited for yet."""
    left = [p for p in psutil.process_iter(["status"]) if _group(p.pid) == group]
    return [p for p in left if p.info["status"] != psutil.STATUS_ZOMBIE]


def listening_ports(process):
    connections = process.net_connections("inet")
    return [c.laddr.port for c in connections if c.status == psutil.CONN_LISTEN]


def _group(pid):
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def is_free(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


@contextmanager
def real_servers(model_path, folder, num):
    servers = [RealServer(model_path, folder / f"server{index}.log") for index in range(num)]
    try:
        for server in servers:
            server.wait_until_ready()
        yield servers
    finally:
        for server in servers:
            if server.process.poll() is None:
                server.kill()
