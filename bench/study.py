"""What does each ingredient of the recipe do? Ablations of the paper in miniature: a baseline, and one flag changed.

`python bench/study.py` trains the embedded policy for every setting and seed that has no log yet (stop and start again
as you like), then draws; `--draw` only rebuilds the pictures and the table of docs/study.md from docs/logs/study.
A log has a line about the run, a line per step and a line per held-out evaluation. Error bars are standard errors over
seeds. Runs of one seed train on the same problems in the same order, so settings are compared seed by seed."""
# ruff: noqa: E402

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import NamedTuple

from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from pyvision_mini.report import read_metrics, smooth

# Twice as many groups as are trained on, in one round: ranking has a choice, and every setting samples the same amount.
SIZES = "--problems_per_round 10 --groups_per_step 5 --max_rounds 1 --steps 24 --eval_n 100 --save_every 1000"
LONG = "--steps 60 --eval_every 20"


class Setting(NamedTuple):
    label: str
    flags: str                                   # besides SIZES; the last of two equal flags counts
    seeds: int = 3
    against: str = "base"                        # the setting it is compared with


SETTINGS = {
    "base": Setting("baseline", ""), "tool_reward": Setting("no tool reward", "--tool_bonus 0"),
    "max_turns": Setting("2 turns, not 4", "--max_turns 2"), "rank_by": Setting("groups not ranked", "--rank_by none"),
    "normalize_std": Setting("advantage / std", "--normalize_std true"),
    "end_on_error": Setting("errors end it", "--end_on_error true"),
    "long": Setting("baseline", LONG, 1, "long"),
    "long_tool_reward": Setting("no tool reward", f"{LONG} --tool_bonus 0", 1, "long")}
KEYS = ("step", "elapsed", "accuracy", "reward", "calls", "no_call_share", "error_calls", "no_op_calls",
        "repeated_calls", "response_tokens", "visual_tokens", "entropy", "grad_norm", "groups_kept")
FIRST, LAST, WINDOW = 5, 10, 5                   # steps at a run's start and end that means are over; of a smoothed curve
COLUMNS = {"before": "held out before", "held_out": "held out", "accuracy": "training", "calls": "calls", "no_call_share": "no call",
           "error_calls": "failed", "no_op_calls": "no-op", "repeated_calls": "repeated", "entropy": "entropy",
           "grad_norm": "grad norm"}
PANELS = {"accuracy": "accuracy (dots: held out)", "calls": "tool calls", "repeated_calls": "repeated calls",
          "error_calls": "failed calls", "entropy": "entropy", "grad_norm": "gradient norm"}


# --- runs → logs ------------------------------------------------------------------------------------------------------


def log_rows(run: Path, about: dict) -> list[dict]:
    """A run's folder → what its log keeps."""
    summary = json.loads((run / "summary.json").read_text())
    metrics = read_metrics(run / "metrics.jsonl")
    steps = [{key: row[key] for key in KEYS} | {"flat": row["dropped"].get("flat", 0)} for row in metrics]
    held_out = [{"step": e["step"], "held_out": e["accuracy"], "held_out_calls": e["tool_calls"]}
                for e in summary["evaluations"]]
    return [about | {"seconds": summary["seconds"]}, *steps, *held_out]


def train(setting: str, seed: int, log: Path) -> None:
    """One run in a process of its own → its log, there only when it is whole."""
    flags = f"{SIZES} {SETTINGS[setting].flags} --seed {seed}".split()
    about = {"setting": setting, "seed": seed, "flags": " ".join(flags), "machine": f"{platform.machine()}, "
             f"{os.cpu_count()} cores, Python {platform.python_version()}, torch {version('torch')}, one thread a run"}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        done = subprocess.run([sys.executable, ROOT / "train_image.py", "--out", out, *flags], capture_output=True,
                              text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
        assert done.returncode == 0, f"{setting}, seed {seed}: {done.stderr[-2000:]}"
        rows = [{key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()}
                for row in log_rows(out, about)]
    (partial := log.with_suffix(".partial")).write_text("".join(json.dumps(row) + "\n" for row in rows))
    partial.replace(log)


def load(folder: Path) -> dict[str, dict[int, list[dict]]]:
    """→ {setting: {seed: rows}}, in the order of SETTINGS; settings without a log are left out."""
    runs = {name: {seed: read_metrics(path) for seed in range(setting.seeds)
                   if (path := folder / f"{name}-{seed}.jsonl").is_file()} for name, setting in SETTINGS.items()}
    return {name: of for name, of in runs.items() if of}


# --- logs → numbers ---------------------------------------------------------------------------------------------------


def outcome(rows: list[dict], key: str) -> float:
    """One run's number: the mean over its last steps; of evaluations the first (`before`) or the last (`held_out`)."""
    values = [row[name] for row in rows if (name := "held_out" if key == "before" else key) in row]
    return values[0] if key == "before" else values[-1] if key.startswith("held_out") else fmean(values[-LAST:])


def change(rows: list[dict], key: str) -> float:
    """What training changed in one run: its outcome minus the first evaluation, or the mean over the first steps."""
    start = outcome(rows, "before") if key == "held_out" else fmean([row[key] for row in rows if key in row][:FIRST])
    return outcome(rows, key) - start


def mean_and_error(values: list[float]) -> tuple[float, float]:
    """Mean over seeds and its standard error; nan where one seed cannot tell."""
    return fmean(values), stdev(values) / sqrt(len(values)) if len(values) > 1 else float("nan")


def band(runs: dict[int, list[dict]], key: str) -> list[tuple[int, float, float]]:
    """(step, mean over seeds, standard error) of the steps all seeds have; training is smoothed, held out is not."""
    curves = []
    for rows in runs.values():
        steps, values = zip(*[(row["step"], row[key]) for row in rows if key in row])
        curves.append(dict(zip(steps, values if key.startswith("held_out") else smooth(values, WINDOW))))
    common = sorted(set.intersection(*map(set, curves)))
    return [(step, *mean_and_error([curve[step] for curve in curves])) for step in common]


def table(runs: dict[str, dict[int, list[dict]]]) -> str:
    """Means ± standard errors per setting; what training changed in the baseline; differences from it, seed by seed."""
    def cells(values: Callable[[str], list[float]], without: str = "") -> str:
        return " ".join(" " * 15 if key == without else "{:7.3f} ±{:<6.3f}".format(*mean_and_error(values(key)))
                        .replace("±nan   ", " " * 7) for key in COLUMNS).rstrip()

    lines = []
    for setting, of in runs.items():
        label, against = SETTINGS[setting].label, SETTINGS[setting].against
        if setting == against:
            steps = max(row.get("step", 0) for rows in of.values() for row in rows)
            lines += ["", f"{f'{steps} steps':20}{' '.join(f'{title:^15}' for title in COLUMNS.values())}".rstrip()]
        lines.append(f"{label:20}{cells(lambda key: [outcome(rows, key) for rows in of.values()])}")
        if setting == against:
            lines.append(f"{'  end minus start':20}{cells(lambda key: [change(rows, key) for rows in of.values()], 'before')}")
        elif (both := of.keys() & (base := runs.get(against, {})).keys()):
            difference = cells(lambda key: [outcome(of[seed], key) - outcome(base[seed], key) for seed in both])
            lines.append(f"{'  minus baseline':20}{difference}")
    return "\n".join(lines)


def report(runs: dict[str, dict[int, list[dict]]]) -> str:
    """The table with how it was made."""
    about = [rows[0] for of in runs.values() for rows in of.values()]
    return (f"{about[0]['machine']}; {len(about)} runs, {sum(a['seconds'] for a in about) / 60:.0f} minutes together\n"
            f"train_image.py {SIZES}\n"
            f"held out before and after training; all else: mean over the last {LAST} steps (start: the first {FIRST})\n"
            f"{table(runs)}")


# --- pictures ---------------------------------------------------------------------------------------------------------


def draw(axes, runs: dict[str, dict[int, list[dict]]], settings: list[str], key: str) -> None:
    """A line with its band per setting, the reference first; with accuracy, the held-out points."""
    for i, setting in enumerate(settings):
        steps, means, errors = zip(*band(runs[setting], key))
        axes.plot(steps, means, color=f"C{i}", label=f"{SETTINGS[setting].label} ({len(runs[setting])})")
        axes.fill_between(steps, [m - e for m, e in zip(means, errors)], [m + e for m, e in zip(means, errors)],
                          color=f"C{i}", alpha=0.2, linewidth=0)
        if key == "accuracy":
            steps, means, errors = zip(*band(runs[setting], "held_out"))
            axes.errorbar([step + 0.4 * (i - 0.5) for step in steps], means, errors, fmt="o", color=f"C{i}", capsize=3)
    axes.set(title=PANELS[key], ylim=(0, None), xlabel="step")
    axes.grid(alpha=0.3)


def pictures(runs: dict[str, dict[int, list[dict]]], docs: Path) -> None:
    from matplotlib.figure import Figure

    ablations = [["base", name] for name in runs if name != "base" and SETTINGS[name].against == "base"]
    pairs = [pair for pair in (["base", "tool_reward"], ["long", "long_tool_reward"]) if set(pair) <= set(runs)]
    for name, rows, keys in (("study_ablations", ablations, list(PANELS)), ("tool_reward", pairs, list(PANELS)[:3])):
        if not rows:
            continue
        figure = Figure(figsize=(3.4 * len(keys), 3.2 * len(rows)), layout="constrained")
        figure.suptitle(f"smoothed over {WINDOW} steps; bands and bars: ± standard error over (n) seeds", fontsize=10)
        for settings, panels in zip(rows, figure.subplots(len(rows), len(keys), squeeze=False)):
            for axes, key in zip(panels, keys):
                draw(axes, runs, settings, key)
            panels[0].legend(loc="lower right")
        figure.savefig(docs / f"{name}.png", dpi=90)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draw", action="store_true", help="train nothing")
    docs = ROOT / "docs"
    (logs := docs / "logs" / "study").mkdir(parents=True, exist_ok=True)
    if not parser.parse_args().draw:
        plan = [(name, seed) for seed in range(3) for name, setting in SETTINGS.items() if seed < setting.seeds]
        for name, seed in tqdm(plan, desc="runs"):
            if not (log := logs / f"{name}-{seed}.jsonl").is_file():
                train(name, seed, log)
    assert "base" in (runs := load(logs)), f"{logs} holds no run of the baseline: start without --draw"
    text = report(runs)
    print(text)
    head, start, rest = (docs / "study.md").read_text().partition("```text\n")
    (docs / "study.md").write_text(f"{head}{start}{text}\n```{rest.partition('```')[2]}")
    pictures(runs, docs)


if __name__ == "__main__":
    main()
