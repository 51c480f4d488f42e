"""The program behind sandbox.py: `python -I sandbox_worker.py SETTINGS`. A zygote with numpy, PIL, matplotlib and decord loaded
forks one process per session; each locks itself down (LAYERS, in order) and runs what the model writes in one namespace.
"""

from __future__ import annotations

import builtins
import ctypes
import errno
import gc
import io
import json
import linecache
import os
import platform
import random
import resource
import select
import signal
import socket
import struct
import sys
import traceback
import types
import warnings

SETTINGS = json.loads(sys.argv[1])
REQUEST, REPLY, SIZE = (struct.Struct(form) for form in SETTINGS["frames"])
READABLE = ["/usr", "/lib", "/lib64", "/etc/ld.so.cache", sys.prefix, sys.base_prefix, *sys.path, *SETTINGS["packages"]]
SCRATCH_MB = 64                     # size of the scratch folder (where no tmpfs can be mounted: of one file)
RESERVE = 64 << 20                  # bytes of memory kept to build the reply of code that used up its own

# System calls, "name x86_64 aarch64". All that are not here fail with EPERM.
ALLOWED = """read 0 63, write 1 64, open 2 -, close 3 57, stat 4 -, fstat 5 80, lstat 6 -, poll 7 -, lseek 8 62, mmap 9 222,
mprotect 10 226, munmap 11 215, brk 12 214, rt_sigaction 13 134, rt_sigprocmask 14 135, rt_sigreturn 15 139, pread64 17 67,
pwrite64 18 68, readv 19 65, writev 20 66, access 21 -, pipe 22 -, select 23 -, sched_yield 24 124, mremap 25 216, madvise 28 233,
dup 32 23, dup2 33 -, nanosleep 35 101, getpid 39 172, sendfile 40 71, exit 60 93, uname 63 160, flock 73 32, fsync 74 82,
fdatasync 75 83, ftruncate 77 46, getcwd 79 17, chdir 80 49, fchdir 81 50, rename 82 -, mkdir 83 -, rmdir 84 -, creat 85 -,
link 86 -, unlink 87 -, symlink 88 -, readlink 89 -, umask 95 166, gettimeofday 96 169, getrlimit 97 163, getrusage 98 165,
sysinfo 99 179, times 100 153, getuid 102 174, getgid 104 176, geteuid 107 175, getegid 108 177, getppid 110 173,
getgroups 115 158, getresuid 118 148, getresgid 120 150, sigaltstack 131 132, statfs 137 43, fstatfs 138 44, gettid 186 178,
time 201 -, futex 202 98, sched_getaffinity 204 123, getdents64 217 61, restart_syscall 219 128, fadvise64 221 223,
clock_gettime 228 113, clock_getres 229 114, clock_nanosleep 230 115, exit_group 231 94, openat 257 56, mkdirat 258 34,
newfstatat 262 79, unlinkat 263 35, renameat 264 38, linkat 265 37, symlinkat 266 36, readlinkat 267 78, faccessat 269 48,
pselect6 270 72, ppoll 271 73, set_robust_list 273 99, fallocate 285 47, dup3 292 24, pipe2 293 59, getcpu 309 168,
renameat2 316 276, getrandom 318 278, membarrier 324 283, copy_file_range 326 285, statx 332 291, rseq 334 293,
close_range 436 436, faccessat2 439 439"""
# Answered with success but not done: Landlock does not cover them, and libraries expect them to work.
IGNORED = """chmod 90 -, fchmod 91 52, chown 92 -, fchown 93 55, lchown 94 -, utime 132 -, listxattr 194 11, llistxattr 195 12,
flistxattr 196 13, utimes 235 -, fchownat 260 54, futimesat 261 -, fchmodat 268 53, utimensat 280 88, fchmodat2 452 452"""
CHECKED = (                         # allowed for these values of one argument
    ("fcntl 72 25", 1, (0, 1, 2, 3, 4, 5, 6, 7, 36, 37, 38, 1030)),    # dup, flags, locks; not F_SETOWN, which sends signals
    ("ioctl 16 29", 1, (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)),    # terminal state, FIONREAD, FIONBIO, F(N)CLEX
    ("prctl 157 167", 0, (15, 16)),                                    # thread names; not the parent-death signal
    ("prlimit64 302 261", 0, (0,)),                                    # of this process
    ("clone 56 220", 0, ()),                                           # threads: by the flag CLONE_THREAD
)
MACHINES = {"x86_64": (1, 0xC000003E), "aarch64": (2, 0xC00000B7)}     # column of the numbers, AUDIT_ARCH


def libc(name: str, *args) -> int:
    """Call a C function; OSError if it fails, AttributeError where it does not exist."""
    result = getattr(ctypes.CDLL(None, use_errno=True), name)(*args)
    if result < 0:
        raise OSError(ctypes.get_errno(), name)
    return result


def seccomp(spec: dict) -> None:
    """The tables above as a BPF program of (code, jump if true, jump if false, constant); jumps count instructions."""
    column, arch = MACHINES[platform.machine()]
    allow, answer = 0x7FFF0000, 0x00050000                             # answer: fail with this errno, 0 is success
    load, end = 0x20, (0x06, 0, 0, answer | errno.EPERM)
    code = [(load, 0, 0, 4), (0x15, 1, 0, arch), end, (load, 0, 0, 0)]  # another ABI has other numbers

    def numbers(table: str) -> list[int]:
        return [int(row.split()[column]) for row in table.split(",") if row.split()[column] != "-"]

    def when(values: list[int], verdict: int, test: int = 0x15) -> list[tuple]:    # test: 0x15 equal, 0x45 has the bit
        return [row for value in values for row in ((test, 0, 1, value), (0x06, 0, 0, verdict))]

    code += when(numbers(ALLOWED), allow) + when(numbers(IGNORED), answer)
    code += when([435], answer | errno.ENOSYS)                         # clone3 hides its flags from us; libc falls back to clone
    for call, argument, values in CHECKED:
        checks = when(values, allow) or when([0x10000], allow, 0x45)
        code += [(0x15, 0, len(checks) + 2, *numbers(call)), (load, 0, 0, 16 + 8 * argument), *checks, end]
    program = ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *row) for row in code + [end]))
    libc("prctl", 22, 2, struct.pack("@HP", len(code) + 1, ctypes.addressof(program)), 0, 0)


def landlock(spec: dict) -> None:
    """Files: read Python, system libraries and this session's media; write the scratch folder; execute nothing."""
    abi = libc("syscall", 444, None, ctypes.c_size_t(0), 1)
    handled = (1 << (13 if abi < 2 else 14 if abi < 3 else 15 if abi < 5 else 16)) - 1
    attributes = struct.pack("<QQQ", handled, 0b11, 0b11)              # files; TCP; abstract sockets and signals
    ruleset = libc("syscall", 444, attributes, ctypes.c_size_t(8 if abi < 4 else 16 if abi < 6 else 24), 0)
    rules = [(path, 0b1100) for path in READABLE + spec["videos"]] + [("/dev/null", 0b110), ("/dev/urandom", 0b100)]
    rules.append((spec["scratch"], 0b0111_0001_1011_1110))             # all but execute, devices, sockets, fifos and ioctl
    for path, rights in rules:
        if os.path.exists(path):
            fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
            rights &= handled if os.path.isdir(path) else 0b110
            libc("syscall", 445, ruleset, 1, struct.pack("<Qi", rights, fd), 0)
            os.close(fd)
    libc("syscall", 446, ruleset, 0)
    os.close(ruleset)


def tmpfs(spec: dict) -> None:
    """A scratch folder of bounded size that only this process sees. Ordinary users may mount in a user namespace."""
    uid, gid = os.getuid(), os.getgid()
    libc("unshare", 0x10020000 if uid else 0x20000)                    # CLONE_NEWUSER, CLONE_NEWNS
    maps = {"uid_map": f"{uid} {uid} 1", "setgroups": "deny", "gid_map": f"{gid} {gid} 1"} if uid else {}
    for name, line in maps.items():
        write(f"/proc/self/{name}", line)
    libc("mount", None, b"/", None, 0x44000, None)                     # MS_REC | MS_PRIVATE
    libc("mount", b"tmpfs", spec["scratch"].encode(), b"tmpfs", 14,    # nosuid, nodev, noexec
         f"size={SCRATCH_MB}m,nr_inodes=8192,mode=0700".encode())


def limits(spec: dict) -> None:
    with open("/proc/self/statm") as statm, open("/proc/loadavg") as loadavg:
        space = int(statm.read().split()[0]) * resource.getpagesize() + (SETTINGS["memory_mb"] << 20)
        tasks = int(loadavg.read().split()[3].split("/")[1]) + 1024    # NPROC counts per user, others' tasks too
    for name, soft, hard in (("AS", space, space + RESERVE), ("FSIZE", SCRATCH_MB << 20, SCRATCH_MB << 20),
                             ("NPROC", 64 if os.getuid() == 0 else tasks, tasks), ("NOFILE", 256, 256), ("CORE", 0, 0)):
        kind = getattr(resource, f"RLIMIT_{name}")
        ceiling = resource.getrlimit(kind)[1] % (1 << 64)              # infinity is -1
        resource.setrlimit(kind, (min(soft, ceiling), min(hard, ceiling)))


def own_uid(spec: dict) -> None:
    """As root: become a user that nothing else has. CAP_DAC_READ_SEARCH stays, because Python and media may lie below
    /root: Landlock says what is readable, and without it `capabilities` takes this one too."""
    if os.getuid():
        raise PermissionError
    uid = 1_900_000_000 + os.getpid()
    os.chown(spec["scratch"], uid, uid)
    libc("prctl", 8, 1, 0, 0, 0)                                       # PR_SET_KEEPCAPS
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    keep_capabilities(1 << 2)


def keep_capabilities(mask: int) -> None:
    libc("capset", struct.pack("<Ii", 0x20080522, 0), struct.pack("<6I", mask, mask, 0, 0, 0, 0))


def capabilities(spec: dict) -> None:
    keep_capabilities(1 << 2 if {"own_uid", "landlock"} <= set(spec["held"]) else 0)


def write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


LAYERS = {
    "own_group": lambda spec: os.setpgid(0, 0),
    "oom_first": lambda spec: write("/proc/self/oom_score_adj", "1000"),    # when memory runs out, not the trainer
    "tmpfs": tmpfs, "limits": limits, "own_uid": own_uid,
    "parent_death": lambda spec: libc("prctl", 1, int(signal.SIGKILL), 0, 0, 0),    # after setuid, which clears it
    "no_new_privs": lambda spec: libc("prctl", 38, 1, 0, 0, 0),
    "landlock": landlock, "capabilities": capabilities, "seccomp": seccomp,
}


class Output(io.StringIO):
    """sys.stdout and sys.stderr of one call: keeps the first `room` characters and counts the rest."""

    room, cut = SETTINGS["max_output_chars"], 0

    def write(self, text: str) -> int:
        kept = text[: self.room]
        self.room, self.cut = self.room - len(kept), self.cut + len(text) - len(kept)
        super().write(kept)
        return len(text)

    def close(self) -> None: ...


# A BaseException, so that `except Exception` in the code does not catch it.
CallTimeout = type("TimeoutError", (BaseException,), {"__module__": "builtins"})


def describe(error: BaseException) -> str:
    """The last lines of the model's code that the exception passed through, its type and its message."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith("<call ")]
    where = "".join(f"line {frame.lineno}: {frame.line[:100]}\n" for frame in frames[-3:])
    what = "".join(traceback.format_exception_only(error)).strip()
    return where + (what if len(what) <= 400 else what[:400] + "...")


class Runtime:
    """One session: the namespace that lives from call to call, and the images the current call has shown."""

    def __init__(self, spec: dict, images: list[Image.Image]):
        self.calls, self.running, self.next_index = 0, False, spec["index"]
        self.shown: list[Image.Image] = []
        self.unopened = dict(enumerate(spec["videos"]))
        self.space = resource.getrlimit(resource.RLIMIT_AS)
        self.builtins, self.saved_builtins = builtins.__dict__, dict(builtins.__dict__)
        module = sys.modules["__main__"] = types.ModuleType("__main__")  # so that classes of the code can be pickled
        self.namespace = module.__dict__
        self.namespace.update(np=np, plt=plt, Image=Image, **{f"image_clue_{i}": image for i, image in enumerate(images)})
        original_crop, self.close_figures = Image.Image.crop, Gcf.destroy_all

        def crop(image, box=None):
            """PIL gives empty images, and black ones from outside; the model gets told instead."""
            left, top, right, bottom = box or (0, 0, *image.size)
            if not (max(left, 0) < min(right, image.width) and max(top, 0) < min(bottom, image.height)):
                raise ValueError(f"crop box {tuple(box)} has nothing of the image of {image.width}x{image.height} pixels")
            return original_crop(image, box)

        def show_all(*_, **__):
            for manager in Gcf.get_all_fig_managers():
                self.show_figure(manager.canvas.figure)

        # Every spelling of "show" ends in self.show. Set anew before each call, because code may overwrite them.
        self.patches = [
            (plt, "show", show_all), (Figure, "show", lambda figure, *_, **__: self.show_figure(figure)),
            (FigureManagerBase, "show", lambda manager: self.show_figure(manager.canvas.figure)),
            (Image.Image, "show", lambda image, *_, **__: self.show(image)),
            (ImageShow, "show", lambda image, *_, **__: self.show(image)), (Image.Image, "crop", crop)]

    def show_figure(self, figure: Figure) -> None:
        Gcf.destroy_fig(figure)
        width, height = (int(side) for side in figure.bbox.size)
        if width * height > SETTINGS["max_pixels"]:
            raise ValueError(f"the figure has {width}x{height} pixels, more than {SETTINGS['max_pixels']} in all")
        canvas = figure.canvas if isinstance(figure.canvas, FigureCanvasAgg) else FigureCanvasAgg(figure)
        canvas.draw()
        self.show(Image.frombytes("RGBA", canvas.get_width_height(), bytes(canvas.buffer_rgba())))

    def show(self, image: Image.Image) -> None:
        """Give an image to the model: it leaves with the reply, and is the next image_clue_k here."""
        if problem := size_problem(*image.size):
            raise ValueError(problem)
        if len(self.shown) >= SETTINGS["max_images"]:
            raise ValueError(f"at most {SETTINGS['max_images']} images can be shown in one call")
        self.namespace[f"image_clue_{self.next_index}"] = image = to_rgb(image)
        self.next_index += 1
        scale = (SETTINGS["max_pixels"] / (image.width * image.height)) ** 0.5
        smaller = [max(1, int(side * scale)) for side in image.size]
        self.shown.append(image.resize(smaller, reducing_gap=2.0) if scale < 1 else image.copy())

    def open_videos(self) -> None:
        """Here and at first use: a reader that was open before the fork would hang."""
        for i in list(self.unopened):
            try:
                import decord
                self.namespace[f"video_clue_{i}"] = decord.VideoReader(self.unopened[i], num_threads=1)
            except Exception as error:                                 # decord raises its own types, or ImportError
                name, reason = os.path.basename(self.unopened[i])[-100:], " ".join(str(error).split())[:120]
                raise ValueError(f"cannot read video_clue_{i} ({name}): {reason}") from None
            del self.unopened[i]

    def alarm(self, *_) -> None:
        if self.running:
            raise CallTimeout(f"the call took longer than {SETTINGS['timeout_s']:g} s")

    def run(self, code: str) -> tuple[bool, str]:
        """One call → (did it fail, text). The images are in `shown`."""
        self.calls += 1
        name, error = f"<call {self.calls}>", None
        linecache.cache[name] = (len(code), None, code.splitlines(True), name)
        for target, attribute, function in self.patches:
            setattr(target, attribute, function)
        self.namespace["__builtins__"] = builtins
        self.shown.clear()
        output = sys.stdout = sys.stderr = Output()
        signal.signal(signal.SIGALRM, self.alarm)
        resource.setrlimit(resource.RLIMIT_AS, self.space)
        try:
            try:
                self.running = True
                if "video_clue" in code:
                    self.open_videos()
                exec(compile(code, name, "exec", dont_inherit=True), self.namespace)
            finally:
                self.running = False
                self.builtins.update(self.saved_builtins)
                resource.setrlimit(resource.RLIMIT_AS, (self.space[1], self.space[1]))
        except BaseException as caught:                                # whatever it is, the session goes on
            error = caught
        self.close_figures()
        text = output.getvalue() + f"\n[{output.cut} more characters were cut]" * (output.cut > 0)
        if error is not None:
            text += "\n" * (not text.endswith("\n") and text != "") + describe(error)
        return error is not None, text


def session(fd: int, spec: dict) -> None:
    """The life of a session's process. Descriptor 3 is its channel, all others lead nowhere."""
    null = os.open(os.devnull, os.O_RDWR)
    for source, target in ((null, 0), (null, 1), (null, 2), (fd, 3)):
        os.dup2(source, target)
    os.closerange(4, 1024)
    os.environ.update(HOME=spec["scratch"], TMPDIR=spec["scratch"])
    for name, layer in LAYERS.items():
        try:
            if name not in SETTINGS["without"]:
                layer(spec)
                spec["held"].append(name)
        except (OSError, AttributeError, KeyError, ValueError):
            pass                                                       # not on this system: `pool.layers` says so
    if os.getppid() != spec["zygote"]:
        return
    os.chdir(spec["scratch"])
    incoming, outgoing = open(3, "rb", closefd=False), open(3, "wb", closefd=False)
    images = [Image.frombytes("RGB", (w, h), incoming.read(3 * w * h)) for w, h in spec["sizes"]]
    runtime, nonce, failed, text = Runtime(spec, images), bytes.fromhex(spec["nonce"]), False, " ".join(spec["held"])
    while True:
        body = text.replace("\0", "\N{REPLACEMENT CHARACTER}").encode("utf-8", "replace")
        outgoing.write(REPLY.pack(nonce, failed, len(body), len(runtime.shown)))
        outgoing.writelines([SIZE.pack(*image.size) for image in runtime.shown] + [body])
        outgoing.writelines(image.tobytes() for image in runtime.shown)
        outgoing.flush()
        header = incoming.read(REQUEST.size)
        if not header:
            return                                                     # the trainer closed the session or died
        nonce, length = REQUEST.unpack(header)
        failed, text = runtime.run(incoming.read(length).decode())


def serve(control: socket.socket) -> None:
    """Fork a session, or kill and reap one, when the trainer asks. Nothing is reaped before, so its pid stays its own."""
    pids: dict[str, int] = {}
    poller = select.poll()
    poller.register(control, select.POLLIN)
    while os.getppid() == SETTINGS["trainer"]:
        if not poller.poll(1000):
            continue
        message, fds, *_ = socket.recv_fds(control, 1 << 20, 1)
        while message and not message.endswith(b"\n"):
            message += control.recv(1 << 20)
        if not message:
            break
        request, answer = json.loads(message), {}
        if "kill" in request:
            pid = pids.pop(request["kill"])
            os.kill(pid, signal.SIGKILL)
            answer["status"] = os.waitpid(pid, 0)[1]
        else:
            zygote, pid = os.getpid(), os.fork()
            if pid == 0:
                try:
                    session(fds[0], {**request, "zygote": zygote, "held": []})
                finally:
                    os._exit(1)
            pids[request["scratch"]] = answer["pid"] = pid
            os.close(fds[0])
        control.sendall(json.dumps(answer).encode() + b"\n")
    for pid in pids.values():
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


os.environ.update(OPENBLAS_NUM_THREADS="1", OMP_NUM_THREADS="1", MPLBACKEND="agg", PATH=os.defpath)    # decord reads PATH
sys.path += [path for path in SETTINGS["packages"] if path not in sys.path]
import matplotlib.pyplot as plt  # noqa: E402
import numpy as np  # noqa: E402
from matplotlib._pylab_helpers import Gcf  # noqa: E402
from matplotlib.backend_bases import FigureManagerBase  # noqa: E402
from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from PIL import Image, ImageShow  # noqa: E402

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from pyvision_mini.images import size_problem, to_rgb  # noqa: E402

sys.path.pop(0)
try:
    import decord  # noqa: F401
except ImportError:
    pass                                                               # said when a session asks for a video
warnings.simplefilter("ignore")
Image.init()
plt.figure().gca().imshow(np.zeros((4, 4)))                            # draw once, so that no session has to warm up
plt.gcf().canvas.draw()
plt.close("all")
random.seed(0)                                                         # in every session: a run repeats exactly
np.random.seed(0)
gc.freeze()                                                            # the collector must not copy shared pages
channel = socket.socket(fileno=SETTINGS["control"])
channel.sendall(b"{}\n")
serve(channel)
os.execvp("rm", ["rm", "-rf", "--", SETTINGS["folder"]])
