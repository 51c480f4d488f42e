"""Groups → one policy update, and the step loop around it: FSDP2, checkpoints, evaluation.

Axes: B rows of a micro-batch, T padded tokens, N action tokens of the micro-batch, V vocabulary, D hidden width.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import time
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from math import isfinite, nan
from pathlib import Path
from typing import IO

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch import nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from pyvision_mini import page, report
from pyvision_mini.config import Config, UserError, direct_config, write_json
from pyvision_mini.data import ProblemStream, unreadable
from pyvision_mini.grpo import entropy_from_logits, group_advantages, logprobs, policy_loss
from pyvision_mini.lockdown import libc
from pyvision_mini.policy import Policy, load_policy, mrope_positions, sampling_logits
from pyvision_mini.reward import GRADER_FAILURES, score
from pyvision_mini.rollout import choose_attention, describe, mix_seed, rollout
from pyvision_mini.sandbox import SandboxPool
from pyvision_mini.selection import collect
from pyvision_mini.trajectory import Group, Problem, Trajectory

# For ranks with fewer micro-batches than others: it costs nothing and changes nothing.
SPARE = Trajectory(Problem("spare", "", ""), ids=[0, 0], action_mask=[0, 1], logps=[nan, 0.0])
M_ARENA_MAX = -8  # of malloc.h
SAME_RUN = ("model", "data", "seed", "eval_data", "eval_n", "eval_temperature")     # what a resumed run may not change
HEAD_CHUNK = 256  # action tokens whose logits exist at once: 0.16 GB in fp32 at Qwen's 151,936 ids


@dataclass
class MicroBatch:
    """Right-padded trajectories as the scorer takes them."""

    ids_BT: torch.Tensor
    pos_3BT: torch.Tensor            # M-RoPE positions
    action_BT: torch.Tensor          # bool: sampled tokens
    features_PD: torch.Tensor        # vision features of all images, rows in order


def collate(policy: Policy, trajs: list[Trajectory], features: torch.Tensor | None = None) -> MicroBatch:
    """Trajectories → tensors; `features` replaces the stored ones (the cold start trains the vision tower too)."""
    B, T = len(trajs), max(len(traj.ids) for traj in trajs)
    ids, action = (np.zeros((B, T), dtype=np.int64) for _ in range(2))
    pos = np.zeros((3, B, T), dtype=np.int64)
    for i, traj in enumerate(trajs):
        n = len(traj.ids)
        ids[i, :n], action[i, :n] = traj.ids, traj.action_mask
        pos[:, i, :n] = mrope_positions(traj.ids, traj.grids, policy.image_id)
    if features is None:
        stored = [f for traj in trajs for f in traj.features]
        width = policy.model.config.get_text_config().hidden_size
        features = torch.cat(stored) if stored else torch.zeros(0, width, device=policy.device)
    ids, action, pos = (torch.from_numpy(a).to(policy.device) for a in (ids, action, pos))
    return MicroBatch(ids, pos, action.bool(), features)


class Scorer(nn.Module):
    """The trained part of the policy as one module whose forward returns log-probs of action tokens only.

    A module of its own because FSDP2 gathers parameters at the root's forward: whatever uses the embeddings or the
    head has to run inside it.
    """

    def __init__(self, policy: Policy, temperature: float, checkpointing: bool):
        super().__init__()
        self.language_model, self.lm_head = policy.model.model.language_model, policy.model.lm_head
        self.image_id, self.suppressed, self.temperature = policy.image_id, policy.suppressed, temperature
        if checkpointing:
            policy.model.activation_checkpointing_enable({"use_reentrant": False})

    def forward(self, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """→ (logp_BT, entropy_BT) in fp32: position t scores token t given all before it; 0 where nothing was sampled."""
        embeds = self.language_model.embed_tokens(batch.ids_BT)
        is_image = (batch.ids_BT == self.image_id)[..., None]
        embeds = embeds.masked_scatter(is_image, batch.features_PD.to(embeds.dtype))
        # No attention mask: the padding is to the right, where causal attention does not look, and scores nothing.
        hidden = self.language_model(inputs_embeds=embeds, position_ids=batch.pos_3BT, use_cache=False).last_hidden_state
        scored = batch.action_BT[:, 1:]
        hidden_ND, ids_N = hidden[:, :-1][scored], batch.ids_BT[:, 1:][scored]
        # The head runs chunk by chunk and again in the backward: no tensor of size tokens × vocabulary ever exists.
        parts = [checkpoint(self._head, h, i, use_reentrant=False)
                 for h, i in zip(hidden_ND.split(HEAD_CHUNK), ids_N.split(HEAD_CHUNK))]
        logp_BT, entropy_BT = (torch.zeros(batch.ids_BT.shape, device=hidden.device) for _ in range(2))
        if len(ids_N):
            where = torch.nn.functional.pad(scored, (1, 0))
            logp_BT = logp_BT.masked_scatter(where, torch.cat([p[0] for p in parts]))
            entropy_BT = entropy_BT.masked_scatter(where, torch.cat([p[1] for p in parts]))
        return logp_BT, entropy_BT

    def _head(self, hidden_ND: torch.Tensor, ids_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits_NV = sampling_logits(self.lm_head(hidden_ND), self.temperature, self.suppressed, give_up=True)
        logp_N = logprobs(logits_NV, ids_N)
        # Entropy last: the backward's recomputation stops before it, as no gradient needs it.
        return logp_N, entropy_from_logits(logits_NV.detach())


# --- the update -------------------------------------------------------------------------------------------------------


def micro_batches(trajs: list[tuple[Trajectory, float]], budget: int) -> list[list[tuple[Trajectory, float]]]:
    """(trajectory, advantage) pairs → lists of at most `budget` padded tokens, similar lengths together.

    One trajectory over the budget makes a micro-batch of its own: nothing is cut.
    """
    batches: list[list[tuple[Trajectory, float]]] = []
    for pair in sorted(trajs, key=lambda pair: -len(pair[0].ids)):
        if batches and len(batches[-1][0][0].ids) * (len(batches[-1]) + 1) <= budget:
            batches[-1].append(pair)
        else:
            batches.append([pair])
    return batches


def update(scorer: Scorer, optimizer: torch.optim.Optimizer, policy: Policy, groups: list[Group], cfg: Config,
           ranks: Ranks, tick: Callable[[str, float], None] = lambda kind, n: None) -> Counter[str]:
    """One pass over the kept groups: `updates_per_batch` optimizer steps, each with its own denominator over all ranks.

    Every rank runs the same number of micro-batches; spare ones hold one sampled token of advantage 0.
    → sums over the optimizer steps and all ranks: tokens, clipped, kl, gap (trainer − sampler, absolute), entropy, loss,
    columns and padding of them; `ratio_max`; `skipped`, optimizer steps left out because the gradient was not finite;
    `grad_norm` of the last one, before clipping.
    """
    parts = []
    for i in range(cfg.updates_per_batch):
        pairs = [(traj, float(adv)) for group in groups[i::cfg.updates_per_batch] for traj, adv in
                 zip(group.trajectories, group_advantages([t.reward for t in group.trajectories], cfg.normalize_std))]
        batches = micro_batches(pairs, cfg.micro_batch_tokens)
        most = max(ranks.all_gather(len(batches)))
        n_tokens = sum(ranks.all_gather(sum(sum(traj.action_mask) for traj, _ in pairs)))
        parts.append((batches + [[(SPARE, 0.0)]] * (most - len(batches)), n_tokens))
    scorer.train()
    old: list[list[torch.Tensor | None]] = [[None] * len(batches) for batches, _ in parts]
    if len(parts) > 1:                           # off-policy after the first part: the ratio needs the weights before it
        with torch.no_grad():
            old = [[scorer(collate(policy, [t for t, _ in batch]))[0] for batch in batches] for batches, _ in parts]
    total: Counter[str] = Counter()
    ratio_max, grad_norm, skipped = 0.0, 0.0, 0
    for (batches, n_tokens), old_logps in zip(parts, old):
        if n_tokens == 0:                        # the same on every rank
            continue
        for pairs, old_logp in zip(batches, old_logps):
            loss, stats = _micro_step(scorer, policy, pairs, old_logp, n_tokens, cfg)
            (loss * ranks.world).backward()      # FSDP averages over ranks; the sum over tokens is what we want
            if pairs[0][0].problem is not SPARE.problem:
                ratio_max = max(ratio_max, stats.pop("ratio_max"))
                total.update(stats)
            tick("micro_batches", 1)
        norm = nn.utils.clip_grad_norm_(scorer.parameters(), cfg.grad_clip)
        grad_norm = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        if isfinite(grad_norm):                  # the norm is over all ranks, so all of them skip or none
            optimizer.step()
        else:
            skipped += 1
        optimizer.zero_grad()
    summed: Counter[str] = Counter()
    for stats, highest in ranks.all_gather((dict(total), ratio_max)):
        summed.update(stats)
        ratio_max = max(ratio_max, highest)
    summed.update(ratio_max=ratio_max, grad_norm=grad_norm, skipped=skipped)
    return summed


def _micro_step(scorer: Scorer, policy: Policy, pairs: list[tuple[Trajectory, float]], old_logp: torch.Tensor | None,
                n_tokens: int, cfg: Config) -> tuple[torch.Tensor, dict[str, float]]:
    """Forward of one micro-batch → (its share of the step's loss, detached sums)."""
    batch = collate(policy, [traj for traj, _ in pairs])
    logp_BT, entropy_BT = scorer(batch)
    adv_B = torch.tensor([adv for _, adv in pairs], device=logp_BT.device)
    # On-policy the old log-probs are these very numbers: the ratio is exactly 1.
    loss, stats = policy_loss(logp_BT, logp_BT.detach() if old_logp is None else old_logp, adv_B, batch.action_BT,
                              n_tokens, cfg.clip_low, cfg.clip_high)
    sampler_BT = torch.zeros_like(logp_BT)
    for i, (traj, _) in enumerate(pairs):
        sampler_BT[i, :len(traj.ids)] = torch.tensor(traj.logps).nan_to_num(0.0)
    sums = {key: float(value) for key, value in stats.items()}
    sums |= {"gap": float(((logp_BT.detach() - sampler_BT).abs() * batch.action_BT).sum()), "loss": float(loss.detach()),
             "entropy": float(entropy_BT.sum()), "columns": float(batch.ids_BT.numel()),
             "padding": float(batch.ids_BT.numel() - sum(len(traj.ids) for traj, _ in pairs))}
    return loss, sums


# --- ranks ------------------------------------------------------------------------------------------------------------


class Ranks:
    """This process among the processes torchrun started; one process without torchrun."""

    def __init__(self, patience_h: float = 0.5):
        """`patience_h`: hours a rank waits in a collective for the slowest one."""
        self.rank, self.world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        self.local_world = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self.cores = max(1, usable // self.local_world)          # this rank's share of them
        self.lock: IO[str] | None = None         # rank 0's, on the output folder
        cuda = torch.cuda.is_available()
        self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
        if cuda:
            torch.cuda.set_device(self.device)
        elif self.world > 1:                     # oversubscribed OpenMP threads are ten times slower
            torch.set_num_threads(self.cores)
        with suppress(AttributeError):           # glibc only: one malloc arena, as each thread that waits for a sandbox
            libc("mallopt", M_ARENA_MAX, 1)      # call would have its own, with holes that nobody else fills
        self.sharded = self.world > 1 or cuda
        if self.sharded:
            alone = {} if self.world > 1 else dict(init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
            dist.init_process_group("cuda:nccl,cpu:gloo" if cuda else "gloo", timeout=timedelta(hours=patience_h), **alone)

    def all_gather(self, value: object) -> list:
        """Every rank's value, in rank order."""
        if self.world == 1:
            return [value]
        values: list = [None] * self.world
        dist.all_gather_object(values, value)
        return values

    def close(self) -> None:
        if self.lock is not None:
            self.lock.close()
        if self.sharded:
            dist.destroy_process_group()


class Stopped(Exception):
    """Ctrl-C or SIGTERM: leave the step, save the state after the last whole one."""


class StopSignal:
    """Turns SIGINT and SIGTERM into a flag that all ranks agree on; a second one interrupts at once."""

    def __init__(self):
        self.signal: int | None = None
        self.launcher = os.getppid() if "RANK" in os.environ else None
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._requested)

    def _requested(self, number: int, frame) -> None:
        if self.signal is not None:
            raise KeyboardInterrupt
        self.signal = number

    def check(self) -> None:
        if self.launcher not in (None, os.getppid()):
            self.signal = signal.SIGHUP              # torchrun was killed: nobody is left to stop its ranks
        if self.signal is not None:
            raise Stopped


# --- learner: weights, optimizer, checkpoints -------------------------------------------------------------------------


class Learner:
    """The policy that samples, the scorer that trains, and the optimizer.

    On one CPU they share their weights. Otherwise the scorer is sharded by FSDP2 in fp32 (bf16 compute on GPUs), and
    `policy` is a plain replica on each rank, refreshed after each update: generation needs no collectives then.
    """

    def __init__(self, cfg: Config, ranks: Ranks):
        self.cfg, self.ranks, cuda = cfg, ranks, ranks.device.type == "cuda"
        self.policy = load_policy(cfg.model or None, ranks.device, torch.bfloat16 if cuda else torch.float32)
        trained = load_policy(cfg.model or None, ranks.device) if ranks.sharded else self.policy
        self.scorer = Scorer(trained, cfg.temperature, cfg.gradient_checkpointing)
        if ranks.sharded:
            precision = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if cuda else MixedPrecisionPolicy()
            for layer in self.scorer.language_model.layers:
                fully_shard(layer, mp_policy=precision)
            fully_shard(self.scorer, mp_policy=precision)
        self.optimizer = torch.optim.AdamW(self.scorer.parameters(), lr=cfg.lr, betas=(0.9, 0.999),
                                           weight_decay=cfg.weight_decay)

    @torch.no_grad()
    def sync(self) -> None:
        """Copy the trained weights into the replica that samples."""
        if self.ranks.sharded:
            replica = {"language_model": self.policy.model.model.language_model, "lm_head": self.policy.model.lm_head}
            for name, param in self.scorer.named_parameters():
                part, rest = name.split(".", 1)
                replica[part].get_parameter(rest).copy_(param.full_tensor())

    def save(self, folder: Path, position: dict, keep: int) -> None:
        """Write a checkpoint beside its place and rename it: model/ in HF format, state/ sharded, position.json.

        Of one that is there already only the position is written anew: no moment may be without a whole checkpoint.
        """
        partial, first = folder.with_suffix(".partial"), self.ranks.rank == 0
        if self.ranks.all_gather((folder / "position.json").is_file())[0]:
            if first:
                write_json(folder / "position.json", position)
            return
        if first:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        self.ranks.all_gather(None)
        model, optimizer = get_state_dict(self.scorer, self.optimizer)
        try:
            with warnings.catch_warnings(action="ignore", category=UserWarning):     # that it runs in one process
                dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=partial / "state")
            if first:
                self.policy.model.save_pretrained(partial / "model")
                self.policy.processor.save_pretrained(partial / "model")
                write_json(partial / "position.json", position)
            failed = ""
        except (OSError, RuntimeError, SafetensorError, CheckpointException) as error:
            failed = str(error).splitlines()[0][:120]
        if failed := next(filter(None, self.ranks.all_gather(failed)), ""):
            raise UserError(f"{partial}: cannot be written ({failed}); is the disk full? Make room, then --resume --out "
                            f"{folder.parent.parent}")
        if first:
            shutil.rmtree(folder, ignore_errors=True)    # what an interrupted clean-up left of it
            partial.rename(folder)
            for old in checkpoints(folder.parent)[:-keep]:
                shutil.rmtree(old)
        self.ranks.all_gather(None)

    def load(self, folder: Path) -> None:
        """Read a checkpoint into weights and optimizer, on any number of ranks. UserError if it is damaged."""
        model, optimizer = get_state_dict(self.scorer, self.optimizer)
        state = {"model": model, "optimizer": optimizer}
        try:
            with warnings.catch_warnings(action="ignore", category=UserWarning):
                dcp.load(state, checkpoint_id=folder / "state")
        except (Exception, CheckpointException) as error:    # whatever a damaged file makes of a reader
            raise damaged(folder, error) from None
        set_state_dict(self.scorer, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        for group in self.optimizer.param_groups:    # came back with the moments, but a new --lr means what it says
            group.update(lr=self.cfg.lr, weight_decay=self.cfg.weight_decay)
        self.sync()


def damaged(folder: Path, error: BaseException) -> UserError:
    return UserError(f"{folder}: cannot be read ({error.__class__.__name__}); delete it and --resume from the checkpoint "
                     "before it")


def read_position(folder: Path, cfg: Config, name: str) -> dict:
    """A checkpoint's position. UserError if it is damaged, or of another run: in this one it would mean nothing."""
    try:
        position = json.loads((folder / "position.json").read_text())
        before = {key: position["config"][key] for key in SAME_RUN}
        script = position["name"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise damaged(folder, error) from None
    if script != name:
        raise UserError(f"--resume --out {cfg.out}: it was started by train_{script}.py")
    for key, value in before.items():
        if value != getattr(cfg, key):
            raise UserError(f"--resume --out {cfg.out}: it was started with --{key} {'(none)' if value == '' else value}")
    return position


def checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first; what a killed run left half written does not count."""
    return sorted(path for path in folder.glob("step-*") if (path / "position.json").is_file() and not path.suffix)


# --- the run ----------------------------------------------------------------------------------------------------------

Change = Callable[[Problem, SandboxPool], Problem]  # of a held-out problem into what a baseline is asked


def evaluate(policy: Policy, problems: list[Problem], cfg: Config, pool: SandboxPool, seed: int,
             tick: Callable[[str, float], None]) -> list[Group]:
    """One trajectory per problem at the evaluation temperature → graded groups of one."""
    cfg = replace(cfg, temperature=cfg.eval_temperature)
    groups = rollout(policy, problems, cfg, pool, seed, n_samples=1, tick=tick)
    for group in groups:
        score(group.trajectories[0], cfg)
    return groups


def train(cfg: Config, name: str, problems: list[Problem], held_out: list[Problem], started: float,
          baselines: dict[str, Change] | None = None) -> None:
    """The whole run: evaluate, then per step sample → select → update → report, then evaluate. Called on every rank.

    `started` is the time the process began, for first_step_seconds. `baselines` turn a held-out problem into one that
    is answered at once, without a tool; a table at the end compares them with the trained policy.
    """
    stop, ranks = StopSignal(), Ranks()
    out = output_folder(cfg, name, ranks)
    position = {"name": name, "step": 0, "evaluated": -1, "stream": {"epoch": 0, "index": 0}}
    found = checkpoints(out / "checkpoints")[-1:] if cfg.resume else []
    for folder in found:                         # before the model is loaded: it may be another one
        position = read_position(folder, cfg, name)
    learner = Learner(cfg, ranks)
    for folder in found:
        learner.load(folder)
    with open_pool(cfg, ranks) as pool, report.Reporter(out, name, cfg, ranks.rank, started, position) as reporter:
        stream = ProblemStream(problems, cfg.seed, ranks.rank, ranks.world, lambda drawn: find_faults(drawn, pool, ranks))
        stream.load_state_dict(position["stream"])
        GRADER_FAILURES["before"] = position.get("grader_failures", 0) if ranks.rank == 0 else 0
        reporter.start(learner.policy, choose_attention(learner.policy), pool, len(problems), len(held_out), ranks.world)
        if cfg.top_k:
            reporter.line(f"warning: --top_k {cfg.top_k} samples from fewer tokens than the update scores: not on-policy")
        run = Run(cfg, learner, stream, held_out, pool, ranks, stop, reporter, out, position, baselines or {})
        try:
            run.loop()
        except Stopped:
            run.save()
            reporter.line(f"stopped by {signal.Signals(stop.signal).name} after step {position['step']}; "
                          f"go on with --resume --out {out}")
            raise SystemExit(128 + stop.signal) from None
        finally:
            ranks.close()


def find_faults(problems: list[Problem], pool: SandboxPool, ranks: Ranks) -> list[str | None]:
    """Why each problem cannot be shown, or None. Every rank looks at its share of them, and all learn the same."""
    parts = ranks.all_gather([unreadable(p) or describe(p, pool) for p in problems[ranks.rank::ranks.world]])
    return [parts[i % ranks.world][i // ranks.world] for i in range(len(problems))]


def output_folder(cfg: Config, name: str, ranks: Ranks) -> Path:
    """Create --out, by default runs/<name>-<time>; UserError if a run is in it already, unless that is to go on."""
    out = Path(ranks.all_gather(cfg.out or f"runs/{name}-{time.strftime('%Y%m%d-%H%M%S')}")[0])
    used = [n for n in ("config.json", "metrics.jsonl", "checkpoints") if (out / n).exists()]
    if any(ranks.all_gather(bool(used) and not cfg.resume)):
        raise UserError(f"--out {out}: holds a run already; add --resume to go on with it, or choose another folder")
    busy = False
    try:
        out.mkdir(parents=True, exist_ok=True)
        if ranks.rank == 0:                      # held until this process ends, however it does
            ranks.lock = (out / ".lock").open("w")
            fcntl.flock(ranks.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        busy = True
    except OSError as error:
        raise UserError(f"--out {out}: cannot be written to: {error.strerror}") from None
    if any(ranks.all_gather(busy)):
        raise UserError(f"--out {out}: a run that is going on writes to it; wait for its end, or choose another folder")
    return out


def open_pool(cfg: Config, ranks: Ranks) -> SandboxPool:
    """This rank's sandbox; by default as many calls at once as its share of the node's cores."""
    return SandboxPool(cfg.tool_workers or ranks.cores, cfg.tool_timeout_s, cfg.tool_memory_mb, mode=cfg.sandbox)


@dataclass
class Run:
    """What the step loop works on."""

    cfg: Config
    learner: Learner
    stream: ProblemStream
    held_out: list[Problem]
    pool: SandboxPool
    ranks: Ranks
    stop: StopSignal
    reporter: report.Reporter
    out: Path
    position: dict                               # finished steps, the step last evaluated, the data after the last step
    baselines: dict[str, Change]

    def loop(self) -> None:
        self.evaluate_if_due()
        while self.position["step"] < self.cfg.steps:
            self.step()
            self.evaluate_if_due()
            if self.position["step"] % self.cfg.save_every == 0 and self.position["step"] < self.cfg.steps:
                self.save()
        self.save()
        table = {label: self._evaluate(direct_config(self.cfg), change=change)
                 for label, change in self.baselines.items() if self.held_out}
        self.reporter.finish(self.position["step"], table)

    def evaluate_if_due(self) -> None:
        step, last = self.position["step"], self.position["step"] == self.cfg.steps
        due = step == 0 or last or self.cfg.eval_every and step % self.cfg.eval_every == 0
        if self.held_out and due and self.position["evaluated"] != step:    # a stopped one is made up for on --resume
            when = "before" if step == 0 else "after" if last else "during"
            self.reporter.evaluated(when, self._evaluate(self.cfg, when))
            self.position["evaluated"] = step

    def step(self) -> None:
        """Sample until there is enough to learn from, update once, report."""
        began = time.perf_counter()
        step = self.position["step"] + 1
        with report.Bars(f"step {step}", self.reporter.first, self.stop.check) as bars:
            selection = collect(lambda round_index: self._sample(round_index, bars), self.cfg, self._gather,
                                self.ranks.rank)
            sampled = time.perf_counter()
            # Zero informative groups on all ranks: nothing to learn from, counted by the metrics as a skipped step.
            # A stop signal waits until the update is whole: no check between its collectives.
            stats = update(self.learner.scorer, self.learner.optimizer, self.learner.policy, selection.kept, self.cfg,
                           self.ranks, bars.count)
            updated = time.perf_counter()
            self.learner.sync()
        with suppress(AttributeError):               # glibc only: holes in the heap go back, or it grows by a MB a step
            libc("malloc_trim", 0)
        self.position |= {"step": step, "stream": self.stream.state_dict()}
        seconds = {"sample": sampled - began, "update": updated - sampled, "sync": time.perf_counter() - updated,
                   "generate": bars.total["generate"], "sandbox": bars.total["sandbox"]}
        mine = ([report.trajectory_row(traj) for g in selection.sampled for traj in g.trajectories],
                report.selection_row(selection), sum(GRADER_FAILURES.values()),
                page.step_rows(selection, self.cfg, step, self.ranks.rank, self.ranks.world))
        parts, groups, failures, shown = zip(*self.ranks.all_gather(mine))
        rows = [row for part in parts for row in part]
        self.position["grader_failures"] = sum(failures)
        skipped = [f"{name}: {why}" for name, why in self.stream.skipped.items()]
        self.reporter.step(step, rows, groups, stats, seconds,
                           {"skipped_rows": len(skipped), "grader_failures": self.position["grader_failures"]})
        self.reporter.show(shown)
        self.reporter.name_failures([*skipped, *(row["failure"] for row in rows)])
        if step == 1:
            report.refuse_hopeless(rows, self.cfg)

    def _sample(self, round_index: int, bars: report.Bars) -> list[Group]:
        """This rank's groups of one round, rewards set. After a stop signal: none, and _gather ends the step."""
        cfg, step = self.cfg, self.position["step"]
        problems = self.stream.next_batch(cfg.problems_per_round)
        bars.expect(len(problems) * cfg.group_size)
        try:
            groups = rollout(self.learner.policy, problems, cfg, self.pool,
                             mix_seed(cfg.seed, step, round_index, self.ranks.rank), tick=bars.tick)
        except Stopped:
            return []
        for group in groups:
            for traj in group.trajectories:
                score(traj, cfg)
        return groups

    def _gather(self, value: object) -> list:
        """all_gather at which all ranks also learn of a stop signal, so that none waits for one that left."""
        pairs = self.ranks.all_gather((value, self.stop.signal))
        if signals := [number for _, number in pairs if number is not None]:
            self.stop.signal = signals[0]
            raise Stopped
        return [value for value, _ in pairs]

    def _evaluate(self, cfg: Config, when: str = "", change: Change = lambda problem, pool: problem) -> dict[str, float]:
        """Means over the held-out problems of all ranks. The same draws each time, on the same number of ranks."""
        problems = self.held_out[self.ranks.rank::self.ranks.world]
        mine: list[dict] = []
        first: list[Group] = []
        with report.Bars("evaluate", self.reporter.first, self.stop.check) as bars, suppress(Stopped):
            bars.expect(len(problems))
            for start in range(0, len(problems), cfg.rollout_rows):     # no more of what `change` brings in at once
                batch = []
                for problem in problems[start:start + cfg.rollout_rows]:
                    self.stop.check()
                    batch.append(change(problem, self.pool))
                seed = mix_seed(cfg.seed, self.ranks.rank, start)
                groups = evaluate(self.learner.policy, batch, cfg, self.pool, seed, bars.tick)
                mine += [report.trajectory_row(group.trajectories[0]) for group in groups]
                first = (first + groups)[:page.HELD_OUT]
        # Also after a stop: all ranks have to learn of it.
        parts, shown = zip(*self._gather((mine, page.held_out_rows(
            first, cfg, when, self.position["step"], self.ranks.rank, self.ranks.world))))
        rows = [row for part in parts for row in part]
        self.reporter.show(shown)
        self.reporter.name_failures(row["failure"] for row in rows)
        if when == "before":
            report.refuse_hopeless(rows, cfg)
        return report.evaluation(rows)

    def save(self) -> None:
        if step := self.position["step"]:        # before the first one a fresh start is as good, and has AdamW's own state
            self.learner.save(self.out / "checkpoints" / f"step-{step:06d}",
                              {**self.position, "config": asdict(self.cfg)}, self.cfg.keep_checkpoints)
        self.reporter.curves()
