"""Run model-written Python beside the trainer.

trainer → zygote (own program, empty environment) → one process per session, forked from it and locked down.

Promises: a call ends within its timeout + 2 s whatever the code does; no process, zombie or file outlives a session; code
can read the Python install, the system libraries and its own media, write one scratch folder of bounded size, and start
threads, but reach no other file, process, network or environment; the trainer never unpickles or evaluates a reply.
Does not promise: protection against bugs of the kernel or of a decoder's memory safety beyond that; secrecy of file names
and sizes (`stat` stays open); fair shares of disk bandwidth or memory between sessions; and nothing that `pool.layers`
does not list: macOS and restricted containers get fewer layers. Run training in a container or a VM of its own.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from PIL import Image

from . import sandbox_worker as worker
from .config import UserError
from .images import load_image, size_problem
from .trajectory import ToolResult

GRACE_S = 1.0                    # between the TimeoutError inside and SIGKILL
START_S = 60.0                   # for starting the zygote or a session on a busy machine
MAX_ERROR_CHARS = 1000           # of the error under the printed text
REQUIRED = {"limits", "parent_death", "no_new_privs", "landlock", "seccomp"}    # strict mode does not start without
PROBE = """
import os, socket
def attempt(name, reach):
    try:
        reach()
        print(name)
    except OSError:
        pass
def fork():
    if os.fork() == 0:
        os._exit(0)
attempt("file", lambda: open({canary!r}).read())
attempt("socket", lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM))
attempt("fork", fork)
attempt("signal", lambda: os.kill({trainer}, 0))
"""


class SandboxError(Exception):
    """The sandbox itself could not serve. Never because of what the code did."""


class _Lost(Exception):
    """The session has to be killed: it is gone, does not yield, or sent something that is no reply."""


class SandboxPool:
    """Starts sessions and says how many calls run at once (`workers`); waiting for a place is outside `timeout_s`.

    `layers` names the protections that hold, `reachable` what the start-up self-test could still reach. mode="strict"
    raises UserError if a required layer is missing or anything was reachable; "best_effort" prints one line.
    """

    def __init__(self, workers: int = 8, timeout_s: float = 30.0, memory_mb: int = 2048, max_output_chars: int = 8192,
                 max_images: int = 8, mode: str = "best_effort", max_pixels: int = 1 << 24, without: tuple[str, ...] = ()):
        self.timeout_s, self.max_output_chars, self.max_images, self.max_pixels = timeout_s, max_output_chars, max_images, max_pixels
        self._settings = dict(timeout_s=timeout_s, memory_mb=memory_mb, max_output_chars=max_output_chars,
                              max_images=max_images, max_pixels=max_pixels, without=without,
                              packages=[path for path in sys.path if path.endswith("-packages")])
        self._slots = threading.BoundedSemaphore(workers)
        self._lock = threading.Lock()                # one request at a time on the control channel
        self._sessions: set[SandboxSession] = set()
        self._count = 0
        self._closed = False
        self.layers: list[str] = []
        self.reachable: list[str] = []
        _remove_stale_folders()
        self._start_zygote()
        try:
            self._self_test(mode)
        except BaseException:
            self.close()
            raise

    def open(self, images=(), videos=()) -> SandboxSession:
        """A session with image_clue_0.. (PIL images or paths), video_clue_0.. (paths), np, plt and Image."""
        session = SandboxSession(self, list(images), [os.path.realpath(video) for video in videos])
        self._sessions.add(session)
        return session

    def close(self) -> None:
        for session in list(self._sessions):
            session.close()
        with self._lock:
            self._closed = True
            self._stop_zygote()

    def __enter__(self) -> SandboxPool:
        return self

    def __exit__(self, *exc) -> None:
        self.close()

    def _self_test(self, mode: str) -> None:
        canary = self._folder / "canary"
        canary.write_text("readable")
        with self.open() as probe:
            self.layers = probe.layers
            self.reachable = probe.run(PROBE.format(canary=str(canary), trainer=os.getpid())).text.split()
        missing = sorted(REQUIRED - set(self.layers))
        if not missing and not self.reachable:
            return
        problem = f"sandbox: missing {', '.join(missing) or 'nothing'}; code can reach: {', '.join(self.reachable) or 'nothing'}"
        if mode == "strict":
            raise UserError(f"{problem}. Use Linux with Landlock and seccomp, or --sandbox best_effort in a throw-away container")
        print(problem, file=sys.stderr)

    def _start_zygote(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}"))
        self._folder.chmod(0o711)
        lock = os.open(self._folder, os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)             # held by the zygote while it lives: such a folder is not stale
        self._control, theirs = socket.socketpair()
        with theirs, open(self._folder / "log", "wb") as log:
            # A program of its own, not a fork: a fork would inherit the trainer's memory, gold answers included.
            self._zygote = subprocess.Popen(
                [sys.executable, "-I", "-B", worker.__file__, str(theirs.fileno()), str(os.getpid())], env={},
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=[theirs.fileno(), lock], start_new_session=True)
        os.close(lock)
        self._control.settimeout(START_S)
        try:
            self._exchange({**self._settings, "folder": str(self._folder)})
        except (OSError, ValueError) as error:
            log_tail = (self._folder / "log").read_text(errors="replace")[-2000:]
            self._stop_zygote()
            raise SandboxError(f"the sandbox did not start: {error} {log_tail}") from None

    def _stop_zygote(self) -> None:
        self._control.close()                        # the zygote kills its sessions, removes its folder and exits
        try:
            self._zygote.wait(10)
        except subprocess.TimeoutExpired:
            self._zygote.kill()
            self._zygote.wait()
        _remove(self._folder)

    def _exchange(self, request: dict, fd: int | None = None) -> dict:
        socket.send_fds(self._control, [json.dumps(request).encode() + b"\n"], [] if fd is None else [fd])
        line = b""
        while not line.endswith(b"\n"):
            chunk = self._control.recv(4096)
            if not chunk:
                raise ConnectionError("the zygote is gone")
            line += chunk
        return json.loads(line)

    def _fork(self, request: dict, fd: int) -> tuple[int, subprocess.Popen, str]:
        """(pid, its zygote, its scratch folder). Starts a new zygote if the old one died."""
        with self._lock:
            if self._closed:
                raise SandboxError("the pool is closed")
            self._count += 1
            for last_try in (False, True):
                scratch = self._folder / f"s{self._count}"
                try:
                    scratch.mkdir(0o700)
                    answer = self._exchange({**request, "scratch": str(scratch)}, fd)
                    break
                except OSError as error:
                    if last_try:
                        raise SandboxError(f"the sandbox cannot start a session: {error}") from None
                    self._stop_zygote()
                    self._start_zygote()
            if "error" in answer:
                raise SandboxError(f"the sandbox cannot start a session: {answer['error']}")
            return answer["pid"], self._zygote, str(scratch)

    def _reap(self, pid: int, zygote: subprocess.Popen, scratch: str) -> int:
        """Kill a session, collect it and remove its files; its wait status (SIGKILL if unknown)."""
        status = int(signal.SIGKILL)
        with self._lock:
            if zygote is self._zygote and not self._closed:
                try:
                    status = self._exchange({"kill": pid})["status"]
                except OSError:                      # the zygote died, and its sessions with it
                    pass
        _remove(scratch)
        return status


class SandboxSession:
    """One runtime whose variables live from call to call. If it has to be killed, the next call starts a fresh one with the
    same inputs; images keep being numbered after all that were shown so far."""

    def __init__(self, pool: SandboxPool, images: list, videos: list[str]):
        self._pool, self._images, self._videos = pool, images, videos
        self._lock = threading.Lock()                # one call at a time
        self.next_index = len(images)                # k of the next image_clue_k
        self.layers: list[str] = []
        self._process: tuple | None = None
        self._closed = False
        self._start()

    def __enter__(self) -> SandboxSession:
        return self

    def __exit__(self, *exc) -> None:
        self.close()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._stop()
        self._pool._sessions.discard(self)

    def run(self, code: str) -> ToolResult:
        """Run one piece of code. Whatever it does comes back as a ToolResult; SandboxError only if we cannot run it."""
        with self._lock, self._pool._slots:
            if self._closed:
                raise SandboxError("the session is closed")
            if self._process is None:
                self._start()
            started = time.monotonic()
            self._alarmed = False
            try:
                status, text, images = self._call(code)
            except (_Lost, OSError) as lost:
                status, text, images = self._lost(str(lost))
            self.next_index += len(images)
            return ToolResult(status, text, images, time.monotonic() - started)

    def _call(self, code: str) -> tuple[str, str, list[Image.Image]]:
        nonce, data = os.urandom(16), code.encode("utf-8", "replace")
        self._deadline = time.monotonic() + self._pool.timeout_s
        os.kill(self._process[0], signal.SIGCONT)
        self._send(worker.REQUEST.pack(nonce, len(data)) + data)
        failed, text, images = self._receive(nonce)
        os.kill(self._process[0], signal.SIGSTOP)    # threads the code left behind get no CPU between turns
        if self._alarmed:
            return "timeout", f"{text}\n[stopped after {self._pool.timeout_s:g} s; variables are kept]".lstrip(), images
        return worker.STATUS[failed], text, images

    def _lost(self, reason: str) -> tuple[str, str, list]:
        wait_status = self._stop()
        after = "All variables are lost: the next call starts afresh with the original inputs."
        if self._alarmed:
            return "timeout", f"[killed: no end after {self._pool.timeout_s:g} s. {after}]", []
        how = os.waitstatus_to_exitcode(wait_status)
        how = reason or (f"exit code {how}" if how >= 0 else signal.Signals(-how).name)
        return "killed", f"[the runtime died: {how}. {after}]", []

    def _start(self) -> None:
        images = [load_image(image) for image in self._images]
        nonce = os.urandom(16)
        self._channel, theirs = socket.socketpair()
        with theirs:
            request = {"sizes": [image.size for image in images], "videos": self._videos, "index": self.next_index,
                       "nonce": nonce.hex()}
            self._process = self._pool._fork(request, theirs.fileno())
        self._alarmed, self._deadline = True, time.monotonic() + START_S
        try:
            for image in images:
                self._send(image.tobytes())
            self.layers = self._receive(nonce)[1].split()
            os.kill(self._process[0], signal.SIGSTOP)
        except (_Lost, OSError) as error:
            self._stop()
            raise SandboxError(f"a session did not start: {error or 'it died'}") from None

    def _stop(self) -> int:
        if self._process is None:
            return 0
        self._channel.close()
        process, self._process = self._process, None
        return self._pool._reap(*process)

    def _wait(self) -> None:
        """Set the channel's timeout from the deadline; past it, first interrupt the code, then give up."""
        left = self._deadline - time.monotonic()
        if left <= 0:
            if self._alarmed:
                raise _Lost("it did not yield")
            self._alarmed = True
            self._deadline = time.monotonic() + GRACE_S
            os.kill(self._process[0], signal.SIGALRM)
            left = GRACE_S
        self._channel.settimeout(left)

    def _send(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            self._wait()
            try:
                view = view[self._channel.send(view):]
            except TimeoutError:
                pass

    def _read(self, count: int) -> bytearray:
        data = bytearray(count)
        view = memoryview(data)
        while view:
            self._wait()
            try:
                received = self._channel.recv_into(view)
            except TimeoutError:
                continue
            if received == 0:
                raise _Lost("")
            view = view[received:]
        return data

    def _receive(self, nonce: bytes) -> tuple[int, str, list[Image.Image]]:
        """One reply. The sender is hostile: every number is checked before anything is allocated for it."""
        pool = self._pool
        echo, status, length, count = worker.REPLY.unpack(self._read(worker.REPLY.size))
        most = pool.max_output_chars + MAX_ERROR_CHARS
        if echo != nonce or status >= len(worker.STATUS) or length > 4 * most or count > pool.max_images:
            raise _Lost("it wrote to the reply channel")
        sizes = [worker.SIZE.unpack(self._read(worker.SIZE.size)) for _ in range(count)]
        if any(size_problem(*size) or size[0] * size[1] > pool.max_pixels for size in sizes):
            raise _Lost("it sent an image that is too large")
        text = self._read(length).decode("utf-8", "replace").replace("\0", "\N{REPLACEMENT CHARACTER}")[:most]
        images = [Image.frombytes("RGB", size, bytes(self._read(3 * size[0] * size[1]))) for size in sizes]
        return status, text, images


PREFIX = "pyvision-mini-"


def _remove(folder: str | Path) -> None:
    """Remove what hostile code may have filled: `rm` follows no links and does not mind how deep it goes."""
    try:
        os.rmdir(folder)
    except FileNotFoundError:
        pass
    except OSError:
        subprocess.run(["rm", "-rf", "--", str(folder)], check=False, stderr=subprocess.DEVNULL)


def _remove_stale_folders() -> None:
    """Folders of runs that were killed together with their zygote: nobody holds their lock."""
    for folder in Path(tempfile.gettempdir()).glob(PREFIX + "*"):
        try:
            fd = os.open(folder, os.O_RDONLY)
        except OSError:
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if time.time() - os.fstat(fd).st_mtime > 60:
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            pass
        finally:
            os.close(fd)
