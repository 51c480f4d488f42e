"""trajectories.html: a sample of what the policy was asked, wrote, ran and saw, in one file that opens from disk.

The sample is bounded and kept in trajectories.jsonl, one group a line, so that a resumed run goes on with it. It is
untrusted: it enters assets/page.html as escaped JSON and leaves it through textContent, and the page's security policy
allows no script but its own and no network. Filters and what is open stand after #.

docs/trajectory.png: bench/pictures.py
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections import Counter, defaultdict
from hashlib import sha256
from io import BytesIO
from math import isfinite
from pathlib import Path

from PIL import Image

from pyvision_mini.config import Config, write_whole
from pyvision_mini.grpo import group_advantages
from pyvision_mini.selection import Selection, drop_reason, group_drop_reason
from pyvision_mini.trajectory import Group, Trajectory, Turn

STEPS, GROUPS, HELD_OUT = 10, 3, 12      # steps shown, groups of each, problems of an evaluation
BYTES = 16 << 20                         # of all rows; with the page around them under 20 MB
TEXT, SIDE, FIGURES = 12_000, 320, 8     # characters of a text, pixels of a thumbnail's longer side, pictures of a call
TEMPLATE = Path(__file__).parent / "assets" / "page.html"


def is_shown(step: int, steps: int) -> bool:
    """Whether it is one of the evenly spread steps, the first and the last among them."""
    return step in {1 + round(i * (steps - 1) / (STEPS - 1)) for i in range(STEPS)}


def mixed(usual: list, others: list, n: int, rank: int = 0, world: int = 1) -> list:
    """This rank's share of n items, every third one of the others if there are enough of both."""
    slots = range(n)[rank::world]
    n_others = min(len(others), max(sum(slot % 3 == 2 for slot in slots), len(slots) - len(usual)))
    return usual[:len(slots) - n_others] + others[:n_others]


def step_rows(selection: Selection, cfg: Config, step: int, rank: int, world: int) -> list[dict]:
    """This rank's share of a step that is shown: groups that trained, and ones that did not with the reason."""
    if not is_shown(step, cfg.steps):
        return []
    trained = {id(traj) for group in selection.kept for traj in group.trajectories}
    kept, dropped = [], []
    for group in selection.sampled:
        if any(id(traj) in trained for traj in group.trajectories):
            kept.append((group, ""))
        else:
            dropped.append((group, group_drop_reason(group, cfg) or "surplus"))
    return [group_row(group, cfg, "", step, why) for group, why in mixed(kept, dropped, GROUPS, rank, world)]


def held_out_rows(groups: list[Group], cfg: Config, when: str, step: int, rank: int, world: int) -> list[dict]:
    """This rank's share of an evaluation before or after training: the first problems, so the same ones in both."""
    n = len(range(HELD_OUT)[rank::world]) if when in ("before", "after") else 0
    return [group_row(group, cfg, f"held out, {when}", step) for group in groups[:n]]


def is_sampled(group: Group, shown: Counter[bool], world: int) -> bool:
    """Whether eval.py shows this rank's next group: the first wrong ones, and half as many that are all right."""
    right = all(traj.correct >= 0.5 for traj in group.trajectories)
    shown[right] += 1
    return shown[right] <= -(-HELD_OUT // (3 * world)) * (1 if right else 2)


def group_row(group: Group, cfg: Config, when: str, step: int = 0, dropped: str | None = None) -> dict:
    """One line of trajectories.jsonl, best rollouts first. `dropped`: why the group does not train, "" if it does.
    None: it is of the evaluation named by `when`, where nothing is dropped and nothing has an advantage."""
    problem, pictures = group.problem, {}
    trajs = sorted(group.trajectories, key=lambda t: -t.reward if isfinite(t.reward) else 1e9)
    reasons = ["" if dropped is None else drop_reason(t, cfg) or dropped for t in trajs]
    rewards = [t.reward for t, reason in zip(trajs, reasons) if not reason]
    advantages = iter(group_advantages(rewards, cfg.normalize_std).tolist() if dropped == "" else ())
    return {"when": _clip(when), "step": step, "drop": dropped or "", "id": _clip(problem.id),
            "question": _clip(problem.question),
            "choices": [_clip(choice) for choice in problem.choices or ()], "gold": _clip(problem.answer),
            "about": _clip(problem.about),
            "images": [_thumbnail(image, pictures) for image in trajs[0].images[:len(problem.images)][:FIGURES]],
            "rollouts": [_rollout(t, cfg, pictures) | {
                "drop": reason, "advantage": None if reason else _number(next(advantages, None))}
                for t, reason in zip(trajs, reasons)],
            "pictures": pictures}


def _rollout(traj: Trajectory, cfg: Config, pictures: dict[str, str]) -> dict:
    return {"answer": traj.answer and _clip(traj.answer), "end": traj.end.value, "failure": _clip(traj.failure),
            "grade": _number(traj.correct), "paid": traj.n_tool_calls, "bonus": cfg.tool_bonus,
            "reward": _number(traj.reward),
            "tokens": sum(traj.action_mask), "context": len(traj.ids), "visual": traj.n_visual_tokens,
            "turns": [_turn(turn, pictures) for turn in traj.turns]}


def _turn(turn: Turn, pictures: dict[str, str]) -> dict:
    """The code is cut out of the text around it; code that does not stand there word for word comes after it."""
    code, result = turn.content if turn.kind == "code" else "", turn.result
    before, _, after = turn.text.rpartition(code) if code and code in turn.text else (turn.text, "", "")
    shown = {"before": _clip(before), "code": _clip(code), "after": _clip(after), "tokens": turn.n_tokens,
             "seconds": round(turn.seconds, 2)}
    return shown if result is None else shown | {
        "status": result.status, "printed": _clip(result.text), "no_op": turn.no_op,
        "returned": turn.n_observation_tokens, "tool_seconds": round(result.seconds, 2),
        "images": [_thumbnail(image, pictures) for image in result.images[:FIGURES]],
        "unshown": len(result.images[FIGURES:])}


def _number(value: float | None) -> float | None:
    return round(value, 4) if value is not None and isfinite(value) else None    # JSON has no NaN


def _clip(text: str) -> str:
    note = f"\n… {len(text) - TEXT:,} characters left out …\n"
    text = text if len(text) <= TEXT else text[:TEXT // 2] + note + text[-TEXT // 2:]
    return text.encode(errors="backslashreplace").decode()           # half a surrogate pair crashes some browsers


def _thumbnail(image: Image.Image, pictures: dict[str, str]) -> list:
    """[its name in `pictures`, width, height]; equal pictures have one name, whatever they are of."""
    (small := image.convert("RGB")).thumbnail((SIDE, SIDE))
    name = sha256(repr(small.size).encode() + small.tobytes()).hexdigest()[:16]
    if name not in pictures:
        fine = {"quality": 95, "subsampling": 0} if max(small.size) < 200 else {"quality": 78}
        small.save(buffer := BytesIO(), "JPEG", **fine)
        pictures[name] = b64encode(buffer.getvalue()).decode()
    return [name, *image.size]


# --- the files --------------------------------------------------------------------------------------------------------


def append(path: Path, rows: list[dict]) -> None:
    with path.open("a") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows))


def merge(out: Path, done: int | None = None) -> list[dict]:
    """All ranks' rows, of steps up to `done` → trajectories.jsonl. Damaged lines go, and what is over BYTES."""
    found: dict[tuple, dict] = {}
    files = sorted(out.glob("trajectories*.jsonl"))
    for line in (line for file in files for line in file.read_bytes().splitlines()):
        try:
            row = json.loads(line)
            if (done is None or row["step"] <= done) and row["rollouts"] and row["pictures"] is not None:
                found[row["when"], int(row["step"]), row["id"]] = row        # a repeated evaluation replaces the first
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
    sections: dict[tuple, list[str]] = defaultdict(list)
    for (when, step, _), row in sorted(found.items(), key=lambda item: item[0][1]):
        sections[when, step].append(json.dumps(row) + "\n")
    while sum(len(line) for lines in sections.values() for line in lines) > BYTES:
        filled = [lines for lines in sections.values() if lines]
        # The largest section loses a row; where all have one left, the middle of the run goes first.
        cut = [(len(lines) > 1 and sum(map(len, lines)), -abs(i - len(filled) / 2)) for i, lines in enumerate(filled)]
        filled[cut.index(max(cut))].pop()
    lines = [line for lines in sections.values() for line in lines]
    write_whole(out / "trajectories.jsonl", "".join(lines))
    for file in files:
        if file.name != "trajectories.jsonl":
            file.unlink()
    return [json.loads(line) for line in lines]


def write(out: Path) -> None:
    """trajectories.jsonl → trajectories.html, each picture once."""
    rows = merge(out)
    pictures = {name: data for row in rows for name, data in row.pop("pictures").items()}
    data = json.dumps({"title": out.resolve().name, "rows": rows, "pictures": pictures})
    for char in "<>&":                           # whatever is not ASCII json has escaped
        data = data.replace(char, f"\\u{ord(char):04x}")
    text = TEMPLATE.read_text(encoding="utf-8")
    for tag in ("style", "script"):              # which may run is said by digest
        body = text.split(f"<{tag}>")[1].split(f"</{tag}>")[0]
        text = text.replace(f"{tag}-digest", b64encode(sha256(body.encode()).digest()).decode())
    write_whole(out / "trajectories.html", text.replace("page-data", data))
