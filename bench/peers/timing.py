"""What the scripts of all peers have in common: their arguments, the clock, and the line that they print."""

import argparse
import json
import sys
import time

import torch
from peers.settings import SETTINGS, Federation, federate
from torch import Tensor

WARM_UP = 2  # rounds before the clock starts


def arguments_of(doc: str | None, *, more: argparse.ArgumentParser | None = None) -> argparse.Namespace:
    parents = [more] if more else []
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter, parents=parents
    )
    parser.add_argument("--setting", choices=SETTINGS, required=True)
    parser.add_argument("--rounds", type=int, default=50, help="that are timed, after two others")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--data-dir", default="", help="folder with the datasets' files")
    parser.add_argument("--small", action="store_true", help="few and small clients: does it run?")
    return parser.parse_args()


def federation_of(arguments: argparse.Namespace, seed: int = 0) -> Federation:
    return federate(arguments.setting, data_dir=arguments.data_dir, small=arguments.small, seed=seed)


class Clock:
    """Times ``rounds`` rounds after the warm-up; ``tick`` is called at the end of every round."""

    def __init__(self, rounds: int, device: str) -> None:
        self.rounds, self._device = rounds, torch.device(device)
        self.ticks, self.samples, self.seconds, self._began = 0, 0, 0.0, 0.0

    @property
    def last(self) -> int:
        """Number of rounds to run, with those of the warm-up."""
        return WARM_UP + self.rounds

    def tick(self, trained: int) -> None:
        """Note the end of a round; ``trained`` are all samples that were trained so far."""
        self.ticks += 1
        if self.ticks == WARM_UP:
            self._wait()
            if self._device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(self._device)
            self.samples, self._began = -trained, time.perf_counter()
        elif self.ticks == self.last:
            self._wait()
            self.seconds = time.perf_counter() - self._began
            self.samples += trained

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    @property
    def memory(self) -> float | None:
        """GiB of GPU memory that PyTorch reserved at most."""
        if self._device.type != "cuda":
            return None
        return round(torch.cuda.max_memory_reserved(self._device) / 2**30, 2)


def report(
    peer: str,
    version: str,
    arguments: argparse.Namespace,
    clock: Clock,
    federations: list[Federation],
    state_dict: dict[str, Tensor],
    note: str = "",
) -> None:
    """Print the line of a peer: what was run, how long it took, and what the model then knew."""
    assert clock.seconds > 0, f"{clock.ticks} rounds were run, not {clock.last}"
    federation, seeds = federations[0], len(federations)
    expected = sum(each.samples(WARM_UP, clock.last) for each in federations)
    if clock.samples != expected:
        note = f"{note}; trained {clock.samples} samples, not {expected}".removeprefix("; ")
    device = torch.cuda.get_device_name(0) if arguments.device.startswith("cuda") else "CPU"
    line = {
        "peer": peer,
        "version": version,
        "setting": arguments.setting,
        "rounds": clock.rounds,
        "runs": seeds,
        "samples": clock.samples,
        "expected_samples": expected,
        "seconds": round(clock.seconds, 4),
        "rounds_per_s": round(clock.rounds / clock.seconds, 4),
        "samples_per_s": round(clock.samples / clock.seconds, 1),
        "accuracy": round(federation.accuracy(state_dict, arguments.device), 4),
        "gpu_gib": clock.memory,
        "data": "real" if federation.is_real else "random",
        "small": arguments.small,
        "device": device,
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "note": note,
    }
    print(json.dumps(line), flush=True)
