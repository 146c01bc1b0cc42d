"""A round of secure sums in one process: the sum, drop-outs at every stage, and a server that cheats."""

import numpy as np
import pytest

pytest.importorskip("cryptography")
pytest.importorskip("Crypto")

from secure_rounds import NUMBERS, Clients, key_of, unmasked

from fedncv.secure import client, server
from fedncv.secure.fixed_point import unpack
from fedncv.secure.session import RefusedError
from fedncv.secure.signatures import roster_mark

STAGES = client.STAGES


def begin(clients, **changes):
    return server.Round(clients.session(**changes))


# ---- the sum ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("neighbours", [0, 4])
@pytest.mark.parametrize("bits", [48, 64])
def test_the_unmasked_sum_is_the_plain_sum(bits, neighbours):
    clients = Clients(7)
    done = clients.run(begin(clients, bits=bits, neighbours=neighbours))
    assert np.array_equal(unmasked(done), clients.total(range(7)))


@pytest.mark.parametrize("neighbours", [0, 6])
@pytest.mark.parametrize("stage", STAGES)
def test_clients_that_drop_out_at_a_stage_change_only_who_is_summed(stage, neighbours):
    """Whoever sent a masked vector is in the sum, also if it is gone afterwards; whoever did not is not."""
    clients = Clients(9)
    done = clients.run(begin(clients, neighbours=neighbours, threshold=6), gone={stage: [2, 5]})
    stay = [u for u in range(9) if u not in (2, 5) or stage in ("confirm", "unmask")]
    assert list(done.survivors) == stay
    assert np.array_equal(unmasked(done), clients.total(stay))


def test_clients_may_drop_out_one_after_the_other_down_to_the_threshold():
    clients = Clients(6)
    gone = {"shares": [0], "masked": [3]}
    done = clients.run(begin(clients, threshold=4), gone=gone)
    assert np.array_equal(unmasked(done), clients.total([1, 2, 4, 5]))
    gone = {"keys": [1], "masked": [0], "unmask": []}
    done = clients.run(begin(clients, threshold=4, round=2), gone=gone)
    assert np.array_equal(unmasked(done), clients.total([2, 3, 4, 5]))


@pytest.mark.parametrize("stage", STAGES)
def test_fewer_than_the_threshold_stop_the_round(stage):
    clients = Clients(5)
    with pytest.raises(server.FewError, match=f"stage {stage} of round 1 has 3 replies of 5 .* threshold, 4"):
        clients.run(begin(clients, threshold=4), gone={stage: [0, 1]})


def test_a_masked_vector_says_nothing_without_the_others():
    """No word of it is one of x, and the same x looks different in every attempt."""
    clients = Clients(3)
    seen = []
    for attempt in range(1, 4):
        round = clients.run(begin(clients, attempt=attempt), until="masked")
        reply = clients.ask(0, "masked", server.request(round, 0))
        seen.append(unpack(64, reply["vector"], NUMBERS))
    flat = np.concatenate([*seen, clients.x[0].astype(np.uint64)])
    assert len(set(flat.tolist())) == 4 * NUMBERS


def test_a_server_without_the_shares_has_noise():
    """The sum of all masked vectors lacks the self masks; those without client 0's lack also its pairwise masks."""
    clients = Clients(4)
    round = clients.run(begin(clients), until="confirm")
    assert not set(round.total.tolist()) & set(clients.total(range(4)).astype(np.uint64).tolist())


def test_repeated_requests_get_the_same_reply_and_train_once():
    clients = Clients(4)
    asked = {}

    def spoil(stage, u, request):
        if stage == "masked":
            asked[u] = clients.ask(u, stage, request)["vector"]
        return request

    round = clients.run(begin(clients), spoil=spoil)
    assert np.array_equal(unmasked(round), clients.total(range(4)))
    assert clients.made == dict.fromkeys(range(4), 1)


def test_a_round_that_was_not_confirmed_can_be_begun_anew_with_new_keys():
    clients = Clients(4)
    first = clients.run(begin(clients), until="confirm")
    second = clients.run(begin(clients, attempt=2))
    assert first.keys.keys() == second.keys.keys()
    assert all(first.keys[u]["mask"] != second.keys[u]["mask"] for u in first.keys)
    assert np.array_equal(unmasked(second), clients.total(range(4)))


def test_after_unmasking_no_secret_is_left_at_the_clients():
    clients = Clients(4)
    before = clients.run(begin(clients), until="unmask")
    kept = [secret for memory in clients.memory.values() for secret in memory.secrets.values()]
    assert len(kept) == 4 * 4  # mask and share keys, seed, own shares
    clients.run(before)
    stored = str([memory.to_json() for memory in clients.memory.values()])
    assert not [secret for secret in kept if secret in stored and secret not in str(before.to_json())]
    assert all(memory.vector is None and memory.secrets == {} for memory in clients.memory.values())


# ---- a server that cheats -----------------------------------------------------------------------------------


def refused(clients, u, stage, request, match, code):
    before = clients.memory[u]
    with pytest.raises(RefusedError, match=match) as found:
        clients.ask(u, stage, request)
    assert found.value.code == code
    assert clients.memory[u] == before


def test_a_living_client_that_is_called_dead_does_not_sign_and_no_one_gives_both_its_secrets():
    """Six clients; the server says that client 0 dropped out, and gets the shares of its mask key. Its self mask stays:
    every other list is refused by all who signed the first one."""
    clients = Clients(6)
    round = clients.run(begin(clients), until="confirm")
    lie = round._replace(survivors=(1, 2, 3, 4, 5))
    refused(clients, 0, "confirm", server.request(lie, 0), "says that this client dropped out", "dead")
    lie = clients.run(lie)
    assert all("0" in said["mask"] and "0" not in said["self"] for said in lie.revealed.values())
    for u in range(1, 6):
        refused(clients, u, "confirm", server.request(round, u), "before the one that it needs", "order")
        again = server.request(round._replace(stage="unmask", signatures=lie.signatures), u)
        refused(clients, u, "unmask", again, "twice, differently", "twice")
    with pytest.raises(server.FewError):  # client 0 alone signs the true list
        clients.run(round, gone={"confirm": range(1, 6)})


def test_two_lists_for_two_halves_do_not_both_get_enough_signatures():
    clients = Clients(6)
    round = clients.run(begin(clients, threshold=4), until="confirm")
    first, second = round._replace(survivors=(0, 1, 2, 3)), round._replace(survivors=(0, 1, 2, 3, 4, 5))
    signed = clients.run(first, until="unmask")
    for u in (0, 1, 2, 3):
        refused(clients, u, "confirm", server.request(second, u), "twice, differently", "twice")
    for u in (4, 5):
        request = server.request(signed._replace(survivors=(0, 1, 2, 3, 4, 5)), u)
        clients.ask(u, "confirm", server.request(second, u))
        refused(clients, u, "unmask", request, "signature of client 0 .* is not by its key", "signature")


@pytest.mark.parametrize(
    ("change", "match", "code"),
    [
        ({"cohort": (0, 1, 2, 3)}, "had another cohort before", "cohort"),
        ({"cohort": (1, 2, 3)}, "this is client 0, and the cohort is", "cohort"),
        ({"cohort": (0, 1), "threshold": 2}, "a threshold of 2 is below this client's minimum_cohort, 3", "minimum"),
        ({"cohort": (0, 1, 2, 3, 4, 9), "threshold": 4}, r"clients \[9\] .* are not in the roster", "roster"),
        ({"roster": "00"}, "roster of public keys is not the one on this disk", "roster"),
        ({"threshold": 3, "cohort": (0, 1, 2, 3, 4, 5)}, r"clients \[5\] .* are not in the roster", "roster"),
        ({"threshold": 6}, "threshold is 6", "threshold"),
        ({"round": 0}, "round 0 is over: this client has been in round 1", "replay"),
        ({"attempt": 1}, "attempt 1 at round 1 is over", "replay"),
    ],
)
def test_a_client_does_not_begin(change, match, code):
    """It has been in round 1, attempt 1, which was not confirmed."""
    clients = Clients(5, minimum=3)
    clients.run(begin(clients), until="masked")
    session = clients.session(**({"attempt": 2} | change))
    if change == {"attempt": 1}:
        session = session._replace(layout="bb")
    refused(clients, 0, "keys", {"session": session.to_json()}, match, code)


def test_a_confirmed_round_is_never_begun_again():
    """Its sum over one list may be known: the sum over another list of the same round would show the difference."""
    clients = Clients(4)
    clients.run(begin(clients), until="unmask")
    again = {"session": clients.session(attempt=2).to_json()}
    refused(clients, 0, "keys", again, "has a signed list of survivors; it has no other", "confirmed")
    later = clients.run(begin(clients, round=2))
    assert np.array_equal(unmasked(later), clients.total(range(4)))
    refused(clients, 0, "keys", {"session": clients.session().to_json()}, "round 1 is over", "replay")


def test_a_stage_is_not_answered_twice_differently():
    clients = Clients(4)
    round = clients.run(begin(clients), until="masked")
    none = {**server.request(round, 0), "sealed": {}}
    refused(clients, 0, "masked", none, "1 clients have dealt shares, and 3 are needed", "few")
    clients.ask(0, "masked", server.request(round._replace(task="one model"), 0))
    other = server.request(round._replace(task="another model"), 0)
    refused(clients, 0, "masked", other, "asks for masked of round 1 twice, differently", "twice")


def test_another_model_for_one_client_is_noticed_before_anything_is_unmasked():
    """A server that sends all others a model without gradients would have client 0's update as the sum."""
    clients = Clients(4)

    def spoil(stage, u, request):
        return {**request, "task": "another"} if stage == "masked" and u == 0 else request

    round = clients.run(begin(clients), until="confirm", spoil=spoil)
    signed = {u: clients.ask(u, "confirm", server.request(round, u))["signature"] for u in range(4)}
    lie = round._replace(stage="unmask", signatures={str(u): text for u, text in signed.items()})
    refused(clients, 0, "unmask", server.request(lie, 0), r"signature of client 1 .* is not by its key", "signature")
    for u in (1, 2, 3):
        refused(clients, u, "unmask", server.request(lie, u), r"signature of client 0", "signature")


def test_a_stage_of_another_session_or_out_of_order_is_refused():
    clients = Clients(4)
    round = clients.run(begin(clients), until="shares")
    old = server.request(round._replace(session=round.session._replace(round=7)), 0)
    refused(clients, 0, "shares", old, "another session than this client's latest, round 1", "replay")
    confirm = {"session": round.session.to_json(), "survivors": [0, 1, 2, 3]}
    refused(clients, 0, "confirm", confirm, "before the one that it needs", "order")
    refused(clients, 0, "nothing", confirm, "there is no stage", "message")
    refused(clients, 0, "shares", server.request(round, 0) | {"more": 1}, "other entries", "message")


def test_keys_that_the_roster_did_not_sign_are_refused():
    """A server in the middle: keys of its own under a client's name, or a client that it invented."""
    clients, outside = Clients(4), Clients(5)
    round = clients.run(begin(clients), until="shares")
    forged = outside.ask(4, "keys", {"session": outside.session(threshold=3).to_json()})
    swapped = server.request(round, 0) | {"keys": {**round.keys, "1": forged}}
    refused(clients, 0, "shares", swapped, r"signature of client 1 \(keys\) is not by its key", "signature")
    invented = server.request(round, 0) | {"keys": {**round.keys, "4": forged}}
    refused(clients, 0, "shares", invented, r"keys of clients \[4\], who are not in the cohort", "cohort")
    mine = server.request(round, 0) | {"keys": {**round.keys, "0": round.keys["1"]}}
    refused(clients, 0, "shares", mine, "for this client are not its own", "key")
    old = clients.run(begin(clients, attempt=2), until="shares")
    replayed = server.request(old, 0) | {"keys": {**old.keys, "1": round.keys["1"]}}
    refused(clients, 0, "shares", replayed, r"signature of client 1 \(keys\)", "signature")
    few = server.request(old, 0) | {"keys": {u: old.keys[u] for u in ("0", "1")}}
    refused(clients, 0, "shares", few, "2 clients have sent keys, and the threshold is 3", "few")


@pytest.mark.parametrize("name", ["mask", "share"])
def test_a_client_that_signs_another_one_s_key_as_its_own_is_refused(name):
    """It works with the server: the masks of both with a third one would be equal."""
    clients = Clients(4)
    round = clients.run(begin(clients), until="shares")
    taken = {**round.keys["1"], name: round.keys["2"][name]}
    taken["signature"] = clients.members[1].sign(round.session, "keys", client.key_data(taken)).hex()
    same = server.request(round, 0) | {"keys": {**round.keys, "1": taken}}
    refused(clients, 0, "shares", same, "two clients have the same key", "key")


def test_another_roster_is_refused_though_the_server_signs_with_it():
    clients = Clients(4)
    own = {u: key_of(u + 10)[1] for u in range(4)}
    request = {"session": clients.session(roster=roster_mark(own)).to_json()}
    refused(clients, 0, "keys", request, "roster of public keys is not the one on this disk", "roster")


def test_a_share_that_does_not_decrypt_is_refused_and_its_sender_is_named():
    clients = Clients(4)
    round = clients.run(begin(clients), until="masked")
    request = server.request(round, 0)
    request["sealed"] = {**request["sealed"], "2": request["sealed"]["3"]}
    refused(clients, 0, "masked", request, "share of client 2 does not decrypt", "share")
    assert clients.made[0] == 0


@pytest.mark.parametrize(
    ("survivors", "match", "code"),
    [
        ([0, 1, 1, 2], "names a client twice", "lists"),
        ([2, 1, 0, 3], "not in order", "lists"),
        ([0, 1], "2 clients stay, and the threshold is 3", "few"),
        ([0, 1, 2, 3], "said to stay, and were not there before", "lists"),
        ([0, 1, 2, 9], "said to stay, and were not there before", "lists"),
        ("all", "not a list of clients", "message"),
    ],
)
def test_a_list_that_cannot_be_is_not_signed(survivors, match, code):
    """Client 3 has sent keys and no shares: dead and living at once cannot be said, for there is one list."""
    clients = Clients(5)
    round = clients.run(begin(clients), until="confirm", gone={"shares": [3]})
    request = {"session": round.session.to_json(), "survivors": survivors}
    refused(clients, 0, "confirm", request, match, code)


def test_a_list_without_enough_of_a_client_s_own_share_holders_is_not_signed():
    """Nine clients with four neighbours each; the list has five of them, and of client 0's neighbours nobody."""
    clients = Clients(9)
    round = clients.run(begin(clients, neighbours=4), until="confirm")
    mine = client.graph_of(round.session, round.keys)[0]
    lie = round._replace(survivors=tuple(u for u in range(9) if u not in mine))
    refused(clients, 0, "confirm", server.request(lie, 0), "1 share holders stay, and 3 are needed", "few")


def test_unmasking_needs_the_signatures_of_a_threshold_on_the_list_that_was_signed():
    clients = Clients(5)
    round = clients.run(begin(clients), until="unmask")
    two = {u: round.signatures[u] for u in ("0", "1")}
    refused(clients, 0, "unmask", server.request(round._replace(signatures=two), 0), "2 clients have signed", "few")
    other = server.request(round._replace(survivors=(0, 1, 2, 3)), 0)
    refused(clients, 0, "unmask", other, "not the one that this client has signed", "lists")
    forged = {**round.signatures, "4": round.signatures["3"]}
    bad = server.request(round._replace(signatures=forged), 0)
    refused(clients, 0, "unmask", bad, r"signature of client 4 \(survivors\) is not by its key", "signature")


# ---- clients that cheat -------------------------------------------------------------------------------------


def test_wrong_shares_are_noticed_and_nothing_is_unmasked():
    clients = Clients(4)
    done = clients.run(begin(clients, threshold=3))
    for kind, gone in (("self", {}), ("mask", {"masked": [3]})):
        clients = Clients(4)
        done = clients.run(begin(clients, threshold=3), gone=gone)
        v = "3" if kind == "mask" else "1"
        said = done.revealed["0"]
        spoiled = {**said, kind: {**said[kind], v: "00" * 32}}
        with pytest.raises(RefusedError, match=f"client {v}'s .* do not fit: a client cheated"):
            server.unmasked(done._replace(revealed={**done.revealed, "0": spoiled}))


@pytest.mark.parametrize(
    ("stage", "spoil"),
    [
        ("keys", lambda reply: {**reply, "mask": "00" * 32}),
        ("keys", lambda reply: {**reply, "mask": "00" * 31}),
        ("keys", lambda reply: {}),
        ("shares", lambda reply: {"sealed": {}}),
        ("shares", lambda reply: {"sealed": dict.fromkeys(reply["sealed"], "00")}),
        ("masked", lambda reply: {"vector": reply["vector"][:-1]}),
        ("masked", lambda reply: {"vector": "text"}),
        ("confirm", lambda reply: {"signature": "00" * 100}),
        ("unmask", lambda reply: {"self": {}, "mask": {}}),
        ("unmask", lambda reply: {**reply, "self": dict.fromkeys(reply["self"], "00")}),
        ("unmask", lambda reply: [1, 2]),
    ],
)
def test_the_server_takes_no_reply_of_another_form(stage, spoil):
    clients = Clients(3)
    round = clients.run(begin(clients), until=stage)
    reply = clients.ask(0, stage, server.request(round, 0))
    server.accept(clients.roster, round, 0, reply)
    with pytest.raises(RefusedError):
        server.accept(clients.roster, round, 0, spoil(reply))
