"""The simulator: cases that can be worked out by hand, what must hold always, bad input."""

import itertools
import json
import math
import random

import pytest
from fakes import observed, sampled, trajectory
from paths import DOCS

from agent_vllm.cli import main
from agent_vllm.errors import RecordError, ScenarioError
from agent_vllm.inspect.simulate import (
    RateCurve,
    Setup,
    Turn,
    Workload,
    distribution,
    predict,
    read_run,
    run_engine,
)
from agent_vllm.inspect.simulate.hardware import DECODERS, LINKS
from agent_vllm.inspect.simulate.rates import TimedTurn, fit_rates
from agent_vllm.inspect.simulate.sync import sync_seconds
from agent_vllm.record import RolloutRecorder
from agent_vllm.types import Span

TEN_EACH = RateCurve(((1, 10), (64, 640)))  # tokens a second for each, however many
TEN_SHARED = RateCurve(((1, 10), (64, 10)))  # for all together


def drawn(num_trajectories=32, seed=0, tool_s="lognormal:1:5"):
    workload = Workload(
        turns=distribution("uniform:1:4"),
        tokens=distribution("uniform:5:50"),
        tool_s=distribution(tool_s),
    )
    return workload.draw(num_trajectories, random.Random(seed))


# ---- by hand ----


def test_one_trajectory_takes_its_tokens_and_its_tools():
    run = run_engine([[Turn(20, 3.0), Turn(10, 0.5), Turn(5, 0.0)]], TEN_EACH, 8)
    assert run.seconds == pytest.approx(2.0 + 3.0 + 1.0 + 0.5 + 0.5)
    assert run.busy_s == pytest.approx(3.5)
    assert (run.sequence_s, run.queued_s, run.num_tokens) == (pytest.approx(3.5), 0.0, 35)


def test_a_tool_after_the_last_turn_is_waited_for():
    assert run_engine([[Turn(10, 2.0)]], TEN_EACH, 8).seconds == pytest.approx(3.0)


def test_a_shared_engine_without_tools_is_never_idle():
    run = run_engine([[Turn(n, 0.0), Turn(2 * n, 0.0)] for n in (1, 5, 30)], TEN_SHARED, 8)
    assert run.seconds == run.busy_s == pytest.approx(108 / 10)


def test_two_sequences_share_the_rate_until_one_leaves():
    # 10 a second together: at 2 s both have 10, and the longer goes on alone at 10 a second
    run = run_engine([[Turn(10, 0.0)], [Turn(30, 0.0)]], TEN_SHARED, 8)
    assert run.seconds == pytest.approx(2.0 + 2.0)
    assert run.sequence_s == pytest.approx(2 * 2.0 + 2.0)


def test_an_infinitely_fast_engine_leaves_the_slowest_chain_of_tools():
    plans = drawn()
    run = run_engine(plans, RateCurve(((1, math.inf),)), 4)
    slowest = max(sum(turn.tool_s for turn in plan) for plan in plans)
    assert (run.seconds, run.busy_s) == (pytest.approx(slowest), 0.0)


def test_places_are_taken_first_come_first_served():
    # one place: 1 s, then 2 s, then 3 s; the second waits 1 s and the third 3 s
    run = run_engine([[Turn(10, 0.0)], [Turn(20, 0.0)], [Turn(30, 0.0)]], TEN_EACH, 1)
    assert (run.seconds, run.queued_s) == (pytest.approx(6.0), pytest.approx(4.0))


def test_a_trajectory_without_a_turn_takes_no_time():
    assert run_engine([[], [Turn(10, 0.0)]], TEN_EACH, 8).seconds == pytest.approx(1.0)


def test_steps_between_measured_points_are_interpolated_and_never_faster_outside():
    rate = RateCurve(((16, 160), (4, 80)))  # 0.05 s a step at 4, 0.1 s at 16
    assert [rate.step_s(n) for n in (1, 4, 10, 16, 32)] == pytest.approx(
        [0.05, 0.05, 0.075, 0.1, 0.2]
    )


# ---- what always holds ----


def test_time_in_the_engine_its_queue_and_tools_is_all_the_time_there_is():
    plans = [[Turn(turn.num_tokens, 1.0) for turn in plan] for plan in drawn()]
    last = [[Turn(10_000, 0.0)]]  # outlasts all others, which have no time after their end
    run = run_engine(last * 2, TEN_EACH, 1)
    assert run.sequence_s + run.queued_s == pytest.approx(run.seconds + run.seconds / 2)
    run = run_engine(plans, TEN_EACH, 4)
    assert run.sequence_s == pytest.approx(sum(t.num_tokens for p in plans for t in p) / 10)
    assert 0 < run.busy_s < run.sequence_s < 4 * run.seconds


@pytest.mark.parametrize("layout", ["shared", "beside", "servers"])
def test_shares_add_up_and_steps_are_their_parts(layout):
    setup = Setup(
        layout=layout, rate=TEN_SHARED, max_num_seqs=4, num_engines=3, learner_s=7.0, sync_s=2.0
    )
    found = predict([drawn(seed=1), drawn(seed=2)], setup)
    assert found.step_s == found.rollout_s + 7.0 + 2.0
    assert set(found.shares) == ({"device"} if layout == "shared" else {"engine", "learner"})
    for share in found.shares.values():
        parts = [share.sampling, share.training, share.sync, share.idle]
        assert sum(parts) == pytest.approx(1.0)
        assert all(0 <= part <= 1 for part in parts)


def test_the_busy_time_is_that_of_the_engines():
    setup = Setup(layout="beside", rate=TEN_SHARED, learner_s=5.0)
    found = predict([[[Turn(20, 3.0), Turn(10, 0.0)]]], setup)  # 3 s busy of 6, then the learner
    assert found.shares["engine"].sampling == pytest.approx(3 / 11)
    assert found.shares["learner"].idle == pytest.approx(6 / 11)
    assert (found.engine_bound_s, found.tool_bound_s) == (pytest.approx(3.0), pytest.approx(3.0))


def test_better_means_are_never_slower():
    plans = [drawn(tool_s="0.5")]  # like ones: with uneven ones a queue may turn out unlucky

    def rollout_s(plans=plans, rate=TEN_SHARED, **changes):
        return predict(plans, Setup(layout="servers", rate=rate, **changes)).rollout_s

    by_engines = [rollout_s(num_engines=n) for n in (1, 2, 4, 8)]
    by_rate = [rollout_s(rate=RateCurve(((1, r),))) for r in (10, 20, 100)]
    by_tools = [rollout_s([drawn(tool_s=s)], TEN_EACH) for s in ("5", "0.5", "0")]
    for slow_to_fast in (by_engines, by_rate, by_tools):
        assert all(b < a for a, b in itertools.pairwise(slow_to_fast)), slow_to_fast


def test_the_same_seed_gives_the_same_prediction(capsys):
    def predicted(seed):
        options = ["--turns", "3", "--tokens", "uniform:5:50", "--tool-s", "lognormal:1:5"]
        assert main(["simulate", *options, "--rate", "1:50", "--seed", seed, "--json"]) == 0
        return json.loads(capsys.readouterr().out)["predicted"]

    assert predicted("1") == predicted("1")
    assert predicted("1") != predicted("2")


# ---- distributions ----


def test_a_log_normal_has_its_median_and_its_tail():
    stream = random.Random(0)
    values = sorted(distribution("lognormal:0.3:3").draw(stream) for _ in range(20_000))
    assert values[10_000] == pytest.approx(0.3, rel=0.05)
    assert values[19_000] == pytest.approx(3, rel=0.1)


def test_drawn_values_stay_inside():
    stream = random.Random(0)
    assert {distribution("list:1,2,3").draw(stream) for _ in range(100)} == {1.0, 2.0, 3.0}
    assert {distribution(0.25).draw(stream) for _ in range(3)} == {0.25}
    assert all(2 <= distribution("uniform:2:3").draw(stream) <= 3 for _ in range(100))


# ---- a recorded run ----


@pytest.mark.parametrize("rate", [TEN_SHARED, TEN_EACH, RateCurve(((1, 40), (8, 200), (32, 400)))])
def test_a_fitted_rate_plays_the_recorded_rollout_again(rate):
    """Spans made by the simulator itself, so the curve behind them is known."""
    plans = drawn(num_trajectories=32)
    spans, seconds = played(plans, rate)
    fitted = fit_rates([spans])
    assert run_engine(plans, fitted, 64).seconds == pytest.approx(seconds, rel=0.05)
    for number, tokens_per_s in fitted.points:
        assert tokens_per_s == pytest.approx(number / rate.step_s(round(number)), rel=0.2)


def played(plans, rate):
    """The spans of all turns on an engine that steps through time, and the whole time."""
    tick_s, now_s, turns = 0.002, 0.0, []
    waiting = [[0.0, plan, 0] for plan in plans]  # until when, plan, index of the next turn
    running = []  # start, tokens left, plan, index
    while waiting or running:
        for row in [row for row in waiting if row[0] <= now_s]:
            waiting.remove(row)
            _, plan, index = row
            if index < len(plan):
                running.append([now_s, plan[index].num_tokens, plan, index])
        for row in running:
            row[1] -= tick_s / rate.step_s(len(running))
        now_s += tick_s
        for row in [row for row in running if row[1] <= 0]:
            running.remove(row)
            start_s, _, plan, index = row
            turns.append(TimedTurn(start_s, now_s, plan[index].num_tokens))
            waiting.append([now_s + plan[index].tool_s, plan, index + 1])
    return turns, now_s


def span(kind, start_s, end_s):
    return Span(kind=kind, name="x", start_s=start_s, end_s=end_s)


@pytest.fixture
def record_path(tmp_path):
    """Two training rollouts 10 s apart, an evaluation, and one more: each a call and an answer."""
    segments = [sampled(*range(3, 23)), observed(2), sampled(*range(3, 13))]
    spans = [span("model", 0.0, 2.0), span("tool", 2.0, 4.5), span("model", 5.0, 6.0)]
    with RolloutRecorder(tmp_path / "rollouts.jsonl") as recorder:
        for step, mode, started in (
            (0, "train", 100.0), (1, "train", 110.0), (1, "eval", 118.0), (2, "train", 130.0),
        ):  # fmt: skip
            recorder.write(
                trajectory([1], *segments, spans=spans),
                step=step,
                mode=mode,
                started=started,
            )
    return recorder.path


def test_a_record_is_turns_times_and_the_learner(record_path):
    recorded = read_run(record_path)
    assert recorded.rollouts == [[[Turn(20, 3.0), Turn(10, 0.0)]]] * 3
    assert recorded.rollout_s == [6.0] * 3
    assert recorded.between_s == [4.0, None, None]
    assert recorded.learner_s() == 4.0
    assert recorded.rate().points == ((1.0, pytest.approx(10.0)),)


def test_what_if_is_asked_of_a_record(record_path, capsys):
    def predicted(*options):
        assert main(["simulate", "--from", str(record_path), "--json", *options]) == 0
        result = json.loads(capsys.readouterr().out)
        assert result["recorded"] == {
            "rollout_s": 6.0,
            "predicted_rollout_s": None if "--rate" in options else pytest.approx(6.0),
            "learner_s": 4.0,
        }
        return [(p["num_engines"], p["rollout_s"], p["step_s"]) for p in result["predicted"]]

    approx = pytest.approx
    assert predicted() == [(1, approx(6.0), approx(10.0))]
    assert predicted("--tool-scale", "0.5") == [(1, approx(4.5), approx(8.5))]
    assert predicted("--tool-s", "1") == [(1, approx(4.0), approx(8.0))]
    assert predicted("--rate", "1:20") == [(1, approx(4.5), approx(8.5))]
    assert predicted("--learner-s", "1", "--sync-s", "2") == [(1, approx(6.0), approx(9.0))]
    # two share 10 tokens a second where one has measured no more; the learner has twice the rows
    assert predicted("--trajectories", "2", "--engines", "1", "2") == [
        (1, approx(9.0), approx(17.0)), (2, approx(6.0), approx(14.0)),
    ]  # fmt: skip


def test_a_table_is_printed(record_path, capsys):
    assert main(["simulate", "--from", str(record_path), "--layout", "servers"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "servers, 1 trajectories per step" in printed
    assert "1 6 4 0 10 3 70% 60%" in printed
    assert "Recorded: 6 s per rollout; simulated: 6 s." in printed


def test_a_simulation_that_is_off_says_so(tmp_path, capsys):
    """Three turns that came back together, as from an engine that batches whole turns."""
    with RolloutRecorder(tmp_path / "rollouts.jsonl") as recorder:
        for num_tokens in (20, 1, 1):
            recorder.write(trajectory([1], sampled(*[3] * num_tokens), spans=[span("model", 0, 2)]))
    assert main(["simulate", "--from", str(recorder.path)]) == 0
    assert "more than 15% apart: don't trust" in " ".join(capsys.readouterr().out.split())


def test_a_scenario_file_is_the_options_and_gives_way_to_them(tmp_path, capsys):
    path = tmp_path / "scenario.json"
    path.write_text(
        '{"turns": 2, "tokens": 10, "tool_s": 1, "rate": ["1:10"], "engines": [1, 2], '
        '"trajectories": 2, "sync_bytes": 8e9, "link": "100g", "layout": "servers"}'
    )
    assert main(["simulate", "--scenario", str(path), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [p["rollout_s"] for p in result["predicted"]] == pytest.approx([5.0, 3.0])
    assert [p["sync_s"] for p in result["predicted"]] == pytest.approx([0.8, 0.8])
    assert main(["simulate", "--scenario", str(path), "--tool-s", "3", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [p["rollout_s"] for p in result["predicted"]] == pytest.approx([7.0, 5.0])


# ---- bad input ----

GOOD = {"turns": "2", "tokens": "10", "tool-s": "1", "rate": "1:10"}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"turns": None, "rate": None}, "--turns must be given"),
        ({"rate": None}, "--rate must be given, or --from"),
        ({"tool-s": "often"}, "must be NUMBER, uniform:LOW:HIGH"),
        ({"tool-s": "-1"}, "0 or more, got '-1'"),
        ({"tool-s": "nan"}, "0 or more, got 'nan'"),
        ({"tool-s": "uniform:2:1"}, "0 <= LOW <= HIGH, got 2 and 1"),
        ({"tool-s": "uniform:1"}, "must be NUMBER, uniform:LOW:HIGH"),
        ({"tool-s": "lognormal:0:1"}, "0 < MEDIAN <= P95, got 0 and 1"),
        ({"tool-s": "list:"}, "must be NUMBER, uniform:LOW:HIGH"),
        ({"tool-s": "list:1,-2"}, "0 or more, got [1.0, -2.0]"),
        ({"rate": "10"}, "SEQUENCES:TOKENS_PER_S"),
        ({"rate": "0:10"}, "both above 0, got 0:10"),
        ({"layout": "cloud"}, "`layout` must be one of"),
        ({"engines": "0"}, "`num_engines` must be 1 or more"),
        ({"max-num-seqs": "0"}, "`max_num_seqs` must be 1 or more"),
        ({"trajectories": "0"}, "`trajectories` must be 1 or more"),
        ({"steps": "0"}, "`steps` must be 1 or more"),
        ({"learner-s": "-1"}, "`learner_s` must be 0 or more"),
        ({"sync-bytes": "1e9"}, "--link must be given"),
        ({"link": "nvlink"}, "needs --sync-bytes"),
        ({"sync-bytes": "1e9", "link": "carrier pigeon"}, "`link` must be one of"),
        ({"sync-bytes": "-1", "link": "nvlink"}, "`sync_bytes` must be 0 or more"),
        ({"sync-bytes": "1", "link": "nvlink", "sync-s": "1"}, "exclude each other"),
        ({"tool-scale": "2"}, "is for recorded runs"),
    ],
)
def test_bad_options_say_what_is_wrong(changes, says):
    options = {name: value for name, value in (GOOD | changes).items() if value is not None}
    with pytest.raises(SystemExit) as ended:
        main(["simulate", *(f"--{name}={value}" for name, value in options.items())])
    assert says in str(ended.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "is not JSON"),
        ("[1]", "must hold a JSON object"),
        ('{"turn": 2}', "unknown options ['turn']"),
        ('{"engines": ["many"]}', "`engines` must be int, got ['many']"),
    ],
)
def test_bad_scenario_files_say_what_is_wrong(tmp_path, text, says):
    path = tmp_path / "scenario.json"
    path.write_text(text)
    with pytest.raises(SystemExit) as ended:
        main(["simulate", "--scenario", str(path)])
    assert says in str(ended.value)


@pytest.mark.parametrize("points", [(), ((1, 5), (1, 6)), ((1, -5),), ((math.nan, 5),)])
def test_a_rate_that_is_none_is_refused(points):
    with pytest.raises(ScenarioError, match="`rate`"):
        RateCurve(points)


def test_records_that_tell_nothing_are_refused(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    with RolloutRecorder(path) as recorder:
        recorder.write(trajectory([1], sampled(3), spans=[span("model", 0, 1)]), mode="eval")
    with pytest.raises(RecordError, match="holds evaluations only"):
        read_run(path)
    with RolloutRecorder(path) as recorder:
        recorder.write(trajectory([1], sampled(3)))
    with pytest.raises(RecordError, match="1 turns and 0 spans"):
        read_run(path)


def test_no_rollout_is_refused():
    with pytest.raises(ScenarioError, match="one trajectory at least"):
        predict([[]], Setup(layout="shared", rate=TEN_EACH))


# ---- sync ----


def test_sync_times_are_bytes_by_the_links_rate():
    assert sync_seconds(10e9, "100g") == pytest.approx(1.0)  # 12.5 GB/s, 80 % of it


def test_parameters_are_those_of_the_models():
    """As their checkpoints count them."""
    counts = {name: decoder.num_parameters() for name, decoder in DECODERS.items()}
    assert counts["Qwen3-0.6B"] == 596_049_920
    assert counts["Qwen3-8B"] == 8_190_735_360
    assert counts["Llama-3.3-70B"] == 70_553_706_496


def test_an_adapter_is_two_thin_matrices_a_layer():
    decoder = DECODERS["Qwen3-0.6B"]
    # queries, keys, values, output; gate, up, down
    sides = [1024 + 2048, 1024 + 1024, 1024 + 1024, 2048 + 1024, *[1024 + 3072] * 3]
    assert decoder.num_adapter_parameters(16) == 28 * 16 * sum(sides)


def test_the_page_has_the_table_that_the_command_prints(capsys):
    assert main(["simulate", "--sync-table"]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert len(rows) == 1 + 2 * len(DECODERS)
    assert rows[0].split(" | ")[3:] == [*list(LINKS)[:-1], f"{list(LINKS)[-1]} |"]
    page = (DOCS / "scaling.md").read_text().splitlines()
    assert [row for row in rows if row not in page] == []
