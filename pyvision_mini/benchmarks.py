"""Published benchmark and training files → Problems: a table of readers, chosen by the columns of the first row.

Promises: a row whose media are missing stays in, fails at the rollout and counts as wrong; one without a question or an
answer is skipped and named, one whose gold is not graded right against itself named. docs/eval.md: the sources.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import json
import os
import random
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pyvision_mini.config import UserError
from pyvision_mini.data import VIDEO_SUFFIXES, read_rows, to_problem
from pyvision_mini.reward import check_gold
from pyvision_mini.trajectory import Problem

SUFFIXES = (".jsonl", ".json", ".tsv", ".parquet")
FLOAT = " Please answer with a floating-point number to three decimals."   # as DynaMath asks; graded by value


@dataclass(frozen=True)
class Reader:
    """One format. `needs` are the columns that tell it; `a|b` is the first of two columns that is filled."""

    name: str
    needs: str                                   # comma separated
    question: str = "question"
    answer: str = "answer"
    id: str = "id"
    media: str = "image"                         # comma separated: all of them
    category: str = ""                           # of the per-category average; "parent/child" averages twice
    kind: Callable[[dict], str | None] = lambda row: None   # None: inferred from the gold
    more: Callable[[dict], dict] = lambda row: {}           # what else follows from the published row; wins


def _options(text: str) -> list[str]:
    """The options of one text: "(A) red (B) green", "A. red;B. green". In "A. vitamin C. B. iron" C is no option."""
    marks: list[re.Match] = []
    for mark in re.finditer(r"(?:^|[;\s])\(?([A-H])[.)]\s*", text := text.strip()):
        marks += [mark] if ord(mark[1]) == 65 + len(marks) else []
    ends = [mark.start() for mark in marks[1:]] + [len(text)]
    return [text[mark.end():end].strip(" ;\n") for mark, end in zip(marks, ends)]


def _tagged(text: object) -> str:
    """The last thing inside <answer> or <CONCLUSION>, or the whole text."""
    tagged = [body for _, body in re.findall(r"<(answer|CONCLUSION)>(.*?)</\1>", str(text), re.DOTALL)]
    return [str(text), *tagged][-1].strip()


def _is(column: str, **kinds: str) -> Callable[[dict], str | None]:
    """The kind by what a column says; spaces and dashes in it are written as underscores."""
    return lambda row: kinds.get(re.sub(r"[\s-]", "_", str(row.get(column))))


def _vstar_text(row: dict) -> dict:
    text = re.sub(r"\s*Answer with the option.s letter.*", "", row["text"], flags=re.DOTALL)
    start = text.index("(A)")
    return {"question": text[:start], "choices": _options(text[start:])}


def _vstar_json(row: dict) -> dict:
    """The annotation file has the right option first, always: shuffle, the same way each time."""
    order = list(range(len(row["options"])))
    random.Random(row["image"]).shuffle(order)
    return {"choices": [row["options"][i] for i in order], "answer": chr(65 + order.index(0))}


def _hrbench(row: dict) -> dict:
    """A question comes in several rows with its options moved on: one observation, not several."""
    image = row["image"]
    if isinstance(image, dict):                  # of a parquet file
        image = image["bytes"]
    else:
        image = (image or "").encode()
        with suppress(ValueError):               # what is no base64 stays in as it is, an image that cannot be read
            image = base64.b64decode(image)
    return {"choices": [row[c] for c in "ABCDEFGH" if row.get(c) not in (None, "")],
            "variant_of": row["question"] + hashlib.sha1(image).hexdigest(), "media": [{"bytes": image}]}


def _wemath(row: dict) -> dict:
    return {"choices": _options(row["option"]), "variant_of": row["ID"], "id": f"{row['ID']}/{row['key']}"}


def _vsi(row: dict) -> dict:
    return {"source": re.sub(r"_(easy|medium|hard)$", r"/\1", row["question_type"]),  # three directions make one task
            "choices": row.get("options") or None, "media": [f"{row['dataset']}/{row['scene_name']}.mp4"]}


READERS = [
    Reader("V* (test_questions.jsonl)", "text,label,category,image", "text", "label", "question_id",
           category="category", more=_vstar_text),
    Reader("V* (JSON per image)", "question,options,category,image", id="image", category="category", more=_vstar_json),
    Reader("HRBench", "index,question,answer,category,A,B,cycle_category,image", id="index", category="category",
           kind=lambda row: "choice", more=_hrbench),
    Reader("DynaMath", "ground_truth,answer_type,knowledge_level", answer="ground_truth", media="decoded_image|image",
           category="subject", kind=_is("answer_type", float="math", multiple_choice="choice", text="text"),
           more=lambda row: {"variant_of": str(row["id"]),
                             "question": row["question"] + FLOAT * (row["answer_type"] == "float")}),
    Reader("MathVerse", "sample_index,problem_index,problem_version,question_type", "question|query_wo",
           id="sample_index", category="problem_version", kind=_is("question_type", multi_choice="choice", free_form="math")),
    Reader("MathVision", "question,options,answer,level,subject", media="decoded_image|image", category="subject",
           kind=lambda row: "choice" if row["options"] else "math",
           more=lambda row: {"choices": row["options"] or None}),
    Reader("WeMath", "ID,knowledge concept,option,key,image_path", media="image_path", category="key",
           kind=lambda row: "choice", more=_wemath),
    Reader("TIR-Bench", "task,prompt,image_1,answer", "prompt", media="image_1,image_2", category="task",
           more=lambda row: {"answer": str(row["answer"])}),
    Reader("VSI-Bench", "dataset,scene_name,question_type,ground_truth", answer="ground_truth",
           kind=lambda row: "choice" if row.get("options") else "number", more=_vsi),
    Reader("SpaceR", "problem,solution,problem_type,path,data_type", "problem", "solution", "problem_id", "path",
           "problem_type", _is("problem_type", multiple_choice="choice", regression="number", numerical="number"),
           lambda row: {"choices": row.get("options") or None}),
    Reader("LongVILA (LongVideo-Reason)", "problem,problem_type,videos,answer", "problem", id="problem_id",
           media="videos"),
    Reader("Mini-o3 (VisualProbe, DeepEyes)", "problem,solution,images", "problem", "solution", "doc_id", "images",
           "data_source"),
    Reader("V-Thinker (V-Interaction)", "question,image,answer,original_img_code"),
    Reader("MMK12", "question,subject,image", answer="correct_answer|answer", category="subject"),
    Reader("ChartQA", "query,label", "query", "label", media="imgname|image"),
    Reader("InfoVQA", "questionId,question,image_local_name,answers", "question", "answers", "questionId",
           "image_local_name", kind=lambda row: "text"),
    Reader("MMPR", "question,chosen,rejected",
           more=lambda row: {"answer": re.split(r"(?i)answer\s*:", row["chosen"])[-1].strip(" *\n")}),
    Reader("GMAI-Reasoning, LLaVA-CoT", "conversations", more=lambda row: {   # the human asks first, the answer is last
        "question": row["conversations"][0]["value"], "answer": row["conversations"][-1]["value"]}),
    Reader("PyVision-RL, DeepEyes", "reward_model,prompt", "", media="images"),
    Reader("own rows", "question,answer", "", media="image,images,image_path,video,videos,video_path"),
]


def load_benchmark(path: str | Path, media: Path) -> tuple[str, list[Problem], dict[str, list[str]]]:
    """File or folder → (format, problems, {"skipped_rows", "bad_golds", "rows_without_media"}: a line per row).

    Images inside the file are unpacked once into the folder `media`. UserError when no reader knows the columns.
    """
    reader, problems, skipped, bad, bare = None, {}, [], [], []
    for number, (folder, row, more) in enumerate(_rows(Path(path)), start=1):
        try:
            row = json.loads(row) if isinstance(row, str) else row
            row = {**row, **more} if more else row
            reader = reader or _find_reader(row)
            problem = _problem(reader, row, number, folder, media)
            if problem == problems.get(problem.id):      # a folder may hold the whole set and parts of it
                raise ValueError(f"the same as an earlier row, id {problem.id}")
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            skipped.append(f"row {number}: {type(error).__name__}: {error}".encode(errors="backslashreplace").decode())
            continue
        while problem.id in problems:
            problem.id += f"#{number}"
        problems[problem.id] = problem
        if not check_gold(problem):
            bad.append(f"row {number} (id {problem.id}): gold {problem.answer!r} is not graded right as {problem.kind}")
        if not problem.images and not problem.videos:
            bare.append(f"row {number} (id {problem.id})")
    if not problems:
        known = "" if reader else "; known are " + "; ".join(f"{known.name}: {known.needs}" for known in READERS)
        why = skipped[0] if skipped else f"no row in a file of {', '.join(SUFFIXES)}"
        raise UserError(f"{path}: no usable row; {why}{known}")
    return reader.name, list(problems.values()), {"skipped_rows": skipped, "bad_golds": bad, "rows_without_media": bare}


def _find_reader(row: object) -> Reader:
    """The reader that recognises most of the row's columns, the earlier one if several do."""
    if not isinstance(row, dict):
        raise ValueError("not a JSON object")
    fits = [reader for reader in READERS if set(reader.needs.split(",")) <= set(row)]
    if not fits:
        raise LookupError(f"no known format has the columns {', '.join(map(str, row))}")
    return max(fits, key=lambda reader: (bool(reader.question), reader.needs.count(",")))


def _problem(reader: Reader, row: dict, number: int, folder: Path, media: Path) -> Problem:
    """A published row → a row of ours → a Problem. Raises ValueError with the reason to skip it."""
    columns = reader.media.split(",")
    if reader.question:
        out = {"id": _first(row, reader.id), "question": _first(row, reader.question), "kind": reader.kind(row),
               "answer": _first(row, reader.answer), "source": _first(row, reader.category), **reader.more(row)}
        gold = out["answer"][0] if isinstance(out["answer"], list) else out["answer"]   # several right ones: the first
        out["answer"] = gold and _tagged(gold)
        out["question"] = re.sub(r"<image\s*\d*>|^Question:\s*", "", str(out["question"] or "")).strip()
    else:
        out = {key: value for key, value in row.items() if key not in (*columns, "mm_hint")}
        hint = (row.get("mm_hint") or {}).get("hint_path")
        out["media"] = [hint] if hint else None
    values, variant_of = out.pop("media", None) or [_first(row, names) for names in columns], out.pop("variant_of", "")
    problem = to_problem({key: value for key, value in out.items() if value is not None}, f"row-{number}", folder)
    problem.variant_of = variant_of
    for value in (v for vs in values for v in (vs if isinstance(vs, list) else [vs]) if v):
        file = _file(value, folder, media)
        name = "videos" if file.suffix.lower() in VIDEO_SUFFIXES else "images"
        setattr(problem, name, (*getattr(problem, name), file))
    return problem


def _first(row: dict, names: str) -> object:
    return next((row[name] for name in names.split("|") if row.get(name) not in (None, "")), None)


def _file(value: object, folder: Path, media: Path) -> Path:
    """A media value as a file: a path below the data's folder or beside it, or bytes that are unpacked."""
    if isinstance(value, dict) and isinstance(value.get("bytes"), bytes):
        path = media / f"{hashlib.sha1(value['bytes']).hexdigest()}.png"   # PIL reads the content, not the suffix
        if not path.is_file():
            media.mkdir(parents=True, exist_ok=True)
            (partial := path.with_suffix(f".{os.getpid()}")).write_bytes(value["bytes"])
            partial.replace(path)
        return path
    name = str(value.get("path") if isinstance(value, dict) else value)
    roots = (folder, *(folder / sub for sub in ("images", "data", "videos", "png")), folder.parent)
    found = [root / n for n in (name, name.lstrip("/")) for root in roots if os.path.isfile(root / n)]
    return found[0] if found else folder / name


def _rows(path: Path) -> Iterator[tuple[Path, object, dict]]:
    """(folder its media are in, row, more columns) of a file, a folder's data files, or V*'s two folders of JSON."""
    files = [path]
    if path.is_dir():
        files = sorted(file for file in (*path.iterdir(), *path.glob("data/*")) if file.suffix in SUFFIXES)
        notes = [] if files else [*path.glob("direct_attributes/*.json"), *path.glob("relative_position/*.json")]
        for note in sorted(notes):
            image = next((f for f in note.parent.glob(f"{note.stem}.*") if f != note), note.with_suffix(".jpg"))
            more = {"category": note.parent.name, "image": str(image.relative_to(path))}
            yield path, note.read_text(errors="replace"), more
    for file in files:
        try:
            yield from ((file.parent, row, {}) for row in _file_rows(file))
        except (OSError, ValueError, csv.Error) as error:
            raise UserError(f"cannot read {file}: {error}") from None


def _file_rows(file: Path) -> Iterator[object]:
    if file.suffix == ".parquet":
        try:
            from pyarrow.parquet import ParquetFile
        except ImportError:
            raise UserError(f"{file}: reading parquet needs pyarrow: pip install pyarrow") from None
        for batch in ParquetFile(file).iter_batches(64):
            yield from batch.to_pylist()
    elif file.suffix == ".tsv":
        csv.field_size_limit(sys.maxsize)
        with file.open(newline="", encoding="utf-8-sig") as lines:
            yield from csv.DictReader(lines, delimiter="\t")
    else:
        yield from (row for _, row in read_rows(file))
