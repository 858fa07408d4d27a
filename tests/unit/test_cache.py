"""Folders that are made once per machine."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from cache import made_once


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("AGENT_VLLM_CACHE", str(tmp_path))
    return tmp_path


def test_of_many_that_ask_at_once_one_fills_the_folder():
    fillers, barrier = [], threading.Barrier(4)

    def make(folder):
        fillers.append(folder)
        time.sleep(0.2)
        (folder / "whole").touch()

    def ask(_):
        barrier.wait()
        folder = made_once("model", [__file__], make)
        assert (folder / "whole").exists()
        return folder

    with ThreadPoolExecutor(4) as pool:
        assert len(set(pool.map(ask, range(4)))) == 1
    assert len(fillers) == 1


def test_a_folder_that_could_not_be_filled_is_asked_for_again(cache):
    def fail(folder):
        (folder / "half").touch()
        raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        made_once("model", [__file__], fail)
    assert [path for path in cache.iterdir() if path.is_dir()] == []
    assert (made_once("model", [__file__], lambda folder: (folder / "x").touch()) / "x").exists()
