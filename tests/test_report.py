"""Runs laid over one another, and the numbers of bench/study.py."""

import json
import subprocess
import sys
from math import isnan
from pathlib import Path

import pytest
import study

from pyvision_mini import report
from pyvision_mini.config import UserError

ROOT = Path(__file__).resolve().parent.parent


def metrics(path, accuracies):
    """A metrics file with a step per accuracy, ten seconds each."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({
        "step": i + 1, "elapsed": 10.0 * (i + 1), "accuracy": accuracy, "reward": accuracy, "calls": 2.0,
        "response_tokens": 100, "entropy": 0.1}) + "\n" for i, accuracy in enumerate(accuracies)))
    return path


def size(picture):
    """(width, height) in pixels, from the header of a PNG."""
    data = picture.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    return int.from_bytes(data[16:20]), int.from_bytes(data[20:24])


# --- report: curves, compare ------------------------------------------------------------------------------------------


def test_a_folder_and_a_file_are_compared_in_one_picture(tmp_path):
    metrics(tmp_path / "first" / "metrics.jsonl", [0.1, 0.2, 0.3])
    metrics(tmp_path / "second.jsonl", [0.3, 0.2])
    done = subprocess.run([sys.executable, "-m", "pyvision_mini.report", tmp_path / "first", tmp_path / "second.jsonl",
                           "--out", tmp_path / "both.png"], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"2 runs in {tmp_path / 'both.png'}\n", "")
    assert size(tmp_path / "both.png") == (1800, 1170)


def test_runs_are_named_by_their_folder_and_by_the_whole_path_where_two_have_the_same(tmp_path):
    for name in ("a/run", "b/run", "c/other"):
        metrics(tmp_path / name / "metrics.jsonl", [0.5])
    paths = [str(tmp_path / name) for name in ("a/run", "b/run", "c/other")]
    assert list(report.read_runs(paths)) == [paths[0], paths[1], "other"]


def test_held_out_accuracies_come_with_a_run_and_the_header_of_a_log_is_no_step(tmp_path):
    log = metrics(tmp_path / "log.jsonl", [0.25, 0.5])
    log.write_text('{"setting": "base"}\n' + log.read_text() + '{"step": 2, "held_out": 0.75}\n')
    metrics(tmp_path / "run.1" / "metrics.jsonl", [0.25])
    (tmp_path / "run.1" / "summary.json").write_text('{"evaluations": [{"step": 0, "accuracy": 0.125, "n": 8}]}')
    runs = report.read_runs([str(log), str(tmp_path / "run.1")])
    assert report._points(runs["log"], "accuracy") == ([1, 2], [0.25, 0.5])
    assert report._points(runs["log"], "held_out") == ([2], [0.75])
    assert report._points(runs["run.1"], "held_out") == ([0], [0.125])


def test_a_run_is_named_by_its_folder_from_inside_it_too_and_given_twice_is_refused(tmp_path, monkeypatch):
    metrics(tmp_path / "inside" / "metrics.jsonl", [0.5])
    monkeypatch.chdir(tmp_path / "inside")
    assert list(report.read_runs(["."])) == ["inside"]
    with pytest.raises(UserError, match="the same run twice"):
        report.read_runs([".", "."])


@pytest.mark.parametrize("content, message", [
    (None, "no such file; give folders"), ("", "holds no step"), ("no json\n", "holds no step"),
    ("[1]\n", "holds no step"), ("3\n", "holds no step"), ('{"step": 1}\n', "holds no step"),
    (b"\xff\xfe\x00", "holds no step")])
def test_what_is_no_run_is_named_with_what_to_give_instead(tmp_path, content, message):
    path = tmp_path / "bad.jsonl"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=message) as error:
        report.read_runs([str(metrics(tmp_path / "good.jsonl", [0.5])), str(path)])
    assert str(path) in str(error.value) and "\n" not in str(error.value)


def test_a_folder_without_metrics_and_no_run_at_all_end_in_one_line(tmp_path):
    with pytest.raises(UserError, match=str(tmp_path / "metrics.jsonl")):
        report.read_runs([str(tmp_path)])
    done = subprocess.run([sys.executable, "-m", "pyvision_mini.report"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == "error: no run to compare: give folders with a metrics.jsonl in them, or .jsonl files\n"


@pytest.mark.parametrize("out", ["no/such/folder.png", "picture.docx"])
def test_a_picture_that_cannot_be_written_is_named(tmp_path, out):
    runs = report.read_runs([str(metrics(tmp_path / "run.jsonl", [0.5]))])
    with pytest.raises(UserError, match="--out .*cannot be written"):
        report.compare(runs, tmp_path / out)


def test_curves_leave_out_the_reasons_that_do_not_occur_and_lines_without_the_metric(tmp_path):
    rows = [{"step": 1, "dropped": {"flat": 3}, "calls": 1.5}, {"step": 2, "dropped": {}}]
    assert report._points(rows, "dropped.flat") == ([1, 2], [3, 0])
    assert report._points(rows, "dropped.too_few") == ([1, 2], [0, 0])
    assert report._points(rows, "calls") == ([1], [1.5])
    report.draw_curves(rows, [{"step": 0, "accuracy": 0.5}], tmp_path / "curves.png", "a run")
    assert size(tmp_path / "curves.png") == (1440, 900)


# --- bench/study.py ---------------------------------------------------------------------------------------------------


def log(accuracies, held_out):
    """A study log: header, steps, evaluations."""
    steps = [{"step": i + 1, "accuracy": accuracy} for i, accuracy in enumerate(accuracies)]
    return [{"setting": "base"}, *steps, *({"step": step, "held_out": value} for step, value in held_out.items())]


def test_the_standard_error_is_over_seeds_and_unknown_for_one():
    mean, error = study.mean_and_error([1.0, 2.0, 3.0])      # sample std 1, divided by √3
    assert (mean, round(error, 4)) == (2.0, 0.5774)
    mean, error = study.mean_and_error([0.5])
    assert mean == 0.5 and isnan(error)


def test_a_curve_is_smoothed_over_the_steps_before():
    assert study.smooth([1.0, 2.0, 3.0, 10.0], window=2) == [1.0, 1.5, 2.5, 6.5]


def test_a_runs_number_is_the_mean_of_its_last_steps_or_its_last_evaluation():
    rows = log([0.0] * 5 + [0.25] * 5 + [0.75] * 5, {0: 0.1, 15: 0.9})
    assert study.outcome(rows, "accuracy") == 0.5            # 5 of the last 10 steps have 0.25, 5 have 0.75
    assert (study.outcome(rows, "before"), study.outcome(rows, "held_out")) == (0.1, 0.9)
    assert (study.change(rows, "accuracy"), round(study.change(rows, "held_out"), 9)) == (0.5, 0.8)


def test_a_band_covers_the_steps_all_seeds_have():
    runs = {0: log([0.0, 0.5, 1.0], {0: 0.25}), 1: log([1.0, 0.5], {0: 0.75})}
    #                smoothed: 0, 0.25, 0.5                1, 0.75
    assert study.band(runs, "accuracy") == [(1, 0.5, 0.5), (2, 0.5, 0.25)]
    assert study.band(runs, "held_out") == [(0, 0.5, 0.25)]


def test_a_log_keeps_what_is_drawn(tmp_path):
    step = {key: 1.0 for key in study.KEYS} | {"step": 1, "dropped": {"flat": 2}, "loss": 0.5}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(step) + "\n")
    (tmp_path / "summary.json").write_text(json.dumps({"seconds": 9.0, "evaluations": [
        {"step": 0, "accuracy": 0.5, "tool_calls": 2.0, "visual_tokens": 40.0, "n": 100}]}))
    head, line, evaluation = study.log_rows(tmp_path, {"setting": "base", "seed": 3})
    assert head == {"setting": "base", "seed": 3, "seconds": 9.0}
    assert line["flat"] == 2 and "loss" not in line and "dropped" not in line
    assert evaluation == {"step": 0, "held_out": 0.5, "held_out_calls": 2.0}


def test_a_difference_from_the_baseline_is_taken_seed_by_seed(monkeypatch):
    monkeypatch.setattr(study, "COLUMNS", {"held_out": "held out"})
    runs = {"base": {0: log([], {0: 0.125, 24: 0.25}), 1: log([], {0: 0.25, 24: 0.75})},   # by 0.5, the settings
            "max_turns": {0: log([], {24: 0.125}), 1: log([], {24: 0.625})}}   # by 0.125 in each of them
    assert study.table(runs).splitlines()[1:] == [
        "24 steps               held out", "baseline              0.500 ±0.250", "  end minus start     0.312 ±0.187",
        "2 turns, not 4        0.375 ±0.250",
        "  minus baseline     -0.125 ±0.000"]


def test_the_page_quotes_what_the_logs_say():
    assert f"```text\n{study.report(study.load(ROOT / 'docs' / 'logs' / 'study'))}\n```\n" in (
        ROOT / "docs" / "study.md").read_text()
