"""What a run prints, logs and draws: progress bars, one line per step, metrics.jsonl, summary.json, curves.

Metrics are computed from plain rows (one per trajectory) gathered from all ranks; README has a glossary of their names.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import fmean

import torch
from tqdm import tqdm

from pyvision_mini.config import Config, explicit, save_config
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
            "observation_tokens": len(traj.ids) - traj.n_prompt - sum(traj.action_mask)}


def selection_row(selection: Selection) -> dict:
    """The numbers of one rank's selection."""
    rewards = [[(t.reward, t.correct) for t in group.trajectories] for group in selection.kept]
    return {"sampled": len(selection.sampled), "kept": len(selection.kept), "rounds": selection.rounds,
            "imbalance": selection.imbalance, "dropped": dict(selection.dropped),
            "right_negative": sum(c >= 0.5 and r < fmean(x for x, _ in g) for g in rewards for r, c in g),
            "bonus_only_groups": sum(len({c for _, c in g}) == 1 for g in rewards)}


def evaluation(rows: list[dict]) -> dict[str, float]:
    """Held-out result: accuracy with its standard error in percent points' terms left to the reader (n is given)."""
    return {"accuracy": _mean(rows, "accuracy"), "tool_calls": _mean(rows, "calls"),
            "visual_tokens": _mean(rows, "visual_tokens"), "n": len(rows)}


def _mean(rows: list[dict], key: str) -> float:
    return fmean(row[key] for row in rows) if rows else 0.0


def step_metrics(rows: list[dict], groups: list[dict], result, seconds: dict[str, float]) -> dict:
    """Rows of all sampled trajectories (dropped ones included) and sums of the update → one line of metrics.jsonl."""
    tokens = max(result.stats["tokens"], 1)
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
        "loss": result.stats["loss"], "entropy": result.stats["entropy"] / tokens, "grad_norm": result.grad_norm,
        "clip_fraction": result.stats["clipped"] / tokens, "ratio_max": result.stats["ratio_max"],
        "kl": result.stats["kl"] / tokens, "logp_gap": result.stats["gap"] / tokens, "trained_tokens": tokens,
        "padding_share": result.stats["padding"] / max(result.stats["columns"], 1),
        "skipped_updates": result.n_skipped, **{f"seconds_{key}": value for key, value in seconds.items()},
        "peak_memory_gb": _peak_memory_gb(),
    }


def _peak_memory_gb() -> float:
    """GPU memory where there is one, else resident memory of this process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


class Bars:
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

    def __enter__(self) -> Bars:
        return self

    def __exit__(self, *exc) -> None:
        for bar in self.bars.values():
            bar.close()


class Reporter:
    """Everything a run writes; only rank 0 does. `done` steps are kept of an earlier run's metrics."""

    def __init__(self, out: Path, name: str, cfg: Config, rank: int, started: float, done: int):
        self.out, self.name, self.cfg, self.first, self.started = out, name, cfg, rank == 0, started
        self.metrics_path = out / "metrics.jsonl"
        self.summary = {"steps": done, "seconds": 0.0, "first_step_seconds": None, "before": None, "after": None,
                        "evaluations": []}
        if not self.first:
            return
        save_config(cfg, out / "config.json")
        if done and (out / "summary.json").is_file():
            self.summary |= json.loads((out / "summary.json").read_text())
        kept = [row for row in read_metrics(self.metrics_path) if row["step"] <= done]
        self.metrics_path.write_text("".join(json.dumps(row) + "\n" for row in kept))

    def __enter__(self) -> Reporter:
        return self

    def __exit__(self, *exc) -> None:
        if self.first:
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
        self.line("settings: " + (", ".join(f"{k}={v}" for k, v in explicit(self.cfg).items()) or "all default"))
        self.line(f"output: {self.out}")

    def progress(self, label: str, check: Callable[[], None]) -> Bars:
        return Bars(label, self.first, check)

    def evaluated(self, when: str, result: dict[str, float]) -> None:
        steps = self.summary["steps"]
        self.line(f"held out, {when if when != 'during' else f'step {steps}'}: accuracy {result['accuracy']:.3f} on {result['n']} problems | calls "
                  f"{result['tool_calls']:.2f} | visual tokens {result['visual_tokens']:.0f}")
        self.summary["evaluations"].append({"step": steps, **result})
        if when != "during":
            self.summary[when] = result
        self._save_summary()

    def step(self, number: int, rows: list[dict], groups: list[dict], result, seconds: dict[str, float],
             counts: dict[str, int]) -> None:
        if not self.first:
            return
        m = {"step": number, "elapsed": time.time() - self.started, **step_metrics(rows, groups, result, seconds), **counts}
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

    def finish(self, steps: int, baselines: dict[str, dict]) -> None:
        """The last lines: a table against the baselines, if there are any, and what changed."""
        before, after = self.summary["before"], self.summary["after"]
        if baselines:
            self.summary["baselines"] = baselines
            self.line(f"{'':24} accuracy   visual tokens")
            for label, result in {"on demand": after, **baselines}.items():
                self.line(f"{label:24} {result['accuracy']:8.3f}   {result['visual_tokens']:13.1f}")
        if before and after:
            self.line(f"held-out accuracy {before['accuracy']:.3f} -> {after['accuracy']:.3f}, tool calls "
                      f"{before['tool_calls']:.2f} -> {after['tool_calls']:.2f}, {steps} steps in "
                      f"{time.time() - self.started:.0f} s; curves and metrics in {self.out}")

    def _save_summary(self) -> None:
        if self.first:
            self.summary["seconds"] = time.time() - self.started
            (self.out / "summary.json").write_text(json.dumps(self.summary, indent=1) + "\n")

    def curves(self) -> None:
        if self.first and (rows := read_metrics(self.metrics_path)):
            draw_curves(rows, self.summary["evaluations"], self.out / "curves.png", self.name)


def read_metrics(path: Path) -> list[dict]:
    """Lines of a metrics file; a last line cut by a kill is left out."""
    rows = []
    for line in path.read_text().splitlines() if path.is_file() else []:
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows


CURVES = [("accuracy and reward", ("accuracy", "reward")), ("tool calls", ("calls", "calls_max", "no_call_share")),
          ("wasted calls", ("error_calls", "no_op_calls", "repeated_calls")),
          ("tokens", ("response_tokens", "observation_tokens", "visual_tokens")),
          ("entropy and gradient norm", ("entropy", "grad_norm")), ("groups", ("groups_sampled", "groups_kept")),
          ("log-prob gap", ("logp_gap",)), ("seconds", ("seconds_generate", "seconds_sandbox", "seconds_update"))]


def draw_curves(rows: list[dict], evaluations: list[dict], path: Path, title: str) -> None:
    """One picture of eight panels against the step; held-out accuracy as points in the first."""
    from matplotlib.figure import Figure    # imported late: a run that is being debugged starts a second earlier

    figure = Figure(figsize=(16, 7), layout="constrained")
    figure.suptitle(title)
    for axes, (name, keys) in zip(figure.subplots(2, 4).flat, CURVES):
        for key in keys:
            axes.plot([row["step"] for row in rows], [row[key] for row in rows], label=key.replace("_", " "),
                      marker="." if len(rows) < 60 else "")
        if name.startswith("accuracy"):
            axes.plot([e["step"] for e in evaluations], [e["accuracy"] for e in evaluations], "k*", label="held out")
        axes.set(title=name, xlabel="step", ylim=(0, None))
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=90)
