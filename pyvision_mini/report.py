"""What a run prints, logs and draws: progress bars, one line per step, metrics.jsonl, summary.json, curves.

Metrics are computed from plain rows (one per trajectory) gathered from all ranks; README has a glossary of their names.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from base64 import b64encode
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict
from html import escape
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev

import torch
from tqdm import tqdm

from pyvision_mini import page
from pyvision_mini.config import Config, UserError, cli, write_json, write_whole
from pyvision_mini.selection import Selection
from pyvision_mini.trajectory import Trajectory


def trajectory_row(traj: Trajectory) -> dict:
    """The numbers of one trajectory that metrics are made of."""
    calls = [turn for turn in traj.turns if turn.result is not None]
    return {"reward": traj.reward, "accuracy": traj.correct, "calls": len(calls), "end": traj.end.value,
            "error_calls": sum(turn.result.status != "ok" for turn in calls),
            "no_op_calls": sum(turn.no_op for turn in calls),
            "repeated_calls": len(calls) - len({turn.content for turn in calls}),
            "response_tokens": sum(traj.action_mask), "visual_tokens": traj.n_visual_tokens,
            "observation_tokens": len(traj.ids) - traj.n_prompt - sum(traj.action_mask),
            "failure": f"{traj.problem.id}: {traj.failure}" if traj.failure else ""}


def selection_row(selection: Selection) -> dict:
    """The numbers of one rank's selection."""
    rewards = [[(t.reward, t.correct) for t in group.trajectories] for group in selection.kept]
    return {"sampled": len(selection.sampled), "kept": len(selection.kept), "rounds": selection.rounds,
            "imbalance": selection.imbalance, "dropped": dict(selection.dropped),
            "right_negative": sum(c >= 0.5 and r < fmean(x for x, _ in g) for g in rewards for r, c in g),
            "bonus_only_groups": sum(len({c for _, c in g}) == 1 for g in rewards)}


def evaluation(rows: list[dict]) -> dict[str, float]:
    """Means over held-out problems. Its standard error is √(accuracy · (1 − accuracy) / n)."""
    return {"accuracy": _mean(rows, "accuracy"), "tool_calls": _mean(rows, "calls"),
            "visual_tokens": _mean(rows, "visual_tokens"), "n": len(rows)}


def _mean(rows: list[dict], key: str) -> float:
    return fmean(row[key] for row in rows) if rows else 0.0


def step_metrics(rows: list[dict], groups: list[dict], stats: Counter[str], seconds: dict[str, float]) -> dict:
    """Rows of all sampled trajectories (dropped ones included) and sums of the update → one line of metrics.jsonl."""
    tokens = max(stats["tokens"], 1)
    dropped: Counter[str] = Counter()
    for group in groups:
        dropped.update(group["dropped"])
    keys = ("accuracy", "reward", "error_calls", "no_op_calls", "repeated_calls", "response_tokens",
            "observation_tokens", "visual_tokens")
    return {
        **{key: _mean(rows, key) for key in keys},
        "calls": _mean(rows, "calls"), "calls_min": min((row["calls"] for row in rows), default=0),
        "calls_max": max((row["calls"] for row in rows), default=0),
        "no_call_share": fmean(row["calls"] == 0 for row in rows) if rows else 0.0,
        "ends": dict(Counter(row["end"] for row in rows)), "dropped": dict(dropped),
        **{f"groups_{key}": sum(group[key] for group in groups) for key in ("sampled", "kept")},
        **{key: sum(group[key] for group in groups) for key in ("right_negative", "bonus_only_groups")},
        "rounds": groups[0]["rounds"], "imbalance": groups[0]["imbalance"],
        **{key: stats[key] for key in ("loss", "grad_norm", "ratio_max")},
        **{name: stats[key] / tokens for name, key in (("entropy", "entropy"), ("clip_fraction", "clipped"), ("kl", "kl"),
                                                       ("logp_gap", "gap"))},
        "trained_tokens": stats["tokens"], "padding_share": stats["padding"] / max(stats["columns"], 1),
        "skipped_updates": stats["skipped"], **{f"seconds_{key}": value for key, value in seconds.items()},
        "peak_memory_gb": _peak_memory_gb(),
    }


def refuse_hopeless(rows: list[dict], cfg: Config) -> None:
    """UserError when not one row could be sampled from: the first rows of a run tell what is wrong with all of it."""
    if rows and all(row["end"] == "prompt_too_long" for row in rows):
        raise UserError(f"every prompt has over --max_prompt_tokens {cfg.max_prompt_tokens} tokens or --max_images "
                        f"{cfg.max_images} images: raise them, lower --max_pixels, or choose another --template")
    if rows and all(row["failure"] for row in rows):
        raise UserError(f"no problem can be shown; {rows[0]['failure']}; check the media")


def _peak_memory_gb() -> float:
    """GPU memory where there is one, else resident memory of this process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


class Bars(AbstractContextManager):
    """Progress bars of one stage, for rank 0's terminal; `total` adds up every tick on any rank."""

    def __init__(self, label: str, visible: bool, check: Callable[[], None]):
        self.label, self.visible, self.check = label, visible, check
        self.total: Counter[str] = Counter()
        self.bars: dict[str, tqdm] = {}

    def expect(self, n: int) -> None:
        """n more trajectories will be sampled."""
        bar = self._bar("trajectories", 0)
        bar.total += n
        bar.refresh()

    def tick(self, kind: str, n: float) -> None:
        """Count; raises Stopped after a stop signal."""
        self.check()
        self.count(kind, n)

    def count(self, kind: str, n: float) -> None:
        self.total[kind] += n
        if kind in ("trajectories", "calls", "micro_batches") and n:
            self._bar(kind, None).update(n)

    def _bar(self, kind: str, total: int | None) -> tqdm:
        if kind not in self.bars:
            self.bars[kind] = tqdm(desc=f"{self.label}: {kind.replace('_', '-')}", total=total, leave=False,
                                   disable=not self.visible, mininterval=0.5, dynamic_ncols=True)
        return self.bars[kind]

    def __exit__(self, *exc) -> None:
        for bar in self.bars.values():
            bar.close()


class Reporter(AbstractContextManager):
    """Everything a run writes; only rank 0 does. Of what an earlier run wrote stays what is up to `position`."""

    def __init__(self, out: Path, name: str, cfg: Config, rank: int, started: float, position: dict):
        self.out, self.name, self.cfg, self.first, self.started = out, name, cfg, rank == 0, started
        self.named: set[str] = set()             # failures that were printed
        self.metrics_path, done = out / "metrics.jsonl", position["step"]
        self.summary = {"steps": done, "seconds": 0.0, "first_step_seconds": None, "before": None, "after": None,
                        "evaluations": []}
        if not self.first:
            return
        write_json(out / "config.json", asdict(cfg))
        if done:
            try:
                old = json.loads((out / "summary.json").read_text())
                kept = [e for e in old["evaluations"] if e["step"] <= position["evaluated"]]
                self.summary |= old | {"steps": done, "evaluations": kept}
                if position["evaluated"] < cfg.steps:        # what the end of a shorter run left
                    self.summary["after"] = None
                    self.summary.pop("baselines", None)
            except (OSError, ValueError, TypeError, KeyError):
                self.line(f"warning: {out / 'summary.json'} is damaged: what was evaluated up to step {done} is lost")
        rows = read_metrics(self.metrics_path)
        kept = [row for row in rows if "elapsed" in row and row["step"] <= done]
        if len(kept) < done:
            self.line(f"warning: {self.metrics_path} is damaged: {done - len(kept)} of {done} steps are missing")
        if rows and not done:
            self.line(f"warning: {out} holds no complete checkpoint: its {len(rows)} steps are run anew")
        write_whole(self.metrics_path, "".join(json.dumps(row) + "\n" for row in kept))
        page.merge(out, done if cfg.resume else -1)
        if kept:                                 # a resumed run's clock goes on
            self.started -= kept[-1]["elapsed"]

    def __exit__(self, *exc) -> None:
        with suppress(OSError):                  # a full disk, which is what ended the run
            self._save_summary()

    def line(self, text: str) -> None:
        if self.first:
            tqdm.write(text, file=sys.stdout)
            sys.stdout.flush()

    def start(self, policy, attention: str, pool, n_train: int, n_held_out: int, world: int) -> None:
        n = sum(p.numel() for p in policy.model.parameters())
        self.line(f"policy: {self.cfg.model or 'embedded'}, {n / 1e6:.1f} M parameters on {world} x {policy.device.type}; "
                  f"attention: {attention}")
        self.line(f"problems: {n_train} to train on, {n_held_out} held out")
        self.line(f"sandbox: {', '.join(pool.layers)}")
        default = vars(Config())
        changed = [f"{key}={value}" for key, value in vars(self.cfg).items() if value != default[key]]
        self.line("settings: " + (", ".join(changed) or "all default"))
        self.line(f"output: {self.out}, with trajectories.html to look at")

    def name_failures(self, failures: Iterable[str]) -> None:
        """A line for each that had none yet: problems that cannot be shown, sandboxes that failed."""
        for failure in failures:
            if failure and failure not in self.named:
                self.named.add(failure)
                self.line(f"failed: {failure}".encode(errors="backslashreplace").decode())

    def evaluated(self, when: str, result: dict[str, float]) -> None:
        steps = self.summary["steps"]
        label = f"step {steps}" if when == "during" else when
        self.line(f"held out, {label}: accuracy {result['accuracy']:.3f} on {result['n']} problems | calls "
                  f"{result['tool_calls']:.2f} | visual tokens {result['visual_tokens']:.0f}")
        self.summary["evaluations"].append({"step": steps, **result})
        if when != "during":
            self.summary[when] = result
        self._save_summary()

    def step(self, number: int, rows: list[dict], groups: list[dict], stats: Counter[str], seconds: dict[str, float],
             counts: dict[str, int]) -> None:
        if not self.first:
            return
        m = {"step": number, "elapsed": time.time() - self.started, **step_metrics(rows, groups, stats, seconds), **counts}
        with self.metrics_path.open("a") as file:
            file.write(json.dumps(m) + "\n")
        self.summary["steps"] = number
        self.summary["first_step_seconds"] = self.summary["first_step_seconds"] or m["elapsed"]
        why = ", ".join(f"{key} {n}" for key, n in m["dropped"].items())
        self.line(f"step {number} | acc {m['accuracy']:.2f} reward {m['reward']:.2f} | calls {m['calls']:.1f} "
                  f"err {m['error_calls']:.2f} none {m['no_call_share']:.0%} | kept {m['groups_kept']}/{m['groups_sampled']}"
                  f"{f' ({why})' if why else ''} | img tok {m['visual_tokens']:.0f} | H {m['entropy']:.2f} "
                  f"gn {m['grad_norm']:.2f} | gen {m['seconds_generate']:.1f}s tool {m['seconds_sandbox']:.1f}s "
                  f"upd {m['seconds_update']:.1f}s{'' if m['groups_kept'] else ' | skipped: no informative group'}"
                  f"{' | skipped: gradient not finite' if m['skipped_updates'] else ''}")

    def show(self, rows: Iterable[list[dict]]) -> None:
        """All ranks' rows for the page, which is written with the curves."""
        if self.first:
            page.append(self.out / "trajectories.jsonl", [row for part in rows for row in part])

    def finish(self, steps: int, baselines: dict[str, dict]) -> None:
        """The last lines: a table against the baselines, if there are any, and what changed."""
        if not self.first:
            return
        before, after = self.summary["before"], self.summary["after"]
        if baselines:
            self.summary["baselines"] = baselines
            self.line(f"{'':24} accuracy   visual tokens")
            for label, result in {"on demand": after or before, **baselines}.items():
                self.line(f"{label:24} {result['accuracy']:8.3f}   {result['visual_tokens']:13.1f}")
        if before and after:
            self.line(f"held-out accuracy {before['accuracy']:.3f} -> {after['accuracy']:.3f}, tool calls "
                      f"{before['tool_calls']:.2f} -> {after['tool_calls']:.2f}, {steps} steps in "
                      f"{time.time() - self.started:.0f} s; curves and metrics in {self.out}")

    def _save_summary(self) -> None:
        if self.first:
            self.summary["seconds"] = time.time() - self.started
            write_json(self.out / "summary.json", self.summary)

    def curves(self) -> None:
        if self.first:
            page.write(self.out)
        if self.first and (rows := read_metrics(self.metrics_path)):
            draw_curves(rows, self.summary["evaluations"], self.out / "curves.png", self.name)


def read_metrics(path: Path) -> list[dict]:
    """Lines of a metrics file; damaged ones, as a last line cut by a kill, are left out."""
    rows = []
    for line in path.read_text(errors="replace").splitlines() if path.is_file() else []:
        with suppress(ValueError, RecursionError):
            rows.append(json.loads(line))
    return [row for row in rows if isinstance(row, dict)]


CURVES = [("accuracy and reward", ("accuracy", "reward")), ("tool calls", ("calls", "calls_max")),
          ("share without a call", ("no_call_share",)),
          ("wasted calls", ("error_calls", "no_op_calls", "repeated_calls")),
          ("tokens", ("response_tokens", "observation_tokens", "visual_tokens")), ("entropy", ("entropy",)),
          ("gradient norm", ("grad_norm",)), ("log-prob gap", ("logp_gap",)),
          ("groups", ("groups_sampled", "groups_kept", "dropped.flat", "dropped.surplus", "dropped.too_few")),
          ("dropped trajectories", tuple(f"dropped.{reason}" for reason in (
              "too_long", "prompt_too_long", "tool_failure", "inconsistent", "bad_reward", "failed_code", "no_action"))),
          ("seconds", ("seconds_generate", "seconds_sandbox", "seconds_update", "seconds_sync")),
          ("memory, GB", ("peak_memory_gb",))]
COMPARED = ("accuracy", "reward", "calls", "no_call_share", "response_tokens", "entropy", "grad_norm", "groups_kept",
            "seconds_generate", "seconds_update")                # of runs laid over one another


def _points(rows: list[dict], key: str, x: str = "step") -> tuple[list[float], list[float]]:
    """(x, y) of a metric; `dropped.flat` is what `dropped` counts as flat. Lines without the metric are left out."""
    name, _, reason = key.partition(".")
    found = [row for row in rows if name in row and x in row]
    return [row[x] for row in found], [row[name].get(reason, 0) if reason else row[name] for row in found]


def smooth(values: list[float], window: int = 5) -> list[float]:
    """Mean over the last `window` values, of the first ones over what there is."""
    return [fmean(values[max(0, i - window):i]) for i in range(1, len(values) + 1)]


def _finish(axes, title: str, xlabel: str) -> None:
    if not any(len(line.get_xdata()) for line in axes.lines):
        axes.text(0.5, 0.5, "none", transform=axes.transAxes, ha="center")
    axes.axhline(0, color="none")            # in view, with room above the highest line
    axes.set(title=title, xlabel=xlabel, ylim=(0, None))
    axes.grid(alpha=0.3)


def draw_curves(rows: list[dict], evaluations: list[dict], path: Path, title: str) -> None:
    """One picture with a panel for each of CURVES, against the step and the time it ended; held-out accuracy as stars."""
    from matplotlib.figure import Figure    # imported late: a run that is being debugged starts a second earlier
    from matplotlib.ticker import MaxNLocator

    ended = dict(zip(*_points(rows, "elapsed")))
    figure = Figure(figsize=(16, 10), layout="constrained")
    figure.suptitle(title)
    for axes, (name, keys) in zip(figure.subplots(3, 4).flat, CURVES):
        for key in keys:
            steps, values = _points(rows, key)
            if any(values) or not key.startswith("dropped."):    # of seven reasons the ones that occur
                axes.plot(steps, values, label=key.replace("_", " ").replace(".", ": "), marker="." if len(rows) < 60 else "")
        if name.startswith("accuracy"):
            axes.plot(*_points(evaluations, "accuracy"), "k*", label="held out")
        _finish(axes, name, "step, and the time it ended")
        axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
        axes.xaxis.set_major_formatter(lambda x, _: f"{x:.0f}" + (f"\n{ended[x]:.0f} s" if x in ended else ""))
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8, framealpha=0.5)
    figure.savefig(path, dpi=90)


def compare(runs: dict[str, list[dict]], path: Path) -> None:
    """Runs by name over one another, against the step above and against time below: each value pale, their mean over
    five steps on top, held-out accuracy as stars."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(20, 13), layout="constrained")
    panels = figure.subplots(4, len(COMPARED) // 2).flat
    for axes, (x, key) in zip(panels, [(x, key) for x in ("step", "elapsed") for key in COMPARED]):
        for i, (name, rows) in enumerate(runs.items()):
            at, values = _points(rows, key, x)
            axes.plot(at, values, color=f"C{i}", alpha=0.25)
            axes.plot(at, smooth(values), color=f"C{i}", label=name)
            if key == "accuracy":
                axes.plot(*_points(rows, "held_out", x), "*", color=f"C{i}")
        _finish(axes, key.replace("_", " "), "step" if x == "step" else "seconds")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=max(1, 200 // max(map(len, runs))))
    try:
        figure.savefig(path, dpi=90)
    except (OSError, ValueError) as error:                       # ValueError: an ending matplotlib does not know
        raise UserError(f"--out {path}: cannot be written: {error}; choose another file, e.g. compare.png") from None


def read_runs(paths: list[str]) -> dict[str, list[dict]]:
    """Folders of runs, or .jsonl files → {name: lines of metrics, and of evaluations as {step, held_out}}; UserError for
    what holds no step, and for a run that is given twice."""
    if not paths:
        raise UserError("no run to compare: give folders with a metrics.jsonl in them, or .jsonl files")
    names = {path: path.resolve().name if path.is_dir() else path.stem for path in map(Path, paths)}
    if len(names) < len(paths):
        raise UserError(f"the same run twice: {' '.join(paths)}; give each once")
    runs = {}
    for path, name in names.items():
        file = path / "metrics.jsonl" if path.is_dir() else path
        if not file.is_file():
            raise UserError(f"{file}: no such file; give folders with a metrics.jsonl in them, or .jsonl files")
        rows = [row for row in read_metrics(file) if {"step", "elapsed"} <= set(row) or {"step", "held_out"} <= set(row)]
        with suppress(OSError, ValueError, TypeError, KeyError):     # a file of metrics alone has none, and it may be damaged
            evaluations = json.loads((path / "summary.json").read_text())["evaluations"]
            rows += [{"step": e["step"], "held_out": e["accuracy"]} for e in evaluations]
        if not any("elapsed" in row for row in rows):
            raise UserError(f"{file}: holds no step of a run; give a metrics.jsonl of one that finished a step")
        runs[name if list(names.values()).count(name) == 1 else str(path)] = rows
    return runs


@cli
def main() -> None:
    """`python -m pyvision_mini.report RUN RUN … --out compare.png`."""
    parser = argparse.ArgumentParser(description="Lay runs over one another in one picture.")
    parser.add_argument("runs", nargs="*", help="folders with a metrics.jsonl in them, or .jsonl files")
    parser.add_argument("--out", type=Path, default=Path("compare.png"), help="the picture (default: %(default)s)")
    args = parser.parse_args()
    compare(read_runs(args.runs), args.out)
    print(f"{len(args.runs)} runs in {args.out}")


# --- eval.py ----------------------------------------------------------------------------------------------------------


def merge_samples(out: Path, k: int = 0) -> list[dict]:
    """All ranks' samples → samples.jsonl. With k: without problems that lack one of k graded samples."""
    files = sorted(out.glob("samples*.jsonl"))
    rows = [row for file in files for row in read_metrics(file)]
    graded = Counter((row["data"], row["setting"], row["id"]) for row in rows if row["accuracy"] is not None)
    rows = [row for row in rows if not k or graded[row["data"], row["setting"], row["id"]] == k]
    write_whole(out / "samples.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    for file in files:
        if file.name != "samples.jsonl":
            file.unlink()
    return rows


def summarize(rows: list[dict]) -> dict:
    """Samples → one line of the table. Ungraded ones (a judge that failed) are counted, and in no accuracy."""
    problems, variants, categories, parents = (defaultdict(list) for _ in range(4))
    for row in rows:
        if row["accuracy"] is not None:
            problems[row["data"], row["id"], row["variant_of"], row["category"]].append(row["accuracy"])
    for (data, name, variant, category), values in problems.items():
        variants[data, variant or name].append(fmean(values))
        categories[category or data].append(fmean(values))
    for name, values in categories.items():
        parents[name.split("/")[0]].append(fmean(values))
    once, n = [fmean(values) for values in variants.values()], len({(row["data"], row["id"]) for row in rows})
    tools = Counter(label for row in rows for label in row["tools"])
    result = {
        "accuracy": fmean(map(fmean, problems.values())) if problems else None, "n": n, "k": len(rows) // max(n, 1),
        # Over problems, variants of one as one: samples of a problem are no independent evidence.
        "ci95": 1.96 * stdev(once) / sqrt(len(once)) if len(once) > 1 else None,
        "pass_k": fmean(map(max, problems.values())) if problems else None,
        "macro": fmean(map(fmean, parents.values())) if problems else None,
        "categories": {name: {"accuracy": fmean(values), "n": len(values)} for name, values in sorted(categories.items())},
        "tool_calls": _mean(rows, "calls"),
        **{key: _mean(rows, key) for key in ("no_op_calls", "error_calls", "turns", "visual_tokens", "text_tokens")},
        "no_call_share": fmean(row["calls"] == 0 for row in rows), "ends": dict(Counter(row["end"] for row in rows)),
        "tools": {label: count / tools.total() for label, count in tools.most_common()},
        "judged": sum(row["judge"] in ("right", "wrong") for row in rows),
        "ungraded": sum(row["accuracy"] is None for row in rows),
        "grader_failures": sum(row["grader_failed"] for row in rows),
        "failed": sorted({row["failure"] for row in rows if row["failure"]})}
    if len(once) < len(problems):
        result["worst_variant"] = fmean(map(min, variants.values()))
    lost = {row["variant_of"] for row in rows if row["accuracy"] is None}    # a chain with an ungraded step is left out
    tries = [{(row["variant_of"], row["category"]): row["accuracy"] for row in rows
              if row["sample"] == i and row["variant_of"] not in lost} for i in range(result["k"])]
    if scores := [one for one in map(wemath_scores, tries) if one]:
        result["wemath"] = {key: fmean(one[key] for one in scores) for key in scores[0]}
    return result


def wemath_scores(right: dict[tuple[str, str], float]) -> dict[str, float]:
    """{(ID, key): right} → We-Math's four dimensions and scores (arXiv 2407.01284), as shares of its composite problems."""
    steps: dict[str, dict[str, bool]] = defaultdict(dict)
    for (name, key), value in right.items():
        steps[name][key.rsplit("_", 1)[-1]] = value >= 0.5
    whole = [(found.pop("multi"), list(found.values())) for found in steps.values() if "multi" in found and len(found) > 1]
    if not whole:
        return {}
    scores = {"insufficient_knowledge": fmean(not multi and not all(parts) for multi, parts in whole),
              "inadequate_generalization": fmean(not multi and all(parts) for multi, parts in whole)}
    for name, mastered in (("strict", all), ("loose", any)):
        rote = fmean(multi and not mastered(parts) for multi, parts in whole)
        complete = fmean(multi and mastered(parts) for multi, parts in whole)
        scores |= {f"complete_mastery_{name}": complete, f"score_{name}": complete + 0.5 * scores["inadequate_generalization"],
                   f"rote_memorization_{name}": rote / (rote + complete) if rote + complete else 0.0}
    return scores


def write_results(rows: list[dict], settings: dict, notes: dict, judge_failures: Counter, out: Path, started: float) -> None:
    """Samples → the printed table, summary.json, results.png and results.html. The agent's numbers head the summary."""
    from matplotlib.figure import Figure

    parts: dict[str, list[dict]] = defaultdict(list)
    for row in rows:
        parts[f"{row['data']}, {row['setting']}"].append(row)
    results = {name: summarize(part) for name, part in parts.items()}
    summary = summarize([row for row in rows if row["setting"] == "agent"]) | {
        "results": results, "settings": settings, "rows": notes, "judge_failures": judge_failures,
        "seconds": time.time() - started}
    write_json(out / "summary.json", summary)
    lines = [f"{'':40} avg@k   ±95%  pass@k  macro      n  calls  no-op  error  none  turns  img tok  text tok"]
    for name, r in results.items():
        numbers = [f"{'-' if r[key] is None else format(r[key], '.3f'):>6}" for key in ("accuracy", "ci95", "pass_k", "macro")]
        lines.append(f"{name[:40]:40}{' '.join(numbers)} {r['n']:6} {r['tool_calls']:6.2f} {r['no_op_calls']:6.2f} "
                     f"{r['error_calls']:6.2f} {r['no_call_share']:5.0%} {r['turns']:6.2f} {r['visual_tokens']:8.1f} "
                     f"{r['text_tokens']:9.1f}")
        if len(r["categories"]) > 1:
            lines += [f"    {c[:36]:36}{v['accuracy']:6.3f} {v['n']:28}" for c, v in r["categories"].items()]
        lines += [f"    {key}: {', '.join(f'{k} {v:.3g}' for k, v in r[key].items())}"
                  for key in ("ends", "tools", "wemath") if r.get(key)]
        lines += [f"    {key}: {r[key]}"
                  for key in ("failed", "ungraded", "grader_failures", "judged", "worst_variant") if r.get(key)]
        if r["ungraded"]:
            low = sum(row["accuracy"] or 0 for row in parts[name]) / len(parts[name])
            lines.append(f"    accuracy between {low:.3f} and {low + r['ungraded'] / len(parts[name]):.3f} if all were graded")
    if judge_failures:
        lines.append(f"failed tries to ask the judge: {', '.join(f'{n} {why}' for why, n in judge_failures.most_common(5))}")
    text = "\n".join(lines).encode(errors="backslashreplace").decode()          # half a surrogate pair prints nowhere
    print(text)
    figure = Figure(figsize=(8, 1 + 0.5 * len(results)), layout="constrained")
    axes, shown = figure.subplots(), {name: r for name, r in reversed(results.items()) if r["accuracy"] is not None}
    axes.barh(list(shown), [r["accuracy"] for r in shown.values()], xerr=[r["ci95"] or 0 for r in shown.values()], capsize=3)
    axes.set(xlim=(0, 1), xlabel="accuracy, 95 % interval over problems")
    figure.savefig(out / "results.png", dpi=90)
    picture = b64encode((out / "results.png").read_bytes()).decode()
    (out / "results.html").write_text(
        f"<!doctype html><meta charset=utf-8><title>Evaluation</title><pre>{escape(text)}</pre>"
        f"<img src='data:image/png;base64,{picture}'>"
        f"<pre>{escape(json.dumps({'settings': settings, 'rows': notes}, indent=1))}</pre>")
    print(f"results, plot and samples in {out}, {time.time() - started:.0f} s")


if __name__ == "__main__":
    main()
