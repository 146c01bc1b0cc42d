"""How a method is named: name:knob=value+switch:knob=value."""

import pytest
from federations import tiny, train
from torch.testing import assert_close

from fedncv.methods import find_method


@pytest.mark.parametrize("text", ["fednova", "fedprox", "fedprox:mu=0.3", "fedavg+prior", "fednova+momentum:beta=0.2"])
def test_a_name_makes_the_method_it_names(text):
    """Each has what the text says of it: the declared uploads and the switches."""
    method = find_method(text)
    assert set(method.reveals) == ({"d_P", "a"} if "fednova" in text else {"delta_P"})
    assert method.switches == tuple(part.partition(":")[0] for part in text.split("+")[1:])


def test_knobs_reach_the_method_and_the_switch():
    """mu = 0 and beta = 0 leave FedAvg to the last bit; the knobs' other values do not."""
    fedavg = train(tiny("fedavg"), rounds=2).server.x_P
    assert_close(train(tiny("fedprox:mu=0"), rounds=2).server.x_P, fedavg, rtol=0, atol=0)
    assert_close(train(tiny("fedavg+momentum:beta=0"), rounds=2).server.x_P, fedavg, rtol=0, atol=0)
    assert not train(tiny("fedprox:mu=3"), rounds=2).server.x_P.equal(fedavg)
    assert not train(tiny("fedavg+momentum:beta=0.9"), rounds=2).server.server.x_P.equal(fedavg)


@pytest.mark.parametrize("text", ["fednova:mu=1", "local:clip=2"])
def test_a_method_without_knobs_takes_none(text):
    with pytest.raises(ValueError, match=r"has no knob .* \(it has none\)"):
        find_method(text)


def test_a_switch_named_twice_is_refused():
    with pytest.raises(ValueError, match="names prior twice"):
        find_method("fedavg+prior+prior")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fedavgg", "unknown method 'fedavgg'; did you mean 'fedavg'"),
        ("fedavg+prio", "unknown switch 'prio'; did you mean 'prior'"),
    ],
)
def test_a_typo_is_named_with_its_kind(text, message):
    with pytest.raises(ValueError, match=message):
        find_method(text)


def test_a_plus_in_a_number_is_no_switch():
    assert find_method("fedprox:mu=1e+3").switches == ()
