"""What a sandbox session costs: start, call, figures, many sessions, memory; beside a fresh process per call.

    python bench/sandbox.py | tee docs/logs/sandbox.txt        # about a minute; needs Linux for the memory lines
"""

import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from PIL import Image  # noqa: E402

from pyvision_mini.sandbox import SandboxPool  # noqa: E402

IMPORTS = "import numpy as np, matplotlib; matplotlib.use('agg'); import matplotlib.pyplot as plt; from PIL import Image"
PHOTO = Image.effect_noise((672, 672), 60).convert("RGB")


def timed(action: Callable, n: int) -> tuple[str, list]:
    """Run n times → (p50 and p95 in ms, results)."""
    seconds, results = [], []
    for _ in range(n):
        start = time.perf_counter()
        results.append(action())
        seconds.append(time.perf_counter() - start)
    p95 = sorted(seconds)[int(0.95 * (n - 1))]
    return f"p50 {1e3 * statistics.median(seconds):8.2f} ms   p95 {1e3 * p95:8.2f} ms   n {n}", results


def each(sessions: list, action: Callable) -> str:
    rest = iter(sessions)
    return timed(lambda: action(next(rest)), len(sessions))[0]


def line(name: str, value: str) -> None:
    print(f"{name:<58}{value}", flush=True)


def private_mb(pid: int) -> float:
    rows = [row.split() for row in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]]
    return sum(int(row[1]) for row in rows if row[0].startswith("Private")) / 1024


def spawned(queue, reply) -> None:
    exec(IMPORTS, {})
    while (code := queue.get()) is not None:
        exec(code, {})
        reply.put("done")


def peers() -> None:
    """What the same first call costs in a process that starts from nothing."""
    fresh = [sys.executable, "-c", f"{IMPORTS}\nx = 1"]
    line("fresh `python -c` with the same imports, one call", timed(lambda: subprocess.run(fresh, check=True), 7)[0])

    def spawn() -> tuple:
        context = multiprocessing.get_context("spawn")
        queue, reply = context.Queue(), context.Queue()
        process = context.Process(target=spawned, args=(queue, reply))
        process.start()
        queue.put("x = 1")
        reply.get()
        return process, queue, reply

    text, workers = timed(spawn, 5)
    line("multiprocessing spawn with the same imports, first call", text)
    process, queue, reply = workers[0]
    line("multiprocessing spawn, a later call", timed(lambda: (queue.put("x = 1"), reply.get()), 300)[0])
    for process, queue, _ in workers:
        queue.put(None)
        process.join()


def main() -> None:
    line("machine", f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, Linux {os.uname().release}, Python {sys.version.split()[0]}")
    start = time.perf_counter()
    pool = SandboxPool(workers=os.cpu_count(), timeout_s=10)
    line("pool start, self-test included", f"    {1e3 * (time.perf_counter() - start):8.2f} ms")
    line("layers", " ".join(pool.layers))
    text, sessions = timed(lambda: pool.open(images=[PHOTO]), 60)
    line("open a session with a 672x672 image", text)
    line("open a session without an image", timed(pool.open, 40)[0])
    line("memory of a fresh session (private)", f"    {statistics.median(private_mb(s._pid) for s in sessions[:20]):8.1f} MB")
    line("first call of a session", each(sessions[:50], lambda s: s.run("x = 1")))
    session = sessions[0]
    line("call: x = 1", timed(lambda: session.run("x = 1"), 1000)[0])
    line("call: crop and show a 336x336 PIL image", timed(lambda: session.run("image_clue_0.crop((0, 0, 336, 336)).show()"), 200)[0])
    line("call: a default matplotlib figure of the image",
         timed(lambda: session.run("plt.imshow(image_clue_0); plt.show()"), 20)[0])
    for used in sessions[:10]:
        used.run("a = np.asarray(image_clue_0).mean(); image_clue_0.crop((0, 0, 336, 336)).show(); plt.imshow(image_clue_0); plt.show()")
    line("memory of a session that drew a figure (private)", f"    {statistics.median(private_mb(s._pid) for s in sessions[:10]):8.1f} MB")
    line("close a session", each(sessions[10:50], lambda s: s.close()))
    pool.close()
    for n in (8, 64, 256):
        with SandboxPool(workers=os.cpu_count(), timeout_s=10) as pool, ThreadPoolExecutor(32) as threads:
            start = time.perf_counter()
            sessions = list(threads.map(lambda _: pool.open(images=[PHOTO]), range(n)))
            opened = time.perf_counter() - start
            list(threads.map(lambda s: s.run("x = 1"), sessions))
            start = time.perf_counter()
            results = list(threads.map(lambda i: sessions[i % n].run("x += 1"), range(2000)))
            rate = len(results) / (time.perf_counter() - start)
            assert {result.status for result in results} == {"ok"}
            line(f"{n} sessions", f"    opened in {opened:6.2f} s, then {rate:6.0f} calls/s from 32 threads")
    peers()


if __name__ == "__main__":
    main()
