"""train_image.py as its users run it: whole runs, resuming, stopping, two ranks, own data, bad input."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from PIL import Image

import train_image
from pyvision_mini import page, selection, trainer
from pyvision_mini.policy import EMBEDDED

ROOT = Path(__file__).parent.parent
SMALL = ["--group_size", "4", "--problems_per_round", "4", "--groups_per_step", "2", "--max_rounds", "1", "--eval_n", "4"]
TIMED = {"elapsed", "seconds_sample", "seconds_generate", "seconds_sandbox", "seconds_update", "seconds_sync", "peak_memory_gb"}


def command(*flags, ranks=1):
    start = [sys.executable] if ranks == 1 else [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    return [*start, str(ROOT / "train_image.py"), *map(str, flags)]


def run(*flags, ranks=1):
    done = subprocess.run(command(*flags, ranks=ranks), capture_output=True, text=True, timeout=240,
                          env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def metrics(out):
    return [{k: v for k, v in json.loads(line).items() if k not in TIMED} for line in (out / "metrics.jsonl").read_text().splitlines()]


def shown(out):
    """What the page shows: (evaluation, step, problem, rewards)."""
    rows = [json.loads(line) for line in (out / "trajectories.jsonl").read_text().splitlines()]
    return [(row["when"], row["step"], row["id"], [t["reward"] for t in row["rollouts"]]) for row in rows]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "run"
    return out, run("--out", out, "--steps", 4, "--save_every", 2, *SMALL)


def test_a_run_prints_a_line_per_step_and_writes_what_it_promises(whole):
    out, printed = whole
    assert [f"step {k} | acc " in printed for k in (1, 2, 3, 4)] == [True] * 4
    assert "held out, before: accuracy" in printed and "held out, after: accuracy" in printed
    summary = json.loads((out / "summary.json").read_text())
    assert summary["steps"] == 4 and summary["before"]["n"] == summary["after"]["n"] == 4
    assert 0 < summary["first_step_seconds"] < summary["seconds"]
    assert [row["step"] for row in metrics(out)] == [1, 2, 3, 4]
    assert {path.name for path in (out / "checkpoints").iterdir()} == {"step-000002", "step-000004"}
    with Image.open(out / "curves.png") as picture:
        assert picture.width > 800
    assert (out / "checkpoints/step-000004/model/model.safetensors").is_file()
    assert {row[:2] for row in shown(out)} == {("held out, before", 0), ("", 1), ("", 2), ("", 3), ("", 4), ("held out, after", 4)}
    assert (out / "trajectories.html").stat().st_size < 4e6


def test_stopping_and_resuming_gives_the_metrics_of_the_uninterrupted_run(whole, tmp_path):
    run("--out", tmp_path / "run", "--steps", 2, "--save_every", 2, *SMALL)
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "left by": "a step after the checkpoint"}\n{"step": 4, "cut')
    with (tmp_path / "run" / "trajectories.jsonl").open("a") as file:
        file.write('{"step": 3, "id": "left", "when": "", "rollouts": [0], "pictures": {}}\n{"step": 4, "cut')
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    summary["evaluations"].append({"step": 3, "accuracy": 0.0, "left by": "a step after the checkpoint"})
    (tmp_path / "run" / "summary.json").write_text(json.dumps(summary))
    run("--out", tmp_path / "run", "--steps", 4, "--save_every", 2, "--resume", *SMALL)
    resumed = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert [e["step"] for e in resumed["evaluations"]] == [0, 2, 4]
    assert resumed["before"] == summary["before"] and resumed["evaluations"][-1] == {"step": 4, **resumed["after"]}
    assert metrics(tmp_path / "run") == metrics(whole[0])
    assert [row for row in shown(tmp_path / "run") if row[:2] != ("held out, after", 2)] == shown(whole[0])
    elapsed = [json.loads(line)["elapsed"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert elapsed == sorted(elapsed)                                            # the clock goes on


def test_top_k_warns_that_training_is_not_on_policy(whole, tmp_path):
    printed = run("--out", tmp_path / "run", "--steps", 0, "--top_k", 5, *SMALL)
    assert "warning: --top_k 5 samples from fewer tokens than the update scores: not on-policy" in printed
    assert "warning" not in whole[1]


def test_an_evaluation_that_was_stopped_is_made_up_for_and_a_damaged_summary_is_no_end(whole, tmp_path):
    shutil.copytree(whole[0], tmp_path / "run")
    position = tmp_path / "run/checkpoints/step-000004/position.json"
    saved = json.loads(position.read_text())
    assert saved["evaluated"] == 4
    position.write_text(json.dumps({**saved, "evaluated": 0}))
    (tmp_path / "run/summary.json").write_text('{"before": ')
    printed = run("--out", tmp_path / "run", "--steps", 4, "--resume", *SMALL)
    assert "held out, after: accuracy" in printed and "held out, before" not in printed
    assert f"warning: {tmp_path}/run/summary.json is damaged" in printed and "metrics.jsonl is damaged" not in printed
    assert json.loads(position.read_text())["evaluated"] == 4                    # and is not made up for again


def test_what_is_left_of_damaged_metrics_is_kept_and_what_is_missing_is_named(whole, tmp_path):
    shutil.copytree(whole[0], tmp_path / "run")
    lines = (tmp_path / "run/metrics.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "run/metrics.jsonl").write_bytes(b"5\n\xff\xfe\n" + b"x" + b"".join(lines))
    (tmp_path / "run/summary.json").unlink()
    printed = run("--out", tmp_path / "run", "--steps", 4, "--resume", *SMALL)
    assert "metrics.jsonl is damaged: 1 of 4 steps are missing" in printed and "summary.json is damaged" in printed
    assert [row["step"] for row in metrics(tmp_path / "run")] == [2, 3, 4]


def test_a_resume_without_a_checkpoint_says_that_it_starts_afresh(whole, tmp_path):
    shutil.copytree(whole[0], tmp_path / "run", ignore=shutil.ignore_patterns("checkpoints"))
    printed = run("--out", tmp_path / "run", "--steps", 0, "--resume", *SMALL)
    assert f"warning: {tmp_path}/run holds no complete checkpoint: its 4 steps are run anew" in printed


def test_a_full_disk_is_one_line_wherever_it_is_met(tmp_path, monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(page, "append", full)
    said = refused(["--out", tmp_path / "run", "--steps", 1, *SMALL], monkeypatch)
    assert said.startswith("error: --out: No space left on device")


def test_a_stop_in_the_first_step_leaves_nothing_to_go_on_from_and_resume_starts_afresh(tmp_path, monkeypatch):
    monkeypatch.setattr(trainer, "collect", lambda *args: signal.raise_signal(signal.SIGTERM) or selection.collect(*args))
    assert in_process(["--out", tmp_path / "run", *SMALL], monkeypatch) == 128 + signal.SIGTERM
    assert not (tmp_path / "run/checkpoints").exists()
    monkeypatch.undo()
    assert "held out, before: accuracy" in run("--out", tmp_path / "run", "--resume", "--steps", 1, *SMALL)
    assert json.loads((tmp_path / "run/summary.json").read_text())["before"]["n"] == 4


def test_held_out_media_that_are_gone_after_training_do_not_end_the_run(small_data, monkeypatch):
    Image.new("RGB", (60, 60), "red").save(small_data / "held_out.png")
    (small_data / "held_out.jsonl").write_text('{"question": "?", "answer": "1", "image": "held_out.png"}')

    def collect(*args):
        (small_data / "held_out.png").unlink()
        return selection.collect(*args)
    monkeypatch.setattr(trainer, "collect", collect)
    in_process(["--out", small_data / "run", "--data", small_data / "good.jsonl", "--eval_data", small_data / "held_out.jsonl",
                "--steps", 1, *SMALL], monkeypatch)
    summary = json.loads((small_data / "run/summary.json").read_text())
    assert summary["before"]["visual_tokens"] > 0 == summary["after"]["visual_tokens"]
    assert (small_data / "run/checkpoints/step-000001").is_dir()


def test_a_checkpoint_that_cannot_be_read_and_a_resume_on_other_data_say_so(whole, small_data, monkeypatch):
    out = small_data / "run"
    shutil.copytree(whole[0], out)
    (out / "checkpoints/step-000002/position.json").write_text("{}")
    monkeypatch.setattr(trainer, "checkpoints", lambda folder: [folder / "step-000002"])
    assert "step-000002: cannot be read (KeyError); delete it" in refused(["--out", out, "--resume"], monkeypatch)
    monkeypatch.undo()
    for flag, value, before in (("--eval_n", 5, 4), ("--eval_temperature", 0.5, 1.0),
                                ("--eval_data", small_data / "good.jsonl", "(none)")):
        said = refused(["--out", out, "--resume", "--eval_n", 4, flag, value], monkeypatch)
        assert f"it was started with {flag} {before}" in said
    assert "it was started with --model (none)" in refused(
        ["--out", out, "--resume", "--model", small_data / "llama", "--data", small_data / "good.jsonl"], monkeypatch)
    with monkeypatch.context() as other:
        other.setattr(train_image, "train", lambda cfg, name, *rest: trainer.train(cfg, "video", *rest))
        assert "it was started by train_image.py" in refused(["--out", out, "--resume"], other)
    assert "it was started with --seed 0" in refused(["--out", out, "--resume", "--seed", 1], monkeypatch)
    assert "it was started with --data (none)" in refused(
        ["--out", out, "--resume", "--data", small_data / "good.jsonl"], monkeypatch)
    shard = next((out / "checkpoints/step-000004/state").glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:shard.stat().st_size // 2])
    assert f"{out}/checkpoints/step-000004: cannot be read" in refused(["--out", out, "--resume", *SMALL], monkeypatch)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ctrl_c_in_the_middle_of_the_imports_leaves_no_traceback(tmp_path):
    started = subprocess.Popen(command("--out", tmp_path / "run"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while "libtorch" not in Path(f"/proc/{started.pid}/maps").read_text():
        time.sleep(0.02)
    started.send_signal(signal.SIGINT)
    _, errors = started.communicate(timeout=60)
    assert started.returncode == -signal.SIGINT and "Traceback" not in errors


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ranks_whose_launcher_was_killed_save_and_end(tmp_path):
    out = tmp_path / "run"
    with open(tmp_path / "printed", "w") as printed:
        started = subprocess.Popen(command("--out", out, "--steps", 500, *SMALL, ranks=2), stdout=printed, stderr=printed,
                                   env={**os.environ, "OMP_NUM_THREADS": "1"})
    while not (out / "metrics.jsonl").is_file() or len(metrics(out)) < 1:
        assert started.poll() is None, (tmp_path / "printed").read_text()
        time.sleep(0.2)
    ranks = subprocess.run(["pgrep", "-P", str(started.pid)], capture_output=True, text=True).stdout.split()
    started.kill()
    started.wait()
    end = time.monotonic() + 60
    while any(Path(f"/proc/{pid}/cmdline").is_file() and Path(f"/proc/{pid}/cmdline").read_bytes() for pid in ranks):
        assert time.monotonic() < end
        time.sleep(0.2)
    assert len(ranks) == 2 and len(list((out / "checkpoints").iterdir())) == 1
    assert "stopped by SIGHUP" in (tmp_path / "printed").read_text()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_the_state_and_leaves_no_process(number, tmp_path):
    out = tmp_path / "run"
    started = subprocess.Popen(command("--out", out, "--steps", 500, *SMALL), stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    while not (out / "metrics.jsonl").is_file() or len(metrics(out)) < 2:
        assert started.poll() is None, started.stderr.read()
        time.sleep(0.2)
    sandboxes = [p for p in subprocess.run(["pgrep", "-P", str(started.pid)], capture_output=True, text=True).stdout.split()]
    assert sandboxes
    started.send_signal(number)
    printed, errors = started.communicate(timeout=60)
    assert started.returncode == 128 + number and "Traceback" not in errors
    assert "go on with --resume" in printed
    saved, = (out / "checkpoints").iterdir()
    assert json.loads((saved / "position.json").read_text())["step"] == len(metrics(out))
    time.sleep(0.5)
    assert [pid for pid in sandboxes if Path(f"/proc/{pid}").exists()] == []


def test_two_ranks_train_own_data_with_a_checkpoint_folder(tmp_path):
    rows = [{"id": k, "question": "What color is the dot?", "answer": "red", "image": "a.png", "kind": "text"} for k in range(12)]
    Image.new("RGB", (300, 200), "red").save(tmp_path / "a.png")
    (tmp_path / "b.png").write_text("no image")
    rows[0]["image"] = "b.png"
    rows += [{"id": "no answer", "question": "?"}, {"id": "half", "question": "\ud800", "answer": "1"},
             {"prompt": [{"role": "user", "content": "<image>Which?"}], "reward_model": {"ground_truth": "B"},
              "mm_hint": {"hint_path": "a.png"}, "data_source": "theirs"}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    out = tmp_path / "run"
    printed = run("--out", out, "--model", EMBEDDED, "--data", tmp_path / "rows.jsonl", "--steps", 2, "--eval_data", tmp_path / "rows.jsonl", "--sandbox", "best_effort",
                  "--template", "short", "--max_turn_tokens", 64, "--max_response_tokens", 400, "--max_pixels", 12544,
                  "--gradient_checkpointing", "false", *SMALL, ranks=2)
    assert "step 2 | acc" in printed and "13 to train on" in printed
    assert printed.count("failed: 0: cannot read image") == 1                    # named once, and the run went on
    assert metrics(out)[1]["groups_sampled"] == 4                                # two on each rank


@pytest.fixture()
def small_data(tmp_path):
    Image.new("RGB", (60, 60), "red").save(tmp_path / "good.png")
    (tmp_path / "bad.png").write_text("no image")
    row = {"id": 1, "question": "?", "answer": "1"}
    for name, rows in {"good": [{**row, "image": "good.png"}], "unreadable": [{**row, "image": "bad.png"}],
                       "no_answer": [{"id": 1, "question": "?"}], "empty": [], "missing": [{**row, "image": "nowhere.png"}]}.items():
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "metrics.jsonl").write_text("")
    shutil.copytree(EMBEDDED, tmp_path / "cut")
    os.truncate(tmp_path / "cut" / "model.safetensors", 1000)
    return tmp_path


@pytest.mark.parametrize("flags, says", [
    (["--stepz", "3"], "unknown argument --stepz"),
    (["--steps", "many"], "invalid int value: 'many'"),
    (["--steps", "-1"], "--steps -1: must be at least 0"),
    (["--broken", "all"], "invalid choice: 'all'"),
    (["--seed", "-5"], "--seed -5: must be at least 0"),
    (["--top_k", "-1"], "--top_k -1: must be at least 0"),
    (["--tool_workers", "-1"], "--tool_workers -1: must be at least 0"),
    (["--max_response_tokens", "0"], "--max_response_tokens 0: must be at least 1"),
    (["--max_images", "0"], "--max_images 0: must be at least 1"),
    (["--min_pixels", "20000"], "--min_pixels 20000: must not be more than --max_pixels 12544"),
    (["--tool_bonus", "nan"], "--tool_bonus nan: must be a finite number"),
    (["--temperature", "inf"], "--temperature inf: must be a number greater than 0"),
    (["--clip_low", "-0.1"], "--clip_low -0.1: must be at least 0"),
    (["--out", "", "--resume"], "--resume: say which run with --out"),
    (["--model", "{}/cut", "--data", "{}/good.jsonl"], "cannot be loaded"),
    (["--template", "paper", *SMALL], "every prompt has over --max_prompt_tokens 512 tokens"),
    (["--data", "{}/good.jsonl", "--eval_data", "{}/unreadable.jsonl"], "no problem can be shown; 1: cannot read image"),
    (["--model", "{}/llama"], "--model without --data"),
    (["--model", "{}/nowhere", "--data", "{}/good.jsonl"], "no such folder"),
    (["--model", "{}/llama", "--data", "{}/good.jsonl"], "its model_type is 'llama'"),
    (["--model", "{}/used", "--data", "{}/good.jsonl"], "no readable config.json"),
    (["--data", "{}/nowhere.jsonl"], "nowhere.jsonl"),
    (["--data", "{}/empty.jsonl"], "no rows"),
    (["--data", "{}/no_answer.jsonl"], "row 1 (id 1): no answer"),
    (["--data", "{}/missing.jsonl"], "nowhere.png not found"),
    (["--data", "{}/unreadable.jsonl"], "bad.png"),
    (["--out", "{}/used"], "holds a run already; add --resume"),
    (["--out", "{}/good.png/run"], "cannot be written to"),
])
def test_bad_input_is_one_line_that_says_what_and_what_to_do(flags, says, small_data, monkeypatch):
    out = [] if "--out" in flags else ["--out", small_data / "run"]
    assert says in refused([*(flag.format(small_data) for flag in flags), *out], monkeypatch)


def in_process(flags, monkeypatch):
    """Run the script in this process → what it exits with."""
    monkeypatch.setattr(sys, "argv", ["train_image.py", *map(str, flags)])
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    try:
        train_image.main()
    except SystemExit as stopped:
        return stopped.code
    finally:
        signal.signal(signal.SIGINT, handlers[0]), signal.signal(signal.SIGTERM, handlers[1])


def refused(flags, monkeypatch):
    """What the script says when it ends in an error."""
    message = str(in_process(flags, monkeypatch))
    assert message.startswith("error: ") and "\n" not in message and len(message) < 400
    return message
