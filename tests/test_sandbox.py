"""The sandbox holds: one hostile claim per case, its name is the claim. A claim counts only if it also breaks a plain executor
(`control`), wherever that is harmless. Payloads are bounded: a fork bomb stops at 60, an allocation at what a laptop can spare.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from pyvision_mini.config import UserError
from pyvision_mini.sandbox import SandboxError, SandboxPool

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="the layers are Linux's")
LIMIT_S, TRAINER = 1.0, os.getpid()
CONTROL = """
import sys
code = sys.stdin.read()
sys.stdin = open("/dev/null")
try:
    exec(code, {})
except Exception as error:
    print(type(error).__name__)
print("ANSWERED")
"""


@pytest.fixture(scope="module")
def pool():
    os.environ["SECRET_TOKEN"] = "gold"
    with SandboxPool(workers=2, timeout_s=LIMIT_S, memory_mb=512, max_output_chars=2000, max_images=4, max_pixels=2_000_000) as pool:
        yield pool


def open_session(pool, *args, **kwargs) -> contextlib.closing:
    return contextlib.closing(pool.open(*args, **kwargs))


@pytest.fixture
def session(pool):
    with open_session(pool, images=[Image.new("RGB", (60, 40), "red")]) as session:
        yield session


def processes(pool) -> list[int]:
    """The zygote's children, zombies included."""
    return [int(pid) for pid in Path(f"/proc/{pool._zygote.pid}/task/{pool._zygote.pid}/children").read_text().split()]


def memory_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") / 2**20


def control_breaks(code: str, folder: Path) -> bool:
    """Does the code reach its aim, flood, or leave no answer within the limit when nothing protects the executor?"""
    with subprocess.Popen([sys.executable, "-c", CONTROL], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=folder,
                          stderr=subprocess.DEVNULL, start_new_session=True) as process:
        timer = threading.Timer(LIMIT_S, os.killpg, (process.pid, signal.SIGKILL))
        timer.start()
        process.stdin.write(code.encode())
        process.stdin.close()
        output = process.stdout.read(1 << 20)
        timer.cancel()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return b"REACHED" in output.splitlines() or b"ANSWERED" not in output


# claim: (code, statuses that hold, what the text must contain, is it run against the control)
CLAIMS = {
    "os._exit ends only its session": ("import os; os._exit(3)", "killed", "exit code 3", True),
    "sys.exit is an error like any other": ("import sys; sys.exit(1)", "error", "SystemExit: 1", True),
    "a BaseException is an error like any other": ("class Stop(BaseException): pass\nraise Stop('x')", "error", "Stop: x", True),
    "a KeyboardInterrupt is an error like any other": ("raise KeyboardInterrupt", "error", "KeyboardInterrupt", True),
    "an endless loop is interrupted": ("while True: pass", "timeout", "variables are kept", True),
    "a loop that swallows exceptions is killed":
        ("import time\nwhile True:\n  try: time.sleep(.01)\n  except BaseException: pass", "timeout", "variables are lost", True),
    "a loop that blocks signals is killed":
        ("import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))\nwhile True: pass", "timeout", "are lost", True),
    "a loop that ignores the alarm is killed":
        ("import signal\nsignal.signal(signal.SIGALRM, signal.SIG_IGN)\nwhile True: pass", "timeout", "are lost", True),
    "an endless loop in C is killed": ("import itertools; sum(itertools.repeat(1))", "timeout", "are lost", True),
    "a big-integer power is stopped": ("x = 9; x ** x ** x", "timeout", "", True),
    "native code that blocks with the GIL is killed":
        ("import ctypes\nlock = bytes(64); lib = ctypes.PyDLL(None); lib.pthread_mutex_lock(lock); lib.pthread_mutex_lock(lock)",
         "timeout", "are lost", True),
    "a 100 GB allocation fails": ("x = bytearray(100 << 30)", "error", "MemoryError", False),
    "memory ends at the limit": ("x = bytearray(700 << 20); print('REACHED')", "error", "MemoryError", True),
    "a list cannot grow for ever":
        ("x = []\nfor _ in range(1000): x.append(bytes(1 << 20))\nprint('REACHED')", "error", "MemoryError", True),
    "small objects cannot grow for ever": ("x = []\nwhile True: x.append([])", "error timeout killed", "", False),
    "a fork bomb does not fork":
        ("import os, time\nfor _ in range(60):\n  if os.fork() == 0: time.sleep(1); os._exit(0)\nprint('REACHED')",
         "error", "PermissionError", True),
    "a thread bomb ends at the limit":
        ("import threading\nstop = threading.Event()\nfor _ in range(300):\n  threading.Thread(target=stop.wait, daemon=True).start()\n"
         "print('REACHED')", "error", "can't start new thread", True),
    "no program can be started": ("import subprocess; subprocess.run(['/bin/echo', 'REACHED'])", "error", "PermissionError", True),
    "exec does not replace the runtime": ("import os; os.execv('/bin/echo', ['echo', 'REACHED'])", "error", "PermissionError", True),
    "no socket opens, not even to loopback":
        ("import socket\ns = socket.socket(); s.bind(('127.0.0.1', 0)); s.listen()\nsocket.create_connection(s.getsockname())\n"
         "print('REACHED')", "error", "PermissionError", True),
    "other files cannot be read": ("print('REACHED' * ('root' in open('/etc/passwd').read()))", "error", "PermissionError", True),
    "other folders cannot be listed": ("import os; os.listdir('/'); print('REACHED')", "error", "PermissionError", True),
    "the trainer's /proc entries cannot be read":
        (f"open('/proc/{TRAINER}/environ').read(); print('REACHED')", "error", "PermissionError", True),
    "the trainer's memory cannot be read":
        (f"open('/proc/{TRAINER}/mem', 'rb'); print('REACHED')", "error", "PermissionError", os.getuid() == 0),
    "the environment holds no secrets": ("import os; print('REACHED' * ('SECRET_TOKEN' in os.environ))", "ok", "", True),
    "nothing is written outside the scratch folder":
        ("import tempfile, os\nf = os.path.join(os.path.dirname(os.getcwd()), 'x'); open(f, 'w'); os.remove(f); print('REACHED')",
         "error", "PermissionError", True),
    "no symlink leads out of the scratch folder":
        ("import os; os.symlink('/etc/passwd', 'link'); open('link').read(); print('REACHED')", "error", "PermissionError", True),
    "the disk cannot be filled":
        ("for i in range(50): open(f'f{i}', 'wb').write(bytes(4 << 20))\nprint('REACHED')", "error", "OSError", True),
    "1 GB on stdout is cut": ("for _ in range(1000): print('x' * 10**6)", "ok", "999999000 more characters were cut", True),
    "1 GB on descriptor 1 goes nowhere": ("import os\nfor _ in range(1000): os.write(1, b'x' * 10**6)", "ok", "", True),
    "writing to the reply channel ends the session": ("import os; os.write(3, b'x' * 99)", "killed", "reply channel", False),
    "closing all descriptors ends the session": ("import os; os.closerange(0, 256)", "killed", "lost", True),
    "deleting the builtins breaks nothing": ("import builtins; builtins.__dict__.clear()", "ok", "", True),
    "deep recursion ends":
        ("import sys; sys.setrecursionlimit(10**9)\ndef f(): f()\nf()", "error timeout killed", "", True),
    "a segmentation fault ends only its session": ("import ctypes; ctypes.string_at(0)", "killed", "SIGSEGV", True),
    "abort ends only its session": ("import os; os.abort()", "killed", "SIG", True),
    "no signal reaches the trainer": (f"import os; os.kill({TRAINER}, 0); print('REACHED')", "error", "PermissionError", True),
    "no F_SETOWN signal reaches the trainer":
        (f"import fcntl\nf = open('x', 'w'); fcntl.fcntl(f, fcntl.F_SETOWN, {TRAINER}); print('REACHED')",
         "error", "PermissionError", True),
    "io_uring is closed":
        ("import ctypes\nif ctypes.CDLL(None).syscall(425, 4, bytes(120)) >= 0: print('REACHED')", "ok", "", True),
    "keyrings are closed":
        ("import ctypes\nif ctypes.CDLL(None).syscall(250, 0, -3, 0) != -1: print('REACHED')", "ok", "", True),
    "ptrace is closed": ("import ctypes\nif ctypes.CDLL(None).ptrace(0, 0, 0, 0) == 0: print('REACHED')", "ok", "", True),
    "the death signal of the parent cannot be cleared":
        ("import ctypes\nif ctypes.CDLL(None).prctl(1, 0, 0, 0, 0) == 0: print('REACHED')", "ok", "", True),
    "no daemon survives":
        ("import os, time\nif os.fork() == 0:\n  os.setsid(); time.sleep(2); os._exit(0)\nprint('REACHED')",
         "error", "PermissionError", True),
    "input() ends": ("input()", "error", "EOFError", False),
    "sys.stdin.read() ends": ("import sys; print(repr(sys.stdin.read()))", "ok", "''", False),
    "surrogates and NUL come through": (r"print('a\udfffb\0c')", "ok", "a?b\N{REPLACEMENT CHARACTER}c", False),
    "an exception that cannot be printed is still an error":
        ("class E(Exception):\n  def __str__(self): raise ValueError\nraise E", "error", "E", False),
    "a huge message is shortened": ("raise ValueError('x' * 10**6)", "error", "ValueError: xxx", False),
    "NUL in the code is an error": ("print(1)\0", "error", "null bytes", False),
    "endless nesting is an error": ("(" * 10**5, "error", "", False),
    "100 figures end at the limit": ("for _ in range(100): plt.figure(figsize=(1, 1))\nplt.show()", "error", "at most 4", False),
    "1000 x 1000 inches are refused": ("plt.figure(figsize=(1000, 1000)); plt.show()", "error", "100000x100000", False),
}


@LINUX
@pytest.mark.parametrize("claim", CLAIMS)
def test_attack(claim, pool, tmp_path):
    code, statuses, text, has_control = CLAIMS[claim]
    if "disk" in claim and "tmpfs" not in pool.layers:
        pytest.skip("no tmpfs can be mounted here: only each file is bounded")
    before, others = memory_mb(), set(processes(pool))
    with open_session(pool) as session:
        started = time.monotonic()
        result = session.run(code)
        assert time.monotonic() - started < LIMIT_S + 2
        assert result.status in statuses.split() and text in result.text and "REACHED" not in result.text.splitlines(), result
        assert len(result.text) < 4000 and len(result.images) <= 4
        assert session.run("print(6 * 7)").text == "42\n"     # it goes on, or starts afresh
    assert set(processes(pool)) == others                     # no process and no zombie
    assert not (pool.folder / session._key).exists()
    assert memory_mb() - before < 50
    if has_control:
        assert control_breaks(code, tmp_path), "an unprotected executor survives this: it proves nothing"


def test_200_timeouts_in_a_row_keep_the_variables():
    with SandboxPool(workers=1, timeout_s=0.02) as pool:
        session = pool.open()
        session.run("n = 0")
        results = [session.run("n += 1\nwhile True: pass") for _ in range(200)]
        assert {result.status for result in results} == {"timeout"}
        assert session.run("print(n)").text == "200\n"


def test_overwritten_print_stdout_and_show_work_again_in_the_next_call(session):
    code = "import sys, builtins\nbuiltins.print = sys.stdout = sys.stderr = plt.show = Image.Image.show = plt.close = None"
    assert session.run(code).status == "ok"
    result = session.run("print('back'); plt.plot([1, 2]); plt.show(); image_clue_0.show()")
    assert (result.status, result.text, len(result.images)) == ("ok", "back\n", 2)


def test_a_thread_left_behind_gets_no_cpu_between_calls(session):
    session.run("import threading\nn = 0\ndef count():\n  global n\n  while True: n += 1\nthreading.Thread(target=count).start()")
    first = int(session.run("print(n)").text)
    time.sleep(0.5)
    cpu = Path(f"/proc/{session._pid}/stat").read_text().split()
    time.sleep(0.3)
    assert Path(f"/proc/{session._pid}/stat").read_text().split()[13] == cpu[13] and cpu[2] == "T"
    assert int(session.run("import time; time.sleep(.2); print(n)").text) > first     # it lives on, but only inside calls


FORGE = """import os, struct, sys, threading, time
def frame(nonce, length=6): return struct.pack("<16s?IB", nonce, False, length, 0) + b"forged"
nonce, level = None, sys._getframe()
while nonce is None: level = level.f_back; nonce = level.f_locals.get("nonce")
"""


@LINUX
def test_a_late_reply_never_answers_the_next_call(session):
    late = FORGE + "def late():\n  time.sleep(.1); os.write(3, frame(nonce))\nthreading.Thread(target=late).start()"
    assert session.run(late).status == "ok"
    time.sleep(0.3)
    result = session.run("import time; time.sleep(.5); print('true')")
    assert result.status == "killed" and "forged" not in result.text
    assert session.run("print('true')").text == "true\n"


@LINUX
def test_a_huge_forged_reply_allocates_nothing(session):
    before = memory_mb()
    result = session.run(FORGE + "os.write(3, frame(nonce, 2**32 - 1)); time.sleep(9)")
    assert (result.status, result.seconds < LIMIT_S, memory_mb() - before < 20) == ("killed", True, True)


@LINUX
def test_a_reply_that_drips_ends_at_the_deadline(session):
    drip = FORGE + "while True:\n  try: os.write(3, frame(nonce, 999)[:1]); time.sleep(.05)\n  except BaseException: pass"
    result = session.run(drip)
    assert result.status in ("timeout", "killed") and result.seconds < LIMIT_S + 2


def test_python_variables_of_one_session_do_not_reach_the_next(pool, session):
    session.run("import os; os.environ.update(PYTHONPATH='/evil', PYTHONSTARTUP='/evil', LD_PRELOAD='/evil')")
    with open_session(pool) as other:
        code = "import os; print([name for name in os.environ if name.startswith(('PYTHON', 'LD_')) or 'TOKEN' in name])"
        assert other.run(code).text == "[]\n"


@LINUX
def test_chmod_does_nothing_and_does_not_fail(session, tmp_path):
    target = tmp_path / "mine"
    target.write_text("x")
    mode = target.stat().st_mode
    assert session.run(f"import os; os.chmod({str(target)!r}, 0)").status == "ok"
    assert target.stat().st_mode == mode


@LINUX
def test_sessions_cannot_touch_each_other(pool, session):
    session.run("open('mine', 'w').write('secret')")
    with open_session(pool) as other:
        scratch = pool.folder / session._key
        assert other.run(f"import os; print(os.listdir({str(scratch)!r}))").status == "error"
        assert other.run(f"import os; os.kill({session._pid}, 9)").status == "error"
    assert session.run("print(open('mine').read())").text == "secret\n"


@LINUX
def test_limits_cannot_be_raised(session):
    code = "import resource\nfor name in ('AS', 'FSIZE', 'NOFILE'):\n  kind = getattr(resource, 'RLIMIT_' + name)\n" \
           "  try: resource.setrlimit(kind, (resource.RLIM_INFINITY,) * 2); print('REACHED')\n  except (ValueError, OSError): pass"
    assert (session.run(code).text, session.run("import os; os.setuid(0)").status) == ("", "error")


@LINUX
def test_the_numbers_of_the_system_calls_are_the_kernels():
    source = (Path(__file__).parent.parent / "pyvision_mini/lockdown.py").read_text()
    rows = re.findall(r"\b([a-z_]\w+) (\d+) (\d+|-)(?=[,\"\n])", source[source.index("ALLOWED ="):source.index("def seccomp_filter")])
    assert len(rows) > 90
    for column, header in ((1, "/usr/include/x86_64-linux-gnu/asm/unistd_64.h"), (2, "/usr/include/asm-generic/unistd.h")):
        if not Path(header).exists():
            pytest.skip(f"{header}: install linux-libc-dev")
        kernel = dict(re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", Path(header).read_text()))
        kernel.setdefault("newfstatat", kernel.get("fstatat"))
        for row in rows:
            assert row[column] == "-" or kernel.get(row[0], row[column]) == row[column], row


# ---------------------------------------------------------------- what it is for

def test_variables_survive_an_error(session):
    session.run("import math\nclass A:\n  n = 7\nf = lambda x: x + A.n\ng = iter(range(5)); next(g)\nfig, ax = plt.subplots()\n1 / 0")
    result = session.run("print(f(1), next(g), math.floor(2.5), A().n); ax.plot([1, 2]); fig.show()")
    assert (result.status, result.text, len(result.images)) == ("ok", "8 1 2 7\n", 1)


def test_variables_survive_a_timeout(session):
    session.run("x = 5\nwhile True: pass")
    assert session.run("print(x)").text == "5\n"


def test_memory_used_up_leaves_the_variables_and_can_be_freed(session):
    assert session.run("x = []\nwhile True: x.append(bytes(1 << 20))").status == "error"
    assert session.run("print(len(x) > 300); del x").text == "True\n"
    assert session.run("y = bytes(300 << 20); print('ok')").text == "ok\n"


def test_an_error_shows_the_line_the_type_and_the_message(session):
    assert session.run("a = 1\nb = a / 0\n").text == "line 2: b = a / 0\nZeroDivisionError: division by zero"
    session.run("def half(x):\n  return x / 0")
    assert session.run("print('before')\nhalf(2)").text == \
        "before\nline 2: half(2)\nline 2: return x / 0\nZeroDivisionError: division by zero"
    result = session.run("x = (1,\ny = 2")
    assert result.status == "error" and "line 1" in result.text and "SyntaxError: '(' was never closed" in result.text


def test_every_spelling_of_show_is_captured_in_order(session):
    code = """plt.imshow(image_clue_0); plt.show()
plt.figure(figsize=(1, 1)); plt.show(block=False)
fig = plt.figure(figsize=(1, 2)); fig.show()
from matplotlib.pyplot import show
import matplotlib; matplotlib.use("Agg")
plt.figure(figsize=(2, 1)); plt.figure(figsize=(2, 2)); show()
"""
    assert [image.size for image in session.run(code.replace("plt.figure(figsize=(1, 1)); plt.show(block=False)\n", "")).images] == \
        [(640, 480), (100, 200), (200, 100), (200, 200)]
    result = session.run("plt.figure(figsize=(1, 1)); plt.show(block=False); image_clue_0.crop((0, 0, 9, 9)).show(title='x')")
    assert [image.size for image in result.images] == [(100, 100), (9, 9)]


def test_shown_images_become_the_next_image_clues(session):
    session.run("image_clue_0.crop((0, 0, 30, 30)).show(); print(image_clue_1.size)")
    result = session.run("print(image_clue_1.size, image_clue_1.mode); plt.plot([1]); plt.show(); print(image_clue_2.size)")
    assert result.text == "(30, 30) RGB\n(640, 480)\n" and session.next_index == 3
    assert session.run("import os; os._exit(0)").status == "killed"
    assert session.run("image_clue_0.show(); print(image_clue_3.size)").text == "(60, 40)\n" and session.next_index == 4
    assert "NameError" in session.run("image_clue_1").text


def test_images_before_an_error_are_kept_and_figures_left_open_are_closed(session):
    result = session.run("image_clue_0.show(); plt.figure(); 1 / 0")
    assert (result.status, len(result.images)) == ("error", 1)
    assert session.run("print(plt.get_fignums()); plt.show()").text == "[]\n"


def test_crops_that_show_nothing_are_errors_that_name_the_size(session):
    for box in ("10, 0, 10, 40", "0, 5, 60, 5", "30, 0, 10, 40", "100, 0, 200, 40", "-9, -9, 0, 0", "float('nan'), 0, 9, 9"):
        result = session.run(f"image_clue_0.crop(({box})).show()")
        assert (result.status, result.images) == ("error", []) and "60x40" in result.text, box
    for code, size in (("Image.new('RGB', (0, 5))", "0x5"), ("Image.new('RGB', (1, 201))", "1x201")):
        result = session.run(f"{code}.show()")
        assert (result.status, result.images) == ("error", []) and size in result.text
    assert session.run("image_clue_0.crop((50, 30, 70, 50)).show()").images[0].size == (20, 20)     # partly outside is fine
    assert session.next_index == 2


def test_images_of_odd_sizes_are_accepted_and_huge_ones_reduced():
    cases = {(1, 1): (1, 1), (5, 5): (5, 5), (27, 300): (27, 300), (200, 1): (200, 1), (8000, 4000): (2000, 1000),
             (10000, 10000): (1414, 1414)}
    with SandboxPool(workers=1, max_pixels=2_000_000) as pool, open_session(pool) as session:
        for size, seen in cases.items():
            result = session.run(f"Image.new('RGB', {size}).show()")
            assert [image.size for image in result.images] == [seen], result.text
        assert session.run("print(image_clue_5.size)").text == "(10000, 10000)\n"     # inside, nothing is lost


def test_an_image_that_is_too_narrow_once_it_is_reduced_is_an_error_and_not_the_end_of_the_session():
    with SandboxPool(workers=1, max_pixels=3_000_000) as pool, open_session(pool) as session:
        result = session.run("keep = 1; Image.new('L', (50_000, 250)).show()")         # 200 to 1, then 24494x122
        assert (result.status, result.images) == ("error", []) and "too narrow: 24494x122" in result.text
        assert session.run("print(keep)").text == "1\n"


@pytest.mark.parametrize("mode,colour,seen", [
    ("RGBA", (9, 9, 9, 0), (255, 255, 255)), ("LA", (0, 0), (255, 255, 255)), ("P", 0, (0, 0, 0)), ("CMYK", (0, 0, 0, 255), (0, 0, 0)),
    ("1", 1, (255, 255, 255)), ("L", 7, (7, 7, 7)), ("I;16", 65535, (255, 255, 255)), ("I", 200, (200, 200, 200)), ("F", 100.0, (100,) * 3)])
def test_images_of_any_mode_are_rgb_inside_and_outside(pool, session, mode, colour, seen):
    image = Image.new(mode, (30, 20), colour)
    if mode == "P":
        image.putpalette([0, 0, 0] * 256)
    with open_session(pool, images=[image]) as other:
        result = other.run("print(image_clue_0.mode, image_clue_0.getpixel((3, 3)))\nimage_clue_0.show()")
    assert result.text == f"RGB {seen}\n" and result.images[0].getpixel((3, 3)) == seen
    shown = session.run(f"Image.new({mode!r}, (30, 20), {colour!r}).show()").images[0]
    assert (shown.mode, shown.size) == ("RGB", (30, 20)) and (mode == "P" or shown.getpixel((3, 3)) == seen)


def test_one_rollout_cannot_change_anothers_image_variables_or_folder(pool):
    image = Image.new("RGB", (64, 64), "red")
    with open_session(pool, images=[image]) as a, open_session(pool, images=[image]) as b:
        a.run("import os; image_clue_0.paste((0, 0, 0), (0, 0, 64, 64)); x = 1; os.mkdir('d'); os.chdir('d')")
        assert b.run("print(image_clue_0.getpixel((5, 5)))").text == "(255, 0, 0)\n"
        assert "NameError" in b.run("print(x)").text
        assert b.run("import os; print(os.listdir('.'))").text == "[]\n" and image.getpixel((5, 5)) == (255, 0, 0)


def test_random_numbers_repeat_in_every_session(pool):
    numbers = []
    for _ in range(2):
        with open_session(pool) as session:
            numbers.append(session.run("import random; print(random.random(), np.random.rand())").text)
    assert numbers[0] == numbers[1]


def test_torch_is_not_loaded_in_the_runtime(session):
    assert session.run("import sys; print('torch' in sys.modules, 'transformers' in sys.modules)").text == "False False\n"


# ---------------------------------------------------------------- video

@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    """12 frames of 64 x 48 at 6 fps; frame i is a grey of 20 i."""
    av = pytest.importorskip("av")
    pytest.importorskip("decord")
    path = tmp_path_factory.mktemp("clips") / "clip.mp4"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=6)
        stream.width, stream.height = 64, 48
        for i in range(12):
            frame = av.VideoFrame.from_ndarray(np.full((48, 64, 3), 20 * i, np.uint8), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def test_decord_works_inside_while_the_parent_holds_a_reader(pool, clip):
    import decord
    reader = decord.VideoReader(str(clip), num_threads=1)
    reader[3]
    for _ in range(200):
        with open_session(pool, videos=[clip]) as session:
            result = session.run("print(len(video_clue_0), video_clue_0[5].shape, round(video_clue_0.get_avg_fps()))\n"
                                 "Image.fromarray(video_clue_0[5].asnumpy()).show()")
            assert result.text == "12 (48, 64, 3) 6\n", result
            assert abs(result.images[0].getpixel((30, 20))[0] - 100) < 5


def test_frames_are_found_by_their_time_stamps(pool, clip):
    with open_session(pool, videos=[clip]) as session:
        result = session.run("print(frame_times(video_clue_0).round(2)[:4])\nframe_at(video_clue_0, 0.9).show()")    # 5/6 to 1 s
        assert result.text == "[0.   0.17 0.33 0.5 ]\n" and abs(result.images[0].getpixel((30, 20))[0] - 100) < 5


def test_only_this_sessions_videos_can_be_read(pool, session, clip):
    assert session.run(f"open({str(clip)!r}, 'rb').read()").status == "error"
    with open_session(pool, videos=[clip]) as other:
        assert other.run(f"print(len(open({str(clip)!r}, 'rb').read()) > 0)").text == "True\n"
        assert other.run(f"open({str(clip)!r}, 'ab')").status == "error"


@pytest.mark.parametrize("content", [None, b"", b"not a video", "truncated"])
def test_an_unreadable_video_is_a_short_error_that_names_it(pool, clip, tmp_path, content):
    path = tmp_path / "broken.mp4"
    if content is not None:
        path.write_bytes(clip.read_bytes()[:400] if content == "truncated" else content)
    with open_session(pool, videos=[path]) as session:
        assert session.run("x = 1").status == "ok"
        result = session.run("print(len(video_clue_0))")
        assert result.status == "error" and "broken.mp4" in result.text and len(result.text) < 500
        assert session.run("print(x)").text == "1\n"


# ---------------------------------------------------------------- slots, life and death of the processes

def test_waiting_for_a_slot_costs_a_session_nothing():
    """64 sessions of 0.25 CPU seconds on 2 slots take 8 s or more, and each has 3 s."""
    code = "import time\nend = time.process_time() + .25\nwhile time.process_time() < end: pass\nprint('done')"
    with SandboxPool(workers=2, timeout_s=3) as pool, ThreadPoolExecutor(64) as threads:
        sessions = [pool.open() for _ in range(64)]
        assert [result.text for result in threads.map(lambda session: session.run(code), sessions)] == ["done\n"] * 64


def test_close_leaves_no_process_and_no_folder():
    pool = SandboxPool(workers=1, timeout_s=1)
    sessions = [pool.open() for _ in range(3)]
    sessions[0].run("open('x', 'w')")
    pids, folder = processes(pool) + [pool._zygote.pid], pool.folder
    pool.close()
    assert not folder.exists() and not any(Path(f"/proc/{pid}").exists() for pid in pids)
    with pytest.raises(SandboxError):
        sessions[0].run("1")


def running(group: int) -> bool:
    """Is any process of the group alive? Zombies are not: PID 1 of some containers does not reap what it adopts."""
    rows = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):                    # it has just ended
            rows.append(stat.read_text().rpartition(")")[2].split())
    return any(row[0] not in "ZX" and int(row[2]) == group for row in rows)


def wait_until(condition, seconds=5.0) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


@LINUX
def test_when_the_trainer_is_killed_everything_goes():
    code = """if 1:
        import os, sys, threading, time
        from pyvision_mini.sandbox import SandboxPool
        pool = SandboxPool(timeout_s=60)
        sessions = [pool.open(), pool.open()]
        sessions[0].run("open('x', 'w')")
        threading.Thread(target=sessions[1].run, args=("while True: pass",), daemon=True).start()
        print(pool._zygote.pid, sessions[0]._pid, sessions[1]._pid, pool.folder, flush=True)
        time.sleep(60)"""
    root = str(Path(__file__).resolve().parent.parent)
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=root, text=True) as trainer:
        *pids, folder = trainer.stdout.readline().split()
        trainer.kill()
    assert wait_until(lambda: not Path(folder).exists())

    assert wait_until(lambda: not any(running(int(pid)) for pid in pids))


@LINUX
def test_when_the_trainer_is_killed_while_the_sandbox_starts_no_folder_stays():
    """The zygote finds its channel closed as it reports that it is ready, or in the middle of an answer."""
    code = "from pyvision_mini.sandbox import SandboxPool\nprint('importing done', flush=True)\nSandboxPool()"
    root, before = str(Path(__file__).resolve().parent.parent), scratch_folders()
    for delay in (0.1, 0.4, 0.8, 1.2):
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=root, text=True) as trainer:
            trainer.stdout.readline()
            time.sleep(delay)
            trainer.kill()
    assert wait_until(lambda: scratch_folders() <= before, 10)


def scratch_folders() -> set[Path]:
    return set(Path(tempfile.gettempdir()).glob("pyvision-mini-*"))


@LINUX
def test_when_the_zygote_dies_its_sessions_go_and_the_pool_starts_another():
    with SandboxPool(workers=1, timeout_s=2) as pool:
        session = pool.open()
        pid = session._pid
        pool._zygote.kill()
        assert wait_until(lambda: not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text())
        assert session.run("print(1)").status == "killed"
        assert session.run("print(1)").text == "1\n"
        pool._zygote.kill()
        with open_session(pool) as other:
            assert other.run("print(2)").text == "2\n"


@LINUX
def test_strict_refuses_when_a_layer_is_missing_and_best_effort_says_so(capsys):
    with pytest.raises(UserError, match="seccomp.*fork"):
        SandboxPool(workers=1, mode="strict", without=("seccomp",))
    capsys.readouterr()
    with SandboxPool(workers=1, without=("landlock", "own_uid")) as pool:
        assert "file" in pool.reachable and "landlock" not in pool.layers
    assert capsys.readouterr().err.count("\n") == 1


@LINUX
def test_without_any_layer_it_still_runs_times_out_and_cleans_up():
    everything = ("tmpfs", "limits", "no_new_privs", "landlock", "own_uid", "parent_death", "seccomp")
    with SandboxPool(workers=1, timeout_s=0.5, without=everything) as pool:
        assert pool.layers == [] and set(pool.reachable) == {"file", "signal", "socket", "fork"}
        session = pool.open()
        assert session.run("print(1); image = Image.new('RGB', (9, 9)); image.show(); open('x', 'w')").text == "1\n"
        deep = "import os\nfor _ in range(2000): os.mkdir('d'); os.chdir('d')\nif os.fork() == 0:\n  while True: pass"
        assert session.run(deep).status == "ok"
        assert session.run("while True: pass").status == "timeout"
        group, folder = session._pid, pool.folder / session._key
        assert folder.exists()
        session.close()
        assert not folder.exists()
        assert wait_until(lambda: not running(group))


@LINUX
def test_strict_starts_here():
    with SandboxPool(workers=1, mode="strict") as pool:
        assert pool.reachable == []


def test_two_pools_work_side_by_side():
    with SandboxPool(workers=1) as a, SandboxPool(workers=1) as b, ThreadPoolExecutor(2) as threads:
        sessions = [a.open(), b.open()]
        results = threads.map(lambda s: [s.run(f"print({i})").text for i in range(20)], sessions)
        assert list(results) == [[f"{i}\n" for i in range(20)]] * 2
