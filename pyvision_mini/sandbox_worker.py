"""The program behind sandbox.py: `python -I sandbox_worker.py SETTINGS`. A zygote with numpy, PIL, matplotlib and decord loaded
forks one process per session; each locks itself down (LAYERS, in order) and runs what the model writes in one namespace.
"""

import builtins, contextlib, ctypes, errno, gc, io, json, linecache, os, platform, random, resource, signal  # noqa: E401
import socket, struct, sys, traceback, warnings  # noqa: E401
from pathlib import Path

SETTINGS = json.loads(sys.argv[1])
os.environ.update(OPENBLAS_NUM_THREADS="1", OMP_NUM_THREADS="1", MPLBACKEND="agg", PATH=os.defpath)    # decord reads PATH
sys.path += [path for path in SETTINGS["packages"] if path not in sys.path]
READABLE = ["/usr", "/lib", "/lib64", "/etc/ld.so.cache", sys.prefix, sys.base_prefix, *sys.path]
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import matplotlib.pyplot as plt  # noqa: E402
import numpy as np  # noqa: E402
from matplotlib._pylab_helpers import Gcf  # noqa: E402
from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from PIL import Image  # noqa: E402
from pyvision_mini.images import size_problem, to_rgb  # noqa: E402
with contextlib.suppress(Exception):
    import decord  # noqa: F401       without it, a session that asks for a video gets an error
sys.path.pop(0)

REQUEST, REPLY, SIZE = map(struct.Struct, SETTINGS["frames"])
SCRATCH = 64 << 20                  # bytes of the scratch folder (where no tmpfs can be mounted: of one file)
RESERVE = 64 << 20                  # bytes of memory kept to build the reply of code that used up its own
BUILTINS = dict(builtins.__dict__)
CallTimeout = type("TimeoutError", (BaseException,), {"__module__": "builtins"})    # `except Exception` does not catch it
LAYERS = ("tmpfs", "limits", "no_new_privs", "landlock", "own_uid", "parent_death", "seccomp")
# System calls, "name x86_64 aarch64". All that are not here fail with EPERM.
ALLOWED = """read 0 63, write 1 64, open 2 -, close 3 57, stat 4 -, fstat 5 80, lstat 6 -, poll 7 -, lseek 8 62, mmap 9 222,
mprotect 10 226, munmap 11 215, brk 12 214, rt_sigaction 13 134, rt_sigprocmask 14 135, rt_sigreturn 15 139, pread64 17 67,
pwrite64 18 68, readv 19 65, writev 20 66, access 21 -, pipe 22 -, select 23 -, sched_yield 24 124, mremap 25 216, madvise 28 233,
dup 32 23, dup2 33 -, nanosleep 35 101, getpid 39 172, exit 60 93, uname 63 160, flock 73 32, fsync 74 82, ftruncate 77 46,
getcwd 79 17, chdir 80 49, fchdir 81 50, rename 82 -, mkdir 83 -, rmdir 84 -, link 86 -, unlink 87 -, symlink 88 -, readlink 89 -,
umask 95 166, gettimeofday 96 169, getrusage 98 165, sysinfo 99 179, times 100 153, getuid 102 174, getgid 104 176, geteuid 107 175,
getegid 108 177, getppid 110 173, sigaltstack 131 132, statfs 137 43, fstatfs 138 44, gettid 186 178, futex 202 98,
sched_getaffinity 204 123, getdents64 217 61, restart_syscall 219 128, clock_gettime 228 113, clock_getres 229 114,
clock_nanosleep 230 115, exit_group 231 94, openat 257 56, mkdirat 258 34, newfstatat 262 79, unlinkat 263 35, renameat 264 38,
linkat 265 37, symlinkat 266 36, readlinkat 267 78, faccessat 269 48, pselect6 270 72, ppoll 271 73, set_robust_list 273 99,
fallocate 285 47, dup3 292 24, pipe2 293 59, renameat2 316 276, getrandom 318 278, statx 332 291, rseq 334 293, faccessat2 439 439"""
# Answered with success but not done: Landlock does not cover them, and libraries expect them to work.
IGNORED = """chmod 90 -, fchmod 91 52, utime 132 -, listxattr 194 11, llistxattr 195 12, flistxattr 196 13, utimes 235 -,
fchmodat 268 53, utimensat 280 88, fchmodat2 452 452"""
CHECKED = (                         # allowed for these values of one argument
    ("fcntl 72 25", 1, (0, 1, 2, 3, 4, 5, 6, 7, 36, 37, 38, 1030)),    # dup, flags, locks; not F_SETOWN, which sends signals
    ("ioctl 16 29", 1, (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)),    # terminal state, FIONREAD, FIONBIO, F(N)CLEX
    ("prctl 157 167", 0, (15, 16)),                                    # thread names; not the parent-death signal
    ("prlimit64 302 261", 0, (0,)),                                    # of this process
    ("clone 56 220", 0, ()),                                           # threads: by the flag CLONE_THREAD
)


def seccomp_filter() -> bytes:
    """The tables above as BPF: rows of (code, jump if true, jump if false, constant), where jumps count rows."""
    column, arch = {"x86_64": (1, 0xC000003E), "aarch64": (2, 0xC00000B7)}[platform.machine()]    # AUDIT_ARCH
    allow, answer = 0x7FFF0000, 0x00050000                             # answer: fail with this errno, 0 is success
    load, end = 0x20, (0x06, 0, 0, answer | errno.EPERM)

    def numbers(table: str) -> list[int]:
        return [int(row.split()[column]) for row in table.split(",") if row.split()[column] != "-"]

    def when(values, verdict: int, test: int = 0x15) -> list[tuple]:   # test: 0x15 equal, 0x45 has one of the bits
        return [row for value in values for row in ((test, 0, 1, value), (0x06, 0, 0, verdict))]

    rows = [(load, 0, 0, 4), (0x15, 1, 0, arch), end, (load, 0, 0, 0)]  # another architecture has other numbers
    rows += when(numbers(ALLOWED), allow) + when(numbers(IGNORED), answer)
    rows += when([435], answer | errno.ENOSYS)                         # clone3 hides its flags; libc falls back to clone
    for call, argument, values in CHECKED:
        checks = when(values, allow) or when([0x10000], allow, 0x45)
        rows += [(0x15, 0, len(checks) + 2, *numbers(call)), (load, 0, 0, 16 + 8 * argument), *checks, end]
    return b"".join(struct.pack("<HBBI", *row) for row in rows + [end])


def libc(name: str, *args) -> int:
    """Call a C function; OSError if it fails, AttributeError where it does not exist."""
    if (result := getattr(ctypes.CDLL(None, use_errno=True), name)(*args)) < 0:
        raise OSError(ctypes.get_errno(), name)
    return result


def frame_times(video) -> np.ndarray:
    """When each frame of a decord reader starts, in seconds: from its time stamps, as the frame rate may vary."""
    return video.get_frame_timestamp(range(len(video)))[:, 0]


def frame_at(video, second: float) -> Image.Image:
    """The frame that is on screen at that second."""
    index = int(np.searchsorted(frame_times(video), second + 1e-6, side="right")) - 1
    return Image.fromarray(video[max(index, 0)].asnumpy())


class Output(io.StringIO):
    """sys.stdout and sys.stderr of one call: keeps the first `room` characters and counts the rest."""

    room, cut = SETTINGS["max_output_chars"], 0

    def write(self, text: str) -> int:
        kept = text[: self.room]
        self.room, self.cut = self.room - len(kept), self.cut + len(text) - len(kept)
        super().write(kept)
        return len(text)


class Session:
    """One process: first the layers it locks itself down with, then running code. Descriptor 3 is its channel."""

    def __init__(self, fd: int, zygote: int, spec: dict):
        self.spec, self.calls, self.next_index, self.held = spec, 0, spec["index"], []
        self.shown: list[Image.Image] = []                             # in the current call
        self.unopened = dict(enumerate(spec["videos"]))
        null = os.open(os.devnull, os.O_RDWR)
        for source, target in ((null, 0), (null, 1), (null, 2), (fd, 3)):
            os.dup2(source, target)
        os.closerange(4, 1024)
        os.environ.update(HOME=spec["scratch"], TMPDIR=spec["scratch"])
        for name in LAYERS if sys.platform == "linux" else ():
            with contextlib.suppress(OSError, AttributeError, NameError, ValueError):    # not here: `pool.layers` says so
                if name not in SETTINGS["without"]:
                    getattr(self, name)()
                    self.held.append(name)
        if os.getppid() != zygote:
            raise SystemExit
        os.chdir(spec["scratch"])
        random.seed(0)                                                 # so that a run repeats exactly; fork has reseeded it
        self.memory = resource.getrlimit(resource.RLIMIT_AS)
        self.namespace = {"__name__": "__main__", "np": np, "plt": plt, "Image": Image,
                          "frame_at": frame_at, "frame_times": frame_times}

    def tmpfs(self) -> None:
        """A scratch folder of bounded size that only this process sees. Ordinary users may mount in a user namespace."""
        uid, gid = os.getuid(), os.getgid()
        libc("unshare", 0x10020000 if uid else 0x20000)                # CLONE_NEWUSER, CLONE_NEWNS
        for name, line in (("uid_map", f"{uid} {uid} 1"), ("setgroups", "deny"), ("gid_map", f"{gid} {gid} 1")) if uid else ():
            Path("/proc/self", name).write_text(line)
        libc("mount", None, b"/", None, 0x44000, None)                 # MS_REC | MS_PRIVATE
        options = f"size={SCRATCH},nr_inodes=8192,mode=0700".encode()
        libc("mount", b"tmpfs", self.spec["scratch"].encode(), b"tmpfs", 14, options)    # nosuid, nodev, noexec

    def limits(self) -> None:
        Path("/proc/self/oom_score_adj").write_text("1000")            # when memory runs out, the kernel takes us first
        space = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + (SETTINGS["memory_mb"] << 20)
        tasks = int(Path("/proc/loadavg").read_text().split()[3].split("/")[1]) + 1024    # NPROC counts all tasks of a user
        for name, soft, hard in (("AS", space, space + RESERVE), ("FSIZE", SCRATCH, SCRATCH), ("CPU", 7200, 7200),
                                 ("NPROC", *2 * [tasks if os.getuid() else 64]), ("NOFILE", 256, 256), ("CORE", 0, 0)):
            kind = getattr(resource, f"RLIMIT_{name}")
            ceiling = resource.getrlimit(kind)[1] % (1 << 64)          # infinity is -1
            resource.setrlimit(kind, (min(soft, ceiling), min(hard, ceiling)))

    def no_new_privs(self) -> None:
        libc("prctl", 38, 1, 0, 0, 0)

    def landlock(self) -> None:
        """Files: read Python, system libraries and this session's media; write the scratch folder; execute nothing."""
        abi = libc("syscall", 444, None, ctypes.c_size_t(0), 1)
        handled = (1 << (13 if abi < 2 else 14 if abi < 3 else 15 if abi < 5 else 16)) - 1
        attributes = struct.pack("<QQQ", handled, 0b11, 0b11)          # files; TCP; abstract sockets and signals
        ruleset = libc("syscall", 444, attributes, ctypes.c_size_t(8 if abi < 4 else 16 if abi < 6 else 24), 0)
        rules = [(path, 0b1100) for path in READABLE + self.spec["videos"]] + [("/dev/null", 0b110), ("/dev/urandom", 0b100)]
        rules.append((self.spec["scratch"], 0b0111_0001_1011_1110))    # all but execute, devices, sockets, fifos and ioctl
        for path, rights in rules:
            if os.path.exists(path):
                fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
                rights &= handled if os.path.isdir(path) else 0b110
                libc("syscall", 445, ruleset, 1, struct.pack("<Qi", rights, fd), 0)
                os.close(fd)
        libc("syscall", 446, ruleset, 0)
        os.close(ruleset)

    def own_uid(self) -> None:
        """As root: become a user that nothing else has. Capabilities go, whoever we are, but as root and with Landlock
        to bound it CAP_DAC_READ_SEARCH stays, because Python and the media may lie below /root."""
        uid, keep = 1_900_000_000 + os.getpid(), 0
        try:
            os.chown(self.spec["scratch"], uid, uid)
            libc("prctl", 8, 1, 0, 0, 0)                               # PR_SET_KEEPCAPS
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            keep = 4 if "landlock" in self.held else 0
        finally:
            libc("capset", struct.pack("<Ii", 0x20080522, 0), struct.pack("<6I", keep, keep, 0, 0, 0, 0))

    def parent_death(self) -> None:
        libc("prctl", 1, int(signal.SIGKILL), 0, 0, 0)                 # after setuid, which clears it

    def seccomp(self) -> None:
        libc("prctl", 22, 2, struct.pack("@HP", len(FILTER) // 8, ctypes.addressof(FILTER)), 0, 0)

    def show_image(self, image: Image.Image) -> None:
        """Give an image to the model: it leaves with the reply, and is the next image_clue_k here."""
        if problem := size_problem(*image.size):
            raise ValueError(problem)
        if len(self.shown) >= SETTINGS["max_images"]:
            raise ValueError(f"at most {SETTINGS['max_images']} images can be shown in one call")
        self.namespace[f"image_clue_{self.next_index}"] = image = to_rgb(image)
        self.next_index += 1
        scale = min(1, (SETTINGS["max_pixels"] / (image.width * image.height)) ** 0.5)
        self.shown.append(image.resize([max(1, int(side * scale)) for side in image.size], reducing_gap=2.0))

    def show_figure(self, figure: Figure) -> None:
        Gcf.destroy_fig(figure)
        width, height = (int(side) for side in figure.bbox.size)
        if width * height > SETTINGS["max_pixels"]:
            raise ValueError(f"the figure has {width}x{height} pixels, more than {SETTINGS['max_pixels']} in all")
        canvas = figure.canvas if isinstance(figure.canvas, FigureCanvasAgg) else FigureCanvasAgg(figure)
        canvas.draw()
        self.show_image(Image.frombytes("RGBA", canvas.get_width_height(), bytes(canvas.buffer_rgba())))

    def patch(self, pil_crop=Image.Image.crop) -> None:
        """Every spelling of "show" leads here. Done before each call, because code may overwrite it."""
        def crop(image, box=None):                                     # PIL: empty images, and black ones from outside
            left, top, right, bottom = box or (0, 0, *image.size)
            if not (max(left, 0) < min(right, image.width) and max(top, 0) < min(bottom, image.height)):
                raise ValueError(f"crop box {tuple(box)} has nothing of the image of {image.width}x{image.height} pixels")
            return pil_crop(image, box)

        def show_all(*_, **__):
            for manager in Gcf.get_all_fig_managers():
                self.show_figure(manager.canvas.figure)

        plt.show, Figure.show, Image.Image.crop = show_all, lambda figure, *_, **__: self.show_figure(figure), crop
        Image.Image.show = lambda image, *_, **__: self.show_image(image)

    def open_videos(self) -> None:
        """Here and at first use: a reader that was open before the fork would hang."""
        for i, path in list(self.unopened.items()):
            try:
                import decord
                self.namespace[f"video_clue_{i}"] = decord.VideoReader(path, num_threads=1)
            except Exception as error:                                 # decord raises its own types, or ImportError
                reason = " ".join(str(error).split())[:120]
                raise ValueError(f"cannot read video_clue_{i} ({os.path.basename(path)[-100:]}): {reason}") from None
            del self.unopened[i]

    def run(self, code: str) -> tuple[bool, str]:
        """One call → (did it fail, text). The images are in `shown`."""
        def on_alarm(*_):
            raise CallTimeout(f"the call took longer than {SETTINGS['timeout_s']:g} s")

        self.calls += 1
        name, error = f"<call {self.calls}>", None
        linecache.cache[name] = (len(code), None, code.splitlines(True), name)
        output = sys.stdout = sys.stderr = Output()
        resource.setrlimit(resource.RLIMIT_AS, self.memory)
        self.patch()
        try:
            try:
                signal.signal(signal.SIGALRM, on_alarm)
                if "video_clue" in code:
                    self.open_videos()
                exec(compile(code, name, "exec"), self.namespace)
            finally:
                builtins.__dict__.update(BUILTINS)
                signal.signal(signal.SIGALRM, signal.SIG_IGN)
        except BaseException as caught:                                # whatever it is, the session goes on
            error = caught
        resource.setrlimit(resource.RLIMIT_AS, (self.memory[1], self.memory[1]))
        Gcf.destroy_all()
        text = output.getvalue() + f"\n[{output.cut} more characters were cut]" * (output.cut > 0)
        if error is not None:                                          # the last lines of the code it passed through
            frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith("<call ")]
            text += "\n" * (not text.endswith("\n") and text != "")
            text += "".join(f"line {frame.lineno}: {(frame.line or '')[:100]}\n" for frame in frames[-3:])
            text += "".join(traceback.format_exception_only(error)).strip()[:400]
        return error is not None, text

    def live(self) -> None:
        """Say that it is ready, then answer calls until the trainer closes the channel: `unpack` fails and ends it."""
        incoming, outgoing = open(3, "rb", closefd=False), open(3, "wb", closefd=False)
        for i, (width, height) in enumerate(self.spec["sizes"]):
            self.namespace[f"image_clue_{i}"] = Image.frombytes("RGB", (width, height), incoming.read(3 * width * height))
        nonce, failed, text = bytes.fromhex(self.spec["key"]), False, " ".join(self.held)
        while True:
            body = text.replace("\0", "\N{REPLACEMENT CHARACTER}").encode("utf-8", "replace")
            outgoing.write(REPLY.pack(nonce, failed, len(body), len(self.shown)))
            outgoing.writelines([SIZE.pack(*image.size) for image in self.shown] + [body])
            outgoing.writelines(image.tobytes() for image in self.shown)
            outgoing.flush()
            self.shown.clear()
            nonce, length = REQUEST.unpack(incoming.read(REQUEST.size))
            failed, text = self.run(incoming.read(length).decode())


def serve(control: socket.socket) -> None:
    """Fork a session, or kill and reap one, when the trainer asks. Nothing is reaped before, so its pid stays its own."""
    pids: dict[str, int] = {}
    zygote = os.getpid()
    while os.getppid() == SETTINGS["trainer"]:
        with contextlib.suppress(TimeoutError):
            message, fds, *_ = socket.recv_fds(control, 1 << 20, 1)
            if not message:
                break                                                  # the trainer has closed it or died
            request, answer = json.loads(message), {}
            request["scratch"] = scratch = os.path.join(SETTINGS["folder"], request["key"])
            if pid := pids.pop(scratch, 0):                            # asked for a second time: end it
                os.killpg(pid, signal.SIGKILL)
                answer["status"] = os.waitpid(pid, 0)[1]
                try:
                    os.rmdir(scratch)
                except OSError:                                        # it was not on a tmpfs; `rm` does not mind any depth
                    os.spawnvp(os.P_WAIT, "rm", ["rm", "-rf", "--", scratch])
            for fd in fds:
                with contextlib.suppress(OSError):                     # the machine is full: no pid in the answer
                    os.mkdir(scratch, 0o700)
                    if (pid := os.fork()) == 0:
                        try:
                            Session(fd, zygote, request).live()
                        finally:
                            os._exit(1)
                    os.setpgid(pid, pid)                               # so that one signal kills what it may have forked
                    pids[scratch] = answer["pid"] = pid
                os.close(fd)
            control.sendall(json.dumps(answer).encode())
    for pid in pids.values():
        os.killpg(pid, signal.SIGKILL)


with contextlib.suppress(KeyError):                                    # no numbers for this machine
    FILTER = ctypes.create_string_buffer(seccomp_filter())
np.random.seed(0)                                                      # loads numpy.random, too: 8 ms that a session saves
warnings.simplefilter("ignore")
Image.init()
plt.imshow(np.zeros((4, 4))).figure.canvas.draw()                      # once, so that no session has to warm up
plt.close()
gc.freeze()                                                            # the collector must not copy shared pages
channel = socket.socket(fileno=SETTINGS["control"])
channel.settimeout(1)                                                  # to see now and then whether the trainer lives
channel.sendall(b"{}")
serve(channel)
os.execvp("rm", ["rm", "-rf", "--", SETTINGS["folder"]])
