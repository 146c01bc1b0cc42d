"""A client's own device. Without a GPU, what is tested is who asks for it, and where its tensors are put."""

from collections import namedtuple
from dataclasses import replace

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedncv[flower]'")

import torch
from torch.testing import assert_close

from fedncv.config import write_toml
from fedncv.engine import problem as problems
from fedncv.engine.evaluate import score_before
from fedncv.engine.local import train
from fedncv.engine.problem import Kept, arrivals, build, start
from fedncv.flower import folder as folders
from fedncv.flower.client import client_of
from fedncv.flower.halves import client_problem
from fedncv.flower.handshake import identity_of
from fedncv.flower.own import Own
from fedncv.flower.refusals import RefusedError
from fedncv.flower.samples import read

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture
def part(tmp_path, tools):
    folders.init(tmp_path / "trial", tools.config, host="127.0.0.1", port=0, listen="127.0.0.1")
    return tmp_path / "trial" / "clients" / "1"


def test_the_model_is_built_for_the_client_s_device_and_the_run_stays_the_same_for_all(part, tools, monkeypatch):
    """The settings that both sides compare say nothing about the device."""
    asked = []
    monkeypatch.setattr(problems, "find_device", lambda name: asked.append(name) or torch.device("cpu"))
    problem = client_problem(tools.config, read(part / "data"), 1, device="cuda:1")
    assert asked == ["cuda:1"]
    assert problem.config == tools.config
    assert identity_of(problem.config) == identity_of(tools.config)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_device_that_is_gone_is_refused_by_name(part, tools):
    with pytest.raises(RefusedError, match="device is 'cuda', but torch sees no GPU") as refused:
        client_of(write_toml(tools.config), "run", 1, part, device="cuda")
    assert (refused.value.code, refused.value.said) == ("device", "cuda")


def test_what_a_client_keeps_comes_back_to_the_device_of_its_model(tmp_path, monkeypatch):
    """The file is the same for every device; here "meta" stands for one that is not the CPU."""
    kept = namedtuple("Kept", Kept._fields)(torch.ones(3), torch.zeros(2))
    own = Own(tmp_path, "run")
    own.write(4, Kept(*kept))
    there = own._read(4, Kept(torch.ones(3, device="meta"), torch.zeros(2)))
    assert (there.own.device.type, there.buffers_R.device.type) == ("meta", "cpu")
    assert torch.equal(own._read(4, Kept(torch.zeros(3), torch.ones(2))).own, torch.ones(3))


@GPU
@pytest.mark.parametrize("method", ["fedavg", "scaffold", "fedncv"])
def test_a_gpu_gives_the_cpu_s_reply_and_score_to_rounding(method, tools, part):
    config = replace(tools.config, method=method, dtype="float64")
    reference = build(config)
    ours = client_problem(config, read(part / "data"), 1, device="cuda")
    (there,) = arrivals(reference, start(reference), [1])
    (here,) = arrivals(ours, start(ours), [1])
    for expected, found in zip(train(reference, 0, there).up, train(ours, 0, here).up, strict=True):
        assert_close(found.cpu(), expected, rtol=1e-9, atol=1e-11)
    assert score_before(ours, 0, here, None)[0].total == score_before(reference, 0, there, None)[0].total
