"""One dataclass is the config, the command line and the help text.

`Config()` is the embedded run: a tiny policy on generated problems on a laptop CPU. `PAPER` holds the values of
PyVision-RL (arXiv 2602.20739) and applies when `--model` is given. Explicit flags win over both.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import sys
from dataclasses import asdict, dataclass, field, fields, replace
from functools import wraps
from math import isfinite
from pathlib import Path

from transformers import HfArgumentParser


class UserError(Exception):
    """Bad input from the user: shown as one line that says what is wrong and what to do, without a traceback."""


def _f(default, text: str, choices: list | None = None):
    return field(default=default, metadata={"help": text, **({"choices": choices} if choices else {})})


@dataclass
class Config:
    # what to run
    model: str = _f("", "folder of a Qwen2.5-VL checkpoint; empty: the embedded tiny policy")
    data: str = _f("", "JSON or JSONL file of training rows; empty: generated problems")
    eval_data: str = _f("", "JSON or JSONL file of held-out rows; empty: generated ones, or none with --data")
    out: str = _f("", "output folder; empty: runs/<name>-<time>")
    steps: int = _f(40, "optimizer batches to train on")
    seed: int = _f(0, "seed of data order, sampling and generated problems")
    resume: bool = _f(False, "go on from the newest complete checkpoint in --out, else start fresh")
    # rollouts
    group_size: int = _f(8, "G: trajectories sampled per problem")
    rollout_rows: int = _f(256, "rows generated at once on a rank (a 7B policy keeps 57 kB of cache per token)")
    max_turns: int = _f(4, "tool turns before the last generation, which has to answer")
    temperature: float = _f(1.0, "sampling temperature; enters the log-probs of the update too")
    top_k: int = _f(0, "keep the k most likely tokens when sampling; 0: all. Training needs 0 to stay on-policy")
    max_pixels: int = _f(112 * 112, "pixels per image, prompt and tool images alike; larger ones are scaled down")
    min_pixels: int = _f(56 * 56, "pixels per image; smaller ones are scaled up")
    max_images: int = _f(12, "images per trajectory, the prompt's included")
    max_prompt_tokens: int = _f(512, "longer prompts are rejected before the rollout, never cut")
    max_turn_tokens: int = _f(96, "sampled tokens per turn")
    max_response_tokens: int = _f(768, "tokens after the prompt per trajectory, observations included")
    template: str = _f("short", "prompt and observation texts (prompts.TEMPLATES)", ["short", "paper", "released"])
    end_on_error: bool = _f(False, "end a trajectory at its first failed call, as the authors' release does")
    # sandbox
    sandbox: str = _f("best_effort", "strict: refuse to start when a protection is missing; best_effort: warn",
                      ["strict", "best_effort"])
    tool_workers: int = _f(0, "sandbox calls at once on a rank; 0: one per core, shared by the node's ranks")
    tool_timeout_s: float = _f(10.0, "wall-clock seconds per call")
    tool_memory_mb: int = _f(2048, "memory per sandbox process")
    # reward
    tool_bonus: float = _f(0.1, "reward per paid tool call of a right answer (paper Eq. 1)")
    paid_calls: str = _f("useful", "useful: calls that ran and returned text or an image; all: the paper's formula",
                         ["useful", "all"])
    # selection
    problems_per_round: int = _f(16, "problems sampled per round over all ranks (the oversampling)")
    groups_per_step: int = _f(12, "informative groups trained on per step over all ranks")
    max_rounds: int = _f(3, "rounds of sampling before a step trains on what there is")
    rank_by: str = _f("std", "std: train on the groups of highest reward std; none: the first ones sampled",
                      ["std", "none"])
    broken: str = _f("default", "default: drop too long, tool failures; any_error: also failed code and no action "
                     "(the paper's strict reading)", ["default", "any_error"])
    train_too_long: bool = _f(False, "train on too long trajectories with reward 0 instead of dropping them")
    # update
    updates_per_batch: int = _f(1, "optimizer steps a batch is split into; 1 is exactly on-policy")
    normalize_std: bool = _f(False, "divide advantages by the group's std (GRPO's original form)")
    clip_low: float = _f(0.2, "lower clip of the probability ratio")
    clip_high: float = _f(0.2, "upper clip of the probability ratio")
    lr: float = _f(1e-4, "AdamW learning rate, constant")
    weight_decay: float = _f(0.01, "AdamW weight decay")
    grad_clip: float = _f(1.0, "maximum gradient norm")
    micro_batch_tokens: int = _f(2048, "tokens per forward-backward, padding included: on a CPU small ones stay in its cache")
    gradient_checkpointing: bool = _f(False, "recompute activations in the backward pass")
    # evaluation, checkpoints
    eval_every: int = _f(0, "steps between held-out evaluations; 0: only before and after training")
    eval_n: int = _f(200, "held-out problems per evaluation")
    eval_temperature: float = _f(1.0, "sampling temperature of evaluations")
    save_every: int = _f(20, "steps between checkpoints; the last step always saves")
    keep_checkpoints: int = _f(2, "newest checkpoints kept")

    def __post_init__(self):
        at_least = {"group_size": 2, "max_pixels": 28 * 28, "tool_memory_mb": 256} | dict.fromkeys(
            ("rollout_rows", "min_pixels", "max_images", "max_prompt_tokens", "max_turn_tokens", "max_response_tokens",
             "problems_per_round", "groups_per_step", "max_rounds", "updates_per_batch", "micro_batch_tokens",
             "save_every", "keep_checkpoints"), 1)
        above = ("temperature", "eval_temperature", "lr", "tool_timeout_s", "grad_clip")
        for name, value in vars(self).items():
            if isinstance(value, float) and not isfinite(value) or name in above and value <= 0:
                wanted = "number greater than 0" if name in above else "finite number"
                raise UserError(f"--{name} {value}: must be a {wanted}")
            # Of all other numbers only the bonus means something below 0: a price per call.
            if isinstance(value, (int, float)) and name != "tool_bonus" and value < at_least.get(name, 0):
                raise UserError(f"--{name} {value}: must be at least {at_least.get(name, 0)}")
        if self.min_pixels > self.max_pixels:
            raise UserError(f"--min_pixels {self.min_pixels}: must not be more than --max_pixels {self.max_pixels}")
        if self.resume and not self.out:
            raise UserError("--resume: say which run with --out FOLDER")


@dataclass
class EvalConfig:
    """The flags of eval.py beside Config's."""

    k: int = _f(1, "samples per problem, for avg@k and pass@k")
    limit: int = _f(0, "problems per data set, the first ones; 0: all, of generated ones 100")
    baseline: str = _f("none", "beside the agent: direct (one answer without a tool), uniform (the same with frames "
                       "of the video in the prompt) or both", ["none", "direct", "uniform", "both"])
    frames: int = _f(8, "frames per video of the uniform baseline")
    judge: str = _f("none", "answers an LLM judges where rules do not find them right: those of kind text, or all",
                    ["none", "text", "all"])
    judge_url: str = _f("", "OpenAI-compatible endpoint, e.g. http://127.0.0.1:8000/v1")
    judge_model: str = _f("", "the judge's name at the endpoint")

    def __post_init__(self):
        if min(self.k, self.frames) < 1 or self.limit < 0:
            raise UserError("--k and --frames must be at least 1, --limit at least 0")
        if self.judge != "none" and not (self.judge_url and self.judge_model):
            raise UserError(f"--judge {self.judge}: name the judge with --judge_url and --judge_model")


# The paper's settings for a 7B policy on 8 GPUs (section 4.1; video and evaluation differ where the scripts say so).
PAPER = Config(
    steps=700, group_size=8, rollout_rows=64, max_turns=4, max_pixels=2_000_000, min_pixels=56 * 56, max_images=32,
    max_prompt_tokens=32_000, max_turn_tokens=10_240, max_response_tokens=20_480, template="paper", sandbox="strict",
    tool_timeout_s=30.0, problems_per_round=32, groups_per_step=16, lr=1e-6, micro_batch_tokens=32_768,
    gradient_checkpointing=True, eval_every=50, save_every=50, eval_temperature=0.5,
)


class _Parser(HfArgumentParser):
    def error(self, message: str):                   # argparse prints the whole usage; one line is enough
        raise UserError(f"{message} (--help lists the flags)")


def parse_config(argv: list[str] | None = None, extra: type | None = None, paper: dict | None = None, **defaults):
    """Flags → Config, or (Config, extra) with a second dataclass of flags. `defaults` are a script's own; PAPER and the
    script's changes to it, `paper`, go over them with --model, explicit flags over all."""
    argv = sys.argv[1:] if argv is None else argv
    peek = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    peek.add_argument("--model", default="")
    parser = _Parser([Config] + [extra] * bool(extra), allow_abbrev=False,
                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.set_defaults(**defaults)
    if peek.parse_known_args(argv)[0].model:
        parser.set_defaults(**asdict(PAPER) | (paper or {}))
    namespace, unknown = parser.parse_known_args(argv)
    if unknown:
        raise UserError(f"unknown argument {unknown[0]} (--help lists the flags)")
    values = vars(namespace)
    cfg = Config(**{field.name: values.pop(field.name) for field in fields(Config)})
    if cfg.model and not cfg.data:
        raise UserError("--model without --data: say which problems with --data FILE")
    return (cfg, extra(**values)) if extra else cfg


def write_whole(path: Path, text: str) -> None:
    """Write a file whole or not at all: a killed run leaves none that is cut."""
    (partial := path.with_suffix(".partial")).write_text(text, encoding="utf-8")
    partial.replace(path)


def write_json(path: Path, value: object) -> None:
    write_whole(path, json.dumps(value, indent=1) + "\n")


def direct_config(cfg: Config) -> Config:
    """The same policy, to answer at once: a baseline without a tool, whatever its prompt holds."""
    return replace(cfg, template="paper_direct" if cfg.model else "direct", max_turns=0, max_images=999,
                   max_prompt_tokens=1 << 20)


def cli(main):
    """Decorate a script's main: a UserError becomes one line on stderr and exit code 1, an interrupt one and 130."""
    @wraps(main)
    def run():
        code: int | str | None = None
        try:
            main()
        except SystemExit as stopped:
            code = stopped.code
        except UserError as error:
            code = f"error: {error}"
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            code = f"error: --out: {error.strerror}; what was saved stays: make room, then go on with --resume --out FOLDER"
        except KeyboardInterrupt:
            print("interrupted; the last checkpoint stays", file=sys.stderr)
            code = 130
        if "RANK" in os.environ:
            # Under torchrun threads of gloo may still hold tensors. One that lets go while the interpreter is torn down
            # aborts the process ("terminate called without an active exception"), so it is not torn down.
            if isinstance(code, str):
                print(code, file=sys.stderr)
                code = 1
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code or 0)
        if code:
            sys.exit(code)
    return run
