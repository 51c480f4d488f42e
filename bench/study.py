"""What does each ingredient of the recipe do? Ablations of the paper in miniature: a baseline, and one flag changed.

`python bench/study.py` trains the embedded policy for every setting and seed that has no log yet (stop and start again
as you like), then draws; `--draw` only rebuilds pictures and tables from docs/logs/study. One run is one thread.

A log has a line about the run, a line per step and a line per held-out evaluation. Error bars are standard errors over
seeds. Runs of one seed train on the same problems in the same order, so settings are compared seed by seed.
"""
# ruff: noqa: E402

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from importlib.metadata import version
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev

from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from pyvision_mini.report import read_metrics

SEEDS = (0, 1, 2)
# Twice as many groups as are trained on, in one round: ranking has a choice, and every setting samples the same amount.
SIZES = "--problems_per_round 10 --groups_per_step 5 --max_rounds 1 --steps 24 --eval_n 100 --save_every 1000"
SETTINGS = {                                     # name → (label, flags besides SIZES)
    "base": ("baseline", ""), "tool_reward": ("no tool reward", "--tool_bonus 0"),
    "max_turns": ("2 turns, not 4", "--max_turns 2"), "rank_by": ("groups not ranked", "--rank_by none"),
    "normalize_std": ("advantage / std", "--normalize_std true"),
    "end_on_error": ("errors end it", "--end_on_error true")}
KEYS = ("step", "elapsed", "accuracy", "reward", "calls", "no_call_share", "error_calls", "no_op_calls",
        "repeated_calls", "response_tokens", "visual_tokens", "entropy", "grad_norm", "groups_kept")
LAST, WINDOW = 10, 5                             # steps a table's means are over; steps a curve is smoothed over
COLUMNS = {"held_out": "held out", "accuracy": "training", "calls": "calls", "no_call_share": "no call",
           "error_calls": "failed", "repeated_calls": "repeated", "response_tokens": "tokens", "entropy": "entropy",
           "grad_norm": "grad norm"}
PANELS = {"accuracy": "accuracy (dots: held out)", "calls": "tool calls", "error_calls": "failed calls",
          "entropy": "entropy", "grad_norm": "gradient norm"}


# --- runs → logs ------------------------------------------------------------------------------------------------------


def log_rows(run: Path, about: dict) -> list[dict]:
    """A run's folder → what its log keeps."""
    summary = json.loads((run / "summary.json").read_text())
    steps = [{key: row[key] for key in KEYS} | {"flat": row["dropped"].get("flat", 0)}
             for row in read_metrics(run / "metrics.jsonl")]
    held_out = [{"step": e["step"], "held_out": e["accuracy"], "held_out_calls": e["tool_calls"]}
                for e in summary["evaluations"]]
    return [about | {"seconds": summary["seconds"]}, *steps, *held_out]


def train(setting: str, seed: int, log: Path) -> None:
    flags = f"{SIZES} {SETTINGS[setting][1]} --seed {seed}".split()
    machine = (f"{platform.machine()}, {os.cpu_count()} cores; Python {platform.python_version()}, torch "
               f"{version('torch')}, one thread a run")
    about = {"setting": setting, "seed": seed, "flags": " ".join(flags), "machine": machine}
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
    runs: dict[str, dict[int, list[dict]]] = {}
    for setting in SETTINGS:
        for path in sorted(folder.glob(f"{setting}-*.jsonl")):
            runs.setdefault(setting, {})[int(path.stem.rsplit("-", 1)[1])] = read_metrics(path)
    return runs


# --- logs → numbers ---------------------------------------------------------------------------------------------------


def outcome(rows: list[dict], key: str) -> float:
    """One run's number: the mean over its last steps, or its last evaluation."""
    values = [row[key] for row in rows if key in row]
    return values[-1] if key.startswith("held_out") else fmean(values[-LAST:])


def mean_and_error(values: list[float]) -> tuple[float, float]:
    """Mean over seeds and its standard error; nan where one seed cannot tell."""
    return fmean(values), stdev(values) / sqrt(len(values)) if len(values) > 1 else float("nan")


def smooth(values: list[float], window: int = WINDOW) -> list[float]:
    """Mean over the last `window` values, of the first ones over what there is."""
    return [fmean(values[max(0, i - window + 1):i + 1]) for i in range(len(values))]


def band(runs: dict[int, list[dict]], key: str) -> list[tuple[int, float, float]]:
    """(step, mean over seeds, standard error) of the steps all seeds have; training is smoothed, held out is not."""
    curves = []
    for rows in runs.values():
        steps, values = zip(*[(row["step"], row[key]) for row in rows if key in row])
        curves.append(dict(zip(steps, values if key.startswith("held_out") else smooth(values))))
    common = sorted(set.intersection(*(set(curve) for curve in curves)))
    return [(step, *mean_and_error([curve[step] for curve in curves])) for step in common]


def table(runs: dict[str, dict[int, list[dict]]]) -> str:
    """Means ± standard errors per setting, then the differences from the baseline, seed by seed."""
    def line(setting: str, number: Callable[[int, str], float], seeds: Iterable[int]) -> str:
        cells = ("{:7.3f} ±{:<6.3f}".format(*mean_and_error([number(seed, key) for seed in seeds])) for key in COLUMNS)
        return f"{SETTINGS[setting][0]:18}{' '.join(cells)}".rstrip()

    base = runs["base"]
    lines = [f"{'':18}{' '.join(f'{title:^15}' for title in COLUMNS.values())}".rstrip()]
    lines += [line(setting, lambda seed, key: outcome(by_seed[seed], key), by_seed)
              for setting, by_seed in runs.items()]
    lines += ["", "minus the baseline, seed by seed"]
    lines += [line(setting, lambda seed, key: outcome(by_seed[seed], key) - outcome(base[seed], key), both)
              for setting, by_seed in runs.items() if setting != "base" and (both := by_seed.keys() & base.keys())]
    return "\n".join(lines)


def report(runs: dict[str, dict[int, list[dict]]]) -> str:
    """The table with how it was made."""
    about = [rows[0] for by_seed in runs.values() for rows in by_seed.values()]
    before = fmean(next(row["held_out"] for row in rows if "held_out" in row) for rows in runs["base"].values())
    return "\n".join([
        f"{about[0]['machine']}", f"python train_image.py {SIZES} --seed {{{','.join(map(str, runs['base']))}}}",
        f"{len(about)} runs in {sum(a['seconds'] for a in about) / 60:.0f} minutes; held out before training: "
        f"{before:.3f}; means over the last {LAST} steps, held out after training", "", table(runs)])


# --- pictures ---------------------------------------------------------------------------------------------------------


def draw(axes, runs: dict[str, dict[int, list[dict]]], settings: list[str], key: str) -> None:
    """A line with its band per setting; with accuracy, the held-out points."""
    for i, setting in enumerate(settings):
        color, label = f"C{0 if setting == 'base' else i}", SETTINGS[setting][0]
        steps, means, errors = zip(*band(runs[setting], key))
        axes.plot(steps, means, color=color, label=label)
        axes.fill_between(steps, [m - e for m, e in zip(means, errors)], [m + e for m, e in zip(means, errors)],
                          color=color, alpha=0.2, linewidth=0)
        if key == "accuracy":
            steps, means, errors = zip(*band(runs[setting], "held_out"))
            axes.errorbar([step + 0.4 * (i - 0.5) for step in steps], means, errors, fmt="o", color=color, capsize=3)
    axes.set(ylim=(0, None), xlabel="step")
    axes.grid(alpha=0.3)


def pictures(runs: dict[str, dict[int, list[dict]]], docs: Path) -> None:
    from matplotlib.figure import Figure

    others = [setting for setting in runs if setting != "base"]
    note = f"mean over {len(runs['base'])} seeds, band and bars: ± standard error; curves smoothed over {WINDOW} steps"
    if "tool_reward" in others:
        figure = Figure(figsize=(11, 4), layout="constrained")
        figure.suptitle(note, fontsize=9)
        for axes, key in zip(figure.subplots(1, 3), ("calls", "no_call_share", "accuracy")):
            draw(axes, runs, ["base", "tool_reward"], key)
            axes.set(title={**PANELS, "no_call_share": "share of answers without a call"}[key])
        axes.legend(["with tool reward", "without"])
        figure.savefig(docs / "tool_reward.png", dpi=100)
    figure = Figure(figsize=(17, 3 * len(others)), layout="constrained")
    figure.suptitle(note)
    for row, setting in zip(figure.subplots(len(others), len(PANELS), squeeze=False), others):
        for axes, (key, title) in zip(row, PANELS.items()):
            draw(axes, runs, ["base", setting], key)
            axes.set(title=title)
        row[0].legend(loc="lower right")
    figure.savefig(docs / "study_ablations.png", dpi=80)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draw", action="store_true", help="train nothing")
    docs = ROOT / "docs"
    (logs := docs / "logs" / "study").mkdir(parents=True, exist_ok=True)
    if not parser.parse_args().draw:
        for seed, setting in tqdm([(seed, setting) for seed in SEEDS for setting in SETTINGS], desc="runs"):
            if not (log := logs / f"{setting}-{seed}.jsonl").is_file():
                train(setting, seed, log)
    text = report(runs := load(logs))
    print(text)
    (docs / "logs" / "study.txt").write_text(text + "\n")
    pictures(runs, docs)


if __name__ == "__main__":
    main()
