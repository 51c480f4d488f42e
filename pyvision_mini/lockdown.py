"""What a session's process may do: the layers it locks itself down with, from resource limits to a seccomp allowlist.

Linux only, through ctypes; a layer that this machine does not have is left out, and `pool.layers` says so.
"""

import contextlib
import ctypes
import errno
import os
import platform
import resource
import signal
import struct
import sys
from pathlib import Path

SCRATCH = 64 << 20                  # bytes of the scratch folder (where no tmpfs can be mounted: of one file)
RESERVE = 64 << 20                  # bytes of memory kept to build the reply of code that used up its own
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


def tmpfs(spec: dict) -> None:
    """A scratch folder of bounded size that only this process sees. Ordinary users may mount in a user namespace."""
    uid, gid = os.getuid(), os.getgid()
    libc("unshare", 0x10020000 if uid else 0x20000)                # CLONE_NEWUSER, CLONE_NEWNS
    for name, line in (("uid_map", f"{uid} {uid} 1"), ("setgroups", "deny"), ("gid_map", f"{gid} {gid} 1")) if uid else ():
        Path("/proc/self", name).write_text(line)
    libc("mount", None, b"/", None, 0x44000, None)                 # MS_REC | MS_PRIVATE
    options = f"size={SCRATCH},nr_inodes=8192,mode=0700".encode()
    libc("mount", b"tmpfs", spec["scratch"].encode(), b"tmpfs", 14, options)    # nosuid, nodev, noexec


def limits(spec: dict) -> None:
    Path("/proc/self/oom_score_adj").write_text("1000")            # when memory runs out, the kernel takes us first
    space = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + (spec["memory_mb"] << 20)
    tasks = int(Path("/proc/loadavg").read_text().split()[3].split("/")[1]) + 1024    # NPROC counts all tasks of a user
    for name, soft, hard in (("AS", space, space + RESERVE), ("FSIZE", SCRATCH, SCRATCH), ("CPU", 7200, 7200),
                             ("NPROC", *2 * [tasks if os.getuid() else 64]), ("NOFILE", 256, 256), ("CORE", 0, 0)):
        kind = getattr(resource, f"RLIMIT_{name}")
        ceiling = resource.getrlimit(kind)[1] % (1 << 64)          # infinity is -1
        resource.setrlimit(kind, (min(soft, ceiling), min(hard, ceiling)))


def no_new_privs(spec: dict) -> None:
    libc("prctl", 38, 1, 0, 0, 0)


def landlock(spec: dict) -> None:
    """Files: read Python, system libraries and this session's media; write the scratch folder; execute nothing."""
    abi = libc("syscall", 444, None, ctypes.c_size_t(0), 1)
    handled = (1 << (13 if abi < 2 else 14 if abi < 3 else 15 if abi < 5 else 16)) - 1
    attributes = struct.pack("<QQQ", handled, 0b11, 0b11)          # files; TCP; abstract sockets and signals
    ruleset = libc("syscall", 444, attributes, ctypes.c_size_t(8 if abi < 4 else 16 if abi < 6 else 24), 0)
    rules = [(path, 0b1100) for path in spec["readable"] + spec["videos"]] + [("/dev/null", 0b110), ("/dev/urandom", 0b100)]
    rules.append((spec["scratch"], 0b0111_0001_1011_1110))    # all but execute, devices, sockets, fifos and ioctl
    for path, rights in rules:
        if os.path.exists(path):
            fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
            rights &= handled if os.path.isdir(path) else 0b110
            libc("syscall", 445, ruleset, 1, struct.pack("<Qi", rights, fd), 0)
            os.close(fd)
    libc("syscall", 446, ruleset, 0)
    os.close(ruleset)


def own_uid(spec: dict) -> None:
    """As root: become a user that nothing else has. Capabilities go, whoever we are, but as root and with Landlock
    to bound it CAP_DAC_READ_SEARCH stays, because Python and the media may lie below /root."""
    uid, keep = 1_900_000_000 + os.getpid(), 0
    try:
        os.chown(spec["scratch"], uid, uid)
        libc("prctl", 8, 1, 0, 0, 0)                               # PR_SET_KEEPCAPS
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
        keep = 4 if "landlock" in spec["held"] else 0
    finally:
        libc("capset", struct.pack("<Ii", 0x20080522, 0), struct.pack("<6I", keep, keep, 0, 0, 0, 0))


def parent_death(spec: dict) -> None:
    libc("prctl", 1, int(signal.SIGKILL), 0, 0, 0)                 # after setuid, which clears it


def seccomp(spec: dict) -> None:
    program = ctypes.create_string_buffer(FILTER, len(FILTER))
    libc("prctl", 22, 2, struct.pack("@HP", len(FILTER) // 8, ctypes.addressof(program)), 0, 0)


def lock_down(spec: dict) -> list[str]:
    """Apply the layers in order to this process → the names of those that hold.

    spec: scratch (folder), videos and readable (paths), memory_mb, without (layers to leave out).
    """
    spec["held"] = []
    for layer in LAYERS if sys.platform == "linux" else ():
        with contextlib.suppress(OSError, AttributeError, TypeError, ValueError):
            if layer.__name__ not in spec["without"]:
                layer(spec)
                spec["held"].append(layer.__name__)
    return spec["held"]


LAYERS = (tmpfs, limits, no_new_privs, landlock, own_uid, parent_death, seccomp)
# Built once, before the forks; None on a machine whose system calls have other numbers.
FILTER = seccomp_filter() if platform.machine() in ("x86_64", "aarch64") else None
