"""Answer → accuracy → reward. R = A + 0.1 · paid calls · 1[A ≥ 0.5] (PyVision-RL, arXiv 2602.20739, Eq. 1).

Answers are read from the final turn only, so nothing a tool prints can pay. No LLM judge: rules decide, and several
values in one box score 0 unless the gold has several. A policy may write 9^{9^{9}}, so sympy runs in one reused child
process that the kernel kills when it is out of time; such failures score 0 and are counted in GRADER_FAILURES.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections import Counter
from math import isfinite, nan

from pyvision_mini.config import Config
from pyvision_mini.data import plain, read_choice
from pyvision_mini.prompts import parse_action
from pyvision_mini.trajectory import EndReason, Problem, Trajectory, Turn

GRADER_FAILURES: Counter[str] = Counter()  # "died" (out of time or memory), "error" (raised in sympy), "too_long"
GRADER_SECONDS, GRADER_CHARS = 3, 500      # per answer
_NUMBER = re.compile(r"(?:about|\\approx|≈|~)?\s*([-+]?(?:\d{1,3}(?:,\d{3})+|\d*)(?:\.\d*)?(?:e[-+]?\d+)?)"
                     r"\s*(?:[a-z%°\\][a-z%°\\{}/\s]*(?:(?<=[a-z])\^?\{?[23]\}?)?)?")  # lower case: a value, its unit
_SEPARATOR = re.compile(r",(?!\d{3}(?!\d))|;|~|\\\\|\\(?:q?quad|lor|cup|pm)\b|\b(?:or|and)\b|(?<=\d)\s+(?=[-+]?\d)")


def extract_answer(text: str) -> str | None:
    """Final turn's text → the last non-empty <answer>, in it the last \\boxed{} if any. None: no answer, unclosed."""
    action = parse_action(text)
    if action.kind != "answer":
        return None
    starts = [match.end() for match in re.finditer(r"\\boxed\s*\{", action.content)]
    if not starts:
        return action.content
    box, depth = action.content[starts[-1]:], 1
    for brace in re.finditer(r"\\.|[{}]", box, re.DOTALL):  # an escaped brace is a character of a set
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return box[:brace.start()].strip() or None
    return None


def grade(answer: str | None, problem: Problem) -> float:
    """Accuracy in 0..1 by the problem's kind; only "number" gives anything between."""
    if not answer or not answer.strip():
        return 0.0
    if problem.kind == "number":
        value, gold = read_number(answer), read_number(problem.answer)
        return 0.0 if value is None or gold is None else mean_relative_accuracy(value, gold)
    if problem.kind == "choice":
        letter = read_choice(answer, problem.choices)
        return float(letter is not None and letter == read_choice(problem.answer, problem.choices))
    if plain(answer) == plain(problem.answer):
        return 1.0
    return float(problem.kind == "math" and _same_math(answer, problem.answer))


def check_gold(problem: Problem) -> bool:
    """Whether the gold, given as an answer, is graded right. A gold that is not would make the problem unlearnable."""
    return grade(problem.answer, problem) == 1.0


def read_number(text: str) -> float | None:
    """One finite number, with a unit or a closing dot: "3 meters", "3.", "1,000". None for anything else or several."""
    text = plain(text).replace("\\,", "").replace("−", "-")
    match = None if _SEPARATOR.search(text) else _NUMBER.fullmatch(text)
    has_digits = match is not None and re.search(r"\d", match[1].split("e")[0])
    value = float(match[1].replace(",", "")) if has_digits else nan
    return value if isfinite(value) else None


def mean_relative_accuracy(value: float, gold: float) -> float:
    """VSI-Bench's MRA (arXiv 2412.14171): share of θ = .50, .55 … .95 with |ŷ − y| / |y| ≤ 1 − θ. Gold 0: exact."""
    if gold == 0:
        return float(value == 0)
    error = abs(value - gold) / abs(gold)  # the 1e-9: 9 for 10 passes θ = .90, where 1 − θ is 0.0999….
    return sum(error <= 1 - theta / 100 + 1e-9 for theta in range(50, 100, 5)) / 10


def _same_math(answer: str, gold: str) -> bool:
    """math-verify's verdict, bounded in time and memory."""
    if len(answer) > GRADER_CHARS:
        GRADER_FAILURES["too_long"] += 1
        return False
    answer, gold = (text.replace("\\$", "").replace("$", "").replace("\\,", "") for text in (answer, gold))
    if len(_SEPARATOR.findall(answer)) > len(_SEPARATOR.findall(gold)):
        return False
    verdict = _ask_child(gold, answer)
    GRADER_FAILURES.update({verdict} & {"error", "died"})
    return verdict == "True"


# math-verify's own timeout is a signal handler: it fails off the main thread and cannot stop a C loop. The default
# action of SIGALRM, in a process of its own, can. It also ends a busy child whose parent was killed.
_CHILD = """
import json, logging, resource, signal, sys
from math_verify import parse, verify
out, sys.stdout = sys.stdout, sys.stderr
logging.disable(), resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
for line in sys.stdin:
    signal.alarm(int(sys.argv[1]))
    try:
        gold, answer = (parse(f"${text}$", parsing_timeout=None, raise_on_error=True) for text in json.loads(line))
        verdict = bool(verify(gold, answer, timeout_seconds=None, raise_on_error=True))
    except Exception:
        verdict = "error"
    signal.alarm(0)
    print(verdict, file=out, flush=True)
"""
_child: subprocess.Popen | None = None    # ends by itself when this process ends and so closes its stdin
_child_lock = threading.Lock()


def _ask_child(gold: str, answer: str) -> str:
    """"True", "False", "error" or "died". Starts the child if none is alive."""
    global _child
    with _child_lock:
        if _child is None or _child.poll() is not None:  # in a session of its own: Ctrl-C is for the trainer
            _child = subprocess.Popen([sys.executable, "-c", _CHILD, str(GRADER_SECONDS)], start_new_session=True,
                                      text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        print(json.dumps([gold, answer]), file=_child.stdin, flush=True)
        verdict = _child.stdout.readline().strip()
        if not verdict:
            _child.wait()
        return verdict or "died"


def total_reward(accuracy: float, n_tool_calls: int, tool_bonus: float = 0.1) -> float:
    """Paper Eq. 1: calls pay only on right answers, so looking is worth it and looking alone is not."""
    return accuracy + tool_bonus * n_tool_calls * (accuracy >= 0.5)


def count_paid_calls(turns: list[Turn], cfg: Config) -> int:
    """Calls that pay. "useful": those that ran and returned text or an image, so not `pass`; "all": every one."""
    results = [turn.result for turn in turns if turn.result is not None]
    if cfg.paid_calls == "all":
        return len(results)
    return sum(result.status == "ok" and bool(result.text.strip() or result.images) for result in results)


def score(trajectory: Trajectory, cfg: Config) -> None:
    """Set answer, correct, n_tool_calls and reward, once. Only an ANSWERED trajectory is read; all others are wrong."""
    if trajectory.end == EndReason.ANSWERED:
        trajectory.answer = extract_answer(trajectory.turns[-1].text)
    trajectory.correct = grade(trajectory.answer, trajectory.problem)
    trajectory.n_tool_calls = count_paid_calls(trajectory.turns, cfg)
    trajectory.reward = total_reward(trajectory.correct, trajectory.n_tool_calls, cfg.tool_bonus)
