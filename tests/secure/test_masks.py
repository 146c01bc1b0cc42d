"""Known vectors of the building blocks, and what masks, shares, seals and signatures hold to."""

import hashlib
import hmac
import itertools

import numpy as np
import pytest

pytest.importorskip("cryptography")
pytest.importorskip("Crypto")

from secure_rounds import Clients, key_of

from fedncv.secure import masks, shares
from fedncv.secure.neighbours import FAILURE, choose, failure, graph, local_threshold
from fedncv.secure.session import RefusedError, check_threshold, session_of
from fedncv.secure.signatures import roster_mark, sign, verify


@pytest.fixture
def session():
    return Clients(3).session()


# ---- known vectors ----------------------------------------------------------------------------------------


def test_x25519_is_that_of_rfc_7748_and_the_key_is_hkdf_of_it(session):
    """RFC 7748, section 5.2, first vector; HKDF of one block written out with HMAC (RFC 5869, section 2)."""
    private = bytes.fromhex("a546e36bf0527c9d3b16154b82465edd62144c0ac1fc5a18506a2244ba449ac4")
    public = bytes.fromhex("e6db6867583030db3594c1a424b15f7c726624ec26b3353b10a903a6d0ab1c4c")
    shared = bytes.fromhex("c3da55379de9c6908e94ea4df28d084f32eccf03491c71f754b4075577a28552")
    extracted = hmac.digest(session.digest, shared, "sha256")
    expected = hmac.digest(extracted, b"mask/1/2" + b"\1", "sha256")
    assert masks.agreed(private, public, session, "mask", 1, 2) == expected


def test_hkdf_has_the_first_vector_of_rfc_5869():
    """Appendix A.1, the first 32 of its 42 bytes."""
    found = masks.derived(bytes([0x0B] * 22), bytes(range(13)), bytes(range(0xF0, 0xFA)))
    assert found.hex() == "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf"


def test_a_stream_is_chacha20_of_rfc_8439():
    """Appendix A.1, first vector: key, nonce and counter are zero."""
    found = masks.stream(bytes(32), 8, 64).astype("<u8").tobytes()
    assert found.hex() == (
        "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
        "da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586"
    )
    assert np.array_equal(masks.stream(bytes(32), 8, 40), masks.stream(bytes(32), 8, 64) % 2**40)


# ---- masks ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [32, 48, 64])
def test_two_clients_add_masks_that_cancel(bits, session):
    session = session._replace(bits=bits)
    a, b = masks.new_key(), masks.new_key()
    one = masks.pair_mask(a, masks.public_of(b), session, 0, 1)
    other = masks.pair_mask(b, masks.public_of(a), session, 1, 0)
    assert not ((one + other) % np.uint64(2 ** (bits - 1)) % 2 ** (bits - 1)).any()
    assert int(one.max()) < 2**bits
    assert one.any()


def test_keys_and_masks_belong_to_one_session_purpose_and_pair(session):
    a, b = masks.new_key(), masks.public_of(masks.new_key())
    sessions = [session._replace(**change) for change in CHANGES]
    keys = [masks.agreed(a, b, each, "mask", 0, 1) for each in [session, *sessions]]
    keys += [masks.agreed(a, b, session, *more) for more in (("shares", 0, 1), ("shares", 1, 0), ("mask", 0, 2))]
    assert len(set(keys)) == len(keys)


CHANGES = [
    {"run": "other"}, {"round": 2}, {"attempt": 2}, {"cohort": (0, 1)}, {"threshold": 3}, {"neighbours": 4},
    {"roster": "00"}, {"layout": "bb"}, {"numbers": 7}, {"bits": 32},
]  # fmt: skip


def test_a_public_key_of_low_order_is_refused(session):
    with pytest.raises(RefusedError, match="do not agree on a secret"):
        masks.agreed(masks.new_key(), bytes(32), session, "mask", 0, 1)


# ---- shares -----------------------------------------------------------------------------------------------


def test_any_threshold_of_shares_gives_the_secret_and_no_fewer():
    secret, holders = bytes(range(32)), [0, 2, 3, 7, 9]
    dealt = shares.deal(secret, holders, 3)
    for some in itertools.combinations(holders, 3):
        assert shares.recover({v: dealt[v] for v in some}, holders, 3) == secret
    with pytest.raises(RefusedError, match="2 shares, and 3 are needed"):
        shares.recover({v: dealt[v] for v in (0, 2)}, holders, 3)


def test_shares_are_on_a_polynomial_of_degree_threshold_minus_one():
    """Of three shares with a threshold of three, each two fit every secret: two as a line give another one."""
    secret, holders = bytes(range(32)), [0, 1, 2]
    dealt = shares.deal(secret, holders, 3)
    lines = {shares.recover({v: dealt[v] for v in pair}, holders, 2) for pair in ((0, 1), (0, 2), (1, 2))}
    assert len(lines | {secret}) == 4


def test_a_sealed_share_opens_for_its_receiver_in_its_session_only(session):
    a, b = masks.new_key(), masks.new_key()
    public_a, public_b = masks.public_of(a), masks.public_of(b)
    sealed = shares.seal(b"x" * 64, a, public_b, session, 0, 1)
    assert shares.unseal(sealed, b, public_a, session, 0, 1) == b"x" * 64
    assert b"x" * 8 not in sealed
    spoiled = [
        (sealed[:-1] + bytes([sealed[-1] ^ 1]), session, 0, 1),
        (sealed, session._replace(round=2), 0, 1),
        (sealed, session, 1, 0),
        (sealed, session, 2, 1),
    ]
    for data, other, sender, receiver in spoiled:
        with pytest.raises(RefusedError, match=f"share of client {sender} does not decrypt"):
            shares.unseal(data, b, public_a, other, sender, receiver)


# ---- signatures -------------------------------------------------------------------------------------------


def test_a_signature_is_of_one_client_session_kind_and_text(session):
    roster = {u: key_of(u)[1] for u in range(3)}
    signature = sign(key_of(1)[0], session, "keys", b"data")
    verify(roster, 1, signature, session, "keys", b"data")
    wrong = [(0, session, "keys", b"data"), (1, session, "survivors", b"data"), (1, session, "keys", b"data2")]
    wrong += [(1, session._replace(**change), "keys", b"data") for change in CHANGES]
    for u, other, kind, data in wrong:
        with pytest.raises(RefusedError, match="is not by its key"):
            verify(roster, u, signature, other, kind, data)
    with pytest.raises(RefusedError, match="client 7 is not in the roster"):
        verify(roster, 7, signature, session, "keys", b"data")


def test_a_roster_s_mark_does_not_depend_on_comments_and_depends_on_every_key():
    roster = {u: key_of(u)[1] for u in range(3)}
    assert roster_mark(roster) == roster_mark({u: text + " somebody@somewhere" for u, text in roster.items()})
    assert roster_mark(roster) != roster_mark({**roster, 1: key_of(3)[1]})
    assert roster_mark(roster) != roster_mark({u: roster[u] for u in (0, 1)})


# ---- thresholds and neighbours ----------------------------------------------------------------------------


def test_a_threshold_is_more_than_half_and_at_least_two():
    for cohort, least in ((2, 2), (3, 2), (4, 3), (5, 3), (10, 6)):
        for threshold in range(cohort + 2):
            if least <= threshold <= cohort:
                check_threshold(threshold, cohort)
            else:
                with pytest.raises(ValueError, match=f"threshold is {threshold}; .* from {least} to {cohort}"):
                    check_threshold(threshold, cohort)
    with pytest.raises(ValueError, match="at least 2 clients in a round, not 1"):
        check_threshold(1, 1)


def test_neighbours_are_mutual_and_as_many_as_asked_for():
    members = list(range(3, 43))
    ring = graph(members, 10, b"seed")
    assert {len(found) for found in ring.values()} == {10}
    assert all(u in ring[v] for u in members for v in ring[u])
    assert ring != graph(members, 10, b"other")
    assert graph(members, 0, b"seed") == {u: [v for v in members if v != u] for u in members}


def test_neighbours_are_on_both_sides_of_a_ring():
    """With two of each side of five in a ring, everybody is a neighbour; with one, the graph is one circle."""
    assert graph([0, 1, 2, 3, 4], 4, b"") == graph([0, 1, 2, 3, 4], 0, b"")
    circle, seen, at = graph(list(range(7)), 2, b"seed"), [], 0
    while at not in seen:
        seen.append(at)
        at = next((v for v in circle[at] if v not in seen), 0)
    assert sorted(seen) == list(range(7))


def test_a_random_graph_is_dense_enough_for_the_stated_failure():
    """A union of hypergeometric tails, summed here by hand for one case."""
    from math import comb

    n, t, k = 40, 27, 12
    local = local_threshold(t, n, k + 1, complete=False)
    assert local == 9  # 27/40 of 13, rounded up

    def tail(bad, least):
        return sum(comb(bad, j) * comb(n - 1 - bad, k - j) for j in range(least, k + 1)) / comb(n - 1, k)

    assert failure(n, t, k) == pytest.approx(n * (tail(8, local) + tail(8, k + 2 - local)))
    assert choose(64, 43) == 0
    k = choose(1000, 667)
    assert failure(1000, 667, k) <= FAILURE < failure(1000, 667, k - 2)


# ---- sessions ---------------------------------------------------------------------------------------------


def test_a_session_survives_its_json_and_nothing_else_is_one(session):
    assert session_of(session.to_json()) == session
    good = session.to_json()
    wrong = [None, [], {}, {**good, "more": 1}, {**good, "round": "1"}, {**good, "round": True}, {**good, "round": -1}]
    wrong += [{**good, "cohort": cohort} for cohort in ([1, 0], [0, 0], [0, -1], ["0"], "01", [0.0])]
    wrong += [{**good, "bits": 63}, {**good, "attempt": 0}, {**good, "neighbours": -2}]
    for said in wrong:
        with pytest.raises(RefusedError):
            session_of(said)


def test_the_digest_of_a_session_is_of_all_of_it(session):
    digests = {session._replace(**change).digest for change in CHANGES} | {session.digest}
    assert len(digests) == len(CHANGES) + 1
    assert len(session.digest) == hashlib.sha256().digest_size
