"""The benchmark command: its files have their shape, goals point the right way, failures show."""

import json
import os
import subprocess
import sys

import pytest
from paths import ROOT

from benchmarks import runner
from benchmarks.figures import SHOWN, Figure, at_least, at_most, ratios

KEYS = {
    "id", "what", "value", "unit", "goal", "limit", "holds", "spread", "note", "versions",
    "machine", "quick",
}  # fmt: skip


def figure(goal, *values):
    return Figure(id="X1", what="a ratio", goal=goal, values=values)


@pytest.mark.e2e
def test_a_row_is_measured_and_written(tmp_path, agent_path):
    command = [sys.executable, "-m", "benchmarks", "--quick", "--only", "B4"]
    process = subprocess.run(
        [*command, "--output-dir", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    rows = json.loads((tmp_path / "latest.json").read_text())
    assert [row["id"] for row in rows] == ["B4", "B4 unseeded"]
    assert all(row.keys() == KEYS for row in rows)
    assert (tmp_path / "latest.png").stat().st_size > 0


def test_a_figure_is_the_median_with_its_extremes():
    row = figure(at_most(2), 1.0, 3.0, 1.5).as_json()
    assert (row["value"], row["spread"], row["goal"], row["holds"]) == (
        1.5,
        [1.0, 3.0],
        "<= 2",
        True,
    )


@pytest.mark.parametrize(
    ("goal", "value", "holds", "margin"),
    [(at_most(2), 4.0, False, 0.5), (at_least(2), 4.0, True, 2.0)],
)
def test_goals_point_the_right_way(goal, value, holds, margin):
    row = figure(goal, value).as_json()
    assert (row["holds"], runner.margin(row)) == (holds, margin)


def test_a_document_gets_the_same_table():
    rows = [
        {**figure(at_most(2), 1.5).as_json(), "machine": {"cores": 2}, "versions": {"vllm": "1"}}
    ]
    assert runner.markdown_table(rows).splitlines() == [
        "cores 2, vllm 1",
        "",
        "| id | what | value | goal | holds | spread | note |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        "| X1 | a ratio | 1.5 | <= 2 | yes | 1.5 to 1.5 |  |",
    ]


def test_what_is_only_shown_holds_nothing():
    assert figure(SHOWN, 1.0).as_json()["holds"] is None


def test_ratios_refuse_sides_of_different_rounds():
    assert ratios([4.0, 9.0], [2.0, 3.0]) == [2.0, 3.0]
    with pytest.raises(ValueError):
        ratios([1.0], [1.0, 2.0])


def test_a_row_that_fails_is_in_the_results(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(runner.sys, "executable", "/bin/false")
    rows = runner.run_rows(["B9"], quick=True)
    assert rows == [{"id": "B9", "error": "ended with 1"}]
    runner.write_results(rows, tmp_path, quick=True)
    runner.print_table(rows)
    assert "failed: ended with 1" in runner.markdown_table(
        json.loads((tmp_path / "latest.json").read_text())
    )
    assert "failed: ended with 1" in capsys.readouterr().out
