"""Every published format, from a small file written as it is published; the expectations are written by hand.

docs/eval.md says where each format was read.
"""

import base64
import csv
import io
import json
import sys
import types

import pytest
from PIL import Image

from pyvision_mini.benchmarks import READERS, load_benchmark
from pyvision_mini.config import UserError
from pyvision_mini.images import load_image
from pyvision_mini.report import wemath_scores


def png(color: str) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (8, 8), color).save(file, "PNG")
    return file.getvalue()


BYTES = {"bytes": png("red"), "path": "red.png"}
BASE64 = base64.b64encode(png("red")).decode()


def write(folder, name, rows, media=()):
    """Rows in the format the suffix says; `media` are created as small pictures (or empty clips)."""
    for file in media:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_bytes(png("blue"))
    path = folder / name
    if name.endswith(".jsonl"):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif name.endswith(".json"):
        path.write_text(json.dumps(rows))
    else:
        with path.open("w", newline="") as file:
            csv.writer(file, delimiter="\t").writerows([list(rows[0]), *(row.values() for row in rows)])
    return path


def load(folder, name, rows, media=()):
    kind, problems, notes = load_benchmark(write(folder, name, rows, media), folder / "unpacked")
    assert notes == {"bad_golds": [], "skipped_rows": [], "rows_without_media": []}
    return kind, problems


def facts(problem):
    return problem.id, problem.question, problem.answer, problem.kind, problem.choices, problem.source


def test_vstar_questions_with_their_options_in_the_text(tmp_path):
    text = ("What is the material of the glove?\n(A) rubber\n(B) cotton\n(C) kevlar\n(D) leather\n"
            "Answer with the option's letter from the given choices directly.")
    row = {"question_id": "0", "image": "direct_attributes/sa_4690.jpg", "text": text, "category": "direct_attributes",
           "label": "A"}
    name, (problem,) = load(tmp_path, "test_questions.jsonl", [row], ["direct_attributes/sa_4690.jpg"])
    assert name.startswith("V*")
    assert facts(problem) == ("0", "What is the material of the glove?", "A", "choice",
                              ["rubber", "cotton", "kevlar", "leather"], "direct_attributes")
    assert problem.images == (tmp_path / "direct_attributes/sa_4690.jpg",)


def test_vstar_annotation_files_are_shuffled_the_same_way_each_time_and_the_gold_moves_with_its_option(tmp_path):
    for i in range(12):
        write(tmp_path, f"relative_position/sa_{i}.json", {
            "target_object": ["dog"], "bbox": [[1, 2, 3, 4]], "question": "Is the dog left of the cat?",
            "options": ["right one", "second", "third", "fourth"]}, [f"relative_position/sa_{i}.jpg"])
    name, problems, _ = load_benchmark(tmp_path, tmp_path / "unpacked")
    again = load_benchmark(tmp_path, tmp_path / "unpacked")[1]
    assert name.startswith("V*") and [p.choices for p in problems] == [p.choices for p in again]
    assert all(p.choices[ord(p.answer) - 65] == "right one" for p in problems)
    assert len({p.answer for p in problems}) > 1 and {p.source for p in problems} == {"relative_position"}
    assert problems[0].images == (tmp_path / "relative_position/sa_0.jpg",)


def test_hrbench_cycles_are_variants_of_one_question_and_share_one_unpacked_image(tmp_path):
    def row(index, answer, a, b):
        return {"index": index, "question": "What number is on the bus?", "answer": answer, "category": "single", "A": a,
                "B": b, "C": "7", "D": "9", "cycle_category": f"cycle_{index}", "image": BASE64}
    name, problems = load(tmp_path, "hr_bench_4k.tsv", [row(0, "A", "12", "3"), row(1, "B", "3", "12")])
    assert name == "HRBench" and [p.answer for p in problems] == ["A", "B"]
    assert facts(problems[0]) == ("0", "What number is on the bus?", "A", "choice", ["12", "3", "7", "9"], "single")
    assert problems[0].variant_of == problems[1].variant_of != ""
    assert problems[0].images == problems[1].images and len(list((tmp_path / "unpacked").iterdir())) == 1
    assert load_image(problems[0].images[0]).getpixel((0, 0)) == (255, 0, 0)


# file name, published rows, media files → (id, question, answer, kind, choices, source) of the last row, its media
FORMATS = {
    "DynaMath": ("sample1.json", [{
        "id": "5", "question": "What is x?", "image": "images/5.png", "ground_truth": "3.142", "answer_type": "float",
        "subject": "plane geometry", "knowledge_level": "high school"}], ["images/5.png"],
        ("5", "What is x? Please answer with a floating-point number to three decimals.", "3.142", "math", None,
         "plane geometry"), ["images/5.png"]),
    "MathVerse": ("testmini.json", [{
        "sample_index": "2", "problem_index": "1", "problem_version": "Vision Only", "question": "",
        "image": "images_version_6/image_1.png", "answer": "D", "question_type": "multi-choice",
        "metadata": {"split": "testmini", "source": "Geometry3K", "subject": "Plane Geometry", "subfield": "Angle"},
        "query_wo": "According to the question shown in the image, give the option letter.", "query_cot": "...",
        "question_for_eval": "Find m"}], ["images/images_version_6/image_1.png"],
        ("2", "According to the question shown in the image, give the option letter.", "D", "choice", None, "Vision Only"),
        ["images/images_version_6/image_1.png"]),
    "MathVision": ("test.jsonl", [{
        "id": "4", "question": "Which picture fits?\n<image1>", "options": ["A", "B", "C", "D", "E"], "image": "images/4.jpg",
        "answer": "B", "solution": None, "level": 1, "subject": "combinatorics"}], ["images/4.jpg"],
        ("4", "Which picture fits?", "B", "choice", ["A", "B", "C", "D", "E"], "combinatorics"), ["images/4.jpg"]),
    "WeMath": ("testmini.json", [{
        "ID": "3steps_165", "split": "testmini", "knowledge concept": "Area of Circles", "question": "What is its area?",
        "option": "A. 200.96;B. 3215.36;C. 6280;D. 32; E. No correct answer", "answer": "B",
        "image_path": "3steps/image/165-3.png", "key": "3steps_3", "question number": 1575,
        "knowledge concept description": "Area"}], ["data/3steps/image/165-3.png"],
        ("3steps_165/3steps_3", "What is its area?", "B", "choice",
         ["200.96", "3215.36", "6280", "32", "No correct answer"], "3steps_3"), ["data/3steps/image/165-3.png"]),
    "TIR-Bench": ("TIR-Bench.json", [{
        "id": 7, "image_1": "data/spot/a.jpg", "image_2": "data/spot/b.jpg", "prompt": "Where do they differ?",
        "answer": [1, 2, 3], "task": "spot_difference", "meta_data": None}], ["data/spot/a.jpg", "data/spot/b.jpg"],
        ("7", "Where do they differ?", "[1, 2, 3]", "math", None, "spot_difference"), ["data/spot/a.jpg", "data/spot/b.jpg"]),
    "VSI-Bench": ("test.jsonl", [{
        "id": 0, "dataset": "arkitscenes", "scene_name": "41069025", "question_type": "object_counting",
        "question": "How many table(s) are in this room?", "ground_truth": "4", "options": None, "pruned": False}, {
        "id": 1, "dataset": "scannet", "scene_name": "scene0011_00", "question_type": "object_rel_direction_easy",
        "question": "Is the stove to the left?", "ground_truth": "B", "options": ["A. left", "B. right"], "pruned": True}],
        ["scannet/scene0011_00.mp4"], ("1", "Is the stove to the left?", "B", "choice", ["left", "right"],
                                       "object_rel_direction/easy"), ["scannet/scene0011_00.mp4"]),
    "SpaceR": ("SpaceR-151k.jsonl", [{
        "problem_id": 1, "problem": "Question:\nHow far is the door (in meters)?", "data_type": "video",
        "problem_type": "regression", "options": [], "solution": "<answer>0.3507</answer>", "path": "/ScanNet/a.mp4",
        "data_source": "SR_dataset"}], ["ScanNet/a.mp4"],
        ("1", "How far is the door (in meters)?", "0.3507", "number", None, "regression"), ["ScanNet/a.mp4"]),
    "LongVILA (LongVideo-Reason)": ("train.jsonl", [{
        "problem_id": 3, "data_type": "video", "videos": "a.mp4", "problem": "Why?\nA. x\nB. y", "problem_type": "general",
        "reasoning": "Because.", "answer": "<answer>B</answer>"}], ["a.mp4"],
        ("3", "Why?\nA. x\nB. y", "B", "choice", None, ""), ["a.mp4"]),
    "Mini-o3 (VisualProbe, DeepEyes)": ("train.json", [{
        "doc_id": "7", "problem": "<image>\nWhat is on the sign?", "solution": "Stop",
        "images": ["VisualProbe_train/data/visual_probe_train_7.jpg"], "data_source": "visual_probe_train"}],
        ["VisualProbe_train/data/visual_probe_train_7.jpg"],
        ("7", "What is on the sign?", "Stop", "text", None, "visual_probe_train"),
        ["VisualProbe_train/data/visual_probe_train_7.jpg"]),
    "ChartQA": ("train_human.json", [{"imgname": "png/1.png", "query": "How many bars?", "label": "4"}], ["png/1.png"],
                ("row-1", "How many bars?", "4", "math", None, ""), ["png/1.png"]),
    "InfoVQA": ("infographicsVQA_train_v1.0.json", {"dataset_name": "infographicVQA", "data": [{
        "questionId": 65718, "question": "Which state?", "image_local_name": "20471.jpeg", "answers": ["Ohio", "ohio state"],
        "ocr_output_file": "20471.json"}]}, ["images/20471.jpeg"],
        ("65718", "Which state?", "Ohio", "text", None, ""), ["images/20471.jpeg"]),
    "MMPR": ("vqa_format_rules.jsonl", [{
        "image": "a.png", "question": "Area?", "chosen": "It is 3 · 4.\n\nFinal answer: 12", "rejected": "Answer: 7"}],
        ["a.png"], ("row-1", "Area?", "12", "math", None, ""), ["a.png"]),
    "GMAI-Reasoning, LLaVA-CoT": ("train.jsonl", [{
        "id": "c", "image": "sqa/a.png", "conversations": [
            {"from": "human", "value": "<image>\nWhich?"},
            {"from": "gpt", "value": "<SUMMARY> s </SUMMARY> <CONCLUSION> The blue one </CONCLUSION>"}]}], ["sqa/a.png"],
        ("c", "Which?", "The blue one", "text", None, ""), ["sqa/a.png"]),
    "own rows": ("rows.jsonl", [{"id": "1", "question": "Read it.", "answer": "STOP", "image": "a.png"}], ["a.png"],
                 ("1", "Read it.", "STOP", "text", None, ""), ["a.png"]),
    "PyVision-RL, DeepEyes": ("train.jsonl", [{
        "data_source": "vstar", "prompt": [{"role": "user", "content": "Long instruction"}], "reward_model":
        {"ground_truth": "A", "style": "rule"}, "mm_hint": {"hint_path": "a.png", "hint_type": "image"},
        "extra_info": {"index": 5, "question": "Which?"}}], ["a.png"],
        ("5", "Which?", "A", "choice", None, "vstar"), ["a.png"]),
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_published_row_becomes_the_problem_written_here(tmp_path, name):
    file, rows, media, expected, files = FORMATS[name]
    found, problems = load(tmp_path, file, rows, media)
    assert found == name and facts(problems[-1]) == expected
    assert [*problems[-1].images, *problems[-1].videos] == [tmp_path / file for file in files]


PARQUET = {
    "DynaMath": {"id": "5", "question": "x?", "image": "images/5.png", "decoded_image": BYTES, "ground_truth": "B",
                 "answer_type": "multiple choice", "subject": "algebra", "knowledge_level": "high school"},
    "MMK12": {"id": "1", "question": "<image>Area?", "answer": "12", "subject": "math", "image": BYTES},
    "V-Thinker (V-Interaction)": {"id": "1", "question": "Area?", "image": BYTES, "original_img_code": "plt", "edited_image":
                                  None, "tool_code": "", "CoT_with_code": "", "answer": "12"},
    "ChartQA": {"image": BYTES, "query": "How many?", "label": ["4"], "human_or_machine": 0},
    "PyVision-RL, DeepEyes": {"data_source": "vstar", "prompt": [{"role": "user", "content": "<image>Which?"}], "images":
                              [BYTES], "reward_model": {"ground_truth": "red", "style": "model"}, "extra_info": {"index": 1}},
}


@pytest.mark.parametrize("name", PARQUET)
def test_images_inside_parquet_rows_are_unpacked(tmp_path, monkeypatch, name):
    batch = types.SimpleNamespace(to_pylist=lambda: [PARQUET[name]])
    file = types.SimpleNamespace(iter_batches=lambda n: [batch])
    monkeypatch.setitem(sys.modules, "pyarrow", types.ModuleType("pyarrow"))
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", types.SimpleNamespace(ParquetFile=lambda path: file))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train-00000-of-00001.parquet").write_bytes(b"")
    found, (problem,), _ = load_benchmark(tmp_path, tmp_path / "unpacked")
    assert found == name and load_image(problem.images[0]).getpixel((0, 0)) == (255, 0, 0)


def test_every_reader_has_a_fixture_in_its_format():
    tested = {*FORMATS, *PARQUET, "HRBench", "V* (test_questions.jsonl)", "V* (JSON per image)"}
    assert {reader.name for reader in READERS} == tested


def test_parquet_without_pyarrow_is_one_line_that_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(UserError, match="pip install pyarrow"):
        load_benchmark(tmp_path / "a.parquet", tmp_path)


def test_an_unknown_format_lists_the_known_ones_and_the_columns_found(tmp_path):
    path = write(tmp_path, "a.jsonl", [{"Frage": "x", "Antwort": "y"}])
    with pytest.raises(UserError, match="no known format has the columns Frage, Antwort; known are V\\*.*VSI-Bench"):
        load_benchmark(path, tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="no usable row; no row in a file of .jsonl"):
        load_benchmark(tmp_path / "empty", tmp_path)


def test_missing_media_stay_in_and_rows_without_a_gold_or_with_an_ungradable_one_are_named(tmp_path):
    def row(id, answer):
        return {"id": id, "dataset": "scannet", "scene_name": "gone", "question_type": "object_counting", "question": "n?",
                "ground_truth": answer, "options": None}
    path = write(tmp_path, "test.jsonl", [row(1, "4"), row(2, None), row(3, "about four")])
    path.write_text(path.read_text() + "{cut\n")
    _, problems, notes = load_benchmark(path, tmp_path)
    assert [p.id for p in problems] == ["1", "3"] and problems[0].videos == (tmp_path / "scannet/gone.mp4",)
    assert "row 3 (id 3): gold 'about four'" in notes["bad_golds"][0]
    assert [note[:5] for note in notes["skipped_rows"]] == ["row 2", "row 4"]


def test_wemath_scores_are_those_of_its_four_dimensions():
    right = {("a", "2steps_1"): 1, ("a", "2steps_2"): 1, ("a", "2steps_multi"): 1,      # mastered
             ("b", "2steps_1"): 1, ("b", "2steps_2"): 1, ("b", "2steps_multi"): 0,      # inadequate generalization
             ("c", "3steps_1"): 1, ("c", "3steps_2"): 0, ("c", "3steps_3"): 1, ("c", "3steps_multi"): 0,  # knowledge
             ("d", "2steps_1"): 1, ("d", "2steps_2"): 0, ("d", "2steps_multi"): 1}      # rote if strict, mastered if loose
    assert wemath_scores(right) == pytest.approx({
        "insufficient_knowledge": 0.25, "inadequate_generalization": 0.25, "complete_mastery_strict": 0.25,
        "rote_memorization_strict": 0.5, "score_strict": 0.375,       # 1 − .25 − .5 · .25 − .25
        "complete_mastery_loose": 0.5, "rote_memorization_loose": 0.0, "score_loose": 0.625})
    assert wemath_scores({("a", "x"): 1}) == {}


def test_options_are_told_by_their_letters_in_order(tmp_path):
    row = {"ID": "2steps_1", "knowledge concept": "k", "question": "Which?", "option": "A. vitamin C. pure; B. iron; C. zinc",
           "answer": "C", "image_path": "a.png", "key": "2steps_1"}
    _, (problem,) = load(tmp_path, "testmini.json", [row], ["a.png"])
    assert (problem.choices, problem.answer) == (["vitamin C. pure", "iron", "zinc"], "C")


def hrbench(index, image, question="Which?"):
    return {"index": index, "question": question, "answer": "A", "category": "single", "A": "1", "B": "2", "C": "3", "D": "4",
            "cycle_category": "c", "image": image}


def test_an_image_that_is_no_image_or_no_base64_or_empty_stays_in_and_fails_when_it_is_read(tmp_path):
    junk = [base64.b64encode(b"no image").decode(), "abcde", ""]
    name, problems = load(tmp_path, "hr.tsv", [hrbench(i, image, f"{i}?") for i, image in enumerate(junk)])
    assert name == "HRBench" and [p.id for p in problems] == ["0", "1", "2"]
    for problem in problems:
        with pytest.raises(ValueError, match="cannot read image"):
            load_image(problem.images[0])


def test_an_hrbench_row_of_a_parquet_file_holds_the_image_itself(tmp_path):
    row = hrbench(0, {"bytes": base64.b64decode(BASE64), "path": None})
    problem = READERS[[reader.name for reader in READERS].index("HRBench")].more(row)
    assert problem["media"] == [{"bytes": base64.b64decode(BASE64)}]


def test_quotes_tabs_line_breaks_and_a_byte_order_mark_in_a_tsv_are_read(tmp_path):
    path = write(tmp_path, "hr.tsv", [hrbench(0, BASE64, 'Which "one"?\tThis\nor that')])
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    name, (problem,), _ = load_benchmark(path, tmp_path / "unpacked")
    assert (name, problem.question, len(problem.choices)) == ("HRBench", 'Which "one"?\tThis\nor that', 4)


@pytest.mark.parametrize("name, content", [("gone.tsv", None), ("a.tsv", b"\xff\xfe\x00"), ("gone.json", None), ("a.json", b"\xff"),
                                           ("a.jsonl", b"[" * 100_000), ("a.csv", b"question,answer\n1,2")])
def test_a_file_that_cannot_be_read_is_one_line(tmp_path, name, content):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=name) as caught:
        load_benchmark(tmp_path / name, tmp_path)
    assert "\n" not in str(caught.value)


def test_rows_that_are_no_rows_are_named_wherever_they_stand(tmp_path):
    good = {"id": "1", "question": "q?", "answer": "STOP", "image": "a.png"}
    path = write(tmp_path, "rows.jsonl", [[1], None, {"license": "x"}, good, {**good, "id": "2", "image": None}])
    path.write_text(path.read_text() + "[" * 100_000 + '\n{"id": ' + "9" * 5000 + "}\n" + json.dumps({**good, "image": "\ud800"}))
    name, problems, notes = load_benchmark(path, tmp_path)
    assert name == "own rows" and [p.id for p in problems] == ["1", "2", "1#8"]
    assert [note[:5] for note in notes["skipped_rows"]] == ["row 1", "row 2", "row 3", "row 6", "row 7"]
    assert "no known format has the columns license" in notes["skipped_rows"][2]
    assert notes["rows_without_media"] == ["row 5 (id 2)"]


def test_cut_annotation_files_of_vstar_are_named(tmp_path):
    for name, text in (("a", "{cut"), ("b", "[1]"), ("c", '{"question": "q?", "options": ["x", "y"]}'), ("d", "[" * 100_000)):
        (tmp_path / "direct_attributes").mkdir(exist_ok=True)
        (tmp_path / f"direct_attributes/{name}.json").write_text(text)
    _, problems, notes = load_benchmark(tmp_path, tmp_path / "unpacked")
    assert [p.id for p in problems] == ["direct_attributes/c.jpg"] and len(notes["skipped_rows"]) == 3


def test_equal_ids_are_told_apart_and_equal_rows_count_once(tmp_path):
    rows = [("x", "one"), ("x#3", "two"), ("x", "three"), ("x", "four"), ("x", "one")]
    path = write(tmp_path, "rows.jsonl", [{"id": i, "question": "q?", "answer": a, "image": "a.png"} for i, a in rows], ["a.png"])
    _, problems, notes = load_benchmark(path, tmp_path)
    assert [p.answer for p in problems] == ["one", "two", "three", "four"] and len({p.id for p in problems}) == 4
    assert notes["skipped_rows"] == ["row 5: ValueError: the same as an earlier row, id x"]
