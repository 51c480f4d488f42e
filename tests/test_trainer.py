"""The update against itself: micro-batchings, ranks, checkpoints, bad gradients. fp32, CPU, the embedded policy."""

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from math import nan
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from pyvision_mini import report, trainer
from pyvision_mini.config import Config, UserError, cli
from pyvision_mini.data import unreadable
from pyvision_mini.policy import load_policy
from pyvision_mini.prompts import IM_END, IM_START, IMAGE, VISION_END, VISION_START
from pyvision_mini.selection import Selection
from pyvision_mini.trainer import Scorer, collate, micro_batches, update
from pyvision_mini.trajectory import EndReason, Group, Problem, Trajectory

torch.set_num_threads(1)
CFG = Config(grad_clip=1e9)
SIZES = [(112, 112), (56, 112), (112, 84)]


class OneRank:
    rank, world, sharded, device = 0, 1, False, torch.device("cpu")

    def all_gather(self, value):
        return [value]


def trajectory(policy, seed, n_images, n_sampled, reward=0.0):
    """A prompt with images, then sampled text, an observation with an image if there are several, sampled text."""
    rng = np.random.default_rng(seed)
    images = [Image.fromarray(rng.integers(0, 255, (*SIZES[k % 3][::-1], 3), dtype=np.uint8)) for k in range(n_images)]
    seen = policy.see(images, {}, 56 * 56, 112 * 112)
    traj = Trajectory(Problem(f"p{seed}", "q", "a"), end=EndReason.ANSWERED, reward=reward)

    def words(n):
        return rng.integers(0, 256, n).tolist()

    def block(k):
        return [VISION_START, IMAGE, VISION_END] if k < n_images else []

    def observe(segments, new):
        ids = policy.encode(segments, [image.grid for image in new])
        traj.extend(ids, trained=False)
        traj.images += [image.image for image in new]
        traj.grids += [image.grid for image in new]
        traj.features += [image.features for image in new]
        traj.n_image_tokens += ids.count(policy.image_id)

    observe([IM_START, "user\nwhat is it?", *block(0), IM_END, "\n", IM_START, "assistant\n"], seen[:1])
    traj.n_prompt = len(traj.ids)
    traj.extend(words(n_sampled), trained=True, logps=[-1.0] * n_sampled)
    if n_images > 1:
        observe([IM_END, "\nsee:", *block(1), *block(2), IM_START, "assistant\n"], seen[1:])
        traj.extend(words(5), trained=True, logps=[-1.0] * 5)
    assert traj.consistent
    return traj


def eight(policy):
    """Two groups of four, 12 to 200 sampled tokens, 0 to 3 images, rewards that differ."""
    shapes = [(0, 12), (1, 200), (3, 20), (1, 33), (2, 60), (0, 9), (1, 12), (3, 90)]
    trajs = [trajectory(policy, i, *shape, reward=float(i % 3 == 0)) for i, shape in enumerate(shapes)]
    return [Group(trajs[0].problem, trajs[:4]), Group(trajs[4].problem, trajs[4:])]


def step_of(policy, groups, cfg, ranks=OneRank()):
    """The gradient, read off a step of plain SGD with learning rate 1, and the update's result."""
    scorer = Scorer(policy, cfg.temperature, cfg.gradient_checkpointing)
    before = {name: p.detach().clone() for name, p in scorer.named_parameters()}
    result = update(scorer, torch.optim.SGD(scorer.parameters(), lr=1.0), policy, groups, cfg, ranks)
    return {name: before[name] - p.detach() for name, p in scorer.named_parameters()}, result


@pytest.fixture()
def policy():
    return load_policy()


@pytest.fixture(scope="module")
def reference():
    policy = load_policy()
    return step_of(policy, eight(policy), replace(CFG, micro_batch_tokens=1 << 30))[0]


def differs(a, b):
    return max((a[name] - b[name]).abs().max().item() for name in a)


@pytest.mark.parametrize("budget, n_batches", [(1 << 30, 1), (1000, None), (1, 8)])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_gradient_does_not_depend_on_micro_batching_or_checkpointing(policy, reference, budget, n_batches, checkpointing):
    groups = eight(policy)
    pairs = [(traj, 0.0) for group in groups for traj in group.trajectories]
    assert n_batches in (None, len(micro_batches(pairs, budget)))
    gradient, _ = step_of(policy, groups, replace(CFG, micro_batch_tokens=budget, gradient_checkpointing=checkpointing))
    assert max(g.abs().max().item() for g in reference.values()) > 1e-3          # there is something to compare
    assert differs(gradient, reference) < 1e-5


def test_the_gradient_does_not_depend_on_the_order_of_trajectories(policy, reference):
    groups = [Group(group.problem, group.trajectories[::-1]) for group in eight(policy)][::-1]
    assert differs(step_of(policy, groups, replace(CFG, micro_batch_tokens=700))[0], reference) < 1e-5


def test_micro_batches_hold_every_trajectory_once_and_keep_to_the_budget(policy):
    pairs = [(traj, 0.0) for group in eight(policy) for traj in group.trajectories]
    batches = micro_batches(pairs, 500)
    assert sorted(id(t) for batch in batches for t, _ in batch) == sorted(id(t) for t, _ in pairs)
    assert all(len(batch) * max(len(t.ids) for t, _ in batch) <= 500 for batch in batches)
    assert len(micro_batches(pairs[:1], 1)) == 1                                  # over the budget alone: still trained


def test_two_ranks_with_unequal_work_give_the_gradient_of_one(tmp_path, reference):
    out = run_ranks(tmp_path, "unequal")
    assert differs(torch.load(out / "gradient.pt"), reference) < 1e-5


def test_a_rank_without_any_group_neither_hangs_nor_changes_the_gradient(tmp_path, reference):
    out = run_ranks(tmp_path, "one_idle")
    assert differs(torch.load(out / "gradient.pt"), reference) < 1e-5


def test_no_rank_having_a_group_leaves_the_weights_alone(tmp_path):
    out = run_ranks(tmp_path, "all_idle")
    assert max(g.abs().max().item() for g in torch.load(out / "gradient.pt").values()) == 0.0


def test_parameters_agree_on_two_ranks_after_three_steps_with_replica_and_checkpoint_loads_on_one(tmp_path):
    out = run_ranks(tmp_path, "three_steps")
    hashes = json.loads((out / "hashes.json").read_text())
    assert hashes["replica"][0] == hashes["replica"][1]
    one = trainer.Learner(replace(CFG, model=str(out / "step-000003" / "model")), OneRank())
    one.load(out / "step-000003")
    total = sum(p.detach().double().abs().sum().item() for p in one.scorer.parameters())
    assert total == pytest.approx(hashes["total"], rel=1e-9)
    assert len(one.optimizer.state) == len(list(one.scorer.parameters()))


def run_ranks(tmp_path, what):
    root = Path(__file__).parent.parent
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
                           str(Path(__file__).with_name("two_ranks.py")), what, str(tmp_path)], capture_output=True,
                          text=True, timeout=120, env={**os.environ, "PYTHONPATH": str(root)})
    assert done.returncode == 0, done.stderr[-3000:]
    return tmp_path


@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_the_first_ratio_is_exactly_one(policy, temperature):
    _, stats = step_of(policy, eight(policy), replace(CFG, temperature=temperature))
    assert (stats["ratio_max"], stats["kl"], stats["clipped"]) == (1.0, 0.0, 0)
    assert stats["tokens"] == 12 + 205 - 5 + 25 + 33 + 65 + 9 + 12 + 95


def test_later_parts_of_a_batch_see_log_probs_from_before_the_first(policy):
    _, stats = step_of(policy, eight(policy), replace(CFG, updates_per_batch=2))
    assert stats["ratio_max"] > 1.0 and stats["kl"] > 0


def test_a_step_without_a_group_trains_no_token_changes_nothing_and_still_has_metrics(policy):
    gradient, stats = step_of(policy, [], replace(CFG, updates_per_batch=2))
    nothing = report.selection_row(Selection([], [], 1, 0, 0, Counter(), 0.0))
    metrics = report.step_metrics([], [nothing], stats, {})
    assert [metrics[key] for key in ("trained_tokens", "loss", "entropy", "kl", "ratio_max", "logp_gap", "padding_share",
                                     "skipped_updates", "groups_kept")] == [0] * 9
    assert max(g.abs().max().item() for g in gradient.values()) == 0.0


def test_a_second_ctrl_c_interrupts_at_once_and_is_one_line(capsys, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    @cli
    def main():
        stop = trainer.StopSignal()
        stop.check()
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(trainer.Stopped):                                      # the first one waits for a border
            stop.check()
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("the second one does not")

    with pytest.raises(SystemExit) as stopped:
        main()
    for number, handler in handlers.items():
        signal.signal(number, handler)
    assert stopped.value.code == 130 and capsys.readouterr().err == "interrupted; the last checkpoint stays\n"


def test_a_nan_gradient_skips_the_step_and_is_counted(policy):
    groups = eight(policy)
    groups[0].trajectories[1].features[0] = torch.full_like(groups[0].trajectories[1].features[0], nan)
    gradient, stats = step_of(policy, groups, CFG)
    assert stats["skipped"] == 1
    assert max(g.abs().max().item() for g in gradient.values()) == 0.0


def test_log_probs_are_those_of_the_whole_models_forward_and_depend_on_the_pixels(policy):
    trajs = [traj for group in eight(policy) for traj in group.trajectories]
    logp_BT, entropy_BT = Scorer(policy, 1.0, checkpointing=False)(collate(policy, trajs))
    for i, traj in enumerate(trajs):
        pixels = policy.processor.image_processor(images=traj.images, return_tensors="pt") if traj.images else {}
        ids = torch.tensor([traj.ids])
        logits = policy.model(input_ids=ids, mm_token_type_ids=(ids == policy.image_id).int(), **pixels).logits[0].float()
        logits[:, list(policy.suppressed)] = -torch.inf
        logp = logits.log_softmax(-1)
        for t in [t for t, sampled in enumerate(traj.action_mask) if sampled]:
            assert logp_BT[i, t].item() == pytest.approx(logp[t - 1, traj.ids[t]].item(), abs=1e-4)
        assert logp_BT[i][torch.tensor(traj.action_mask + [1] * (logp_BT.shape[1] - len(traj.ids))) == 0].abs().sum() == 0
    assert (entropy_BT >= 0).all()
    changed = trajs[2]
    changed.features = [torch.zeros_like(f) for f in changed.features]
    other_BT, _ = Scorer(policy, 1.0, checkpointing=False)(collate(policy, trajs))
    assert (other_BT[2] - logp_BT[2]).abs().max() > 0.01
    assert (other_BT[[0, 1, 3, 4, 5, 6, 7]] - logp_BT[[0, 1, 3, 4, 5, 6, 7]]).abs().max() == 0


def test_the_head_never_sees_more_than_a_chunk_of_action_tokens(policy, monkeypatch):
    monkeypatch.setattr(trainer, "HEAD_CHUNK", 50)
    rows = []
    policy.model.lm_head.register_forward_hook(lambda module, args, out: rows.append(out.shape))
    trajs, saved = [traj for group in eight(policy) for traj in group.trajectories], []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor.shape) or tensor, lambda tensor: tensor):
        Scorer(policy, 1.0, checkpointing=False)(collate(policy, trajs))
    assert saved and not [shape for shape in saved if shape[-1:] == rows[0][-1:]]  # not even a chunk waits for the backward
    assert [len(shape) for shape in rows] == [2] * len(rows)
    assert [shape[0] for shape in rows] == [50] * 9 + [1]                          # 451 action tokens in all


def test_a_new_learning_rate_holds_after_a_resume(tmp_path):
    learner = trainer.Learner(CFG, OneRank())
    learner.save(tmp_path / "step-000001", {"step": 1}, keep=1)
    other = trainer.Learner(replace(CFG, lr=0.5, weight_decay=0.25), OneRank())
    other.load(tmp_path / "step-000001")
    assert [(group["lr"], group["weight_decay"]) for group in other.optimizer.param_groups] == [(0.5, 0.25)]


def test_every_rank_looks_at_its_share_of_the_problems_and_all_learn_the_same(tmp_path, monkeypatch):
    (tmp_path / "bad.png").write_text("no image")
    Image.new("RGB", (60, 60)).save(tmp_path / "good.png")
    problems = [Problem(str(i), "?", "1", images=(tmp_path / f"{'bad' if i in (1, 2) else 'good'}.png",)) for i in range(5)]
    looked = []
    monkeypatch.setattr(trainer, "unreadable", lambda p: looked.append(p.id) or unreadable(p))
    ranks = [SimpleNamespace(rank=r, world=2) for r in range(2)]
    shares = {}

    def faults(rank):
        def all_gather(mine):
            shares[rank.rank] = mine
            return [shares.get(r) for r in range(2)]
        rank.all_gather = all_gather
        return trainer.find_faults(problems, None, rank)

    with suppress(TypeError):                                                     # rank 1's share is not there yet
        faults(ranks[0])
    assert looked == ["0", "2", "4"]
    found = faults(ranks[1])
    assert looked == ["0", "2", "4", "1", "3"] and found == faults(ranks[0])
    assert [bool(fault) for fault in found] == [False, True, True, False, False] and "bad.png" in found[1]


def test_a_folder_that_a_run_writes_to_is_refused_until_that_run_has_ended(tmp_path):
    cfg, first = replace(CFG, out=str(tmp_path / "run")), trainer.Ranks()
    trainer.output_folder(cfg, "image", first)
    with pytest.raises(UserError, match="a run that is going on writes to it"):
        trainer.output_folder(cfg, "image", trainer.Ranks())
    first.close()
    assert trainer.output_folder(cfg, "image", trainer.Ranks()) == tmp_path / "run"


def test_a_half_written_checkpoint_does_not_count_and_old_ones_go(tmp_path):
    learner = trainer.Learner(CFG, OneRank())
    for step in (1, 2, 3):
        learner.save(tmp_path / f"step-{step:06d}", {"step": step}, keep=2)
    (tmp_path / "step-000003" / "it stays").touch()                                # a kill must find one that is whole
    learner.save(tmp_path / "step-000003", {"step": 3}, keep=2)
    assert (tmp_path / "step-000003" / "it stays").exists()
    (tmp_path / "step-000004.partial").mkdir()
    (tmp_path / "step-000005").mkdir()
    assert [path.name for path in trainer.checkpoints(tmp_path)] == ["step-000002", "step-000003"]
    assert load_policy(tmp_path / "step-000003" / "model").decode([1]) == learner.policy.decode([1])
