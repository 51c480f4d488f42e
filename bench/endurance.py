"""Does a run survive anything, and stay flat? Two checks; `python bench/endurance.py | tee docs/logs/endurance.txt`.

kill: SIGKILL at ten random moments, each followed by --resume. The metrics must be those of a run that nobody touched,
step for step, and no process or scratch file may be left. A checkpoint is written after every step, so some kills hit one.
soak: 200 steps; resident memory, descriptors, processes and scratch files, medians over 20 steps near the start, in the middle
and at the end (one step's memory depends on the moment): memory may grow by a tenth, the others not at all.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from statistics import median

import torch
from tqdm import tqdm

ROOT = Path(__file__).parent.parent
SMALL = ("--group_size 4 --problems_per_round 4 --groups_per_step 2 --max_rounds 1 --eval_n 0 --save_every 1 "
         "--keep_checkpoints 2").split()
CLOCKED = ("elapsed", "seconds_", "peak_memory_gb")


def errors(out: Path) -> Path:
    return out.with_suffix(".stderr")            # a file: a pipe that nobody reads would fill up with progress bars


def start(out: Path, steps: int, *flags: str) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, ROOT / "train_image.py", "--out", out, "--steps", str(steps), *SMALL, *flags],
                            stdout=subprocess.DEVNULL, stderr=errors(out).open("w"), start_new_session=True,
                            env={**os.environ, "TMPDIR": str(out.parent)})


def metrics(out: Path) -> list[dict]:
    """Finished steps, without what a clock measured."""
    lines = (out / "metrics.jsonl").read_text().splitlines() if (out / "metrics.jsonl").is_file() else []
    return [{k: v for k, v in json.loads(line).items() if not k.startswith(CLOCKED)} for line in lines if line.endswith("}")]


def left_behind(folder: Path) -> tuple[int, int]:
    """(sandbox processes, scratch folders) of the runs below `folder`."""
    n_processes = 0
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):                  # it has just ended
            n_processes += b"sandbox_worker.py" in (command := path.read_bytes()) and str(folder).encode() in command
    return n_processes, len(list(folder.glob("pyvision-mini-*")))


def kills(folder: Path, steps: int = 30, n_kills: int = 10) -> None:
    whole = start(folder / "whole", steps)
    assert whole.wait() == 0, errors(folder / "whole").read_text()
    rng, out, during_save = random.Random(0), folder / "killed", 0
    for i in tqdm(range(n_kills), desc="kills"):
        run, done = start(out, steps, *["--resume"] * (i > 0)), len(metrics(out))
        while len(metrics(out)) < min(done + 2, steps - 1):      # it gets somewhere between two kills
            assert run.poll() is None, errors(out).read_text()
            time.sleep(0.05)
        if i % 2:                                # every other time at a random moment, else while a checkpoint is written
            time.sleep(rng.uniform(0, 2))
        else:
            while not list(out.glob("checkpoints/*.partial")) and run.poll() is None:
                time.sleep(0.001)
            time.sleep(rng.uniform(0, 0.05))
        os.killpg(run.pid, signal.SIGKILL)
        run.wait()
        during_save += bool(list(out.glob("checkpoints/*.partial")))
    last = start(out, steps, "--resume")
    assert last.wait() == 0, errors(out).read_text()
    time.sleep(3)
    same, left = metrics(out) == metrics(folder / "whole"), left_behind(folder)
    print(f"kill: {n_kills} times SIGKILL in {steps} steps, {during_save} of them left a half-written checkpoint; metrics equal "
          f"those of an untouched run, step for step: {same}; processes and scratch folders left: {left}", flush=True)
    assert same and left == (0, 0)


def soak(folder: Path, steps: int = 200) -> None:
    out, found = folder / "soak", {}
    run = start(out, steps)
    with tqdm(total=steps, desc="soak") as bar:
        while run.poll() is None:
            n, proc = len(metrics(out)), Path("/proc") / str(run.pid)
            bar.update(n - bar.n)
            with suppress(OSError):              # it has just ended
                rss = int((proc / "statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") / 2**20
                if rss:
                    found[n] = (round(rss), len(os.listdir(proc / "fd")), *left_behind(folder))
            time.sleep(0.5)
    assert run.wait() == 0, errors(out).read_text()
    windows = [range(11, 31), range(91, 111), range(steps - 20, steps)]      # at `steps` it may be about to end
    medians = [[round(median(values)) for values in zip(*(found[n] for n in window if n in found))] for window in windows]
    for window, values in zip(windows, medians):
        print("soak: steps {} to {}: {} MB resident, {} descriptors, {} sandbox processes, {} scratch folders".format(
            window[0], window[-1], *values), flush=True)
    assert medians[-1][0] <= 1.1 * medians[0][0] and medians[-1][1:] == medians[0][1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["kill", "soak"], default="")
    only = parser.parse_args().only
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, torch {torch.__version__}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o711)                  # the sandbox's own users have to reach their scratch in it
        for name, check in (("kill", kills), ("soak", soak)):
            if only in ("", name):
                check(Path(folder))


if __name__ == "__main__":
    main()
