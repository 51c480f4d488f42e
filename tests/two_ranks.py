"""Run by torchrun from test_trainer.py: two_ranks.py WHAT FOLDER."""

import hashlib
import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
from test_trainer import CFG, eight

from pyvision_mini.config import cli
from pyvision_mini.trainer import Learner, Ranks, update


def gradient(ranks, cfg, groups, learner):
    before = {name: p.full_tensor().clone() for name, p in learner.scorer.named_parameters()}
    update(learner.scorer, torch.optim.SGD(learner.scorer.parameters(), lr=1.0), learner.policy, groups, cfg, ranks)
    return {name: before[name] - p.full_tensor() for name, p in learner.scorer.named_parameters()}


def main(what, folder):
    ranks = Ranks()
    learner = Learner(CFG, ranks)
    groups = eight(learner.policy)
    mine = {"unequal": [groups[0]] if ranks.rank else [groups[1]], "one_idle": [] if ranks.rank else groups,
            "all_idle": [], "three_steps": [groups[ranks.rank]]}[what]
    cfg = replace(CFG, micro_batch_tokens=500 if ranks.rank else 100)
    if what != "three_steps":
        found = gradient(ranks, cfg, mine, learner)
        if ranks.rank == 0:
            torch.save(found, folder / "gradient.pt")
    else:
        for _ in range(3):
            update(learner.scorer, learner.optimizer, learner.policy, mine, replace(cfg, gradient_checkpointing=True), ranks)
            learner.sync()
        learner.save(folder / "step-000003", {"step": 3}, keep=1)
        replica = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in learner.policy.model.parameters())).hexdigest()
        hashes = ranks.all_gather(replica)
        total = sum(p.full_tensor().double().abs().sum().item() for p in learner.scorer.parameters())
        if ranks.rank == 0:
            (folder / "hashes.json").write_text(json.dumps({"replica": hashes, "total": total}))
    ranks.close()


cli(lambda: main(sys.argv[1], Path(sys.argv[2])))()
