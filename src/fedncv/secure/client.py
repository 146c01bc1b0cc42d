"""A client's answers in a round of secure sums, and what it refuses, whatever the server says.

``answer`` maps what the client remembers and a request to what it remembers then and its reply. The caller stores the
memory before it sends the reply. A request that comes again gets the same reply; another request of the same stage is
refused. What holds over all messages of a run:

    one cohort for a round; an earlier round or attempt is never answered again
    one list of survivors for a round: after signing it, the client begins no other attempt at that round
    one task for a round: the list is signed together with the model that was sent, and must be the same for all
    one secret of each neighbour: of the self mask if it is in the signed list, of the mask key if it is not

A threshold is more than half of the cohort, and every unmasking needs that many signatures under one list. So a round
can be unmasked for one list only, and the sums over two lists, whose difference could be one client, never exist.
"""

import hashlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from fedncv.secure import masks, neighbours, shares
from fedncv.secure.fixed_point import Words, mask_of, pack
from fedncv.secure.session import (
    RefusedError,
    Session,
    canonical,
    check_threshold,
    ids_of,
    mark,
    raw,
    session_of,
    table_of,
)
from fedncv.secure.signatures import Roster, roster_mark, verify

STAGES = ("keys", "shares", "masked", "confirm", "unmask")
Json = Mapping[str, Any]  # of values that JSON has


class Member(NamedTuple):
    """What stays the same for a client."""

    u: int
    sign: Callable[[Session, str, bytes], bytes]
    roster: Roster
    minimum: int  # fewest clients whose sum it lets the server see: the least threshold


class Memory(NamedTuple):
    """What a client remembers of a run, for the caller to store. Everything but the vector is JSON."""

    round: int = -1  # the latest
    attempt: int = 0
    cohort: tuple[int, ...] = ()
    confirmed: bool = False  # it has signed a list of survivors in this round
    session: Json | None = None
    secrets: Mapping[str, Any] = {}  # of the attempt; gone after unmasking
    keys: Mapping[str, Any] = {}  # client -> its public keys of the attempt
    sealed: Mapping[str, Any] = {}  # neighbour -> its sealed shares
    survivors: tuple[int, ...] = ()
    task: str = ""  # what it made its vector of
    asked: Mapping[str, Any] = {}  # stage -> mark of its request
    replies: Mapping[str, Any] = {}  # stage -> reply
    vector: bytes | None = None  # the masked one

    def to_json(self) -> dict[str, Any]:
        """Return everything but the vector."""
        said = {**self._asdict(), "cohort": list(self.cohort), "survivors": list(self.survivors)}
        del said["vector"]
        return said


def memory_of(said: Json, vector: bytes | None = None) -> Memory:
    """Return the memory that was stored; raise ValueError if it is not one."""
    if sorted([*said, "vector"]) != sorted(Memory._fields):
        raise ValueError("it has other entries than this version of fedncv writes")
    lists = {"cohort": tuple(said["cohort"]), "survivors": tuple(said["survivors"])}
    return Memory(**{**said, **lists, "vector": vector})


def answer(
    member: Member, memory: Memory, stage: str, request: Json, vector: Callable[[Session], Words] | None = None
) -> tuple[Memory, Json]:
    """Return the memory and the reply to a stage's request; raise RefusedError. ``vector`` gives x_u when masking."""
    if stage not in STAGES:
        raise RefusedError("message", f"there is no stage {stage!r}")
    session = session_of(request.get("session"))
    asked = mark(request)
    if session.to_json() == memory.session and stage in memory.asked:
        if memory.asked[stage] != asked:
            raise RefusedError("twice", f"the server asks for {stage} of round {session.round} twice, differently")
        return memory, {"vector": memory.vector} if stage == "masked" else memory.replies[stage]
    if stage == "keys":
        memory = _begin(member, memory, session)
    elif session.to_json() != memory.session:
        raise RefusedError("replay", f"a request of another session than this client's latest, round {memory.round}")
    elif STAGES[STAGES.index(stage) - 1] not in memory.asked:
        raise RefusedError("order", f"stage {stage} comes before the one that it needs")
    wanted = {
        "keys": {"session"},
        "shares": {"session", "keys"},
        "masked": {"session", "sealed", "task"},
        "confirm": {"session", "survivors"},
        "unmask": {"session", "survivors", "signatures"},
    }[stage]
    if request.keys() != wanted:
        raise RefusedError("message", f"a request of stage {stage} has other entries than {sorted(wanted)}")
    if stage == "masked":
        assert vector is not None
        memory = _masked(member, memory, session, request, vector)
        return memory._replace(asked={**memory.asked, stage: asked}), {"vector": memory.vector}
    handle = {"keys": _keys, "shares": _shares, "confirm": _confirm, "unmask": _unmask}[stage]
    memory, reply = handle(member, memory, session, request)
    return memory._replace(asked={**memory.asked, stage: asked}, replies={**memory.replies, stage: reply}), reply


def _begin(member: Member, memory: Memory, session: Session) -> Memory:
    """Return the memory at the begin of an attempt; raise RefusedError if the client must not take part in it."""
    u, cohort = member.u, session.cohort
    if u not in cohort:
        raise RefusedError("cohort", f"this is client {u}, and the cohort is {list(cohort)}")
    if session.threshold < member.minimum:
        raise RefusedError(
            "minimum", f"a threshold of {session.threshold} is below this client's minimum_cohort, {member.minimum}"
        )
    if session.roster != roster_mark(member.roster):
        raise RefusedError("roster", "the server's roster of public keys is not the one on this disk")
    if strangers := [v for v in cohort if v not in member.roster]:
        raise RefusedError("roster", f"clients {strangers} of the cohort are not in the roster on this disk")
    try:
        check_threshold(session.threshold, len(cohort))
    except ValueError as error:
        raise RefusedError("threshold", str(error)) from None
    if session.round < memory.round:
        raise RefusedError("replay", f"round {session.round} is over: this client has been in round {memory.round}")
    if session.round == memory.round:
        if session.cohort != memory.cohort:
            raise RefusedError("cohort", f"round {session.round} had another cohort before, {list(memory.cohort)}")
        if session.attempt <= memory.attempt:
            raise RefusedError("replay", f"attempt {session.attempt} at round {session.round} is over")
        if memory.confirmed:
            raise RefusedError("confirmed", f"round {session.round} has a signed list of survivors; it has no other")
    return Memory(session.round, session.attempt, session.cohort, session=session.to_json())


def _keys(member: Member, memory: Memory, session: Session, _request: Json) -> tuple[Memory, Json]:
    secrets = {name: masks.new_key() for name in ("mask", "share", "seed")}
    public = _publish(secrets)
    public["signature"] = member.sign(session, "keys", key_data(public)).hex()
    return memory._replace(secrets={name: secret.hex() for name, secret in secrets.items()}), public


def _publish(secrets: dict[str, bytes]) -> dict[str, Any]:
    return {
        "mask": masks.public_of(secrets["mask"]).hex(),
        "share": masks.public_of(secrets["share"]).hex(),
        "seed": hashlib.sha256(secrets["seed"]).hexdigest(),  # so that a wrong share shows
    }


def key_data(public: Json) -> bytes:
    """Return what the signature of a client's keys covers; raise RefusedError for a wrong form."""
    return b"".join(raw(public.get(name), 32, what=f"the key {name!r}") for name in ("mask", "share", "seed"))


def check_keys(roster: Roster, session: Session, u: int, public: Json) -> None:
    """Raise RefusedError unless these are keys of client u, signed for this session."""
    if public.keys() != {"mask", "share", "seed", "signature"}:
        raise RefusedError("message", f"the keys of client {u} have another form")
    signature = raw(public["signature"], what=f"the signature of client {u}")
    verify(roster, u, signature, session, "keys", key_data(public))


def graph_of(session: Session, keys: Json) -> dict[int, list[int]]:
    """Return client -> neighbours, among those with keys. The seed is all of them, which no one chooses alone."""
    seed = hashlib.sha256(session.digest + canonical(keys)).digest()
    return neighbours.graph(sorted(map(int, keys)), session.neighbours, seed)


def local_threshold(session: Session, holders: int) -> int:
    complete = neighbours.is_complete(len(session.cohort), session.neighbours)
    return neighbours.local_threshold(session.threshold, len(session.cohort), holders, complete=complete)


def _shares(member: Member, memory: Memory, session: Session, request: Json) -> tuple[Memory, Json]:
    u, given = member.u, table_of(request["keys"], dict, what="the keys")
    if strangers := sorted(set(given) - set(session.cohort)):
        raise RefusedError("cohort", f"there are keys of clients {strangers}, who are not in the cohort")
    if given.get(u) != memory.replies["keys"]:
        raise RefusedError("key", "the keys that the server shows for this client are not its own")
    for v, public in given.items():
        check_keys(member.roster, session, v, public)
    if len({public[name] for public in given.values() for name in ("mask", "share")}) < 2 * len(given):
        raise RefusedError("key", "two clients have the same key")
    _check_many(session, len(given), "have sent keys")
    keys = {str(v): public for v, public in given.items()}
    holders = sorted({u, *graph_of(session, keys)[u]})
    least = local_threshold(session, len(holders))
    if len(holders) < least:
        raise RefusedError("few", f"{len(holders)} clients hold shares, and {least} are needed")
    private = {name: bytes.fromhex(secret) for name, secret in memory.secrets.items()}
    dealt = [shares.deal(private[name], holders, least) for name in ("seed", "mask")]
    both = {v: dealt[0][v] + dealt[1][v] for v in holders}
    sealed = {
        str(v): shares.seal(both[v], private["share"], bytes.fromhex(given[v]["share"]), session, u, v).hex()
        for v in holders
        if v != u
    }
    secrets = {**memory.secrets, "own": both[u].hex()}
    return memory._replace(keys=keys, secrets=secrets), {"sealed": sealed}


def _masked(
    member: Member, memory: Memory, session: Session, request: Json, vector: Callable[[Session], Words]
) -> Memory:
    u, sealed, task = member.u, table_of(request["sealed"], str, what="the shares"), request["task"]
    if not isinstance(task, str):
        raise RefusedError("message", "the task is not a hash")
    mine = graph_of(session, memory.keys)[u]
    if strangers := sorted(set(sealed) - set(mine)):
        raise RefusedError("share", f"there are shares of clients {strangers}, who are not neighbours")
    least = local_threshold(session, len(mine) + 1)
    if len(sealed) + 1 < least:
        raise RefusedError("few", f"{len(sealed) + 1} clients have dealt shares, and {least} are needed")
    memory = memory._replace(sealed={str(v): text for v, text in sealed.items()})
    for v in sealed:
        _opened(member, memory, session, v)
    x = vector(session)
    if x.shape != (session.numbers,):
        raise RefusedError("layout", f"the vector here has {len(x)} numbers, and the server's {session.numbers}")
    y = x + masks.self_mask(bytes.fromhex(memory.secrets["seed"]), session, u)
    private = bytes.fromhex(memory.secrets["mask"])
    for v in sealed:
        y += masks.pair_mask(private, bytes.fromhex(memory.keys[str(v)]["mask"]), session, u, v)
    return memory._replace(task=task, vector=pack(session.bits, np.asarray(y & mask_of(session.bits))))


def _confirm(member: Member, memory: Memory, session: Session, request: Json) -> tuple[Memory, Json]:
    survivors = ids_of(request["survivors"], what="the list of survivors")
    if member.u not in survivors:
        raise RefusedError("dead", "the server says that this client dropped out, and it did not")
    mine = graph_of(session, memory.keys)[member.u]
    unknown = [v for v in survivors if str(v) not in memory.keys]
    unknown += [v for v in survivors if v in mine and str(v) not in memory.sealed]
    if unknown:
        raise RefusedError("lists", f"clients {unknown} are said to stay, and were not there before")
    _check_many(session, len(survivors), "stay")
    alive, least = len(set(mine) & set(survivors)) + 1, local_threshold(session, len(mine) + 1)
    if alive < least:
        raise RefusedError("few", f"{alive} share holders stay, and {least} are needed")
    signature = member.sign(session, "survivors", list_data(survivors, memory.task)).hex()
    return memory._replace(confirmed=True, survivors=tuple(survivors)), {"signature": signature}


def list_data(survivors: list[int], task: str) -> bytes:
    """Return what the signature of a list of survivors covers: the list, and what all of them made their vectors of.

    So a server that sends one client another model than the others gets no sum.
    """
    return canonical({"survivors": survivors, "task": task})


def _unmask(member: Member, memory: Memory, session: Session, request: Json) -> tuple[Memory, Json]:
    survivors = ids_of(request["survivors"], what="the list of survivors")
    if tuple(survivors) != memory.survivors:
        raise RefusedError("lists", "the list of survivors is not the one that this client has signed")
    signatures = table_of(request["signatures"], str, what="the signatures")
    for v, signature in signatures.items():
        if v not in survivors:
            raise RefusedError("lists", f"client {v} signs a list of survivors in which it is not")
        said = list_data(survivors, memory.task)
        verify(member.roster, v, raw(signature, what="a signature"), session, "survivors", said)
    if len(signatures) < session.threshold:
        raise RefusedError("few", f"{len(signatures)} clients have signed the list, and {session.threshold} are needed")
    revealed: dict[str, dict[str, str]] = {"self": {}, "mask": {}}
    for v in sorted({member.u, *map(int, memory.sealed)}):
        both = bytes.fromhex(memory.secrets["own"]) if v == member.u else _opened(member, memory, session, v)
        kind, part = ("self", both[: shares.SECRET]) if v in survivors else ("mask", both[shares.SECRET :])
        revealed[kind][str(v)] = part.hex()
    # the secrets are gone with this reply, and nothing but the reply is ever said again
    return memory._replace(secrets={}, keys={}, sealed={}, replies={}, asked={}, vector=None), revealed


def _opened(member: Member, memory: Memory, session: Session, v: int) -> bytes:
    """Return both shares that neighbour v has dealt to this client."""
    sealed, public = raw(memory.sealed[str(v)], what="a share"), bytes.fromhex(memory.keys[str(v)]["share"])
    private = bytes.fromhex(memory.secrets["share"])
    both = shares.unseal(sealed, private, public, session, v, member.u)
    if len(both) != 2 * shares.SECRET:
        raise RefusedError("share", f"the share of client {v} has {len(both)} bytes")
    return both


def _check_many(session: Session, number: int, what: str) -> None:
    if number < session.threshold:
        raise RefusedError("few", f"{number} clients {what}, and the threshold is {session.threshold}")
