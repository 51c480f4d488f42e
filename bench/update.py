"""What an update costs: forward and backward of 32 trajectories of about 600 tokens, ours beside TRL's loss path.

Both start from the same forced episodes of bench/rollout.py (4 problems × 8 rollouts, 4 tool turns, 64 tokens an image; 1
problem at the large vocabulary), have the same advantages and one denominator, clip the gradient, and must end with the same
gradient norm (within 1 %: ours never samples the image control ids, TRL scores them too). Every variant runs in a process of
its own: one update for the peak memory above what was resident before it, then more for the median time. Vocabulary: the embedded policy's own, and
Qwen's 151,936 (random rows on top), where the head is nearly all the work; on a 7B policy it is under a tenth.
- ours          trainer.update: micro-batches of 2,048 tokens, stored vision features, head at action tokens in chunks
- trl           GRPOTrainer.compute_loss as TRL sets it by default: 8 rows at a time, activation checkpointing
- trl, plain    8 rows at a time, no checkpointing (nor has ours any)
- trl, at once  32 rows at once, no checkpointing

    OMP_NUM_THREADS=1 python bench/update.py | tee docs/logs/update.txt          # writes docs/logs/update.jsonl too
    OMP_NUM_THREADS=1 python bench/update.py profile | tee docs/logs/update_profile.txt        # of ours, at the small vocabulary
"""

import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import torch
import transformers
from rollout import Episodes, Trainer, machine, sample

from pyvision_mini.trainer import Ranks, Scorer, update

QWEN = 151_936
TRL = {"trl": (8, True), "trl, plain": (8, False), "trl, at once": (32, False)}     # rows at a time, checkpointing


def ours(episodes: Episodes) -> Callable[[], float]:
    """→ one whole trainer.update, with an optimizer that moves nothing."""
    groups = sample(episodes)
    for i, traj in enumerate(traj for group in groups for traj in group.trajectories):
        traj.reward = float(i % 3 == 0)
    scorer = Scorer(episodes.policy, temperature=1.0, checkpointing=False)
    optimizer = torch.optim.SGD(scorer.parameters(), lr=0.0)
    return lambda: update(scorer, optimizer, episodes.policy, groups, episodes.cfg, Ranks())["grad_norm"]


def trl(episodes: Episodes, folder: str, rows: int, checkpointing: bool) -> Callable[[], float]:
    """→ the batch as TRL's _prepare_inputs cuts it, loss and backward of each part, then the norm."""
    parts = episodes.n_rows // rows
    trainer = Trainer(episodes, folder, per_device_train_batch_size=rows, gradient_accumulation_steps=parts,
                      steps_per_generation=parts, activation_checkpointing=checkpointing, generation_batch_size=None)
    trainer.current_gradient_accumulation_steps = parts
    model = trainer.model.train()
    if checkpointing:                            # as Trainer.train() would do, which is not called here
        model.activation_checkpointing_enable({"use_reentrant": False})
    assert model.is_gradient_checkpointing == checkpointing
    trainer._prepare_inputs(trainer.inputs)

    def step() -> float:
        for part in trainer._buffered_inputs:
            trainer.compute_loss(model, part).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        model.zero_grad()
        return float(norm)
    return step


def resident_mb(field: str) -> float:
    return int(re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) / 1024


def measure(name: str, vocabulary: int, n_problems: int, repeats: int) -> dict[str, float]:
    """In a fresh process: peak memory of the first update above the start, the median seconds of `repeats` more."""
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(1)
    episodes, seconds = Episodes(n_problems, 8, 4, 64, vocabulary), []
    with tempfile.TemporaryDirectory() as folder:
        step = ours(episodes) if name == "ours" else trl(episodes, folder, *TRL[name])
    Path("/proc/self/clear_refs").write_text("5")            # the peak so far is forgotten
    before = resident_mb("VmRSS")
    norm = step()
    peak = resident_mb("VmHWM") - before
    for _ in range(repeats):
        started = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - started)
    return {"seconds": statistics.median(seconds), "peak_mb": peak, "grad_norm": norm}


def main() -> None:
    print(machine())
    root = Path(__file__).resolve().parent.parent
    with (root / "docs/logs/update.jsonl").open("w") as log:
        for vocabulary, n_problems, repeats in ((0, 4, 5), (QWEN, 1, 3)):        # of the second one an update takes minutes
            episodes, results = Episodes(n_problems, 8, 4, 64), {}
            lengths = [len(traj.ids) for group in sample(episodes) for traj in group.trajectories]
            size = vocabulary or episodes.policy.model.config.text_config.vocab_size
            print(f"\nvocabulary {size}: {len(lengths)} trajectories of {min(lengths)} to {max(lengths)} tokens, {sum(lengths)} "
                  f"in all, {episodes.n_sampled} of them sampled; median of {repeats}", flush=True)
            for name in ("ours", *(name for name, (rows, _) in TRL.items() if rows <= len(lengths))):
                command = [sys.executable, __file__, name, str(vocabulary), str(n_problems), str(repeats)]
                r = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
                results[name] = r = r | {"tokens_per_s": sum(lengths) / r["seconds"]}
                assert abs(r["grad_norm"] / results["ours"]["grad_norm"] - 1) < 0.01, f"{name}: {r['grad_norm']} {results}"
                log.write(json.dumps({"vocabulary": size, "variant": name} | {k: round(v, 4) for k, v in r.items()}) + "\n")
                times, share = (r[key] / results["ours"][key] for key in ("seconds", "peak_mb"))
                print(f"  {name:<14}{r['tokens_per_s']:8.0f} tok/s {r['seconds']:8.2f} s {r['peak_mb']:8.0f} MB above start   "
                      f"gradient norm {r['grad_norm']:.4f}   ours = 1: seconds {times:.2f}, memory {share:.2f}", flush=True)


def profile() -> None:
    torch.set_num_threads(1)
    step = ours(Episodes(4, 8, 4, 64))
    step()
    with torch.profiler.profile() as profiler:
        step()
    print(profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=15, max_name_column_width=45))


if __name__ == "__main__":
    if len(sys.argv) == 1:
        main()
    elif sys.argv[1] == "profile":
        profile()
    else:
        print(json.dumps(measure(sys.argv[1], *map(int, sys.argv[2:]))))
