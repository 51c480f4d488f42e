"""Run model-written Python beside the trainer: trainer → zygote (own program, empty environment) → one process per session.

Promises: a call ends within its timeout + 2 s whatever the code does, and no process, zombie or file outlives its session.
Code reads Python, the system libraries and its own media, writes one scratch folder of bounded size, starts threads, and
reaches no other file, process, network or environment. A reply is bytes with checked lengths: never unpickled or evaluated.
Does not promise: protection against kernel bugs; secret file names and sizes (`stat` stays open); fair shares of memory and
CPU between sessions; or anything that `pool.layers` does not list. Run training in a container or VM of its own.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from PIL import Image

from .config import UserError
from .images import load_image, size_problem
from .trajectory import ToolResult

FRAMES = ("<16sI", "<16s?IB", "<II")    # nonce, bytes of code | nonce, failed, bytes of text, images | width, height
REQUEST, REPLY, SIZE = map(struct.Struct, FRAMES)
GRACE_S = 1.0                           # between the TimeoutError inside and SIGKILL
START_S = 60.0                          # for a zygote or a session to start on a busy machine
REQUIRED = {"limits", "parent_death", "no_new_privs", "landlock", "seccomp"}    # strict does not start without them
LOST = "All variables are lost: the next call starts afresh with the original inputs."
PROBE = """import os, socket
for name, reach in (("file", lambda: open({!r})), ("signal", lambda: os.kill({}, 0)), ("socket", socket.socket),
                    ("fork", lambda: os.fork() or os._exit(0))):
    try: reach(); print(name)
    except OSError: pass"""


class SandboxError(Exception):
    """The sandbox itself could not serve. Never because of what the code did."""


class SandboxPool(contextlib.AbstractContextManager):
    """Opens sessions; `workers` of them run at once, and waiting for a place is outside `timeout_s`.

    `layers`: protections that hold. `reachable`: what a self-test at the start could still reach. "strict" raises UserError
    if a required layer is missing or anything was reachable, "best_effort" prints a line. `without` leaves layers out.
    """

    def __init__(self, workers: int = 8, timeout_s: float = 30.0, memory_mb: int = 2048, max_output_chars: int = 8192,
                 max_images: int = 8, mode: str = "best_effort", max_pixels: int = 1 << 24, without: tuple[str, ...] = ()):
        self.settings = dict(timeout_s=timeout_s, memory_mb=memory_mb, max_output_chars=max_output_chars, without=without,
                             max_images=max_images, max_pixels=max_pixels, trainer=os.getpid(), frames=FRAMES,
                             packages=[path for path in sys.path if path.endswith("-packages")])
        self.slots, self._lock, self._closed = threading.BoundedSemaphore(workers), threading.Lock(), False
        self.sessions: set[SandboxSession] = set()
        self._start_zygote()
        canary = self.folder / "canary"
        canary.write_text("readable")
        probe = self.open()
        self.layers, self.reachable = probe.layers, probe.run(PROBE.format(str(canary), os.getpid())).text.split()
        probe.close()
        missing = sorted(REQUIRED - set(self.layers))
        if missing or self.reachable:
            problem = f"sandbox: not protected by {missing}, code can reach {self.reachable}"
            if mode == "strict":
                self.close()
                raise UserError(f"{problem}: needs Linux with Landlock and seccomp, or --sandbox best_effort in a container")
            print(problem, file=sys.stderr)

    def open(self, images=(), videos=()) -> SandboxSession:
        """A session with image_clue_0.. (PIL images or paths), video_clue_0.. (paths), np, plt and Image."""
        return SandboxSession(self, list(images), [os.path.realpath(video) for video in videos])

    def close(self) -> None:
        for session in list(self.sessions):
            session.close()
        with self._lock:
            self._closed = True
            self._stop_zygote()

    def __exit__(self, *_) -> None:
        self.close()

    def _start_zygote(self) -> None:
        """An own program and not a fork: that would inherit the trainer's memory, gold answers included."""
        self.folder = Path(tempfile.mkdtemp(prefix="pyvision-mini-"))
        self.folder.chmod(0o711)
        self._control, theirs = socket.socketpair()
        self._control.settimeout(START_S)
        settings = json.dumps({**self.settings, "folder": str(self.folder), "control": theirs.fileno()})
        with theirs:
            self._zygote = subprocess.Popen(
                [sys.executable, "-I", "-B", Path(__file__).with_name("sandbox_worker.py"), settings], env={},
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=[theirs.fileno()], start_new_session=True)
        with contextlib.suppress(OSError):
            if self._control.recv(4096):
                return
        self._stop_zygote()
        raise SandboxError("the sandbox did not start")

    def _stop_zygote(self) -> None:
        self._control.close()
        self._zygote.kill()                 # sessions that are left die with it
        self._zygote.wait()
        subprocess.run(["rm", "-rf", "--", self.folder], check=False)

    def ask(self, request: dict, *fds: int) -> dict:
        """The zygote's answer. If it has died, so have its sessions, and a new one answers."""
        with self._lock:
            for _ in range(2):
                if self._closed:
                    raise SandboxError("the pool is closed")
                with contextlib.suppress(OSError, ValueError):
                    socket.send_fds(self._control, [json.dumps(request).encode()], fds)
                    return json.loads(self._control.recv(4096))
                self._stop_zygote()
                self._start_zygote()
        raise SandboxError("the zygote dies again and again")


class SandboxSession:
    """One runtime whose variables live from call to call. If it had to be killed, the next call starts a fresh one with the
    same inputs; shown images are numbered on after all that came before. One call at a time."""

    def __init__(self, pool: SandboxPool, images: list, videos: list[str]):
        self.pool, self.images, self.videos = pool, images, videos
        self.next_index, self._pid, self._lock = len(images), 0, threading.Lock()    # k of the next image_clue_k
        self._start()
        pool.sessions.add(self)

    def close(self) -> None:
        with self._lock:
            self._stop()
            self.pool.sessions.discard(self)

    def run(self, code: str) -> ToolResult:
        """Run one piece of code. Whatever it does comes back as a ToolResult; SandboxError only if we cannot run it."""
        with self._lock, self.pool.slots:
            if self not in self.pool.sessions:
                raise SandboxError("the session is closed")
            if not self._pid:
                self._start()
            started, limit = time.monotonic(), self.pool.settings["timeout_s"]
            self._deadline, self._alarmed = started + limit, False
            nonce, data = os.urandom(16), code.encode("utf-8", "replace")
            try:
                os.kill(self._pid, signal.SIGCONT)
                self._move(self._channel.send, REQUEST.pack(nonce, len(data)) + data)
                failed, text, images = self._receive(nonce)
                os.kill(self._pid, signal.SIGSTOP)    # threads that the code left behind get no CPU between turns
                status = "timeout" if self._alarmed else "error" if failed else "ok"
                text += f"\n[stopped after {limit:g} s; variables are kept]" * self._alarmed
            except OSError as lost:         # gone, not yielding, or it sent something that is no reply
                code = os.waitstatus_to_exitcode(self._stop())
                how = str(lost) if not lost.errno else f"exit code {code}" if code >= 0 else signal.Signals(-code).name
                status, images = "timeout" if self._alarmed else "killed", []
                text = f"[killed: no end after {limit:g} s. {LOST}]" if self._alarmed else f"[the runtime died: {how}. {LOST}]"
            self.next_index += len(images)
            return ToolResult(status, text.lstrip("\n"), images, time.monotonic() - started)

    def _start(self) -> None:
        images, nonce = [load_image(image) for image in self.images], os.urandom(16)
        self._channel, theirs = socket.socketpair()
        self._key = nonce.hex()
        request = {"sizes": [image.size for image in images], "videos": self.videos, "index": self.next_index, "key": self._key}
        with theirs:
            self._pid = self.pool.ask(request, theirs.fileno()).get("pid", 0)
        if not self._pid:
            raise SandboxError("the zygote cannot fork a session")
        self._deadline, self._alarmed = time.monotonic() + START_S, True
        try:
            for image in images:
                self._move(self._channel.send, image.tobytes())
            self.layers = self._receive(nonce)[1].split()
            os.kill(self._pid, signal.SIGSTOP)
        except OSError as error:
            self._stop()
            raise SandboxError(f"a session did not start: {error}") from None

    def _stop(self) -> int:
        """Kill and reap the process, and remove its files; the wait status."""
        self._channel.close()
        pid, self._pid = self._pid, 0
        return self.pool.ask({"key": self._key}).get("status", signal.SIGKILL) if pid else 0

    def _move(self, move, data: bytes | bytearray) -> bytes | bytearray:
        """Send or receive all of `data`. At the deadline interrupt the code, after the grace period give up."""
        view = memoryview(data)
        while view:
            left = self._deadline - time.monotonic()
            if left <= 0 and self._alarmed:
                raise ConnectionError("it does not yield")
            if left <= 0:
                self._alarmed, self._deadline, left = True, time.monotonic() + GRACE_S, GRACE_S
                os.kill(self._pid, signal.SIGALRM)
            self._channel.settimeout(left)
            with contextlib.suppress(TimeoutError):
                count = move(view)
                if count == 0:
                    raise ConnectionResetError(errno.ECONNRESET, "it closed the channel")
                view = view[count:]
        return data

    def _receive(self, nonce: bytes) -> tuple[bool, str, list[Image.Image]]:
        """One reply. Its sender may be hostile: every number is checked before anything is allocated for it."""
        def read(count: int) -> bytearray:
            return self._move(self._channel.recv_into, bytearray(count))

        limits = self.pool.settings
        echo, failed, length, count = REPLY.unpack(read(REPLY.size))
        room = limits["max_output_chars"] + 2000    # for the error under the printed text
        if echo != nonce or length > 4 * room or count > limits["max_images"]:
            raise ConnectionError("it wrote to the reply channel")
        sizes = [SIZE.unpack(read(SIZE.size)) for _ in range(count)]
        if any(size_problem(w, h) or w * h > limits["max_pixels"] for w, h in sizes):
            raise ConnectionError("it sent an image of a wrong size")
        text = read(length).decode("utf-8", "replace").replace("\0", "\N{REPLACEMENT CHARACTER}")[:room]
        return failed, text, [Image.frombytes("RGB", (w, h), bytes(read(3 * w * h))) for w, h in sizes]
