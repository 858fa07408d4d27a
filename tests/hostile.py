"""Tools that misbehave, in the place of a calculator; for `test_hostile_tools_on_vllm.py`.

At the top level of a module that imports little, so that each can be isolated, too.
"""

import asyncio
import math
import os
import signal
import sys
import threading
import time

# ---- never done ----

release = threading.Event()  # a thread in C code can't be ended; the test lets it go
one, two = threading.Lock(), threading.Lock()
both_hold = threading.Barrier(2)


def wait_for_ever(expression):
    release.wait()


def sleep_for_ever(expression):
    time.sleep(10**6)


def spin(expression):
    while True:
        pass


async def hold_the_loop(expression):
    while True:
        pass


async def wait_for_ever_async(expression):
    await asyncio.Event().wait()


def take_both(first, second):
    with first:
        both_hold.wait()
        second.acquire()
        second.release()


def take_one_then_two(expression):
    take_both(one, two)


def take_two_then_one(expression):
    take_both(two, one)


# ---- raises ----


def raising(error):
    def tool(expression):
        raise error

    return tool


def recurse(expression):
    return recurse(expression)


def leave(expression):
    sys.exit("bye")


# ---- returns ----


def returning(value):
    return lambda expression: value


def contains_itself(expression):
    circle = []
    circle.append(circle)
    return circle


def flood(expression):
    return "9" * 10**8


def fork(expression):
    return ["parent" if os.fork() else "child"]


# ---- does to its process ----


def exit_at_once(expression):
    os._exit(7)


def crash(expression):
    os.kill(os.getpid(), signal.SIGSEGV)


def close_stdout(expression):
    sys.stdout.close()
    os.close(1)
    return "closed"


def fork_and_stay(expression):
    if os.fork() == 0:
        os.setsid()
        time.sleep(10**6)
    return "forked"


def fill_the_memory(expression):
    return len(b"x" * (1 << 40))


NAN, CONTROL, SURROGATE = math.nan, "\x00\x1b[2J\x1b]0;t\x07\r\x08\u202e", "\ud83d"
