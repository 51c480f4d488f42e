"""The program behind sandbox.py: `python -I sandbox_worker.py SETTINGS`. A zygote with numpy, PIL, matplotlib and decord loaded
forks one process per session; each locks itself down (lockdown.py) and runs what the model writes in one namespace.
"""

import builtins, contextlib, gc, io, json, linecache, os, random, resource, signal  # noqa: E401
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
from pyvision_mini.lockdown import lock_down  # noqa: E402
with contextlib.suppress(Exception):
    import decord  # noqa: F401       without it, a session that asks for a video gets an error
sys.path.pop(0)

REQUEST, REPLY, SIZE = map(struct.Struct, SETTINGS["frames"])
BUILTINS = dict(builtins.__dict__)
CallTimeout = type("TimeoutError", (BaseException,), {"__module__": "builtins"})    # `except Exception` does not catch it


def frame_times(video) -> np.ndarray:
    """When each frame of a decord reader starts, in seconds: from its time stamps, as the frame rate may vary."""
    return video.get_frame_timestamp(range(len(video)))[:, 0]


def frame_at(video, second: float) -> Image.Image:
    """The frame that is on screen at that second."""
    index = int(np.searchsorted(frame_times(video), second + 1e-6, side="right")) - 1
    return Image.fromarray(video[max(index, 0)].asnumpy())


TOOLS = {"frame_at": frame_at, "frame_times": frame_times}    # what code finds beside np, plt, Image and its media


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
        self.spec, self.calls, self.next_index = spec, 0, spec["index"]
        self.shown: list[Image.Image] = []                             # in the current call
        self.unopened = dict(enumerate(spec["videos"]))
        null = os.open(os.devnull, os.O_RDWR)
        for source, target in ((null, 0), (null, 1), (null, 2), (fd, 3)):
            os.dup2(source, target)
        os.closerange(4, 1024)
        os.environ.update(HOME=spec["scratch"], TMPDIR=spec["scratch"])
        self.held = lock_down({**spec, "readable": READABLE, "memory_mb": SETTINGS["memory_mb"], "without": SETTINGS["without"]})
        if os.getppid() != zygote:
            raise SystemExit
        os.chdir(spec["scratch"])
        random.seed(0)                                                 # so that a run repeats exactly; fork has reseeded it
        self.memory = resource.getrlimit(resource.RLIMIT_AS)
        self.namespace = {"__name__": "__main__", "np": np, "plt": plt, "Image": Image, **TOOLS}

    def show_image(self, image: Image.Image) -> None:
        """Give an image to the model: it leaves with the reply, and is the next image_clue_k here."""
        scale = min(1, (SETTINGS["max_pixels"] / max(1, image.width * image.height)) ** 0.5)
        size = [int(side * scale) for side in image.size]
        if problem := size_problem(*image.size) or size_problem(*size):
            raise ValueError(problem)
        if len(self.shown) >= SETTINGS["max_images"]:
            raise ValueError(f"at most {SETTINGS['max_images']} images can be shown in one call")
        self.namespace[f"image_clue_{self.next_index}"] = image = to_rgb(image)
        self.next_index += 1
        self.shown.append(image.resize(size, reducing_gap=2.0))

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
    try:
        while os.getppid() == SETTINGS["trainer"]:
            with contextlib.suppress(TimeoutError):
                message, fds, *_ = socket.recv_fds(control, 1 << 20, 1)
                if not message:
                    break                                              # the trainer has closed it or died
                request, answer = json.loads(message), {}
                request["scratch"] = scratch = os.path.join(SETTINGS["folder"], request["key"])
                if pid := pids.pop(scratch, 0):                        # asked for a second time: end it
                    os.killpg(pid, signal.SIGKILL)
                    answer["status"] = os.waitpid(pid, 0)[1]
                    try:
                        os.rmdir(scratch)
                    except OSError:                                    # it was not on a tmpfs; `rm` does not mind any depth
                        os.spawnvp(os.P_WAIT, "rm", ["rm", "-rf", "--", scratch])
                for fd in fds:
                    with contextlib.suppress(OSError):                 # the machine is full: no pid in the answer
                        os.mkdir(scratch, 0o700)
                        if (pid := os.fork()) == 0:
                            try:
                                Session(fd, zygote, request).live()
                            finally:
                                os._exit(1)
                        os.setpgid(pid, pid)                           # so that one signal kills what it may have forked
                        pids[scratch] = answer["pid"] = pid
                    os.close(fd)
                control.sendall(json.dumps(answer).encode())
    finally:                                                           # killed sessions write no more: then `rm` can
        for pid in pids.values():
            os.killpg(pid, signal.SIGKILL)


np.random.seed(0)                                                      # loads numpy.random, too: 8 ms that a session saves
warnings.simplefilter("ignore")
Image.init()
plt.imshow(np.zeros((4, 4))).figure.canvas.draw()                      # once, so that no session has to warm up
plt.close()
gc.freeze()                                                            # the collector must not copy shared pages
channel = socket.socket(fileno=SETTINGS["control"])
channel.settimeout(1)                                                  # to see now and then whether the trainer lives
with contextlib.suppress(OSError):                                     # the trainer was killed while it asked
    channel.sendall(b"{}")
    serve(channel)
os.execvp("rm", ["rm", "-rf", "--", SETTINGS["folder"]])
