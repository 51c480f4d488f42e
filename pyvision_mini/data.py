"""Rows of a JSON or JSONL file → Problems, and a seeded, resumable order over them.

Promises: a bad row is skipped, counted and named, it never stops a run; a file without a usable row is a UserError.
Cheap checks run at load (is the media file there), decoding at use: an unreadable image is found as it is drawn.

Rows of ours: {id, question, answer, image | images, video | videos, kind, choices?, source?}. PyVision-RL's release:
{prompt, reward_model: {ground_truth}, mm_hint: {hint_path, hint_type}, data_source, extra_info: {index, question}} for
training, {id, question, answer, image_path | video_path, data_source} for validation.
"""

from __future__ import annotations

import json
import os
import random
import re
import sys
from collections.abc import Callable
from pathlib import Path

from pyvision_mini.config import Config, UserError
from pyvision_mini.images import load_image, size_problem
from pyvision_mini.trajectory import Problem

KINDS = ("choice", "math", "number", "text")
VIDEO_SUFFIXES = (".mp4", ".avi", ".mov", ".mkv", ".webm")
_LETTER = re.compile(r"\(?([A-Za-z])\)?[.:)]?(?:(?<=[.:)])\s*(\S.*))?", re.DOTALL)  # B, (b), B., B: green


def load_problems(path: str | Path) -> tuple[list[Problem], list[str]]:
    """File → (problems, one line per skipped row). Relative media paths start at the file's folder.
    Raises UserError when the file is missing, is no JSON or JSONL, or has no usable row."""
    path, problems, skipped = Path(path), {}, []
    for number, row in read_rows(path):
        try:
            row = _parse(row) if isinstance(row, str) else row
            problem = to_problem(row, f"row-{number}", path.parent)
        except (ValueError, RecursionError) as error:
            named = f" (id {row['id']})" if isinstance(row, dict) and row.get("id", "") != "" else ""
            line = f"row {number}{named}: {'not JSON: ' * isinstance(error, json.JSONDecodeError)}{error}"
            skipped.append(line.encode(errors="backslashreplace").decode())
            continue
        while problem.id in problems:                # merged files number each of their sources from 0
            problem.id += f"#{number}"
        problems[problem.id] = problem
    if not problems:
        why = f"no usable row of {len(skipped)}, the first: {skipped[0]}" if skipped else "no rows"
        raise UserError(f"{path}: {why}; give JSON or JSONL rows with a question, an answer and media that exist")
    return list(problems.values()), skipped


def read_problems(path: str | Path) -> list[Problem]:
    """load_problems for scripts: the skipped rows are named on stderr."""
    problems, skipped = load_problems(path)
    if skipped:
        more = f"\n  and {len(skipped) - 5} more" if len(skipped) > 5 else ""
        print(f"{path}: {len(skipped)} rows skipped\n  " + "\n  ".join(skipped[:5]) + more, file=sys.stderr)
    return problems


def load_splits(cfg: Config, generate: Callable[[int, int, str], list[Problem]]) -> tuple[list[Problem], list[Problem]]:
    """A run's (training, held-out) problems: the user's files, or generated ones where no file is named."""
    if cfg.eval_data:
        held_out = read_problems(cfg.eval_data)[:cfg.eval_n]
    else:
        held_out = [] if cfg.data else generate(cfg.eval_n, 0, "val")
    return read_problems(cfg.data) if cfg.data else generate(384, cfg.seed, "train"), held_out


def read_rows(path: Path) -> list[tuple[int, object]]:
    """(number from 1, row) pairs; a file that is not one JSON value comes as its non-empty lines."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {error}; give a JSON or JSONL file") from None
    try:
        rows = _parse(text)
    except (ValueError, RecursionError):
        return [(number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
    rows = rows.get("data", rows) if isinstance(rows, dict) else rows
    return list(enumerate(rows if isinstance(rows, list) else [rows], start=1))


def _parse(text: str) -> object:
    """JSON; an integer too long for Python's int (4,300 digits) stays text."""
    return json.loads(text, parse_int=lambda digits: int(digits) if len(digits) < 1000 else digits)


def to_problem(row: object, fallback_id: str, folder: Path) -> Problem:
    """One row of either format → Problem. Raises ValueError with the reason to skip it."""
    if not isinstance(row, dict):
        raise ValueError("not a JSON object")
    extra, reward, hint = ({} if not isinstance(row.get(key), dict) else row[key]
                           for key in ("extra_info", "reward_model", "mm_hint"))
    prompt = row.get("prompt")                       # text, or a chat whose last user turn counts
    chat = [turn for turn in prompt if isinstance(turn, dict)] if isinstance(prompt, list) else []
    prompt = next((turn.get("content") for turn in reversed(chat) if turn.get("role") == "user"), prompt)
    # The release's prompt is the question inside its whole tool instruction; the bare question is in extra_info.
    question = row.get("question") or extra.get("question") or prompt
    question = re.sub(r"<image>|<video>", "", question).strip() if isinstance(question, str) else ""
    if not question:
        raise ValueError("no question")
    gold = reward.get("ground_truth", row.get("answer"))
    if not isinstance(gold, (str, int, float)) or not str(gold).strip():
        raise ValueError("no answer")
    gold = str(gold).strip()
    choices = _choices(row.get("choices"))
    kind = row.get("kind") or _infer_kind(gold, choices)
    if kind not in KINDS:
        raise ValueError(f"unknown kind {kind!r}, must be one of {', '.join(KINDS)}")
    answer = read_choice(gold, choices) if kind == "choice" else gold
    if answer is None:
        raise ValueError(f"answer {gold!r} is not one of the choices")
    images = _existing([row.get("image"), row.get("images"), row.get("image_path")], "image", folder)
    videos = _existing([row.get("video"), row.get("videos"), row.get("video_path")], "video", folder)
    for file in _existing([hint.get("hint_path")], "media", folder):
        is_video = hint.get("hint_type") == "video" or file.suffix.lower() in VIDEO_SUFFIXES
        (videos if is_video else images).append(file)
    ids = (str(name) for name in (row.get("id"), extra.get("id"), extra.get("index")) if name not in (None, ""))
    name = next(ids, fallback_id)
    if any("\ud800" <= char <= "\udfff" for char in "".join([name, question, gold, *(choices or ())])):
        raise ValueError("half a surrogate pair in its text")     # no tokenizer takes it
    return Problem(name, question, answer, kind, choices, tuple(images), tuple(videos),
                   source=str(row.get("source") or row.get("data_source") or ""))


def _choices(value: object) -> list[str] | None:
    """Option texts without letters of their own ("A. red" → "red"): the prompt writes them."""
    if value is not None and (not isinstance(value, list) or not 2 <= len(value) <= 26):
        raise ValueError("choices must be a list of 2 to 26 texts")
    return value and [re.sub(rf"^\(?{chr(65 + k)}[.):]\s*", "", str(text).strip()) for k, text in enumerate(value)]


def _infer_kind(gold: str, choices: list[str] | None) -> str:
    """Options or one capital letter: choice; a digit or LaTeX command and no word of 3 letters ("12 cm"): math; else
    text. "number" gives partial credit for a near miss, so it has to be asked for."""
    if choices or re.fullmatch("[A-Z]", gold):
        return "choice"
    has_words = re.search(r"[^\W\d_]{3,}", re.sub(r"\\[A-Za-z]+", " ", gold))
    return "math" if re.search(r"\d|\\[A-Za-z]", gold) and not has_words else "text"


def _existing(values: list[object], kind: str, folder: Path) -> list[Path]:
    """Names and lists of names → paths of files that exist. An absolute name stands as it is."""
    names = [name for value in values for name in (value if isinstance(value, list) else [value]) if name]
    for name in names:
        if not isinstance(name, str) or not os.path.isfile(folder / name):  # Path.is_file raises on an overlong name
            raise ValueError(f"{kind} {str(name)[:200]} not found")
    return [folder / name for name in names]


def strip_text(answer: str) -> str:
    """LaTeX's \\text{B} → B, and no dollar signs."""
    return re.sub(r"\\(?:text|textbf|mathrm|mathbf)\s*\{([^{}]*)\}", r"\1", answer).replace("$", "").strip()


def plain(text: str) -> str:
    """Text as it is compared: no \\text{}, lower case, single spaces, no punctuation at the end."""
    return " ".join(strip_text(text).casefold().split()).rstrip(" .,;:!?")


def read_choice(text: str, choices: list[str] | None) -> str | None:
    """The one letter an answer names ("B", "(b)", "B.", "B: green", the option's text), None if none or several.
    A text behind a letter must be that letter's option: "B: red" with red under A is no answer."""
    options = [plain(choice) for choice in choices or []]
    if match := _LETTER.fullmatch(strip_text(text)):
        letter, behind = match[1].upper(), match[2] or ""
        known = options[ord(letter) - 65:][:1]
        if known and plain(behind) in ("", *known) or not options and not re.search(rf"\b(?!{letter})[A-Z]\b", behind):
            return letter
    return chr(65 + options.index(plain(text))) if plain(text) in options else None


class ProblemStream:
    """Problems in shuffled order, epoch after epoch. Every rank draws the same global batch and takes its part.

    A row that cannot be shown is replaced by the next one. `find_faults` says why each of the problems drawn cannot, or
    None; it has to say the same on all ranks, so that they skip the same rows.
    """

    def __init__(self, problems: list[Problem], seed: int = 0, rank: int = 0, world: int = 1,
                 find_faults: Callable[[list[Problem]], list[str | None]] = lambda drawn: [unreadable(p) for p in drawn]):
        assert 0 < len({p.id for p in problems}) == len(problems), f"{len(problems)} problems, but none or equal ids"
        self.problems, self.seed, self.rank, self.world, self.find_faults = problems, seed, rank, world, find_faults
        self.skipped: dict[str, str] = {}            # problem id → why it cannot be shown
        self._start(0, 0)

    def state_dict(self) -> dict:
        return {"epoch": self.epoch, "index": self.index, "skipped": dict(self.skipped)}

    def load_state_dict(self, state: dict) -> None:
        """Go to a position: `index` problems of `epoch` are drawn already, `skipped` could not be shown."""
        known = {problem.id for problem in self.problems}
        self.skipped = {name: why for name, why in state.get("skipped", {}).items() if name in known}
        self._start(state["epoch"], state["index"])

    def _start(self, epoch: int, index: int) -> None:
        self.epoch, self.index = epoch, index
        self.order = list(range(len(self.problems)))
        # A string seed: epoch 1 of seed 0 is not epoch 0 of seed 1, and every process gets the same order.
        random.Random(f"{self.seed}/{self.epoch}").shuffle(self.order)

    def _draw(self) -> Problem:
        if self.index >= len(self.order):
            self._start(self.epoch + 1, 0)
        self.index += 1
        return self.problems[self.order[self.index - 1]]

    def next_batch(self, n: int) -> list[Problem]:
        """This rank's share [rank::world] of the next n problems over all ranks. UserError if none can be shown."""
        batch: list[Problem] = []
        failed: dict[str, str] = {}
        while missing := n - len(batch):
            drawn = [self._draw() for _ in range(missing)]
            faults = self.find_faults(drawn)
            failed |= {problem.id: fault for problem, fault in zip(drawn, faults) if fault}
            batch += [problem for problem, fault in zip(drawn, faults) if not fault]
            if not batch and len(failed) == len(self.problems):
                name, fault = next(iter(failed.items()))
                raise UserError(f"no problem of the data can be shown; {name}: {fault}; check its media")
        self.skipped |= failed
        return batch[self.rank::self.world]


def unreadable(problem: Problem) -> str | None:
    """Why one of the problem's images cannot be shown, or None. Decodes every image, keeps none, closes every file."""
    try:
        return next(filter(None, (size_problem(*load_image(source).size) for source in problem.images)), None)
    except ValueError as error:
        return str(error)
