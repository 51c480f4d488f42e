"""The page of trajectories: what is on it, that it stays small, and that nothing a policy writes comes alive in it."""

import base64
import hashlib
import json
import os
import re
import shutil
import subprocess
import time
from collections import Counter
from io import BytesIO
from math import nan

import numpy as np
import pytest
from PIL import Image

from pyvision_mini import page
from pyvision_mini.config import Config
from pyvision_mini.selection import collect
from pyvision_mini.trajectory import EndReason, Group, Problem, ToolResult, Trajectory, Turn

CFG = Config(groups_per_step=1, max_rounds=1, steps=1)
HOSTILE = ["<script>document.title='owned'</script>", "</script><script>document.title='owned'</script>",
           "<b unclosed <i", "<img src=x onerror=\"document.title='owned'\">", "<!-- <script>",
           "half a pair \udc00, a null \0, a line\u2028end", "'\"`${document.title='owned'}", "]]> &lt; & &amp;"]


def picture(seed, size=(64, 48)):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (*size[::-1], 3), dtype=np.uint8))


def trajectory(problem, reward, n_calls=1, text="Look.", end=EndReason.ANSWERED):
    calls = [Turn(f"{text}\n<code>\n```python\nprint({i})\n```\n</code>", "code", f"print({i})",
                  ToolResult("ok", text, [picture(i)], 0.1), n_tokens=9, seconds=1.0) for i in range(n_calls)]
    return Trajectory(problem, images=[picture(7)], grids=[(1, 4, 4)], n_image_tokens=4, n_tool_calls=n_calls,
                      turns=[*calls, Turn(text, "answer", "red")], answer="red", end=end, correct=float(reward >= 0.5),
                      reward=reward)


def group(name, rewards, **more):
    problem = Problem(name, "What color?", "red", images=("i.png",))
    return Group(problem, [trajectory(problem, reward, **more) for reward in rewards])


def rows_of(path):
    text = path.read_text()
    return json.loads(text.split('id="data">')[1].split("</script>")[0])


# --- what is on it ----------------------------------------------------------------------------------------------------


def test_the_steps_shown_are_spread_evenly_with_the_first_and_the_last():
    assert [s for s in range(1, 41) if page.is_shown(s, 40)] == [1, 5, 10, 14, 18, 23, 27, 31, 36, 40]
    assert [s for s in range(1, 701) if page.is_shown(s, 700)][::9] == [1, 700]
    assert [[s for s in range(1, n + 1) if page.is_shown(s, n)] for n in (1, 3)] == [[1], [1, 2, 3]]


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_all_ranks_together_show_as_much_as_one_and_something_that_was_dropped(world):
    shown = [item for rank in range(world) for item in page.mixed(["kept"] * 9, ["dropped"] * 9, 3, rank, world)]
    assert Counter(shown) == {"kept": 2, "dropped": 1}
    assert page.mixed([], ["dropped"] * 9, 3) == ["dropped"] * 3 and page.mixed(["kept"], [], 3) == ["kept"]
    shown = Counter()
    evaluated = [page.is_sampled(group("p", [reward]), shown, 1) for reward in [1.0] * 20 + [0.0] * 20]
    assert (sum(evaluated[:20]), sum(evaluated[20:])) == (4, 8)


def test_a_step_shows_rollouts_by_reward_with_advantages_where_they_trained_and_reasons_where_they_did_not():
    best = group("best", [0.0, 1.2, 1.1])
    best.trajectories.append(trajectory(best.problem, 0.0, end=EndReason.TOO_LONG))
    selection = collect(lambda i: [group("flat", [1.1, 1.1]), best, group("lower", [1.1, 1.0])], CFG)
    rows = {row["id"]: row for row in page.step_rows(selection, CFG, 1, 0, 1)}
    assert {name: row["drop"] for name, row in rows.items()} == {"best": "", "flat": "flat", "lower": "surplus"}
    # mean of 1.2, 1.1 and 0: the one that is too long is no part of it
    assert [(t["reward"], t["advantage"], t["drop"]) for t in rows["best"]["rollouts"]] == [
        (1.2, 0.4333, ""), (1.1, 0.3333, ""), (0.0, -0.7667, ""), (0.0, None, "too_long")]
    assert [(t["advantage"], t["drop"]) for t in rows["flat"]["rollouts"]] == [(None, "flat")] * 2
    assert page.step_rows(selection, Config(steps=100), 2, 0, 1) == []
    parts = rows["best"]["rollouts"][0]
    assert [parts[key] for key in ("grade", "paid", "bonus", "end", "visual")] == [1.0, 1, 0.1, "answered", 4]
    assert parts["turns"][0] | {"images": 0} == {
        "before": "Look.\n<code>\n```python\n", "code": "print(0)", "after": "\n```\n</code>", "tokens": 9,
        "seconds": 1.0, "status": "ok", "printed": "Look.", "no_op": False, "returned": 0,
        "tool_seconds": 0.1, "images": 0, "unshown": 0}


def test_an_evaluation_shows_its_first_problems_without_advantages_and_a_reward_that_is_nan_as_none():
    groups = [group(str(i), [nan]) for i in range(30)]
    shown = [row["id"] for rank in (0, 1) for row in page.held_out_rows(groups[rank::2], CFG, "after", 9, rank, 2)]
    assert sorted(map(int, shown)) == list(range(12)) and page.held_out_rows(groups, CFG, "during", 5, 0, 1) == []
    row = page.group_row(groups[0], CFG, "held out, after", 9)
    assert [(t["reward"], t["advantage"], t["drop"]) for t in row["rollouts"]] == [(None, None, "")]


def test_equal_pictures_are_stored_once_as_thumbnails_and_long_texts_are_cut_in_the_middle():
    row = page.group_row(group("p", [1.0] * 8, n_calls=2, text="a" + "x" * 1_000_000 + "z"), CFG, "eval")
    assert len(row["pictures"]) == 3 and len(json.dumps(row)) < 8 * 6 * (page.TEXT + 2000)
    printed = row["rollouts"][0]["turns"][0]["printed"]
    assert printed.startswith("ax") and printed.endswith("xz") and "988,002 characters left out" in printed
    large = {}
    assert page._thumbnail(picture(1, (1600, 800)), large)[1:] == [1600, 800]
    with Image.open(page.BytesIO(base64.b64decode(*large.values()))) as image:
        assert (image.format, image.size) == ("JPEG", (320, 160))


# --- the files --------------------------------------------------------------------------------------------------------


def test_a_resumed_run_drops_later_rows_and_damaged_lines_and_replaces_repeated_evaluations(tmp_path):
    file = tmp_path / "trajectories.jsonl"
    for name, step, when in (("a", 0, "before"), ("b", 1, ""), ("c", 2, ""), ("d", 3, ""), ("a", 0, "before")):
        page.append(file, [page.group_row(group(name, [0.0, 1.0]), CFG, when, step, None if when else "")])
    with file.open("ab") as damaged:
        damaged.write(b'[1, 2]\n3\n{"step": 1}\n\xff\xfe\n' + b"[" * 100_000 + b'\n'
                      b'{"step": 1, "when": [], "id": {}, "rollouts": [1], "pictures": {}}\n'
                      b'{"step": 2, "when": "", "id": "c')
    page.append(tmp_path / "trajectories-1.jsonl", [page.group_row(group("other rank", [1.0]), CFG, "", 2, "flat")])
    kept = [(row["id"], row["step"]) for row in page.merge(tmp_path, 2)]
    assert kept == [("a", 0), ("b", 1), ("other rank", 2), ("c", 2)]
    page.append(file, [page.group_row(group("e", [1.0]), CFG, "", 3, "flat")])
    page.write(tmp_path)
    assert [row["id"] for row in rows_of(tmp_path / "trajectories.html")["rows"]] == ["a", "b", "other rank", "c", "e"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["trajectories.html", "trajectories.jsonl"]
    assert page.merge(tmp_path, -1) == []                            # a fresh run in a folder with an old page
    page.write(tmp_path)
    assert rows_of(tmp_path / "trajectories.html")["rows"] == []


def test_the_page_stays_under_20_mb_and_still_shows_every_step(tmp_path):
    row = page.group_row(group("p", [0.0, 1.0]), CFG, "", 1, "")
    for step in range(10):
        page.append(tmp_path / "trajectories.jsonl", [row | {
            "step": step, "id": str(i), "pictures": {f"{step}-{i}": "A" * 1_000_000}} for i in range(3)])
    page.write(tmp_path)
    shown = rows_of(tmp_path / "trajectories.html")["rows"]
    assert {row["step"] for row in shown} == set(range(10)) and 12 <= len(shown) < 20
    for step in range(30):                       # not even one a step: the first and the last stay
        page.append(tmp_path / "trajectories.jsonl", [row | {
            "step": step, "id": "p", "pictures": {f"{step}": "A" * 1_000_000}}])
    page.write(tmp_path)
    shown = [row["step"] for row in rows_of(tmp_path / "trajectories.html")["rows"]]
    assert len(set(shown)) == len(shown) == 16 and {0, 1, 2, 27, 28, 29} < set(shown)
    assert all((tmp_path / name).stat().st_size < 20e6 for name in ("trajectories.html", "trajectories.jsonl"))


def hostile(folder):
    """A page with a right trajectory of one call and a wrong one of two, everything in them hostile, a tame group, and
    a large one whose rewards are not correct + bonus."""
    text = "\n".join(HOSTILE)
    problem = Problem(text, text, text, "choice", [text], videos=("v.mp4",), about=text)
    bad = Group(problem, [trajectory(problem, 1.1, 1, text), trajectory(problem, 0.0, 2, text)])
    for traj in bad.trajectories:
        traj.images, traj.grids, traj.n_image_tokens, traj.answer, traj.failure = [], [], 0, text, text
        traj.turns[0].content = traj.turns[0].text = text
        traj.turns[0].result.status = "error"
    tame = group("tame", [1.1, 0.0, 0.0])
    other = group("other", [0.9, nan, 1.7], n_calls=3)
    other.trajectories += [trajectory(other.problem, 0.0, 12, end=EndReason.PROMPT_TOO_LONG) for _ in range(9)]
    page.append(folder / "trajectories.jsonl", [
        page.group_row(bad, CFG, text), page.group_row(tame, CFG, "", 1, ""), page.group_row(other, CFG, "", 2, "surplus")])
    page.write(folder)
    return folder / "trajectories.html"


def test_hostile_text_is_escaped_and_only_the_pages_own_script_may_run(tmp_path):
    text = hostile(tmp_path).read_text("utf-8")
    data = text.split('id="data">')[1].split("</script>")[0]
    assert not set("<>&\u2028\0") & set(data) and data.isascii()
    assert json.loads(data)["rows"][0]["question"] == "\n".join(HOSTILE).replace("\udc00", "\\udc00")
    template = page.TEMPLATE.read_text("utf-8")
    assert text.count("<script") == 2
    assert not re.search(r"(src|href)=|https?:|innerHTML =|insertAdjacent|document\.write|eval\(", template)
    script = text.split("<script>")[1].split("</script>")[0]
    assert base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() in text.split("script-src")[1][:70]
    assert "default-src 'none'" in text and "unsafe" not in text


# --- in a browser -----------------------------------------------------------------------------------------------------


class Chromium:
    """A headless chromium with one page, driven over --remote-debugging-pipe: JSON ended by NULs on descriptors 3 and 4."""

    def __init__(self, chromium, profile):
        self.process = subprocess.Popen(
            ["sh", "-c", 'exec timeout 300 "$@" 3<&0 4>&1 >&2', "sh", chromium, "--headless", "--remote-debugging-pipe",
             "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
             "--disable-component-update", "--disable-sync", f"--user-data-dir={profile}"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        self.n, self.received, self.session = 0, b"", {}
        target = self("Target.createTarget", url="about:blank")["targetId"]
        self.session = {"sessionId": self("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}

    def __call__(self, method, **params):
        self.n += 1
        message = {"id": self.n, "method": method, "params": params, **self.session}
        os.write(self.process.stdin.fileno(), json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self.received:
                assert (part := os.read(self.process.stdout.fileno(), 1 << 20)), f"chromium ended during {method}"
                self.received += part
            line, _, self.received = self.received.partition(b"\0")
            if (reply := json.loads(line)).get("id") == self.n:              # the others are events
                assert "error" not in reply, (method, reply)
                return reply["result"]

    def js(self, expression):
        done = self("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in done, (expression, done)
        return done["result"].get("value")

    def becomes(self, expression, expected):
        end = time.monotonic() + 10
        while (value := self.js(expression)) != expected and time.monotonic() < end:
            time.sleep(0.02)
        assert value == expected, expression

    def resize(self, width, height):
        self("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def open(self, url, width=1280, height=900):
        self.resize(width, height)
        self("Page.navigate", url="about:blank")                             # so that another # is another page
        self("Page.navigate", url=url)
        self.becomes("document.readyState", "complete")

    def click(self, selector):
        at = self.js(f"""{{ const node = document.querySelector({json.dumps(selector)});
            node.scrollIntoView({{ block: 'nearest' }});
            const box = node.getBoundingClientRect(); ({{ x: box.x + box.width / 2, y: box.y + box.height / 2 }}) }}""")
        for kind in ("mousePressed", "mouseReleased"):
            self("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **at)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """Open the hostile page at an address and a size → the chromium it is in."""
    if not (chromium := shutil.which("chromium")):
        pytest.skip("no chromium on PATH: apt-get install chromium")
    folder = tmp_path_factory.mktemp("browser")
    file, driven = hostile(folder), Chromium(chromium, folder / "profile")

    def open_page(address="", *size):
        driven.open(f"file://{file}#{address}", *size)
        return driven
    yield open_page
    driven.process.terminate()
    driven.process.wait()


COUNT, ROWS = "document.querySelector('#count').textContent", "document.querySelectorAll('details').length"
TEXT = "document.querySelector('main').textContent"
WIDTHS = "[innerWidth, document.documentElement.scrollWidth - document.documentElement.clientWidth]"
# The middle of the opened row's summary is to be seen: nothing, and not the bar, lies over it.
SEEN = """{ const row = document.querySelector('details[open] > summary'), box = row.getBoundingClientRect();
    box.top >= 0 && [box.top + 1, box.bottom - 1].every(y => row.contains(document.elementFromPoint(box.x + box.width / 2, y))) }"""


def test_a_browser_shows_what_the_address_asks_for_and_nothing_hostile_comes_alive(browser):
    tab = browser("view=list&open=0.1")
    assert (tab.js(ROWS), tab.js("document.querySelectorAll('details[open]').length")) == (17, 1)
    assert tab.js("document.title") == tab.js("document.querySelector('h1').textContent") != "owned"
    assert tab.js("document.querySelectorAll('main :is(script, b:not([class]), img[onerror])').length") == 0
    shown = tab.js(TEXT)
    for line in HOSTILE[:5] + HOSTILE[6:]:
        assert line in shown
    assert "Turn 3" in shown and "0.00 = 0.00" in shown and "64 × 48" in shown
    tab = browser("view=list&right=wrong&calls=2")
    assert (tab.js(ROWS), tab.js(COUNT)) == (1, "1 of 17 trajectories")
    tab = browser("step=step 1&open=1")
    assert "1.10 = 1.00 + 1 × 0.1+0.73" in tab.js(TEXT) and "0.00 = 0.00−0.37" in tab.js(TEXT) and tab.js(ROWS) == 1
    with Image.open(BytesIO(base64.b64decode(tab("Page.captureScreenshot")["data"]))) as image:
        assert image.width == 1280 and len(image.convert("RGB").getcolors(1 << 24)) > 100


def test_a_reward_is_shown_as_a_sum_only_where_it_is_one(browser):
    """Three paid calls of 0.1 each: a right answer's sum is 1.3, and a reward that is not finite has none."""
    sums = browser("open=2").js("[...document.querySelectorAll('.columns a span:first-of-type')].map(node => node.textContent)")
    assert sums == ["1.70, grade 1.00", "0.90, grade 1.00", *["0.00 = 0.00"] * 9, "–, grade 0.00"]


@pytest.mark.parametrize("kind, said", [
    ("", "per step two that trained to one dropped"), ("held out, before", "per step two that trained to one dropped"),
    ("image, agent", "two with wrong answers to one all right")])
def test_the_page_says_what_its_sample_prefers(browser, tmp_path, kind, said):
    page.append(tmp_path / "trajectories.jsonl", [page.group_row(group("p", [0.0]), CFG, kind)])
    page.write(tmp_path)
    (tab := browser()).open(f"file://{tmp_path}/trajectories.html")
    assert tab.js("document.querySelector('#about').textContent") == (
        f"1 group, 1 rollout: a sample, {said}; not a measure of accuracy")


@pytest.mark.parametrize("size", [(1280, 900), (400, 800)])
def test_clicks_filter_switch_the_view_and_open_rows(browser, size):
    tab = browser("", *size)
    assert (tab.js(COUNT), tab.js(ROWS)) == ("17 of 17 trajectories", 3)
    tab.click("button[data-view=list]")
    tab.becomes(ROWS, 17)
    tab.js("{ const filter = document.querySelector('select[name=right]'); filter.value = 'wrong';"
           "  filter.dispatchEvent(new Event('change')) }")
    tab.becomes(COUNT, "13 of 17 trajectories")
    assert tab.js(ROWS) == 13 and "right=wrong" in tab.js("location.hash")
    tab.click("details[data-key='1.1'] > summary")
    tab.becomes("location.hash", "#view=list&right=wrong&open=1.1")
    assert tab.js("document.querySelectorAll('details[open]').length") == 1 and "Turn 2" in tab.js(TEXT) and tab.js(SEEN)
    tab.click("details[data-key='1.1'] > summary")
    tab.becomes("location.hash", "#view=list&right=wrong")
    tab.click("button[data-view='']")
    tab.becomes(ROWS, 3)
    assert tab.js("document.title") != "owned"


@pytest.mark.parametrize("widths, height", [((1280, 1000, 830), 900), ((400, 360, 600), 800)])
def test_no_view_is_wider_than_the_window_and_the_bar_covers_no_opened_row(browser, widths, height):
    for address in ("", "view=list", "open=0", "open=2", "view=list&open=0.1", "view=list&open=2.11"):
        tab = browser(address, widths[0], height)
        assert "open" not in address or tab.js(SEEN), address
        for width in widths:
            tab.resize(width, height)
            assert tab.js(WIDTHS) == [width, 0], address
