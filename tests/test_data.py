"""Rows → problems, the skips that name their row, and the order of the stream."""

import json
import os
from pathlib import Path

import pytest
from PIL import Image

from pyvision_mini.config import UserError
from pyvision_mini.data import ProblemStream, load_problems
from pyvision_mini.trajectory import Problem


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    Image.new("RGB", (32, 24), "red").save(tmp_path / "a.png")
    Image.new("RGB", (32, 24), "blue").save(tmp_path / "b.jpg")
    for name in ("clip.mp4", "clip"):
        (tmp_path / name).write_bytes(b"not opened at load")
    return tmp_path


def write(folder: Path, rows: list, name: str = "rows.jsonl") -> Path:
    (folder / name).write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n")
    return folder / name


def load_one(folder: Path, **row) -> Problem:
    problems, skipped = load_problems(write(folder, [{"question": "Q?", "answer": "1", **row}]))
    assert skipped == []
    return problems[0]


def test_our_rows_load_with_media_beside_the_file(folder):
    choice = load_one(folder, id=7, answer="green", image="a.png", choices=["A. red", "(B) green"], source="v*")
    assert choice == Problem("7", "Q?", "B", "choice", ["red", "green"], (folder / "a.png",), (), "v*")
    both = load_one(folder, images=["a.png", str(folder / "b.jpg")], video="clip.mp4", kind="number", answer=3.5)
    files = (folder / "a.png", folder / "b.jpg"), (folder / "clip.mp4",)
    assert both == Problem("row-1", "Q?", "3.5", "number", None, *files)


def test_json_lists_a_data_key_and_jsonl_read_the_same(folder):
    rows = [{"id": str(i), "question": f"Q{i}", "answer": i} for i in range(3)]
    from_lines, _ = load_problems(write(folder, [*rows[:1], "", *rows[1:]]))
    for name, whole in (("list.json", rows), ("data.json", {"data": rows})):
        (folder / name).write_text(json.dumps(whole, indent=1), encoding="utf-8-sig")
        assert load_problems(folder / name) == (from_lines, []) and len(from_lines) == 3


def test_rows_that_break_a_reader_are_skipped_and_named(folder):
    good, deep = json.dumps({"id": "good", "question": "Q?", "answer": "1"}), "[" * 100_000
    rows = [good, '{"id": "long", "question": "Q?", "answer": ' + "7" * 5000 + "}", deep,
            '{"id": "half", "question": "\\ud83d?", "answer": "1"}', '{"id": "\\udc00", "question": "Q?", "answer": " "}',
            '{"id": "name", "question": "Q?", "answer": "1", "image": "\\ud800.png"}']
    problems, skipped = load_problems(write(folder, rows))
    assert [p.id for p in problems] == ["good", "long"] and problems[1].answer == "7" * 5000
    assert [line.split(":")[0] for line in skipped] == ["row 3", "row 4 (id half)", "row 5 (id \\udc00)", "row 6 (id name)"]
    assert "".join(skipped).encode()                                             # can be printed anywhere
    whole, _ = load_problems(write(folder, [f"[{', '.join(rows[:2])}]"], "whole.json"))
    assert [p.id for p in whole] == ["good", "long"]
    same, _ = load_problems(write(folder, [{**json.loads(good), "id": name} for name in ("x", "x#3", "x")], "same.jsonl"))
    assert [p.id for p in same] == ["x", "x#3", "x#3#3"]
    with pytest.raises(UserError, match="no usable row of 1"):
        load_problems(write(folder, [deep], "deep.json"))


def test_rows_of_the_release_load(folder):
    chat = [{"role": "system", "content": "S"}, {"role": "user", "content": "<image>\nFirst?"},
            {"role": "assistant", "content": "A"}, {"role": "user", "content": "<image>Where is it?"}]
    row = {"prompt": chat, "reward_model": {"ground_truth": "on the left", "style": "model"}, "data_source": "deepeyes",
           "mm_hint": {"hint_path": "a.png", "hint_type": "image"}, "extra_info": {"index": 12, "split": "train"}}
    templated = {**row, "extra_info": {"index": 13, "question": "Bare?"}}
    video = {**row, "prompt": "<video>When?", "extra_info": 0, "mm_hint": {"hint_type": "video", "hint_path": ["clip"]}}
    untyped = {**video, "mm_hint": {"hint_path": "clip.mp4"}, "id": "v"}
    problems, skipped = load_problems(write(folder, [row, templated, video, untyped]))
    assert skipped == []
    picture = (folder / "a.png",)
    assert problems[0] == Problem("12", "Where is it?", "on the left", images=picture, source="deepeyes")
    assert (problems[1].id, problems[1].question) == ("13", "Bare?")
    for problem, name, clip in ((problems[2], "row-3", "clip"), (problems[3], "v", "clip.mp4")):
        assert (problem.id, problem.question, problem.images, problem.videos) == (name, "When?", (), (folder / clip,))


@pytest.mark.parametrize("answer, kind", [
    ("35", "math"), ("\\frac{1}{2}", "math"), ("2\\sqrt{3}", "math"), ("x^8", "math"), ("12 cm", "math"),
    ("blue", "text"), ("\\text{blue}", "text"), ("7 red cars", "text"), ("no", "text"), ("B", "choice"),
])
def test_the_kind_follows_from_the_answer_when_it_is_not_given(folder, answer, kind):
    assert load_one(folder, answer=answer).kind == kind
    assert load_one(folder, answer="red", choices=["red", "blue"]).kind == "choice"


def test_every_bad_row_is_skipped_and_named_in_one_line(folder):
    good = {"id": "good", "question": "Q?", "answer": "1"}
    choice = {**good, "kind": "choice", "choices": ["red", "blue"]}
    bad = [
        ({**good, "id": "x", "image": "gone.png"}, "row 2 (id x): image gone.png not found"),
        ({**good, "id": 0, "question": "  "}, "row 3 (id 0): no question"),
        ({"answer": "1", "prompt": [{"role": "user", "content": "<image>"}]}, "row 4: no question"),
        ({"id": "n", "question": "Q?"}, "row 5 (id n): no answer"),
        ({**good, "answer": " "}, "row 6 (id good): no answer"),
        ({**good, "answer": ["1"]}, "row 7 (id good): no answer"),
        ({**good, "kind": "poem"}, "row 8 (id good): unknown kind 'poem', must be one of choice, math, number, text"),
        ({**choice, "answer": "C"}, "row 9 (id good): answer 'C' is not one of the choices"),
        ({**choice, "answer": "red", "choices": "red"}, "row 10 (id good): choices must be a list of 2 to 26 texts"),
        ("[1, 2]", "row 11: not a JSON object"),
        ('{"id": "cut', "row 12: not JSON: Unterminated string starting at: line 1 column 8 (char 7)"),
        ({**good, "mm_hint": {"hint_path": 5}}, "row 13 (id good): media 5 not found"),
        ({**good, "image": "x" * 5000}, "row 14 (id good): image " + "x" * 200 + " not found"),
    ]
    problems, skipped = load_problems(write(folder, [good, *(row for row, _ in bad)]))
    assert [p.id for p in problems] == ["good"]
    assert skipped == [line for _, line in bad]


def test_equal_ids_are_told_apart(folder):
    assert ids(load_problems(write(folder, [{"id": 0, "question": "Q?", "answer": "1"}] * 3))[0]) == ["0", "0#2", "0#3"]


@pytest.mark.parametrize("content, complaint", [
    (None, "cannot read .*No such file"), (b"\xff\xfe\x00PAR1", "cannot read .*JSON or JSONL"), (b"", "no rows"),
    (b"[]", "no rows"), (b"hello\nworld\n", "no usable row of 2.*row 1: not JSON.*JSONL"),
    (b'[{"question": "Q?"}]', "no usable row of 1, the first: row 1: no answer; give"), (b"3", "not a JSON object"),
])
def test_a_file_without_a_usable_row_is_one_line_that_names_it_and_what_to_do(folder, content, complaint):
    if content is not None:
        (folder / "bad.json").write_bytes(content)
    with pytest.raises(UserError, match=complaint) as error:
        load_problems(folder / "bad.json")
    assert "bad.json" in str(error.value) and "\n" not in str(error.value)


def problems(n: int) -> list[Problem]:
    return [Problem(str(i), "?", "1") for i in range(n)]


def ids(batch: list[Problem]) -> list[str]:
    return [p.id for p in batch]


def test_an_epoch_shows_every_problem_once_and_the_next_one_in_another_order():
    stream = ProblemStream(problems(20), seed=3)
    first, second = ids(stream.next_batch(20)), ids(stream.next_batch(20))
    assert sorted(first, key=int) == sorted(second, key=int) == [str(i) for i in range(20)]
    assert first != second and first == ids(ProblemStream(problems(20), seed=3).next_batch(20))
    assert ids(ProblemStream(problems(20), seed=4).next_batch(20)) not in (first, second)


def test_a_restored_stream_goes_on_where_the_saved_one_stopped():
    stream = ProblemStream(problems(10), seed=1)
    for _ in range(4):
        stream.next_batch(3)
        restored = ProblemStream(problems(10), seed=1)
        restored.load_state_dict(json.loads(json.dumps(stream.state_dict())))
        saved = stream.state_dict()
        assert ids(restored.next_batch(13)) == ids(stream.next_batch(13))
        stream.load_state_dict(saved)
    assert stream.state_dict() == {"epoch": 1, "index": 2, "skipped": {}}


def test_rows_that_left_the_file_before_a_resume_do_not_count_as_skipped():
    stream = ProblemStream(problems(2), seed=1)
    stream.load_state_dict({"epoch": 0, "index": 0, "skipped": {"gone": "cannot read", "gone too": "cannot read", "1": "cannot read"}})
    assert stream.skipped == {"1": "cannot read"} and sorted(ids(stream.next_batch(2))) == ["0", "1"]


def test_ranks_take_interleaved_parts_of_one_global_batch():
    whole = ids(ProblemStream(problems(10), seed=5).next_batch(7))
    parts = [ids(ProblemStream(problems(10), seed=5, rank=r, world=2).next_batch(7)) for r in range(2)]
    assert parts == [whole[0::2], whole[1::2]]


def damaged(folder: Path, n: int) -> list[Problem]:
    """n good problems and four: a truncated JPEG, a text file named .png, a line of pixels, a file that is gone."""
    Image.effect_noise((64, 64), 50).save(folder / "cut.jpg")
    (folder / "cut.jpg").write_bytes((folder / "cut.jpg").read_bytes()[:800])
    (folder / "text.png").write_text("hello")
    Image.new("RGB", (500, 1)).save(folder / "line.png")
    files = ["cut.jpg", "text.png", "line.png", "left.png"] + ["a.png"] * n
    return [Problem(file if k < 4 else f"good {k}", "?", "1", images=(folder / file,)) for k, file in enumerate(files)]


def test_unreadable_images_are_replaced_by_the_next_problem_and_every_rank_skips_the_same(folder):
    streams = [ProblemStream(damaged(folder, 6), seed=0, rank=r, world=2) for r in range(2)]
    parts = [ids(stream.next_batch(12)) for stream in streams]   # two epochs of the six good ones
    assert [len(part) for part in parts] == [6, 6]
    assert sorted(parts[0] + parts[1]) == sorted(2 * [f"good {k}" for k in range(4, 10)])
    assert streams[0].skipped == streams[1].skipped
    assert sorted(streams[0].skipped) == ["cut.jpg", "left.png", "line.png", "text.png"]
    assert "cut.jpg" in streams[0].skipped["cut.jpg"] and "too narrow" in streams[0].skipped["line.png"]


def test_problems_that_each_failed_once_but_can_be_shown_go_on():
    busy = ["0", "1"]

    def find_faults(drawn):
        return ["busy" if p.id in busy and not busy.remove(p.id) else None for p in drawn]
    stream = ProblemStream(problems(3), find_faults=find_faults)
    assert len(stream.next_batch(3)) == 3
    busy.append("2")
    assert len(stream.next_batch(3)) == 3
    assert sorted(stream.skipped) == ["0", "1", "2"]


def test_data_of_which_nothing_can_be_shown_is_an_error_and_no_endless_loop(folder):
    with pytest.raises(UserError, match="no problem of the data can be shown"):
        ProblemStream(damaged(folder, 0)).next_batch(1)


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="counts /proc/self/fd")
def test_a_thousand_samples_leave_no_file_open(folder):
    stream = ProblemStream(damaged(folder, 20))
    stream.next_batch(20)
    before = len(os.listdir("/proc/self/fd"))
    stream.next_batch(1000)
    assert len(os.listdir("/proc/self/fd")) == before
