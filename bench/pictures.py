"""The README's pictures and numbers from the committed logs; `python bench/pictures.py` (docs/study.md's: bench/study.py --draw).

docs/train_image.png and docs/train_video.png are the curves of docs/logs/train_*.jsonl (steps as in a run's metrics.jsonl, then
its evaluations); docs/trajectory.png is a screenshot of the page that docs/logs/trajectory.jsonl makes, by Chromium where
it is installed. Printed: what README says about the runs.
"""
# ruff: noqa: E402

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from pyvision_mini import page
from pyvision_mini.report import draw_curves, read_metrics

DOCS, LOGS = ROOT / "docs", ROOT / "docs" / "logs"
SHOWN = ("accuracy", "error_calls", "no_call_share", "no_op_calls", "repeated_calls")


def curves(name: str) -> None:
    rows = read_metrics(LOGS / f"train_{name}.jsonl")
    steps, evaluations = ([row for row in rows if key in row] for key in ("reward", "n"))
    draw_curves(steps, evaluations, DOCS / f"train_{name}.png", name)
    first, last = ({key: fmean(row[key] for row in part) for key in SHOWN} for part in (steps[:5], steps[-5:]))
    print(f"{name}: held out {', '.join(format(e['accuracy'], '.3f') for e in evaluations)}; mean of the first and the last five steps: "
          + ", ".join(f"{key} {first[key]:.3f} -> {last[key]:.3f}" for key in SHOWN))


def trajectory() -> None:
    """Of the logged group the best rollout that looked twice and was right, opened."""
    if not (chromium := shutil.which("chromium")):
        print("docs/trajectory.png stays as it is: no chromium on PATH")
        return
    group, = read_metrics(LOGS / "trajectory.jsonl")
    group["rollouts"] = [t for t in group["rollouts"] if t["grade"] == 1 and len(t["turns"]) == 3][:1]
    with tempfile.TemporaryDirectory() as folder:
        (out := Path(folder) / "image").mkdir()
        page.append(out / "trajectories.jsonl", [group])
        page.write(out)
        subprocess.run([chromium, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1280,1045",
                        f"--user-data-dir={folder}/profile", f"--screenshot={DOCS / 'trajectory.png'}",
                        f"file://{folder}/image/trajectories.html#view=list&open=0.0"],
                       check=True, capture_output=True, timeout=120)


if __name__ == "__main__":
    for name in ("image", "video"):
        curves(name)
    trajectory()
