"""A simulation runs where POSIX's modules are missing, as on Windows; what does not says so in one line.

The modules and functions are hidden in a process of its own. This is not Windows: it only shows what does not need
them.
"""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fedncv import portable
from fedncv.cli import main
from fedncv.results import read_rows

HIDDEN_MODULES = ("fcntl", "grp", "pwd", "resource", "termios", "syslog")
HIDDEN_FUNCTIONS = (
    "fork", "forkpty", "fchmod", "fchown", "geteuid", "getpgrp", "getpgid", "getsid", "getuid", "killpg", "mkfifo",
    "openpty", "posix_spawn", "posix_spawnp", "pread", "pwrite", "sched_getaffinity", "setpgid", "setsid", "sysconf",
    "uname", "waitid",
)  # fmt: skip
HIDE = f"""
import os, signal, sys, types

import fcntl, matplotlib, numpy, rich, scipy, sklearn, torch, tyro  # other people's packages look at sys.platform
import multiprocessing.context, platform, subprocess, tempfile
import torch._dynamo
platform.uname()
subprocess._USE_POSIX_SPAWN = False  # Python's own

def locking(descriptor, mode, size):  # of msvcrt, as on Windows: other processes may not lock the same bytes
    assert (mode, size) == (msvcrt.LK_NBLCK, 1)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, size, os.lseek(descriptor, 0, os.SEEK_CUR))
    except BlockingIOError:
        raise PermissionError(13, "Permission denied") from None  # EACCES, which Windows reports

fcntl_open, folders = os.open, []
def no_folder(path, *args, **options):
    if isinstance(path, (str, os.PathLike)) and os.path.isdir(path):
        raise PermissionError(13, "Permission denied", str(path))
    return fcntl_open(path, *args, **options)

msvcrt = types.ModuleType("msvcrt")
msvcrt.LK_NBLCK, msvcrt.locking = 2, locking
sys.modules["msvcrt"] = msvcrt
for name in {HIDDEN_MODULES}:
    sys.modules[name] = None
for name in {HIDDEN_FUNCTIONS}:
    if hasattr(os, name):
        delattr(os, name)
for name in ("SIGKILL", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGCHLD", "pthread_sigmask", "setitimer"):
    delattr(signal, name)
os.open = no_folder
import fedncv.portable
assert fedncv.portable.fcntl is None
fedncv.portable._windows_memory_bytes = lambda: 8 * 2**30
from fedncv.cli import main
"""
QUICK = ["--model", "mlp", "--clients", "5", "--per-round", "2", "--rounds", "2", "--epochs", "1"]


def without_posix(code, folder):
    command = [sys.executable, "-c", HIDE + code]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_a_run_its_resume_and_its_table_need_no_posix_and_what_does_is_refused_in_one_line(tmp_path):
    """One process for all, because it loads torch. The run's bytes are those of an ordinary process."""
    code = f"""
quick = {QUICK}
assert main(["run", *quick, "--method", "scaffold", "--out", "runs"]) == 0
assert main(["resume", "runs", "--rounds", "3"]) == 0
assert main(["show", "runs"]) == 0
assert main(["export", "runs/scaffold-seed0"]) == 0
from fedncv.store import hold
hold(__import__("pathlib").Path("runs/scaffold-seed0"))
other = "import os; from fedncv.portable import lock; lock(os.open('runs/scaffold-seed0/.lock', os.O_RDWR))"
done = subprocess.run([sys.executable, "-c", other], stderr=subprocess.PIPE, close_fds=False)
print("another process:", done.returncode, b"LockedError" in done.stderr)
for words in (["federation", "init", "trial"], ["run", *quick, "--engine", "ray", "--out", "b"],
              ["run", *quick, "--engine", "processes", "--out", "b"],
              ["run", *quick, "--method", "scaffold", "--rows", "disk", "--out", "c"]):
    print("refused:", main(words))
"""
    done = without_posix(code, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "another process: 1 True" in done.stdout  # it was locked
    assert done.stdout.count("refused: 2") == 4
    said = [line for line in done.stderr.splitlines() if line.startswith("fedncv:")]
    assert "Traceback" not in done.stderr
    assert said[0] == "fedncv: a federation: not supported on Windows; use Linux, macOS or WSL 2"
    assert said[1] == "fedncv: a Ray cluster: not supported on Windows; use Linux, macOS or WSL 2"
    assert said[2].startswith("fedncv: engine=processes forks, which does not work on ")
    assert "state of clients on disk: not supported on Windows; use --rows memory, or Linux, macOS or WSL 2" in said[3]
    ours = ["run", *QUICK, "--method", "scaffold", "--engine", "sequential", "--layers", "torch"]
    assert main([*ours, "--rounds", "3", "--out", str(tmp_path / "ours")]) == 0
    theirs = read_rows(tmp_path / "runs" / "scaffold-seed0")
    assert theirs[-1] == read_rows(tmp_path / "ours" / "scaffold-seed0")[-1]


def test_a_lock_that_another_process_holds_is_told_from_a_file_system_without_locks(tmp_path, monkeypatch):
    def fails(number):
        def lockf(*_):
            raise OSError(number, os.strerror(number))

        return lockf

    with (tmp_path / "lock").open("w") as file:
        for number in (errno.EACCES, errno.EAGAIN):
            monkeypatch.setattr(portable.fcntl, "lockf", fails(number))
            with pytest.raises(portable.LockedError):
                portable.lock(file.fileno())
        monkeypatch.setattr(portable.fcntl, "lockf", fails(errno.ENOLCK))
        with pytest.raises(OSError, match="No locks available"):
            portable.lock(file.fileno())


def test_the_memory_is_that_of_this_machine():
    if not Path("/proc/meminfo").exists():
        pytest.skip("only Linux has /proc/meminfo")
    kilobytes = int(Path("/proc/meminfo").read_text().split()[1])
    assert portable.memory_bytes() == 1024 * kilobytes
