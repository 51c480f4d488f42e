"""Answers, grades and rewards. Every expectation is written by hand; grade.jsonl holds one hard case per line."""

import json
import threading
from pathlib import Path

import pytest
from PIL import Image

from pyvision_mini import reward
from pyvision_mini.config import Config
from pyvision_mini.reward import GRADER_FAILURES, check_gold, count_paid_calls, extract_answer, grade, score
from pyvision_mini.trajectory import EndReason, Problem, ToolResult, Trajectory, Turn

CASES = [json.loads(line) for line in (Path(__file__).parent / "cases" / "grade.jsonl").read_text().splitlines()]
COLOURS = ["red", "green", "blue", "yellow"]


def problem(kind: str, answer: str, choices: list[str] | None = None) -> Problem:
    return Problem("p", "What?", answer, kind, choices)


@pytest.mark.parametrize("case", CASES, ids=[f"{n}-{c['kind']}-{c['answer']}" for n, c in enumerate(CASES)])
def test_every_case_of_grade_jsonl_scores_as_written(case):
    got = grade(extract_answer(case["final_turn"]), problem(case["kind"], case["answer"], case["choices"]))
    assert got == pytest.approx(case["expect"], abs=1e-12), case["why"]


@pytest.mark.parametrize("text, answer", [
    ("<answer>\\boxed{\\frac{1}{\\sqrt{2}}}</answer>", "\\frac{1}{\\sqrt{2}}"),
    ("<answer>\\boxed{\\{1, 2\\}}</answer>", "\\{1, 2\\}"),
    ("<answer>\\boxed{\\boxed{3}}</answer>", "3"),
    ("<answer>\\boxed{1} then \\boxed {2} km</answer>", "2"),
    ("<answer>  plain text </answer>", "plain text"),
    ("<answer>\\boxed{1}</answer> <answer> </answer>", "1"),
    ("<answer>\\boxed{1} and \\boxed{2</answer>", None),
    ("<answer>\\boxed{}</answer>", None),
    ("\\boxed{5}", None),
    ("<answer>\\boxed{5}", None),
])
def test_the_answer_is_the_last_balanced_box_of_the_last_answer(text, answer):
    assert extract_answer(text) == answer


@pytest.mark.parametrize("answer, expect", [
    ("(c)", 1), ("C)", 1), ("C. Blue", 1), ("BLUE.", 1), ("$\\text{C}$", 1),
    ("C: red", 0), ("B or C", 0), ("B, C", 0), ("C or B", 0), ("C.or B", 0), ("not C", 0), ("Cyan", 0), ("F", 0),
    ("red", 0), ("3", 0),
])
def test_a_choice_is_one_offered_letter_or_its_own_text(answer, expect):
    assert grade(answer, problem("choice", "C", COLOURS)) == expect


def test_a_choice_whose_options_stand_in_the_question_is_a_letter_and_no_second_one():
    lettered = problem("choice", "B")
    assert [grade(a, lettered) for a in ("B", "(b)", "B: to the left")] == [1, 1, 1]
    assert [grade(a, lettered) for a in ("A", "B: or A", "to the left")] == [0, 0, 0]


@pytest.mark.parametrize("gold, answer, expect", [
    ("1/2", "0.5", 1), ("\\{1,2\\}", "\\{2, 1\\}", 1), ("1, 2", "2, 1", 1), ("1000", "1\\,000", 1), ("5", "3 + 2", 1),
    ("$5$", "5", 1), ("12", "12\\text{ cm}", 1), ("blue", "Blue.", 1),
    # Several values where the gold has one: math-verify alone would take the last of some of them.
    ("5", "4, 5", 0), ("5", "4 or 5", 0), ("5", "4 \\text{ or } 5", 0), ("5", "4 \\quad 5", 0), ("5", "4 \\\\ 5", 0),
    ("9", "4 5", 0), ("5", "4; 5", 0), ("5", "\\pm 5", 0), ("5", "4~5", 0), ("5", "4\\lor 5", 0), ("5", "5, 5", 0),
])
def test_mathematics_is_compared_by_value_and_one_gold_wants_one_value(gold, answer, expect):
    assert grade(answer, problem("math", gold)) == expect


@pytest.mark.parametrize("text, value", [
    ("3 meters", 3), ("3.", 3), ("-2.5 m^2", -2.5), ("\\approx 3\\text{ km}", 3), ("1,000", 1000), ("1e3", 1000),
    ("−4", -4), ("12 m/s", 12), ("5%", 5),
    ("3 or four", None), ("3-4", None), ("3 4", None), ("1/2", None), ("1,5", None), ("nan", None), ("inf", None),
    ("1e999", None), ("three", None), ("-", None), ("e5", None), ("3" + " a" * 200 + "!4", None),
])
def test_a_number_is_one_finite_value_with_an_optional_unit(text, value):
    assert reward.read_number(text) == value


def test_mean_relative_accuracy_counts_ten_thresholds_from_half_off_to_five_percent_off():
    gold = problem("number", "100")
    #           |ŷ−y|/|y| = 0     .05      .06       .50      .51     −100 %
    answers = ["100", "105", "106", "50", "49", "0"]
    assert [grade(a, gold) for a in answers] == pytest.approx([1.0, 1.0, 0.9, 0.1, 0.0, 0.0])
    assert [grade(a, problem("number", "-10")) for a in ("-9", "10")] == pytest.approx([0.9, 0.0])


def test_an_endless_power_scores_zero_in_bounded_time_off_the_main_thread_and_is_counted():
    died, gold, grades = GRADER_FAILURES["died"], problem("math", "2"), []
    work = threading.Thread(target=lambda: grades.extend(grade(a, gold) for a in ("9^{9^{9}}", "4/2")), daemon=True)
    work.start()
    work.join(30)
    assert grades == [0.0, 1.0] and GRADER_FAILURES["died"] == died + 1  # the second one was asked of a new child


def test_an_overlong_formula_never_reaches_sympy_and_is_counted(monkeypatch):
    monkeypatch.setattr(reward, "_ask_child", lambda *_: pytest.fail("asked"))
    before = GRADER_FAILURES["too_long"]
    assert grade("1" + "+1" * 300, problem("math", "301")) == 0.0
    assert GRADER_FAILURES["too_long"] == before + 1


def test_a_gold_is_checked_against_itself():
    assert check_gold(problem("choice", "B", COLOURS)) and check_gold(problem("number", "3.5"))
    assert check_gold(problem("math", "\\frac{1}{2}")) and check_gold(problem("text", "the left one"))
    assert not check_gold(problem("number", "about three")) and not check_gold(problem("choice", "E", COLOURS))


def test_the_bonus_grows_with_the_calls_and_only_right_answers_get_it():
    total_reward = reward.total_reward
    assert total_reward(1.0, 3) == pytest.approx(1.3)
    assert total_reward(0.5, 2) == pytest.approx(0.7)
    assert [total_reward(a, 9) for a in (0.4, 0.0)] == [0.4, 0.0]
    assert total_reward(1.0, 3, tool_bonus=0.0) == 1.0


PICTURE = Image.new("RGB", (4, 4))
CALLS = [ToolResult("ok", "7"), ToolResult("ok", "", [PICTURE]), ToolResult("ok", " \n"), ToolResult("error", "x"),
         ToolResult("timeout", "too slow"), ToolResult("killed", "gone", [PICTURE])]


def finished(final: str, end: EndReason = EndReason.ANSWERED, calls: list[ToolResult] = CALLS) -> Trajectory:
    turns = [Turn("<code>1</code>", "code", "1", result) for result in calls] + [Turn(final, "answer")]
    return Trajectory(problem("math", "7"), turns=turns, end=end)


def test_only_calls_that_ran_and_returned_something_are_paid_unless_all_are():
    turns = finished("<answer>7</answer>").turns
    assert count_paid_calls(turns, Config()) == 2
    assert count_paid_calls(turns, Config(paid_calls="all")) == 6


def test_a_right_answer_earns_one_plus_its_paid_calls():
    right = finished("<answer>\\boxed{7}</answer>")
    score(right, Config())
    assert (right.answer, right.correct, right.n_tool_calls, right.reward) == ("7", 1.0, 2, pytest.approx(1.2))


@pytest.mark.parametrize("end", [end for end in EndReason if end != EndReason.ANSWERED])
def test_a_trajectory_that_did_not_end_in_an_answer_is_wrong_whatever_it_contains(end):
    cut = finished("<answer>\\boxed{7}</answer>", end)
    score(cut, Config())
    assert (cut.answer, cut.correct, cut.reward) == (None, 0.0, 0.0)


def test_an_answer_in_tool_output_or_in_an_earlier_turn_pays_nothing():
    sly = finished("<answer>\\boxed{8}</answer>", calls=[ToolResult("ok", "<answer>\\boxed{7}</answer>")])
    sly.turns[0].text = "<answer>\\boxed{7}</answer>"
    score(sly, Config())
    assert (sly.answer, sly.reward) == ("8", 0.0)
