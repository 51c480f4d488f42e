"""Filters, ranking and the oversampling loop; ranks are simulated by threads that meet at a barrier."""

import math
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from PIL import Image

from pyvision_mini.config import Config
from pyvision_mini.selection import collect, drop_reason, group_drop_reason, rank_groups
from pyvision_mini.trajectory import EndReason, Group, Problem, ToolResult, Trajectory, Turn


def trajectory(reward: float = 0.0, end: EndReason = EndReason.ANSWERED, status: str | None = None) -> Trajectory:
    turns = [Turn("", "code", "1", ToolResult(status))] if status else []
    traj = Trajectory(Problem("p", "?", "1"), turns=turns, end=end, reward=reward)
    traj.extend([1], trained=False)
    traj.extend([2], trained=True, logps=[-0.1])
    return traj


def group(name: str, *rewards: float) -> Group:
    return Group(Problem(name, "?", "1"), [trajectory(r) for r in rewards])


def names(groups: list[Group]) -> list[str]:
    return [g.problem.id for g in groups]


def test_what_the_code_did_drops_nothing_by_default():
    for end in (EndReason.ANSWERED, EndReason.OUT_OF_TURNS, EndReason.NO_ACTION, EndReason.CODE_ERROR):
        for status in ("ok", "error", "timeout", "killed"):
            assert drop_reason(trajectory(end=end, status=status), Config()) is None


def test_the_strict_reading_also_drops_failed_code_and_turns_without_action():
    strict = Config(broken="any_error")
    assert drop_reason(trajectory(status="ok"), strict) is None
    assert [drop_reason(trajectory(status=s), strict) for s in ("error", "timeout", "killed")] == ["failed_code"] * 3
    assert drop_reason(trajectory(end=EndReason.NO_ACTION), strict) == "no_action"
    assert drop_reason(trajectory(end=EndReason.OUT_OF_TURNS), strict) is None


def test_too_long_is_dropped_unless_it_trains_and_our_own_failures_always_are():
    keep = Config(train_too_long=True)
    assert drop_reason(trajectory(end=EndReason.TOO_LONG), Config()) == "too_long"
    assert drop_reason(trajectory(end=EndReason.TOO_LONG), keep) is None
    assert drop_reason(trajectory(end=EndReason.PROMPT_TOO_LONG), keep) == "prompt_too_long"
    assert drop_reason(trajectory(end=EndReason.TOOL_FAILURE), keep) == "tool_failure"


def test_images_that_do_not_fit_the_tokens_and_bad_rewards_are_dropped():
    odd = trajectory()
    odd.images.append(Image.new("RGB", (28, 28)))
    assert drop_reason(odd, Config()) == "inconsistent"
    assert [drop_reason(trajectory(r), Config()) for r in (math.nan, math.inf, -math.inf)] == ["bad_reward"] * 3


@pytest.mark.parametrize("reward", [0, 0.1, 1 / 3, 0.7, 0.9, 1.1])
@pytest.mark.parametrize("size", [2, 3, 7, 8, 16])
def test_a_constant_group_is_flat(reward, size):
    assert group_drop_reason(group("g", *[reward] * size), Config()) == "flat"
    assert group_drop_reason(group("g", *[reward] * (size - 1), reward + 0.1), Config()) is None


def test_a_group_is_judged_by_the_trajectories_that_are_left():
    bad = math.nan
    for rewards in ([1.0], [bad, bad, bad], [1.0, *[bad] * 7]):
        assert group_drop_reason(group("g", *rewards), Config()) == "too_few"
    assert group_drop_reason(group("g", 1.0, 1.0, bad), Config()) == "flat"
    assert group_drop_reason(group("g", 1.0, 0.0, bad), Config()) is None


def test_groups_are_ranked_by_the_population_std_of_the_total_reward():
    #                population std:  0.5             0.433             0.05       0.4       (sample std of d: 0.566)
    groups = [group("c", 1, 1, 1.1, 1.1), group("b", 1, 0, 0, 0), group("d", 0.8, 0.0), group("a", 1, 0, 1, 0)]
    assert names(rank_groups(groups)) == ["a", "b", "d", "c"]
    assert names(groups) == ["c", "b", "d", "a"]


def test_equal_spreads_keep_their_order_however_the_rewards_are_ordered_or_shifted():
    groups = [group("x", 0.1, 0, 0), group("y", 1.1, 1.1, 1.2), group("z", 0, 0.1, 0), group("w", 0.7, 0.6, 0.6)]
    assert names(rank_groups(groups)) == ["x", "y", "z", "w"] == names(rank_groups(groups[::-1]))[::-1]


def on_ranks(rounds_of_rank: list[list[list[Group]]], cfg: Config) -> tuple[list, list[int]]:
    """collect() on simulated ranks; rounds_of_rank[rank][round]: its groups. → (selections, rounds asked per rank)"""
    world = len(rounds_of_rank)
    slots, barrier, asked = [None] * world, threading.Barrier(world, timeout=20), [0] * world

    def run(rank: int):
        def all_gather(obj):
            slots[rank] = obj
            barrier.wait()
            everything = list(slots)
            barrier.wait()
            return everything

        def sample_round(round_index: int) -> list[Group]:
            asked[rank] += 1
            return rounds_of_rank[rank][round_index]

        return collect(sample_round, cfg, all_gather, rank)

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(run, range(world))), asked


def cfg(**changes) -> Config:
    return Config(**{"groups_per_step": 2, "max_rounds": 3, **changes})


def test_one_rank_samples_until_enough_groups_are_informative_and_keeps_the_best():
    first, second = [group("flat", 1, 1), group("low", 0, 0.1)], [group("high", 0, 1), group("mid", 0, 0.5)]
    out = collect([first, second, [group("never", 0, 1)]].__getitem__, cfg())
    assert (out.rounds, out.n_informative, out.n_kept, out.imbalance) == (2, 3, 2, 0)
    assert names(out.kept) == ["high", "mid"]
    assert names(out.sampled) == ["flat", "low", "high", "mid"]
    assert out.dropped == {"flat": 1, "surplus": 1}


def test_without_ranking_the_first_informative_groups_train():
    rounds = [[group("flat", 1, 1), group("low", 0, 0.1), group("mid", 0, 0.5), group("high", 0, 1)]]
    assert names(collect(rounds.__getitem__, cfg(rank_by="none")).kept) == ["low", "mid"]


def test_broken_trajectories_leave_their_group_and_nothing_sampled_is_changed():
    sampled = group("g", 1.0, math.nan, 0.0)
    sampled.trajectories.append(trajectory(1.0, EndReason.TOO_LONG))
    before = list(sampled.trajectories)
    out = collect(lambda _: [sampled], cfg(max_rounds=1))
    assert len(out.kept) == 1 and out.kept[0] is not sampled
    assert [id(t) for t in out.kept[0].trajectories] == [id(before[0]), id(before[2])]
    assert sampled.trajectories == before and len(out.sampled[0].trajectories) == 4
    assert out.dropped == {"bad_reward": 1, "too_long": 1}


def test_a_shrunken_group_does_not_outrank_a_full_one():
    rounds = [[group("shrunken", 0.8, 0.0, *[math.nan] * 6), group("full", 1, 1, 1, 0, 0, 0, 0, 0)]]  # 0.4 and 0.48
    assert names(collect(rounds.__getitem__, cfg(groups_per_step=1)).kept) == ["full"]


@pytest.mark.parametrize("reward", [1.0, 0.0])
def test_constant_rewards_end_after_max_rounds_with_nothing_kept_on_every_rank(reward):
    rounds = [[[group(f"{rank}{r}", *[reward] * 4)] for r in range(5)] for rank in range(2)]
    outs, asked = on_ranks(rounds, cfg())
    assert asked == [3, 3]
    assert [(o.rounds, o.n_informative, o.n_kept, o.kept, o.imbalance) for o in outs] == [(3, 0, 0, [], 0)] * 2
    assert [o.dropped for o in outs] == [{"flat": 3}] * 2


def test_one_useful_group_in_fifty_trains_alone_after_max_rounds():
    rounds = [[[group(f"{rank} {r} {i}", 1, 1) for i in range(10)] for r in range(3)] for rank in range(2)]
    rounds[1][1][4] = group("useful", 1, 0)
    outs, asked = on_ranks(rounds, cfg())
    assert asked == [3, 3]
    assert [names(o.kept) for o in outs] == [[], ["useful"]]
    assert [(o.n_informative, o.n_kept, o.imbalance) for o in outs] == [(1, 1, 0.5)] * 2


def test_all_ranks_compute_the_same_global_top_and_train_what_they_sampled():
    #          rank 0: spreads 0.5, 0.4, 0.1                                   rank 1: spreads 0.45, 0.05
    rounds = [[[group("a", 0, 1), group("b", 0, 0.8), group("c", 0, 0.2)]], [[group("d", 0, 0.9), group("e", 0, 0.1)]]]
    outs, asked = on_ranks(rounds, cfg(groups_per_step=3))
    assert asked == [1, 1]                                       # 5 over both ranks, though rank 1 alone has only 2
    assert [names(o.kept) for o in outs] == [["a", "b"], ["d"]]
    assert [(o.n_informative, o.n_kept, o.imbalance) for o in outs] == [(5, 3, 0.5)] * 2
    assert [o.dropped for o in outs] == [{"surplus": 1}, {"surplus": 1}]


def test_ties_go_to_the_earlier_round_then_to_the_earlier_problem_of_the_global_batch():
    # The global batch of round 0 is a0 b0 a1 b1 (slices [rank::2]); b1 is flat. Everything informative has spread 0.5.
    rounds = [[[group("a0", 0, 1), group("a1", 0, 1)], [group("late a", 0, 1), group("later a", 0, 1)]],
              [[group("b0", 1, 0), group("b1", 1, 1)], [group("late b", 1, 0), group("later b", 1, 0)]]]
    for rank_by in ("std", "none"):
        for n, kept in ((2, [["a0"], ["b0"]]), (3, [["a0", "a1"], ["b0"]]), (4, [["a0", "a1", "late a"], ["b0"]]),
                        (5, [["a0", "a1", "late a"], ["b0", "late b"]])):
            outs, _ = on_ranks(rounds, cfg(groups_per_step=n, max_rounds=2, rank_by=rank_by))
            assert [names(o.kept) for o in outs] == kept, (rank_by, n)


def test_a_rank_that_forgets_to_say_which_it_is_stops_the_run():
    with pytest.raises(AssertionError, match=r"ranks \[0, 0\] of 2"):
        collect(lambda _: [group("g", 0, 1)], cfg(), lambda obj: [obj, obj])
