"""Ctrl-C and SIGTERM in a real training run: what `make stops` does at 20 moments, at two.

Also: a signal that comes while something must become whole is put off, not lost.
"""

import json
import os
import signal
import subprocess
import sys
import threading

import pytest
from paths import PYTHONPATH, ROOT

from stress import stops
from trl_integration.interrupts import interrupted_afterwards


@pytest.mark.e2e
@pytest.mark.vllm
def test_a_run_that_is_stopped_leaves_everything_whole(agent_path):
    command = [sys.executable, "-m", "stress.stops", "--num-moments=2", "--patience-s=60"]
    run = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": PYTHONPATH},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0, run.stdout + run.stderr[-2000:]
    assert run.stdout.count("ended in") == 2


def test_the_check_finds_what_is_not_whole(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    log, record = folder.with_suffix(".log"), folder / "rollouts.jsonl"
    log.write_text("Stopped. Checkpoints are there")
    record.write_text(json.dumps({"schema": 2}) + "\n")
    nobody = 2**22  # above every process id
    assert stops.problems(folder, 1, nobody) == []
    record.write_text(json.dumps({"schema": 2}))
    log.write_text("Traceback (most recent call last)")
    found = stops.problems(folder, None, nobody)
    assert [problem.partition(":")[0] for problem in found] == [
        "exit status None",
        "a traceback",
        "no word of having stopped",
        "the record's last line was cut",
    ]


def test_a_process_of_the_session_is_found():
    child = subprocess.Popen(["sleep", "60"], start_new_session=True)
    try:
        assert stops.left_in_session(child.pid) == [str(child.pid)]
    finally:
        child.kill()
        child.wait()
    assert stops.left_in_session(child.pid) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_put_off_and_comes_once(number):
    told = []
    before = signal.signal(number, lambda *_: told.append("late"))
    try:
        with interrupted_afterwards():
            signal.raise_signal(number)
            signal.raise_signal(number)
            told.append("whole")
        assert told == ["whole", "late"]
        signal.raise_signal(number)
        assert told == ["whole", "late", "late"]
    finally:
        signal.signal(number, before)


def test_an_error_in_the_block_is_told_and_handlers_are_back():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(ValueError, match="no space"), interrupted_afterwards():
        raise ValueError("no space")
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_on_another_thread_nothing_is_touched():
    seen, before = [], signal.getsignal(signal.SIGINT)

    def work():
        with interrupted_afterwards():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before]
