"""Would one row per group, with the prompt once, make the update faster? `python bench/shared_prefix.py | tee docs/logs/shared_prefix.txt`

The trajectories of a group share their prompt. Instead of G rows of prompt + continuation, one row holds the prompt and then
all continuations; a mask lets each see the prompt and itself. Gradients must agree within 1e-5. Measured: forward and backward of
4 groups of 8, one thread, medians of 5, against the number of image tokens in the prompt, with the trainer's micro-batches.
"""
# ruff: noqa: E402

from __future__ import annotations

import platform
import sys
import time
from pathlib import Path
from statistics import median

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from pyvision_mini.config import Config
from pyvision_mini.grpo import policy_loss
from pyvision_mini.policy import Policy, load_policy, mrope_positions
from pyvision_mini.prompts import IMAGE, VISION_END, VISION_START
from pyvision_mini.trainer import Scorer, collate, micro_batches
from pyvision_mini.trajectory import Group, Problem, Trajectory

CONTINUATION, SAMPLED, TEXT = 180, 120, 60     # tokens: after the prompt, of them sampled, of text in the prompt


def group_of(policy: Policy, side: int, rng: np.random.Generator, size: int = 8) -> Group:
    """A made-up group whose prompt holds one image of (side / 2)² tokens and whose continuations differ in length."""
    grid, words = (1, side, side), lambda n: rng.integers(0, 200, size=n).tolist()
    prompt = words(TEXT // 2) + policy.encode([VISION_START, IMAGE, VISION_END], [grid]) + words(TEXT // 2)
    features, problem, group = torch.randn(side * side // 4, 128), Problem("p", "?", "1"), []
    for _ in range(size):
        traj = Trajectory(problem, grids=[grid], features=[features], n_prompt=len(prompt))
        traj.extend(prompt, trained=False)
        n = SAMPLED + int(rng.integers(-30, 30))
        traj.extend(words(n), trained=True, logps=[0.0] * n)
        traj.extend(words(CONTINUATION - SAMPLED), trained=False)
        group.append(traj)
    return Group(problem, group)


def shared_logps(scorer: Scorer, policy: Policy, group: Group) -> torch.Tensor:
    """Log-probs of all action tokens of a group, in the order of its trajectories, from one row with the prompt once."""
    trajs, n_prompt = group.trajectories, group.trajectories[0].n_prompt
    ids, owner = list(trajs[0].ids[:n_prompt]), [-1] * n_prompt
    positions = [mrope_positions(trajs[0].ids, trajs[0].grids, policy.image_id)[:, :n_prompt]]
    predictors, targets = [], []
    for k, traj in enumerate(trajs):
        start = len(ids) - n_prompt
        for t in np.flatnonzero(traj.action_mask).tolist():
            targets.append(traj.ids[t])
            predictors.append(t - 1 if t == n_prompt else start + t - 1)
        ids += traj.ids[n_prompt:]
        owner += [k] * (len(traj.ids) - n_prompt)
        positions.append(mrope_positions(traj.ids, traj.grids, policy.image_id)[:, n_prompt:])
    owner_L, ids_1L = torch.tensor(owner), torch.tensor([ids])
    sees_LL = ((owner_L[None, :] == -1) | (owner_L[:, None] == owner_L[None, :])).tril()
    embeds = scorer.language_model.embed_tokens(ids_1L)
    features = torch.cat(trajs[0].features)
    embeds = embeds.masked_scatter((ids_1L == policy.image_id)[..., None], features.to(embeds.dtype))
    hidden = scorer.language_model(inputs_embeds=embeds, attention_mask=sees_LL[None, None], use_cache=False,
                                   position_ids=torch.from_numpy(np.concatenate(positions, axis=1))[:, None]).last_hidden_state
    return scorer._head(hidden[0, torch.tensor(predictors)], torch.tensor(targets))[0]


def ours(scorer: Scorer, policy: Policy, groups: list[Group], adv: list[float], n_tokens: int, cfg: Config) -> None:
    pairs = [(traj, a) for group in groups for traj, a in zip(group.trajectories, adv)]
    for batch in micro_batches(pairs, cfg.micro_batch_tokens):
        made = collate(policy, [traj for traj, _ in batch])
        logp = scorer(made)[0]
        policy_loss(logp, logp.detach(), torch.tensor([a for _, a in batch]), made.action_BT, n_tokens)[0].backward()


def shared(scorer: Scorer, policy: Policy, groups: list[Group], adv: list[float], n_tokens: int, cfg: Config) -> None:
    for group in groups:
        logp_N = shared_logps(scorer, policy, group)
        adv_N = torch.cat([torch.full((sum(t.action_mask),), a) for t, a in zip(group.trajectories, adv)])
        policy_loss(logp_N[:, None], logp_N.detach()[:, None], adv_N, torch.ones(len(logp_N), 1), n_tokens)[0].backward()


def gradient(step, scorer: Scorer, *args) -> tuple[torch.Tensor, float]:
    """(all gradients as one vector, seconds) of forward and backward."""
    scorer.zero_grad()
    began = time.perf_counter()
    step(scorer, *args)
    seconds = time.perf_counter() - began
    return torch.cat([p.grad.flatten() for p in scorer.parameters()]), seconds


def main() -> None:
    torch.set_num_threads(1)
    print(f"{platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}, one thread")
    policy, cfg, adv = load_policy(), Config(), torch.linspace(-1, 1, 8).tolist()
    scorer = Scorer(policy, 1.0, checkpointing=False)
    for side in (8, 16, 32, 64):
        rng = np.random.default_rng(side)
        groups = [group_of(policy, side, rng) for _ in range(4)]
        n_tokens = sum(sum(t.action_mask) for g in groups for t in g.trajectories)
        args = scorer, policy, groups, adv, n_tokens, cfg
        (a, _), (b, _) = gradient(ours, *args), gradient(shared, *args)
        seconds = [(gradient(ours, *args)[1], gradient(shared, *args)[1]) for _ in range(5)]
        rows, one = (median(times) for times in zip(*seconds))
        print(f"{side * side // 4:5} image tokens of {TEXT + side * side // 4 + 2 + CONTINUATION}: rows {rows:.2f} s, one row per group "
              f"{one:.2f} s, {rows / one:.2f} times as fast; gradients differ by {(a - b).abs().max():.1e}")


if __name__ == "__main__":
    main()
