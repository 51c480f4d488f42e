"""eval.py: what it counts, how it resumes, what a failing judge and failing media do. Expectations are written by hand."""

import json
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from math import sqrt
from pathlib import Path

import pytest
from PIL import Image

import eval as evaluation
from pyvision_mini.config import Config, EvalConfig, UserError, parse_config
from pyvision_mini.judge import Judge
from pyvision_mini.report import summarize
from pyvision_mini.taxonomy import label_call
from pyvision_mini.trajectory import EndReason, Problem, ToolResult, Trajectory, Turn

ROOT = Path(__file__).parent.parent
CASES = [json.loads(line) for line in (Path(__file__).parent / "cases" / "grade.jsonl").read_text().splitlines()]
IMAGE = {"data": "d", "setting": "agent", "variant_of": "", "category": "", "calls": 1, "no_op_calls": 0, "error_calls": 0,
         "turns": 2, "visual_tokens": 16, "text_tokens": 40, "end": "answered", "failure": "", "tools": ["basic: crop"], "judge": None,
         "grader_failed": False}


def rows(table, **more):
    """{id: accuracies of its samples} → sample rows."""
    return [{**IMAGE, "id": name, "sample": i, "accuracy": a, **more} for name, accs in table.items() for i, a in enumerate(accs)]


# --- counting ---------------------------------------------------------------------------------------------------------


def test_avg_at_k_of_a_deterministic_policy_equals_its_accuracy_with_the_same_interval():
    once, often = summarize(rows({"a": [1], "b": [0], "c": [1]})), summarize(rows({"a": [1] * 8, "b": [0] * 8, "c": [1] * 8}))
    for key in ("accuracy", "ci95", "pass_k", "n"):
        assert once[key] == pytest.approx(often[key])
    assert (once["accuracy"], once["k"], often["k"], often["n"]) == (pytest.approx(2 / 3), 1, 8, 3)
    assert once["ci95"] == pytest.approx(1.96 * sqrt(1 / 3) / sqrt(3))       # sample variance of 1, 0, 1 is 1/3


def test_avg_at_k_averages_samples_and_pass_at_k_takes_the_best():
    result = summarize(rows({"a": [1, 0, 0, 0], "b": [0, 0, 0, 0], "c": [0.4, 0.2, 0, 0.2]}))
    assert result["accuracy"] == pytest.approx((0.25 + 0 + 0.2) / 3) and result["pass_k"] == pytest.approx(1.4 / 3)


def test_variants_of_a_question_are_one_observation_of_the_interval():
    table = rows({"a1": [1], "a2": [1]}, variant_of="a") + rows({"b1": [0], "b2": [1]}, variant_of="b")
    result = summarize(table)
    assert (result["accuracy"], result["worst_variant"]) == (0.75, 0.5)
    assert result["ci95"] == pytest.approx(1.96 * sqrt(1 / 8) / sqrt(2))      # of 1 and 1/2


def test_the_macro_average_is_over_tasks_and_a_task_over_its_parts():
    result = summarize(rows({"1": [1], "2": [0]}, category="direction/easy") + rows({"3": [0]}, category="direction/hard")
                       + rows({"4": [1]}, category="counting"))
    assert result["macro"] == pytest.approx((0.25 + 1) / 2) and result["accuracy"] == 0.5
    assert result["categories"]["direction/easy"] == {"accuracy": 0.5, "n": 2}


def test_ungraded_samples_are_counted_and_neither_right_nor_wrong_and_failed_problems_stay_wrong():
    result = summarize(rows({"a": [1, None], "b": [None, None]}) + rows({"c": [0, 0]}, failure="c: why"))
    assert (result["accuracy"], result["ungraded"], result["n"], result["failed"]) == (0.5, 3, 3, ["c: why"])


def test_wemath_rows_get_its_scores():
    table = [row for key, right in (("2steps_1", 1), ("2steps_2", 1), ("2steps_multi", 0))
             for row in rows({"a/" + key: [right]}, variant_of="a", category=key)]
    assert summarize(table)["wemath"]["score_strict"] == 0.5


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['kind']}-{case['final_turn'][:30]!r}")
def test_a_sample_is_graded_by_the_functions_of_training_on_its_final_turn(case):
    problem = Problem("p", "q", case["answer"], case["kind"], case["choices"])
    call = Turn("<answer>\\boxed{" + case["answer"] + "}</answer>", "code", "1", ToolResult("ok", case["answer"]))
    traj = Trajectory(problem, turns=[call, Turn(case["final_turn"], "answer")], end=EndReason.ANSWERED)
    assert evaluation.sample_row(("d", "agent"), 0, traj, Config())["accuracy"] == pytest.approx(case["expect"]), case["why"]


@pytest.mark.parametrize("code, label", [
    ("image_clue_0.crop((0, 0, 9, 9)).show()", "basic: crop"), ("plt.imshow(np.array(im)[10:90, 5:50])", "basic: crop"),
    ("im.rotate(90).show()", "basic: rotate"), ("ImageEnhance.Contrast(im).enhance(2)", "basic: enhance"),
    ("im.crop((0, 0, 9, 9)).resize((99, 99))", "basic: crop"), ("im.resize((99, 99)).show()", "basic: enhance"),
    ("cv2.inRange(a, lo, hi)", "advanced: segmentation"), ("cv2.findContours(m, 0, 1)", "advanced: detection"),
    ("import pytesseract\nprint(pytesseract.image_to_string(im))", "advanced: ocr"),
    ("d.rectangle([1, 2, 3, 4], outline='red')", "sketching: marks"), ("plt.axhline(3)", "sketching: lines"),
    ("plt.hist(np.array(im).ravel())", "numerical: histogram"), ("print(np.array(im).mean())", "numerical: analysis"),
    ("print(3 * 7)", "numerical: analysis"), ("frame_at(video_clue_0, 3).show()", "video: frame sampling"),
    ("Image.fromarray(video_clue_0[12].asnumpy()).show()", "video: frame sampling"),
    ("print(open('x').read())", "long tail"), ("im.crop((", "invalid: no Python"),
    ("for line in text.split('\\n'):\n    print(line)", "long tail"), ("label = circle = 'red'\nprint(label)", "long tail"),   # variables
    ("print(np.array(im)[:, :, 0])", "long tail"), ("im.point(lambda p: p * 2).show()", "basic: enhance"),
    ("plt.imshow(frames[3].asnumpy())", "video: frame sampling"), ("im.filter(ImageFilter.SHARPEN)", "basic: enhance"),
    ("plt.imshow(image_clue_0)\nplt.axis('off')\nplt.show()", "no-op: shown again"), ("plt.imshow(255 - image_clue_0)", "long tail")])
def test_a_call_gets_the_label_of_its_most_specific_operation(code, label):
    assert label_call(code) == label and label_call(code, no_op=True) == "no-op: shown again"


# --- the judge --------------------------------------------------------------------------------------------------------


@pytest.fixture()
def server():
    """A judge whose behaviour is named in the question; `asked` keeps every question it got."""
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            prompt = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["messages"][0]["content"]
            behaviour = prompt.split('Question: "')[1].split('"')[0]
            asked.append(behaviour)
            if behaviour == "stall" or behaviour == "recovers" and asked.count(behaviour) == 1:
                time.sleep(1.5 if behaviour == "stall" else 0)
                return self.send_error(500)
            if behaviour == "redirect":
                self.send_response(302)
                self.send_header("Location", "/elsewhere")
                return self.end_headers()
            reply = {"right": "Same.\nVerdict: yes", "wrong": "No.\n**Verdict: no**", "recovers": "Verdict: yes",
                     "nonsense": "no idea", "unsure": "Verdict: yes or no"}.get(behaviour, "")
            body = json.dumps({"choices": [{"message": {"content": reply}}]}).encode()
            body = {"error": b'{"error": "overloaded"}', "html": b"<html>", "nested": b"[" * 100_000}.get(behaviour, body)
            self.send_response(200)
            self.end_headers()
            for i in range(0, len(body), 1 if behaviour == "drip" else len(body)):
                self.wfile.write(body[i:i + 1] if behaviour == "drip" else body)
                time.sleep(0.2 if behaviour == "drip" else 0)

        def do_GET(self):                        # where a redirect leads, without the question
            asked.append(self.headers.get("Authorization"))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"choices": [{"message": {"content": "Verdict: yes"}}]}')

        def log_message(self, *args):
            pass

    asked, http = [], ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.handle_error = lambda *args: None
    threading.Thread(target=http.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{http.server_port}/v1", asked
    http.shutdown()


def test_the_judge_answers_retries_and_never_turns_a_failure_into_a_verdict(server, tmp_path):
    url, asked = server
    judge = Judge(url, "j", tmp_path / "judge.txt", timeout_s=1, tries=2, backoff_s=0.01)
    names, started = ["right", "wrong", "recovers", "nonsense", "unsure", "error", "html", "stall", "drip"], time.time()
    assert judge([(name, "gold", "answer") for name in names]) == [True, False, True] + [None] * 6
    assert time.time() - started < 8 and asked.count("nonsense") == 2          # all at once, each within its limit
    n = len(asked)
    assert Judge(url, "j", tmp_path / "judge.txt", tries=1)([("right", "gold", "answer"), ("wrong", "gold", "answer")]) == [True, False] and len(asked) == n
    assert Judge("http://127.0.0.1:9/v1", "j", tmp_path / "x", tries=1)([("right", "g", "a")]) == [None]  # nobody there


def test_hostile_replies_of_a_judge_are_failures_with_their_reasons(server, tmp_path):
    url, asked = server
    judge = Judge(url, "j", tmp_path / "judge.txt", timeout_s=1, tries=1)
    assert judge([("redirect", "g", "a"), ("nested", "g", "a"), ("nonsense", "g", "a")]) == [None] * 3
    assert asked.count(None) == 1                # the key stays with the endpoint it is for
    assert sorted(reason.split(":")[0] for reason in judge.failures) == ["RecursionError", "TimeoutError", "no clear verdict"]


def test_only_what_rules_do_not_find_right_is_judged_and_failures_stay_ungraded(server, tmp_path):
    judge = Judge(server[0], "j", tmp_path / "judge.txt", tries=1)
    def row(question, kind, accuracy, answer="a"):
        return {"question": question, "gold": "g", "answer": answer, "kind": kind, "accuracy": accuracy, "judge": None,
                "choices": None}
    table = [row("right", "text", 0.0), row("wrong", "text", 0.0), row("nonsense", "text", 0.0), row("right", "math", 0.0),
             row("wrong", "text", 1.0), row("right", "text", 0.0, answer=None)]
    evaluation.ask(judge, "text", table)
    assert [(r["accuracy"], r["judge"]) for r in table] == [
        (1.0, "right"), (0.0, "wrong"), (None, "failed"), (0.0, None), (1.0, None), (0.0, None)]
    evaluation.ask(judge, "all", table[3:4])
    assert table[3]["accuracy"] == 1.0
    near = [row("wrong", "number", 0.9)]
    evaluation.ask(judge, "all", near)           # partial credit is the rule's to give
    assert (near[0]["accuracy"], near[0]["judge"]) == (0.9, None)


# --- the script -------------------------------------------------------------------------------------------------------


@pytest.fixture()
def run(monkeypatch):
    """Call eval.py's main with these flags; its signal handlers are taken back."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def call(*flags):
        monkeypatch.setattr(sys, "argv", ["eval.py", *map(str, flags)])
        evaluation.main()
    yield call
    for number, handler in handlers.items():
        signal.signal(number, handler)


def questions(folder, n=4):
    """n V*-like questions; the image of the last one is missing."""
    for i in range(n - 1):
        Image.new("RGB", (672, 672), (128, 128, 128 + i)).save(folder / f"{i}.png")
    path = folder / "test_questions.jsonl"
    path.write_text("".join(json.dumps({
        "question_id": str(i), "image": f"{i}.png", "text": "What color is the dot?\n(A) red\n(B) green", "label": "A",
        "category": "direct_attributes" if i % 2 else "relative_position"}) + "\n" for i in range(n)))
    return path


def read(out):
    samples = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    return json.loads((out / "summary.json").read_text()), samples


def test_an_evaluation_keeps_failing_media_in_and_resumes_without_sampling_again(tmp_path, run, capsys):
    flags = ("--data", questions(tmp_path), "--k", 2, "--max-turns", 1, "--baseline", "direct", "--out", tmp_path / "out")
    run(*flags)
    summary, samples = read(tmp_path / "out")
    assert (summary["n"], summary["k"]) == (4, 2) and len(samples) == 16
    assert [line.split(" image")[0] for line in summary["failed"]] == ["3: cannot read"]
    assert {"accuracy", "ci95", "tool_calls", "visual_tokens", "pass_k", "macro", "settings"} <= set(summary)
    assert set(summary["results"]) == {"V* (test_questions.jsonl): test_questions.jsonl, agent",
                                       "V* (test_questions.jsonl): test_questions.jsonl, direct"}
    assert {row["end"] for row in samples if row["id"] == "3"} == {"tool_failure"}
    assert all(row["calls"] == 0 for row in samples if row["setting"] == "direct")
    assert (tmp_path / "out/results.html").read_text().count("data:image/png;base64") == 1
    assert "template=short" in capsys.readouterr().out

    marked = [{**row, "answer": "kept"} for row in samples if row["id"] != "1"]          # as after a kill: problem 1 is
    lines = [json.dumps(row) for row in marked] + [json.dumps(samples[2]), '{"data": "cu']  # unfinished, a line is cut
    (tmp_path / "out/samples.jsonl").write_text("\n".join(lines))
    run(*flags, "--resume")
    _, again = read(tmp_path / "out")
    assert len(again) == 16 and sum(row["answer"] == "kept" for row in again) == 12
    assert {(row["setting"], row["id"], row["sample"]) for row in again} == {
        (row["setting"], row["id"], row["sample"]) for row in samples}

    for more, message in [((), "holds a run already"), (("--resume", "--k", 3), "another k, 2")]:
        with pytest.raises(SystemExit, match=message):
            run(*flags, *more)
    path = tmp_path / "test_questions.jsonl"
    path.write_text(path.read_text().replace("color", "colour"))     # other questions under the same ids
    with pytest.raises(SystemExit, match="another data_crc32"):
        run(*flags, "--resume")


def test_files_of_one_name_stay_apart_odd_text_is_printed_and_what_each_run_sampled_with_is_saved(tmp_path, run, capsys):
    row = {"id": "1", "question": "q?", "answer": "red", "image": "gone.png", "source": "\udc00"}
    for folder, n in (("a", 1), ("b", 2)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "rows.jsonl").write_text("".join(json.dumps({**row, "id": i, "source": f"\udc00{i}"}) + "\n" for i in range(n)))
    run("--data", f"{tmp_path}/a/rows.jsonl,{tmp_path}/b/rows.jsonl", "--temperature", 0.3, "--out", tmp_path / "out")
    summary, samples = read(tmp_path / "out")
    assert (summary["n"], len(samples), len(summary["results"])) == (3, 3, 2) and len(summary["failed"]) == 3
    assert [one["temperature"] for one in summary["settings"]["runs"].values()] == [0.3, 0.3]
    assert "\\udc001" in capsys.readouterr().out


def test_a_comma_in_the_name_of_a_file_is_no_border(tmp_path):
    path = questions(tmp_path).rename(tmp_path / "a,b.jsonl")
    assert list(evaluation.problems(Config(data=str(path)), EvalConfig(), tmp_path)) == ["V* (test_questions.jsonl): a,b.jsonl"]


def test_two_ranks_write_each_sample_once_and_name_a_bad_row(tmp_path):
    path = questions(tmp_path, 5)
    path.write_text(path.read_text() + "{cut\n")
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "eval.py",
                           "--data", str(path), "--k", "2", "--max_turns", "1", "--out",
                           str(tmp_path / "out")], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("1 skipped_rows") == 1
    summary, samples = read(tmp_path / "out")
    assert sorted((row["id"], row["sample"]) for row in samples) == [(str(i), s) for i in range(5) for s in (0, 1)]
    assert (summary["n"], [line[:2] for line in summary["failed"]]) == (5, ["4:"]) and not list((tmp_path / "out").glob("*-1.jsonl"))
    shown = [json.loads(line) for line in (tmp_path / "out/trajectories.jsonl").read_text().splitlines()]
    assert len(shown) >= 4 and {len(row["rollouts"]) for row in shown} == {2} and (tmp_path / "out/trajectories.html").is_file()


def test_the_generated_sets_are_evaluated_with_both_baselines_when_nothing_is_named(tmp_path, run):
    run("--limit", 2, "--out", tmp_path / "out")
    assert set(read(tmp_path / "out")[0]["results"]) == {
        "image, agent", "image, direct", "video, agent", "video, direct", "video, uniform, 8 frames"}


def test_the_papers_sampling_holds_with_a_model_unless_a_flag_says_otherwise(monkeypatch):
    image, video = [Problem("i", "q", "a", images=("i.png",))], [Problem("v", "q", "a", videos=("v.mp4",))]

    def sampling(argv, name, rows):
        monkeypatch.setattr(sys, "argv", ["eval.py", *argv])
        cfg, flags = parse_config(argv, extra=EvalConfig, paper={"max_turns": 30})
        agent = evaluation.runs(cfg, flags, name, rows)["agent"][0]
        return agent.temperature, agent.top_k, agent.max_turns
    model = ["--model", "m", "--data", "d"]
    assert sampling(model, "V*: d", image) == (0.01, 0, 30)
    assert sampling(model, "HRBench: d", image) == (0.5, 20, 30)
    assert sampling(model, "VSI-Bench: d", video) == (0.01, 0, 30)
    assert sampling([*model, "--temperature=0.7", "--max-turns", "4"], "V*: d", image) == (0.7, 0, 4)
    assert sampling([*model, "--eval_temperature", "0.9"], "HRBench: d", image) == (0.9, 20, 30)
    assert sampling([], "image", image) == (Config().eval_temperature, 0, 4)


@pytest.mark.parametrize("flags, message", [
    (["--kk", "3"], "unknown argument --kk"), (["--k", "0"], "--k and --frames must be at least 1"),
    (["--judge", "all"], "--judge_url"), (["--baseline", "best"], "invalid choice"), (["--model", "m"], "--model without --data")])
def test_wrong_flags_are_one_line(flags, message):
    with pytest.raises(UserError, match=message) as caught:
        parse_config(flags, extra=EvalConfig)
    assert "\n" not in str(caught.value)
