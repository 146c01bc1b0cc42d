"""The server's side of a round of secure sums: what it asks, what it takes, and the sum in the end.

A ``Round`` holds the answers so far. ``request`` makes a stage's message to a client, ``accept`` checks a reply, and
``after`` adds the replies of a stage. ``unmasked`` is the sum of the survivors' vectors, or an error; never a part.
"""

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from fedncv.secure import masks, shares
from fedncv.secure.client import STAGES, Json, check_keys, graph_of, list_data, local_threshold
from fedncv.secure.fixed_point import Words, mask_of, unpack
from fedncv.secure.session import RefusedError, Session, raw, session_of, table_of
from fedncv.secure.signatures import Roster, verify


class FewError(RuntimeError):
    """Too few clients have answered a stage."""


class Round(NamedTuple):
    """The answers of a round so far. Everything but the sum of the masked vectors is JSON."""

    session: Session
    stage: str = "keys"  # the next one
    keys: Mapping[str, Any] = {}  # client -> its public keys
    sealed: Mapping[str, Any] = {}  # client -> neighbour -> what it sealed for that neighbour
    total: Words | None = None  # the sum of the masked vectors
    survivors: tuple[int, ...] = ()
    task: str = ""  # hash of what the clients make their vectors of, the same for all
    signatures: Mapping[str, Any] = {}
    revealed: Mapping[str, Any] = {}

    def members(self) -> list[int]:
        """Return the clients to ask in the next stage."""
        given: dict[str, Iterable[Any]] = {
            "keys": self.session.cohort,
            "shares": self.keys,
            "masked": self.sealed,
            "confirm": self.survivors,
            "unmask": self.signatures,
        }
        return sorted(map(int, given[self.stage]))

    def to_json(self) -> dict[str, Any]:
        """Return everything but the sum."""
        said = self._asdict() | {"session": self.session.to_json(), "survivors": list(self.survivors)}
        del said["total"]
        return said


def round_of(said: Json, total: Words | None) -> Round:
    """Return the round that was stored."""
    session, survivors = session_of(said["session"]), tuple(said["survivors"])
    return Round(**{**said, "session": session, "survivors": survivors, "total": total})


def request(round: Round, u: int) -> Json:
    """Return the next stage's message to client u."""
    said: dict[str, Any] = {"session": round.session.to_json()}
    if round.stage == "shares":
        said["keys"] = round.keys
    elif round.stage == "masked":
        mine = graph_of(round.session, round.keys)[u]
        said["sealed"] = {str(v): round.sealed[str(v)][str(u)] for v in mine if str(v) in round.sealed}
        said["task"] = round.task
    elif round.stage in ("confirm", "unmask"):
        said["survivors"] = list(round.survivors)
        if round.stage == "unmask":
            said["signatures"] = round.signatures
    return said


def accept(roster: Roster, round: Round, u: int, reply: object) -> Any:
    """Return client u's reply to the next stage, checked; raise RefusedError."""
    session, stage = round.session, round.stage
    names = {"keys": {"mask", "share", "seed", "signature"}, "shares": {"sealed"}, "masked": {"vector"}}
    names |= {"confirm": {"signature"}, "unmask": {"self", "mask"}}
    if not isinstance(reply, dict) or reply.keys() != names[stage]:
        raise RefusedError("message", f"the reply of client {u} to stage {stage} has another form")
    if stage == "keys":
        check_keys(roster, session, u, reply)
        return reply
    if stage == "confirm":
        signature = raw(reply["signature"], what="a signature")
        verify(roster, u, signature, session, "survivors", list_data(list(round.survivors), round.task))
        return reply["signature"]
    if stage == "masked":
        try:
            return unpack(session.bits, reply["vector"], session.numbers)
        except (ValueError, TypeError) as error:
            raise RefusedError("message", f"the vector of client {u}: {error}") from None
    mine = set(graph_of(session, round.keys)[u])
    if stage == "shares":
        sealed = table_of(reply["sealed"], str, what="the shares")
        if set(sealed) != mine:
            raise RefusedError("message", f"client {u} has dealt shares to others than its neighbours")
        for text in sealed.values():
            raw(text, 2 * shares.SECRET + shares.TAG, what="a sealed share")
        return {str(v): text for v, text in sealed.items()}
    dealt = {u, *(v for v in mine if str(v) in round.sealed)}
    wanted = {"self": dealt & set(round.survivors), "mask": dealt - set(round.survivors)}
    for kind, of in wanted.items():
        found = table_of(reply[kind], str, what="the shares")
        if set(found) != of:
            raise RefusedError("message", f"client {u} reveals other shares than those of its neighbours")
        for text in found.values():
            raw(text, shares.SECRET, what="a share")
    return reply


def after(round: Round, replies: Mapping[int, Any]) -> Round:
    """Return the round after a stage with these replies; raise FewError if they are fewer than the threshold."""
    session, stage = round.session, round.stage
    if len(replies) < session.threshold:
        raise FewError(
            f"stage {stage} of round {session.round} has {len(replies)} replies of {len(round.members())} clients, "
            f"fewer than the threshold, {session.threshold}"
        )
    given = {str(u): replies[u] for u in sorted(replies)}
    following = (*STAGES[1:], "done")[STAGES.index(stage)]
    if stage == "masked":
        total = np.zeros(session.numbers, np.uint64)
        for words in replies.values():
            total += words
        total &= mask_of(session.bits)
        return round._replace(stage=following, total=total, survivors=tuple(sorted(replies)))
    if stage == "keys":
        return round._replace(stage=following, keys=given)
    if stage == "shares":
        return round._replace(stage=following, sealed=given)
    if stage == "confirm":
        return round._replace(stage=following, signatures=given)
    return round._replace(stage=following, revealed=given)


def dropped(round: Round) -> list[int]:
    """Return those who have dealt shares and did not stay."""
    return [u for u in sorted(map(int, round.sealed)) if u not in round.survivors]


def unmasked(round: Round) -> Words:
    """Return the sum of the survivors' vectors; raise RefusedError if a secret cannot be recovered."""
    session, total = round.session, round.total
    assert round.stage == "done"
    assert total is not None
    graph = graph_of(session, round.keys)

    def secret(v: int, kind: str) -> bytes:
        holders = sorted({v, *graph[v]})
        said = {u: round.revealed[str(u)][kind] for u in holders if str(u) in round.revealed}
        told = {u: bytes.fromhex(of[str(v)]) for u, of in said.items() if str(v) in of}
        return shares.recover(told, holders, local_threshold(session, len(holders)))

    total = total.copy()
    for v in round.survivors:
        seed = secret(v, "self")
        if hashlib.sha256(seed).hexdigest() != round.keys[str(v)]["seed"]:
            raise RefusedError("share", f"the shares of client {v}'s self mask do not fit: a client cheated")
        total -= masks.self_mask(seed, session, v)
    for d in dropped(round):
        private = secret(d, "mask")
        if masks.public_of(private).hex() != round.keys[str(d)]["mask"]:
            raise RefusedError("share", f"the shares of client {d}'s mask key do not fit: a client cheated")
        for v in sorted(set(graph[d]) & set(round.survivors)):
            total -= masks.pair_mask(private, bytes.fromhex(round.keys[str(v)]["mask"]), session, v, d)
    return np.asarray(total & mask_of(session.bits))
