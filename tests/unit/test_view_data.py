"""The viewer's data, its errors for bad input, and the server of a live run."""

import base64
import contextlib
import json
import math
import os
import re
import threading
import urllib.error
import urllib.request
from array import array
from dataclasses import replace

import pytest
from browser import browser, needs_chromium
from fakes import sampled, trajectory
from records import hostile_record, record, write

from agent_vllm.cli import main
from agent_vllm.inspect.viewer.data import PageData, read_page_data, to_json
from agent_vllm.inspect.viewer.live import LiveData, make_server
from agent_vllm.inspect.viewer.page import write_page
from agent_vllm.record import RolloutRecorder
from agent_vllm.record.export import write_parquet


@pytest.fixture
def path(tmp_path):
    return tmp_path / "rollouts.jsonl"


def ids(report):
    return [row["id"] for row in report.rows]


def column(typecode, text):
    return list(array(typecode, base64.b64decode(text)))


# ---- what is in a report ----


def test_a_body_has_the_records_columns(path):
    learner = [-0.5, math.nan, 0.0, -1.75, -0.125]
    report = read_page_data(write(path, [record(learner_logprobs=learner)]), limit=9)
    body = json.loads(report.bodies["t0"])
    assert column("i", body["prompt_ids"]) == [1, 2]
    assert column("i", body["completion_ids"]) == [3, 4, 5, 6, 7]
    assert column("B", body["completion_mask"]) == [1, 1, 0, 1, 1]
    assert column("f", body["logprobs"]) == [-0.5, -0.25, 0.0, -2.0, -0.125]
    shown = column("f", body["learner_logprobs"])
    assert shown[:1] + shown[2:] == learner[:1] + learner[2:]
    assert shown[1] != shown[1]  # not a number


def test_a_recorded_file_is_shown_with_what_was_amended(path):
    with RolloutRecorder(path) as recorder:
        record_id = recorder.write(trajectory([1], sampled(2, 3)), step=4, row={"answer": [3]})
        recorder.amend(record_id, learner_logprobs=[-0.25, -4.0])
    report = read_page_data(path, limit=9)
    (row,) = report.rows
    assert (row["id"], row["step"], row["num_sampled_tokens"]) == ("rollout-4-0-0", 4, 2)
    body = json.loads(report.bodies["rollout-4-0-0"])
    assert column("f", body["learner_logprobs"]) == [-0.25, -4.0]
    assert json.loads(body["row"]["answer"]) == [3]
    assert report.notes == []


def test_parquet_shows_the_same(path):
    write(path, [record(), record("t1", advantage=None)])
    output = path.with_suffix(".parquet")
    write_parquet(path, output)
    report = read_page_data(output, limit=9)
    assert report == replace(read_page_data(path, limit=9), name=output.name)


def test_the_newest_are_kept_and_the_figures_are_over_all(path):
    lines = [record(f"t{i}", step=i // 2, rewards={"a": i, "b": None}) for i in range(6)]
    report = read_page_data(write(path, lines), limit=2)
    assert ids(report) == list(report.bodies) == ["t4", "t5"]
    assert [step["rewards"]["a"]["mean"] for step in report.steps] == [0.5, 2.5, 4.5]
    assert [step["num"] for step in report.steps] == [2, 2, 2]
    assert report.notes[-1].startswith("The newest 2 of 6 trajectories are shown")


def test_data_can_not_leave_its_script_element(path):
    report = read_page_data(write(path, [hostile_record("t0")]), limit=9)
    for text in (*report.bodies.values(), to_json(report.index)):
        assert "<" not in text
        assert text.isascii()
        json.loads(text)


# ---- bad input ----


def test_a_line_that_was_cut_off_is_a_note(path):
    path.write_text(json.dumps(record("t0")) + "\n" + json.dumps(record("t1"))[:-9])
    report = read_page_data(path, limit=9)
    assert ids(report) == ["t0"]
    (note,) = report.notes
    assert note == f"{path}:2 is cut off, as by a run that was killed; it is skipped."


AMENDMENT = {"schema": 3, "amends": "t0", "session": 1, "advantage": 1.0}


@pytest.mark.parametrize(
    ("line", "note"),
    [
        (record("t1", schema=4), ":2 has schema 4, this version reads 2 and 3."),
        (AMENDMENT | {"schema": 4}, ":2 has schema 4, this version reads 2 and 3."),
        (json.dumps(AMENDMENT)[:-9], ":2 is not JSON: "),
        ("[" * 100_000, ":2 is not JSON: "),
        (record("t0"), ":2 has id 't0', which line 1 has too."),
        (record("t1", messages=[3]), ":2: `messages.0` must be a valid dictionary, got 3."),
        (record("t1", prompt_ids=[2**31]), "Record t1 can't be shown: "),
        (record("t1", rewards={"a": 10**400}), ":2: `rewards.a` must be a valid number, got 1000"),
        (record("t1", messages=[{"tool_calls": [3]}]), "Record t1 can't be shown: AttributeError"),
        (record("t1", messages=[{"tool_calls": 3}]), "Record t1 can't be shown: TypeError"),
    ],
)
def test_what_comes_before_a_wrong_line_is_shown(path, line, note):
    report = read_page_data(write(path, [record("t0"), line, record("t2")]), limit=9)
    assert ids(report) == ["t0"]
    assert report.rows[0]["advantage"] == 0.5
    (said,) = report.notes
    assert said.removeprefix("Read up to here: ").removeprefix(str(path)).startswith(note)


def view(*arguments):
    return main(["view", *map(str, arguments)])


def test_the_command_writes_one_file_beside_the_record(path, capsys):
    write(path, [record()])
    assert view(path) == 0
    output = path.with_suffix(".html")
    assert capsys.readouterr().out == f"{output}: 1 of 1 trajectories\n"
    html = output.read_text()
    assert re.findall(r"(?:src|href)=\"([^\"]*)\"", html) == ["data:,", "#main"]
    assert "{{" not in html.split("</script>")[0].replace("{{style}}", "")


@pytest.mark.parametrize(
    ("lines", "error"),
    [
        ([], "holds no recorded trajectory"),
        (["[1, 2]"], ":1 is not a recorded rollout: it has no `schema`."),
        (["\x89PNG"], ":1 is not JSON: Expecting value"),
        (['{"loss": 0.5}'], ":1 is not a recorded rollout: it has no `schema`."),
        ([record(schema=1)], ":1 has schema 1, this version reads 2 and 3."),
        ([json.dumps(record())[:99]], ":1 is not JSON: "),
    ],
)
def test_a_file_that_is_no_record_is_an_error(path, capsys, lines, error):
    write(path, lines)
    assert view(path) == 1
    assert error in capsys.readouterr().err
    assert not path.with_suffix(".html").exists()


def test_files_that_can_not_be_read_or_written_are_errors(path, capsys):
    assert view(path) == 1
    write(path, [record()])
    assert view(path, "-o", path.parent / "none" / "r.html") == 1
    assert view(path, "-o", path) == 1
    assert view(path, "--limit", 0) == 1
    errors = capsys.readouterr().err.splitlines()
    assert [error.startswith("agent-vllm view: ") for error in errors] == [True] * 4
    assert "does not exist" in errors[0] and str(path) in errors[0]
    assert "none" in errors[1]
    assert "must be another file than the record" in errors[2]
    assert "--limit must be 1 or more, got 0" in errors[3]
    assert len(path.read_text().splitlines()) == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_write_access(path, capsys):
    write(path, [record()])
    path.parent.chmod(0o500)
    assert view(path) == 1
    path.parent.chmod(0o700)
    assert "Permission denied" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["view", "trace", "export", "replay"])
def test_help_is_written_for_users(capsys, command):
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help"])
    out = capsys.readouterr().out
    assert "the folder of the run" in out
    assert not {"Owns", "Invariant", "`"} & set(out.replace(":", "").split())


def test_the_folder_of_a_run_stands_for_its_record(path, capsys):
    write(path, [record()])
    assert view(path.parent) == 0
    assert capsys.readouterr().out == f"{path.with_suffix('.html')}: 1 of 1 trajectories\n"


# ---- a live run ----


@contextlib.contextmanager
def serving(path):
    server = make_server(LiveData(path, limit=9), port=0)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def get(url, **headers):
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=10) as answer:
        return answer.status, answer.read().decode()


def test_the_server_answers_with_what_is_new(path):
    write(path, [record("a b&c")])
    with serving(path) as address:
        index = json.loads(get(f"{address}/index")[1])
        assert [row["id"] for row in index["rows"]] == ["a b&c"]
        assert get(f"{address}/index?version={index['version']}") == (204, "")
        body = json.loads(get(f"{address}/body?id=a%20b%26c")[1])
        assert column("i", body["completion_ids"]) == [3, 4, 5, 6, 7]
        with pytest.raises(urllib.error.HTTPError, match="404"):
            get(f"{address}/body?id=none")


def test_a_port_that_is_taken_is_an_error(path, capsys):
    write(path, [record()])
    with serving(path) as address:
        port = address.rpartition(":")[2]
        assert view(path, "--live", "--port", port) == 1
    assert f"Port {port} is taken" in capsys.readouterr().err


def test_another_sites_name_is_refused(path):
    write(path, [record()])
    with serving(path) as address, pytest.raises(urllib.error.HTTPError, match="403"):
        get(f"{address}/index", Host="evil.example")


@pytest.mark.parametrize(
    "text", [None, "", json.dumps(record())[:99]], ids=["missing", "empty", "half a line"]
)
def test_a_run_that_has_recorded_nothing_yet(path, text):
    if text is not None:
        path.write_text(text)
    assert LiveData(path, limit=9).current() == PageData(name=path.name)


def test_a_record_that_went_bad_is_said(path):
    write(path, [record()])
    with serving(path) as address:
        get(f"{address}/index")
        write(path, [record(schema=7)])
        with pytest.raises(urllib.error.HTTPError, match="409") as caught:
            while True:  # the server takes its time between two readings
                get(f"{address}/index?version=1")
        assert "has schema 7" in caught.value.read().decode()


@needs_chromium
def test_the_page_follows_a_growing_file(path):
    with browser() as new_tab, serving(path) as address:
        tab = new_tab()
        tab.open(f"{address}/")
        assert "No trajectories yet" in tab.page.inner_text("#panel")
        write(path, [record("t0")])
        tab.wait_for("[role=option]")
        tab.press("c")
        tab.wait_for(".message")
        with path.open("a") as file:
            file.write(json.dumps(record("t1", generation=1)) + "\n")
        tab.wait_for("[role=option]:nth-child(2)")
        assert tab.texts("[role=option] .row-place") == [
            "Step 0, train · group 0, sample 1",
            "Step 0, train · group 0, sample 0",
        ]
        tab.press("j")  # from the one that was open
        tab.settle()
        assert "sample 0" in tab.page.inner_text(".trajectory h2")
        assert tab.problems == []
        assert {url.split("/")[2] for url in tab.requests if "http" in url} == {address[7:]}


def test_a_report_is_written_in_the_records_order(path):
    lines = [record(f"t{i}") for i in range(3)]
    output = path.with_suffix(".html")
    write_page(write(path, lines), output)
    assert re.findall(r'id="(index|body-\d+)"', output.read_text()) == [
        "index",
        "body-0",
        "body-1",
        "body-2",
    ]
