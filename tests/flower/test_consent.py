"""A client's own rules: what does not fit is refused before training, in words that the operator sees."""

import math
import re
from dataclasses import fields, replace
from itertools import pairwise

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedncv[flower]'")

from fedncv.cli import main
from fedncv.config import RunConfig
from fedncv.flower import consent, handshake
from fedncv.flower import folder as folders
from fedncv.flower.asking import StoppedError
from fedncv.flower.consent import RULES, ClientRules, Terms, check_size, check_terms, read_client_rules
from fedncv.flower.refusals import RefusedError
from fedncv.flower.wire import ARRAYS
from fedncv.methods import METHODS
from fedncv.results import read_rows

RUN = Terms("scaffold+prior:tau=2+momentum", rounds=20, per_round=5, secure_sums=False, epsilon=math.inf)


@pytest.fixture
def config(tools):
    return replace(tools.config, clients=3, per_round=3, rounds=3, epochs=1)


def rules_of(by_hand, config, text, *, client=1):
    if not by_hand.folder.exists():
        folders.init(by_hand.folder, config, host="127.0.0.1", port=0, listen="127.0.0.1")
    (by_hand.folder / "clients" / str(client) / RULES).write_text(text)


@pytest.mark.parametrize(
    "rules",
    [
        {},
        {"methods": ["fedavg", "scaffold+momentum+prior"]},
        {"methods": ["scaffold+*"]},
        {"max_rounds": 20, "min_clients": 5},
    ],
)
def test_a_run_that_fits_is_taken(rules):
    check_terms(ClientRules(**rules), RUN)
    check_size(ClientRules(max_parameters=100), 100)


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ({"methods": ["scaffold"]}, "methods is scaffold, and the run's is scaffold+momentum+prior"),
        ({"methods": ["fed*", "scaffold+prior"]}, "methods is fed*, scaffold+prior, and the run's is scaffold+"),
        ({"max_rounds": 19}, "max_rounds is 19, and the run has 20"),
        ({"min_clients": 6}, "min_clients is 6, and the run draws 5 in a round"),
        ({"secure_sums": True}, "secure_sums is true, and the run has none"),
        ({"max_epsilon": 8.0}, "max_epsilon is 8, and the run has no differential privacy"),
    ],
)
def test_a_run_that_breaks_a_rule_is_refused_with_its_name(rules, said):
    with pytest.raises(RefusedError, match=re.escape(said)) as refused:
        check_terms(ClientRules(**rules), RUN)
    assert refused.value.code == "consent"


def test_runs_with_secure_sums_or_a_small_epsilon_fit_where_they_are_required():
    rules = ClientRules(secure_sums=True, max_epsilon=8.0)
    check_terms(rules, RUN._replace(secure_sums=True, epsilon=8.0))
    with pytest.raises(RefusedError, match="max_epsilon is 8, and the run has 8\\.1"):
        check_terms(rules, RUN._replace(secure_sums=True, epsilon=8.1))


@pytest.mark.parametrize("method", METHODS)
def test_a_method_s_own_name_allows_it_and_nothing_else(method):
    for other in METHODS:
        assert consent._matches(method, other) == (method == other)
    assert not consent._matches(method, f"{method}+prior")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("max_round = 3", "unknown rule 'max_round'; did you mean 'max_rounds'?"),
        ("max_rounds = -1", "max_rounds must be a whole number of at least 0, not -1"),
        ("max_rounds = 2.0", "max_rounds must be a whole number"),
        ("min_clients = true", "min_clients must be a whole number"),
        ("min_test_samples = 1", "min_test_samples must be a whole number of at least 2, not 1"),
        ("secure_sums = 1", "secure_sums must be true or false, not 1"),
        ('evaluate = "false"', "evaluate must be true or false, not 'false'"),
        ("max_epsilon = 0", "max_epsilon must be above 0, or inf, not 0"),
        ("max_epsilon = nan", "max_epsilon must be above 0, or inf, not nan"),
        ("max_epsilon = true", "max_epsilon must be above 0, or inf, not True"),
        ('methods = "fedavg"', "methods must be a list of names"),
        ("methods = []", "methods must be a list of names"),
        ('methods = ["fedavgg"]', "unknown method 'fedavgg'; did you mean 'fedavg'?"),
        ('methods = ["fedavg+prio"]', "unknown switch 'prio'; did you mean 'prior'?"),
        ('methods = ["fedprox:mu=0.1"]', "leave the knobs out, as in 'fedprox'"),
        ("max_rounds = ", "rules.toml"),
    ],
)
def test_a_rule_that_is_wrong_gets_one_line_at_the_client_s_start(text, said, tmp_path, capsys):
    folder = tmp_path / "trial"
    folders.init(folder, RunConfig(clients=2, per_round=2), host="127.0.0.1", port=0, listen="127.0.0.1")
    part = folder / "clients" / "1"
    (part / RULES).write_text(text)
    with pytest.raises(ValueError, match=re.escape(said)):
        read_client_rules(part)
    assert main(["federation", "client", str(part)]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert "clients/1/rules.toml" in error
    assert error.count("\n") == 1


def test_init_and_add_write_the_rules_with_comments_and_for_the_owner_alone(tmp_path):
    from fedncv.flower import members

    folder = tmp_path / "trial"
    folders.init(folder, RunConfig(clients=2, per_round=2), host="127.0.0.1", port=0, listen="127.0.0.1")
    part, _ = members.add(folder)
    for path in (folder / "clients" / "0" / RULES, part / RULES):
        assert read_client_rules(path.parent) == ClientRules()
        assert path.stat().st_mode & 0o777 == 0o600
        text = path.read_text()
        for f in fields(ClientRules):
            (before,) = [a for a, b in pairwise(text.splitlines()) if b.startswith(f"{f.name} = ")]
            assert before.startswith("# ")
    (part / RULES).unlink()
    assert read_client_rules(part) == ClientRules()  # a part of an earlier version


def test_a_run_that_a_client_refuses_stops_before_training_and_says_why(by_hand, config):
    rules_of(by_hand, config, "max_rounds = 2")
    with pytest.raises(StoppedError) as stopped:
        by_hand(config)
    assert 'client 1: its own rules.toml does not allow this run (it says "max_rounds is 2, and the run has 3")' in str(
        stopped.value
    )
    assert not any(ARRAYS in message.content for _, message, _ in by_hand.grid.sent)  # no model was sent
    rules_of(by_hand, config, "max_rounds = 3")
    by_hand(config)
    assert read_rows(by_hand.folder / "server" / "runs" / "run")[-1]["counted"] == [0, 1, 2]


def test_a_client_can_withdraw_in_mid_run(by_hand, tools, config, caplog):
    def spoil(u, group, _message, answer):
        if (u, group) == (2, "1"):
            rules_of(by_hand, config, 'methods = ["fedprox"]')
        return [answer]

    state, _ = by_hand(config, spoil=spoil)
    assert tools.compare(state, tools.sequential(config, absent={2: [1], 3: [1]})) == "equal"
    said = [record.getMessage() for record in caplog.records if record.name == "fedncv.flower"]  # the server's log
    (line,) = [each for each in said if "rules.toml does not allow" in each]
    assert "methods is fedprox, and the run's is scaffold" in line
    assert "agree on a run with whoever keeps the client" in line


@pytest.mark.slow
def test_rules_that_were_spoiled_in_mid_run_are_no_consent(by_hand, tools, config):
    def spoil(u, group, _message, answer):
        if (u, group) == (2, "2"):
            rules_of(by_hand, config, "nonsense")
        return [answer]

    state, _ = by_hand(config, spoil=spoil)
    assert tools.compare(state, tools.sequential(config, absent={3: [1]})) == "equal"


@pytest.mark.slow
def test_a_model_that_is_too_large_is_refused(by_hand, config):
    rules_of(by_hand, config, "max_parameters = 1000")
    with pytest.raises(StoppedError, match=r"max_parameters is 1000, and the run's model has \d{4,}"):
        by_hand(config)


def test_terms_are_what_a_run_has_today():
    """Neither secure sums nor differential privacy: whoever requires them is never in a run without."""
    terms = consent.terms_of(RunConfig(method="fedavg", rounds=7, clients=9, per_round=4))
    assert terms == Terms("fedavg", 7, 4, secure_sums=False, epsilon=math.inf)


# ---- an upgrade -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_upgrade_in_mid_run_ends_as_if_it_had_not_been(by_hand, tools, config, monkeypatch):
    """docs/federation.md: stop, install everywhere, --accept-version. A client that was forgotten refuses till then."""
    from fedncv.flower import joining

    class Stopped(BaseException):
        pass

    def stop(_u, group, _message, answer):
        if group == "2":
            raise Stopped
        return [answer]

    with pytest.raises(Stopped):
        by_hand(config, spoil=stop)
    new = {"fedncv": "9.9", "source": "abcdef"}
    real = handshake.check
    forgotten = [handshake.installed()]
    monkeypatch.setattr(handshake, "installed", lambda: new)
    joining.accept_version(by_hand.folder / "server" / "runs" / "run")

    def check(theirs, ours):
        real(theirs, ours | (forgotten[0] if forgotten and by_hand.asked == 1 else {}))

    hand_made = by_hand.__globals__["HandMade"]
    send = hand_made.push_messages

    def push_messages(self, messages):
        messages = list(messages)
        by_hand.asked = messages[0].metadata.dst_node_id - 1000
        return send(self, messages)

    def install(u, group, _message, answer):
        if (u, group) == (2, "2"):
            forgotten.clear()
        return [answer]

    monkeypatch.setattr(hand_made, "push_messages", push_messages)
    monkeypatch.setattr(handshake, "check", check)
    state, _ = by_hand(config, spoil=install)
    assert tools.compare(state, tools.sequential(config, absent={2: [1]})) == "equal"
    why = read_rows(by_hand.folder / "server" / "runs" / "run")[2]["refused"]["1"]
    assert "another version of fedncv" in why
