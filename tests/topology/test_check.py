"""What cannot run without a server is refused in one line that says which part needs it."""

import pytest
from federations import quadratics

from fedncv.cli import main
from fedncv.config import RunConfig
from fedncv.engine.check import check
from fedncv.engine.choose import decide
from fedncv.methods import METHODS, find_method, needs_each_reply

SOME = {"clients": 8, "per_round": 8}


def refused(reason, **settings):
    with pytest.raises(ValueError, match=reason) as error:
        check(RunConfig(**SOME | settings))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("method", "part"),
    [
        ("fedncv", "drift looks at single replies, .* drift:memory=clients needs only sums, as in fedncv-sums"),
        ("fedavg+drift", "drift looks"),
        ("fedavg+memory", "memory looks"),
        ("fedavg+ht", "ht looks"),
        ("fedavg+labels", "labels looks"),
        ("fedavg+calibrated", "calibrated looks"),
        ("fedvarp", "fedvarp looks"),
        ("mifa", "mifa looks"),
        ("pfedsim", "pfedsim looks"),
        ("fedgen", "fedgen looks"),
        ("fedadp", "fedadp looks"),
        ("fedncv-paper", "fedncv-paper looks"),
    ],
)
def test_a_method_that_needs_single_replies_is_refused_with_the_part(method, part):
    refused(f"cannot run without a server: {part}", method=method, topology="ring")


@pytest.mark.parametrize(
    ("switch", "reason"), [("dp:noise=1", "adds its noise to sums"), ("fixed_point", "everyone has weighted means")]
)
def test_a_switch_that_acts_on_the_server_s_sums_is_refused_by_name(switch, reason):
    refused(f"cannot run without a server: .*{reason}", method=f"fedavg+{switch}", topology="ring")


def test_clients_that_never_train_have_no_model_on_a_graph():
    refused("a model of its own.* set unseen to 0", unseen=0.5, clients=16, topology="ring")


def test_every_method_runs_or_is_refused_by_its_form_or_by_itself():
    for name in METHODS:
        text = {"symmetric": "ring", "tree": "chain"}.get(find_method(name).graph, "exponential")
        if "topology" in find_method(name).refuses:
            refused("cannot run without a server: the server replaces", method=name, topology=text)
        elif find_method(name).form == "sums":
            check(RunConfig(**SOME, method=name, topology=text))
            assert needs_each_reply(name) == ""
        else:
            refused("cannot run without a server", method=name, topology=text)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"per_round": 4}, "per_round is 4, but without a server nobody draws clients.* set per_round to 8"),
        ({"per_round": 6, "unseen": 0.25}, "unseen is 0.25, but with topology 'ring' .* set unseen to 0"),
        ({"sampling": "weighted"}, "sampling=weighted draws clients, which needs a server"),
        ({"stream": "arrivals"}, "leave stream empty"),
        ({"engine": "ray"}, "engine=ray has no topologies yet"),
        ({"topology": "hexagon"}, "unknown topology 'hexagon'"),
        ({"topology": "torus", "clients": 7, "per_round": 7}, "7 clients make no torus"),
        ({"topology": "ring:"}, None),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings, reason):
    if reason is None:
        check(RunConfig(**SOME | {"topology": "ring"} | settings))
    else:
        refused(reason, **{"topology": "ring"} | settings)


@pytest.mark.parametrize("method", ["scaffold", "feddyn", "fedavgm", "fedadam", "fedncv-sums", "fedavg+average"])
def test_tracking_needs_columns_that_sum_to_one(method):
    refused("needs weights whose columns sum to one too", method=method, topology="epidemic")
    refused("do not once clients fall away", method=method, topology="one_peer_exponential", dropout=0.1)
    check(RunConfig(**SOME, method=method, topology="one_peer_exponential"))
    check(RunConfig(**SOME, method=method, topology="matching", dropout=0.1))


@pytest.mark.parametrize("method", ["fedavg", "fedprox", "fedper", "quasi_global", "fedavg+prior", "local"])
def test_methods_that_keep_the_model_alone_run_on_an_epidemic(method):
    check(RunConfig(**SOME, method=method, topology="epidemic", dropout=0.1))


def test_a_matrix_without_columns_that_sum_to_one_is_for_the_model_alone(tmp_path):
    path = tmp_path / "w.txt"
    path.write_text("0.5 0.5 0\n0.25 0.5 0.25\n0 0.5 0.5\n")
    three = {"clients": 3, "per_round": 3, "topology": f"matrix:path={path}"}
    check(RunConfig(**three))
    refused("tracks c_P over the graph", method="scaffold", **three)
    refused("the same symmetric weights in every round", method="d2", **three)
    refused("weights of topology matrix are for all clients", dropout=0.1, **three)


@pytest.mark.parametrize("topology", ["matching", "epidemic", "one_peer_exponential", "random_regular:redraw=true"])
def test_d2_needs_the_same_symmetric_weights_in_every_round(topology):
    refused(r"d2 needs the same symmetric weights in every round", method="d2", topology=topology)


@pytest.mark.parametrize("topology", ["ring", "complete", "matching", "torus"])
def test_a_tree_method_needs_a_tree(topology):
    refused(f"relaysgd relays sums on a tree, and '{topology}' is not one", method="relaysgd", topology=topology)


def test_relayed_sums_are_of_models_alone():
    refused("clients send dc_P, new too", method="relaysgd+drift:memory=clients", topology="chain")


@pytest.mark.parametrize("settings", [{"dropout": 0.1}, {"diverged": "skip"}])
def test_d2_and_relaysgd_need_everyone(settings):
    refused("d2 needs every client in every round", method="d2", topology="ring", **settings)
    refused("d2 needs every client in every round", method="d2", **settings)
    refused("relaysgd needs every client in every round", method="relaysgd", topology="chain", **settings)
    check(RunConfig(**SOME, method="relaysgd", **settings))  # with a server it is FedAvg


def test_everyone_are_the_clients_that_train():
    check(RunConfig(**SOME | {"per_round": 6}, method="d2", unseen=0.25))
    refused("d2 needs every client in every round: set per_round to 6", method="d2", unseen=0.25, per_round=5)


def test_d2_takes_no_switch_that_needs_its_update():
    for switch in ("momentum", "drift", "memory"):
        with pytest.raises(ValueError, match="d2"):
            find_method(f"d2+{switch}")


@pytest.mark.parametrize("method", ["fedavg", "scaffold"])
def test_exact_sums_need_a_server(method):
    refused(
        "cannot run without a server: .fixed_point is for exact sums", method=f"{method}+fixed_point", topology="ring"
    )


def test_a_method_of_one_s_own_is_refused_too():
    with pytest.raises(ValueError, match="cannot run without a server"):
        quadratics(find_method("fedavg+memory"), topology="chain")


def test_engines():
    assert decide([quadratics("fedavg", topology="chain", engine="sequential")]).engine == "sequential"
    with pytest.raises(ValueError, match="engine=ray has no topologies"):
        quadratics("fedavg", topology="chain", engine="ray")


def test_the_command_line_says_so_in_one_line(capsys, tmp_path):
    words = ["run", "--clients", "8", "--per-round", "8", "--out", str(tmp_path / "run"), "--model", "mlp"]
    assert main([*words, "--topology", "rign"]) == 2
    assert "did you mean 'ring'" in capsys.readouterr().err
    assert main([*words, "--topology", "ring", "--method", "fedncv"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not (tmp_path / "run").exists()
