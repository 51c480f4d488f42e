"""What trains: oversample, filter, rank (PyVision-RL, arXiv 2602.20739). Broken trajectories leave their group, groups
that teach nothing are dropped, the rest are ranked by how much their rewards differ. Every exit is named and counted.

Groups are never split and never changed: a kept group is a new Group that shares the trajectory objects.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite
from statistics import pstdev

from pyvision_mini.config import Config
from pyvision_mini.trajectory import EndReason, Group, Trajectory

FLAT = 1e-6  # rewards closer than this are equal; a float std > 0 lets seven equal rewards of 0.7 through


@dataclass
class Selection:
    """Outcome of one oversampling loop. Counts are over all ranks only where the comment says so."""

    kept: list[Group]         # what this rank trains on, best first; broken trajectories removed; may be empty
    sampled: list[Group]      # everything this rank sampled, in order: metrics are reported over these
    rounds: int               # rounds sampled, the same on all ranks
    n_informative: int        # all ranks: groups that passed the filters
    n_kept: int               # all ranks: groups that train
    dropped: Counter[str]     # this rank: reasons of trajectories, and of groups (group_drop_reason or "surplus")
    imbalance: float          # all ranks: most kept groups on a rank − mean over ranks


def drop_reason(trajectory: Trajectory, cfg: Config) -> str | None:
    """Why a trajectory does not train, or None. What the code did is no reason unless broken="any_error"."""
    if trajectory.end == EndReason.TOO_LONG and not cfg.train_too_long:
        return "too_long"
    if trajectory.end == EndReason.PROMPT_TOO_LONG:
        return "prompt_too_long"
    if trajectory.end == EndReason.TOOL_FAILURE:
        return "tool_failure"
    if not trajectory.consistent:
        return "inconsistent"
    if not isfinite(trajectory.reward):
        return "bad_reward"
    if cfg.broken == "any_error":  # the paper's strict reading
        if any(turn.result is not None and turn.result.status != "ok" for turn in trajectory.turns):
            return "failed_code"
        if trajectory.end == EndReason.NO_ACTION:
            return "no_action"
    return None


def _survivors(group: Group, cfg: Config) -> Group:
    return Group(group.problem, [t for t in group.trajectories if drop_reason(t, cfg) is None])


def group_drop_reason(group: Group, cfg: Config) -> str | None:
    """Why a group does not train, judged by its unbroken trajectories, or None."""
    rewards = [t.reward for t in _survivors(group, cfg).trajectories]
    if len(rewards) < 2:
        return "too_few"  # nothing to compare with
    if max(rewards) - min(rewards) <= FLAT:
        return "flat"     # all advantages are zero
    return None


def _spread(group: Group) -> float:
    """Population std of the total reward: with the sample std a shrunken group would outrank a full one."""
    rewards = [float(t.reward) for t in group.trajectories if isfinite(t.reward)]
    # pstdev is exact, so the order of the trajectories is no matter; rounding makes 1.2 − 1.1 and 0.1 − 0 a tie.
    return round(pstdev(rewards), 9) if rewards else 0.0


def rank_groups(groups: list[Group]) -> list[Group]:
    """Highest reward spread first; equal ones keep their order."""
    return sorted(groups, key=_spread, reverse=True)


def collect(sample_round: Callable[[int], list[Group]], cfg: Config,
            all_gather: Callable[[object], list] = lambda x: [x], rank: int = 0) -> Selection:
    """Sample rounds until there are `groups_per_step` informative groups over all ranks, at most `max_rounds`.

    sample_round(round) returns this rank's groups, of problems [rank::world] of the round's global batch.
    all_gather(obj) returns every rank's obj in rank order. All ranks see the same list and so decide the same.
    """
    sampled: list[Group] = []
    dropped: Counter[str] = Counter()
    mine: dict[tuple[int, int], Group] = {}                  # (round, index in the global batch) → its survivors
    everyone: list[tuple[float, tuple[int, int], int]] = []  # (sort key of the spread, (round, index), rank)
    for round_index in range(cfg.max_rounds):
        groups = sample_round(round_index)
        sampled += groups
        spreads: list[tuple[int, float]] = []              # (local index, spread) of this round's informative groups
        survivors = [_survivors(group, cfg) for group in groups]
        for i, group in enumerate(groups):
            dropped.update(reason for t in group.trajectories if (reason := drop_reason(t, cfg)))
            if reason := group_drop_reason(group, cfg):
                dropped[reason] += 1
            else:
                spreads.append((i, _spread(survivors[i])))
        gathered = all_gather((rank, spreads))
        world = len(gathered)
        ranks = [r for r, _ in gathered]
        assert ranks == list(range(world)), f"all_gather returned ranks {ranks} of {world}: pass each process its rank"
        for r, of_rank in gathered:
            everyone += [(-spread if cfg.rank_by == "std" else 0.0, (round_index, i * world + r), r)
                         for i, spread in of_rank]
        mine.update({(round_index, i * world + rank): survivors[i] for i, _ in spreads})
        if len(everyone) >= cfg.groups_per_step:
            break
    top = sorted(everyone)[:cfg.groups_per_step]           # ties: the earlier round, then the earlier problem
    kept = [mine[key] for _, key, r in top if r == rank]
    dropped["surplus"] += len(mine) - len(kept)
    per_rank = Counter(r for _, _, r in top)
    return Selection(kept, sampled, round_index + 1, len(everyone), len(top), +dropped,
                     max(per_rank.values(), default=0) - len(top) / world)
