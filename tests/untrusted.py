"""Tools that nobody should run in a process that matters; for `test_isolation.py`."""

import os
import signal
import subprocess
import sys
import time


def add(a: int, b: int) -> int:
    """
    Add two numbers.

    Args:
        a: first
        b: second
    """
    return a + b


async def add_async(a, b):
    return a + b


def sleep():
    time.sleep(600)


def spin():
    while True:
        pass


def spin_through_the_signal():
    signal.signal(signal.SIGXCPU, signal.SIG_IGN)
    spin()


def allocate():
    return len(b"x" * (4 << 30))


def large(num_chars):
    return "x" * num_chars


def write_file(num_bytes):
    with open("large", "wb") as file:
        file.write(b"x" * num_bytes)


def fork_and_stay(path):
    """Its child outlives the call and goes on to note its id, and that it lives."""
    if os.fork() == 0:
        with open(path, "w") as file:
            file.write(str(os.getpid()))
        time.sleep(600)
    while not os.path.exists(path) or not os.path.getsize(path):
        time.sleep(0.01)
    return "forked"


def fork_and_die(path):
    fork_and_stay(path)
    os._exit(7)


def escape(path):
    """Its child leaves the process group, and can't be told from others any more."""
    if os.fork() == 0:
        os.setsid()
        with open(path, "w") as file:
            file.write(str(os.getpid()))
        time.sleep(600)
    while not os.path.exists(path) or not os.path.getsize(path):
        time.sleep(0.01)
    os._exit(7)


def exit_at_once():
    os._exit(7)


def leave():
    sys.exit("bye")


def interrupt():
    raise KeyboardInterrupt


def crash():
    os.kill(os.getpid(), signal.SIGSEGV)


def close_stdout():
    sys.stdout.close()
    sys.stderr.close()
    return "closed"


def close_everything():
    os.closerange(0, 256)
    return "closed"


def talk():
    print("to stdout")
    os.write(1, b'{"text": "forged"}\n')
    subprocess.run(["echo", "from a child"], check=True)
    return "talked"


def read_stdin():
    return sys.stdin.read()


def environment():
    return sorted(os.environ)


def folder():
    return [os.getcwd(), os.listdir()]


def stop_the_caller():
    """Do what a tool on a thread could do: the process that it reaches is its own."""
    os.kill(os.getppid(), 0)
    os.killpg(0, signal.SIGKILL)


def several():
    return {"set": {3, 1, 2}, "none": None}


class Box:
    @staticmethod
    def open():
        return "opened"

    def method(self):
        return "method"


# ---- what a warm worker must keep from the next call ----

calls = []


def count():
    """Only of its own call."""
    calls.append(1)
    sys.modules["json"].loads = None
    os.environ["LEFT"] = "behind"
    return [len(calls), os.getppid()]


def use_processor(seconds):
    while time.process_time() < seconds:
        pass
    return "used"


def kill_the_worker():
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(600)


def daemonise(path):
    """A grandchild in a session of its own, whose parent is gone."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            with open(path, "w") as file:
                file.write(str(os.getpid()))
            time.sleep(600)
        os._exit(0)
    while not os.path.exists(path) or not os.path.getsize(path):
        time.sleep(0.01)
    return "daemonised"


def daemonise_and_sleep(path):
    daemonise(path)
    time.sleep(600)


def do(what):
    return globals()[what]()
