"""Flower's SuperExec, which starts a process for each task; here no token of a task is in a command line.

    python -m fedncv.flower.executor WORKER and the arguments of flower-superexec

A token gives access to one task: its messages and its results. Command lines can be read by every user of a machine.
So the token is in a file that only its owner can read, which is removed when the process ends. While a task runs, the
time of the file WORKER is set: a node that trains does not ask the server for work.

It imports only Flower, so that it starts fast.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from flwr.supercore.cli import flower_superexec
from flwr.supercore.constant import TASK_TYPE_TO_APPIO_API_ADDRESS_ARG, TASK_TYPE_TO_COMMAND
from flwr.supercore.superexec import run_superexec
from flwr.supercore.superexec.executor import ExecutionSpec, LaunchResult, SubprocessExecutor

from fedncv.flower.keeper import touch


class Private(SubprocessExecutor):
    """Starts processes with their tokens in files."""

    def __init__(self, worker: Path) -> None:
        self._worker = worker
        self._running: list[tuple[subprocess.Popen[bytes], Path]] = []

    def launch(self, spec: ExecutionSpec) -> LaunchResult:
        descriptor, name = tempfile.mkstemp(prefix="token-", dir=self._worker.parent)  # its mode is 0600
        with os.fdopen(descriptor, "w") as file:
            file.write(spec.token)
        words = [TASK_TYPE_TO_COMMAND[spec.task_type], TASK_TYPE_TO_APPIO_API_ADDRESS_ARG[spec.task_type]]
        words += [spec.runtime_api_address, "--token-file", name]
        if spec.insecure:
            words += ["--insecure"]
        elif spec.root_certificates_path is not None:
            words += ["--root-certificates", spec.root_certificates_path]
        if spec.parent_pid is not None:
            words += ["--parent-pid", str(spec.parent_pid)]
        silent = subprocess.DEVNULL if spec.suppress_output else None
        self._running.append((subprocess.Popen(words, stdout=silent, stderr=silent), Path(name)))
        return LaunchResult.accepted()

    def reconcile(self) -> None:
        """Called every second: note that tasks run, and remove the tokens of those that have ended."""
        for process, token in list(self._running):
            if process.poll() is not None:
                token.unlink(missing_ok=True)
                self._running.remove((process, token))
        if self._running:
            touch(self._worker)

    def close(self) -> None:
        for _, token in self._running:
            token.unlink(missing_ok=True)


def main(worker: str, *arguments: str) -> None:
    place = Path(worker)
    for left in place.parent.glob("token-*"):
        left.unlink(missing_ok=True)  # of an executor that was killed

    def executor(*_: Any, **__: Any) -> Private:
        return Private(place)

    run_superexec.get_executor = executor  # type: ignore[attr-defined]  # the name that Flower looks up
    sys.argv = ["flower-superexec", *arguments]
    flower_superexec()


if __name__ == "__main__":
    main(*sys.argv[1:])
