"""The reading-order table of README: every module of the package, in order, with the lines it has.

`python tests/test_readme.py` writes the counts (and a row for a module that has none) into README.
"""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE, README = ROOT / "pyvision_mini", ROOT / "README.md"
ROW = re.compile(r"^\| \[`(\w+)`\]\(pyvision_mini/\w+\.py\) \| ([\d,]+) \| (.*) \|$", re.MULTILINE)
TOTAL = re.compile(r"([\d,]+) lines in all")


def order():
    """The reading order, from the test that checks the imports against it."""
    tree = ast.parse((ROOT / "tests/test_prompts.py").read_text())
    return next(ast.literal_eval(node.value) for node in tree.body
                if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "ORDER")


def lines(name):
    return len((PACKAGE / f"{name}.py").read_text().splitlines())


def table(readme):
    return [(name, int(count.replace(",", "")), text) for name, count, text in ROW.findall(readme)]


def refreshed(readme):
    """README with the table as the package is now; what a module holds is kept, or taken from its docstring."""
    texts = {name: text for name, _, text in table(readme)}
    for name in set(order()) - set(texts):
        docstring = ast.get_docstring(ast.parse((PACKAGE / f"{name}.py").read_text())) or ""
        texts[name] = " ".join(re.split(r"[.:]\s", docstring)[0].split()[:12])
    rows = [f"| [`{name}`](pyvision_mini/{name}.py) | {lines(name)} | {texts[name]} |" for name in order()]
    first, *_, last = ROW.finditer(readme)
    readme = readme[:first.start()] + "\n".join(rows) + readme[last.end():]
    return TOTAL.sub(f"{sum(map(lines, order())):,} lines in all", readme)


def test_the_reading_order_names_every_module_with_the_lines_it_has():
    rows = table(README.read_text())
    assert [name for name, _, _ in rows] == order()
    wrong = [(name, count, lines(name)) for name, count, _ in rows if count != lines(name)]
    assert not wrong, f"{wrong}: python tests/test_readme.py"
    total, = TOTAL.findall(README.read_text())
    assert int(total.replace(",", "")) == sum(map(lines, order()))
    assert [name for name, _, text in rows if not 0 < len(text.split()) <= 12] == []


def test_every_relative_link_of_the_documents_leads_to_a_file():
    for page in (README, *(ROOT / "docs").glob("*.md")):
        links = re.findall(r"\]\((?!https?://|#)([^)#]+)", page.read_text())
        assert [link for link in links if not (page.parent / link).exists()] == [], page.name


def test_what_a_run_prints_is_quoted_from_its_log():
    logs = {line for name in ("image", "video") for line in (ROOT / f"docs/logs/train_{name}.txt").read_text().splitlines()}
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", README.read_text(), re.DOTALL | re.MULTILINE)
    quoted = [block.splitlines() for language, block in blocks if not language]
    assert len(quoted) == 2 and [line for block in quoted for line in block if line not in logs | {"..."}] == []


if __name__ == "__main__":
    README.write_text(refreshed(README.read_text()))
