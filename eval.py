"""Evaluate a policy with the rollout and the graders of training. `python eval.py` takes the shipped policy.

avg@k is the mean over problems of the mean over k samples, its interval is over problems (variants of one question
count once). A problem that fails, by its media or our sandbox, counts as wrong and is listed. docs/eval.md has the rest.
"""
# ruff: noqa: E402

import json
import signal
import sys
import time
from collections import Counter
from dataclasses import asdict, replace
from math import nan
from pathlib import Path
from statistics import fmean
from zlib import crc32

signal.signal(signal.SIGINT, signal.SIG_DFL)     # Ctrl-C before anything could be saved: no traceback, just the end

import torch
from tqdm import tqdm

from pyvision_mini import page, report, toy, trainer
from pyvision_mini.benchmarks import load_benchmark
from pyvision_mini.config import Config, EvalConfig, UserError, cli, direct_config, parse_config, write_json
from pyvision_mini.judge import Judge
from pyvision_mini.policy import load_policy
from pyvision_mini.reward import GRADER_FAILURES, score, total_reward
from pyvision_mini.rollout import choose_attention, mix_seed, rollout, with_uniform_frames
from pyvision_mini.sandbox import SandboxPool
from pyvision_mini.taxonomy import label_call
from pyvision_mini.trajectory import Group, Problem, Trajectory


def problems(cfg: Config, flags: EvalConfig, out: Path) -> dict[str, tuple[list[Problem], dict]]:
    """Name → (problems, what is to be told of rows): `image`, `video` (generated) and files, separated by commas, or one
    file whose name may hold some."""
    found, made = {}, {"image": toy.image_problems, "video": toy.video_problems}
    for part in [cfg.data] if Path(cfg.data).is_file() else (cfg.data or "image,video").split(","):
        if part in made:
            found[part] = made[part](flags.limit or 100, 0, "test"), {}
        else:
            name, rows, notes = load_benchmark(part, out / "media")
            label = f"{name}: {Path(part).name}"
            found[f"{name}: {part}" if label in found else label] = rows[:flags.limit or None], notes
    return found


def runs(cfg: Config, flags: EvalConfig, name: str, rows: list[Problem]) -> dict[str, tuple[Config, int]]:
    """Setting → (its config, frames in the prompt). Sampling is the paper's with --model, unless its flag is given."""
    exact, given = name.startswith("V*") or any(p.videos for p in rows), " ".join(sys.argv).replace("-", "_")
    sampling = {"temperature": 0.01 if exact else 0.5, "top_k": 0 if exact else 20} if cfg.model else {}
    if not cfg.model or "__eval_temperature" in given:
        sampling["temperature"] = cfg.eval_temperature
    agent = replace(cfg, **{key: value for key, value in sampling.items() if f"__{key}" not in given})
    direct = direct_config(agent)
    found = {"agent": (agent, 0), "direct": (direct, 0)}
    if any(p.videos for p in rows):
        found[f"uniform, {flags.frames} frames"] = (direct, flags.frames)
    return {name: run for name, run in found.items() if name == "agent" or flags.baseline in ("both", name.split(",")[0])}


def sample_row(where: tuple[str, str], i: int, traj: Trajectory, cfg: Config) -> dict:
    """One line of samples.jsonl."""
    failures, problem = sum(GRADER_FAILURES.values()), traj.problem
    score(traj, cfg)
    return {"data": where[0], "setting": where[1], "id": problem.id, "sample": i, "category": problem.source,
            "variant_of": problem.variant_of, "question": problem.question, "choices": problem.choices, "kind": problem.kind,
            "gold": problem.answer, "answer": traj.answer, **report.trajectory_row(traj), "turns": len(traj.turns),
            "text_tokens": len(traj.ids) - traj.n_image_tokens, "judge": None,
            "grader_failed": sum(GRADER_FAILURES.values()) > failures,
            "tools": [label_call(turn.content, turn.no_op) for turn in traj.turns if turn.result is not None]}


def ask(judge: Judge | None, which: str, rows: list[dict]) -> None:
    """The judge's verdicts over answers that rules give nothing. Where it fails the sample stays ungraded."""
    asked = [row for row in rows if row["answer"] and row["accuracy"] == 0 and which in ("all", row["kind"])]
    cases = [("\n".join([row["question"], *(row["choices"] or ())]), row["gold"], row["answer"]) for row in asked]
    for row, verdict in zip(asked, judge(cases) if judge else ()):
        row["judge"] = {True: "right", False: "wrong", None: "failed"}[verdict]
        row["accuracy"] = None if verdict is None else float(verdict)


def show(groups: list[Group], rows: list[dict], cfg: Config, where: tuple[str, str], shown: Counter[bool], file: Path,
         world: int) -> None:
    """Put groups on the page until it has enough of them, with the judge's verdict where there is one."""
    for traj, row in zip((traj for group in groups for traj in group.trajectories), rows):
        traj.correct = nan if row["accuracy"] is None else row["accuracy"]
        traj.reward = total_reward(traj.correct, traj.n_tool_calls, cfg.tool_bonus)
    page.append(file, [page.group_row(group, cfg, ", ".join(where)) for group in groups if page.is_sampled(group, shown, world)])


def evaluate(where: tuple[str, str], todo: list[Problem], run: tuple[Config, int], flags: EvalConfig, policy, pool: SandboxPool,
             judge: Judge | None, out: Path, ranks: trainer.Ranks, stop: trainer.StopSignal) -> None:
    """Sample and grade this rank's problems of one setting, and append them batch by batch."""
    (cfg, n_frames), mine, accuracies = run, todo[ranks.rank::ranks.world], []
    file, shown = out / ("samples.jsonl" if ranks.rank == 0 else f"samples-{ranks.rank}.jsonl"), Counter()
    with file.open("a", buffering=1) as log, tqdm(total=len(mine) * flags.k, desc=" ".join(where), disable=ranks.rank > 0) as bar:
        def tick(kind: str, n: float) -> None:
            stop.check()
            if kind == "trajectories":
                bar.update(n)

        for start in range(0, len(mine), size := max(1, cfg.rollout_rows // flags.k)):
            batch = [with_uniform_frames(problem, pool, n=n_frames) if n_frames and problem.videos else problem
                     for problem in mine[start:start + size]]
            seed = mix_seed(cfg.seed, crc32(repr((*where, batch[0].id)).encode()))
            groups = rollout(policy, batch, cfg, pool, seed, n_samples=flags.k, tick=tick)
            rows = [sample_row(where, i, traj, cfg) for group in groups for i, traj in enumerate(group.trajectories)]
            ask(judge, flags.judge, rows)
            log.write("".join(json.dumps(row) + "\n" for row in rows))
            show(groups, rows, cfg, where, shown, out / file.name.replace("samples", "trajectories"), ranks.world)
            accuracies += [row["accuracy"] for row in rows if row["accuracy"] is not None]
            bar.set_postfix_str(f"accuracy {fmean(accuracies or [0]):.3f}")


@cli
def main() -> None:
    both = "none" if any(arg.startswith("--data") for arg in sys.argv) else "both"
    cfg, flags = parse_config(extra=EvalConfig, paper={"max_turns": 30}, baseline=both)
    started, stop, ranks = time.time(), trainer.StopSignal(), trainer.Ranks(patience_h=24)
    out = trainer.output_folder(cfg, "eval", ranks)
    data, saved = problems(cfg, flags, out), out / "config.json"
    crcs = {name: crc32(repr([replace(p, images=(), videos=()) for p in rows]).encode()) for name, (rows, _) in data.items()}
    settings = {**asdict(cfg), **asdict(flags), "data_crc32": crcs}
    before = ranks.all_gather(json.loads(saved.read_text()) if saved.is_file() else settings)[0]
    if changed := [key for key in settings if before.get(key) != settings[key] and key not in ("out", "resume")]:
        raise UserError(f"--resume --out {out}: it was started with another {changed[0]}, {before.get(changed[0])!r}")
    if ranks.rank == 0:
        write_json(saved, settings)
        kept = report.merge_samples(out, flags.k)
    done = ranks.all_gather(ranks.rank == 0 and {(row["data"], row["setting"], row["id"]) for row in kept})[0]
    policy = load_policy(cfg.model or None, ranks.device, torch.float32 if ranks.device.type == "cpu" else torch.bfloat16)
    say = print if ranks.rank == 0 else lambda *_, **__: None
    say(f"policy: {cfg.model or 'embedded'}; attention: {choose_attention(policy)}; output: {out}, with trajectories.html "
        "to look at")
    say("settings:", *(f"{key}={settings[key]}" for key in ("k", "limit", "judge", "judge_model", "seed")))
    judge = Judge(flags.judge_url, flags.judge_model, out / "judge.txt") if flags.judge != "none" else None
    try:
        with trainer.open_pool(cfg, ranks) as pool:
            for name, (rows, notes) in data.items():
                for kind, lines in ((kind, lines) for kind, lines in notes.items() if lines):
                    say(f"{name}: {len(lines)} {kind}", *lines[:5], sep="\n  ")
                for setting, run in runs(cfg, flags, name, rows).items():
                    told = {key: getattr(run[0], key) for key in ("template", "max_pixels", "max_turns", "temperature", "top_k")}
                    settings.setdefault("runs", {})[f"{name}, {setting}"] = told | {"frames": run[1]}
                    say(f"{name}, {setting}: {len(rows)} problems", *(f"{key}={value}" for key, value in told.items()))
                    evaluate((name, setting), [p for p in rows if (name, setting, p.id) not in done], run, flags, policy, pool,
                             judge, out, ranks, stop)
        failures = sum(ranks.all_gather(judge.failures if judge else Counter()), Counter())
        if ranks.rank == 0:
            notes = {name: lines for name, (_, lines) in data.items()}
            page.write(out)
            report.write_results(report.merge_samples(out), settings, notes, failures, out, started)
    except trainer.Stopped:
        print(f"stopped; go on with --resume --out {out}")
        raise SystemExit(128 + stop.signal) from None
    ranks.close()


if __name__ == "__main__":
    main()
