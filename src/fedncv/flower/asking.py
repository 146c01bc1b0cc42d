"""Send one request to each client and collect one valid reply from each, whatever fails in between."""

import logging
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

from flwr.app import Message, RecordDict

from fedncv.flower import refusals
from fedncv.flower.foreign import quoted
from fedncv.flower.wire import WireError

POLL_SECONDS = 0.5  # between two checks for replies
RETRY_SECONDS = 2.0  # before a request to a failed client is repeated

log = logging.getLogger("fedncv.flower")


class Grid(Protocol):
    """The part of Flower's Grid that is used here."""

    def get_nodes(self) -> Iterable[Any]: ...

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]: ...

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]: ...


class StoppedError(RuntimeError):
    """The run cannot continue now; finished rounds are on the disk, and the run can be resumed."""


class Gathered(NamedTuple):
    """Results of the requests: accepted values, and the reasons why other replies are left out."""

    values: dict[int, Any]
    refused: dict[int, str]
    unwilling: set[int]  # those of ``refused`` that refuse the request; the replies of the others were rejected


def gather(
    grid: Grid,
    nodes: dict[int, int],
    request: Callable[[int], RecordDict],
    receive: Callable[[int, Message], Any],
    *,
    kind: str,
    group: str,
    seconds: float,
    attempts: int,
    told: dict[int, str],
) -> Gathered:
    """Return one valid reply from each client in ``nodes`` (client -> node) that replies in time.

    ``receive`` makes a value of a reply, or raises WireError: then the client is left out of this round. The request
    to a client that is offline, fails or was restarted (and lost the request) is repeated as soon as the client is
    available, ``attempts`` times in total. A repeated request is harmless: the client starts from the same state.

    ``told`` holds the last reason that the log gave for each client, so that it gives a lasting reason once.
    """
    deadline = time.monotonic() + seconds
    waiting, pending = set(nodes), dict[str, int]()
    left = dict.fromkeys(nodes, attempts)
    not_before = dict.fromkeys(nodes, 0.0)
    began: dict[int, str] = {}  # client -> when its node was activated, at the latest request to it
    gathered = Gathered({}, {}, set())

    def tell(u: int, words: str, more: str = "") -> None:
        if told.get(u) != words:
            log.warning("%s: client %d: %s", group, u, words + more)
        told[u] = words

    while waiting and time.monotonic() < deadline:
        online = {node.node_id: node.last_activated_at for node in grid.get_nodes()}
        for sent, u in list(pending.items()):
            if online.get(nodes[u], began[u]) != began[u]:
                log.warning("%s: client %d was restarted", group, u)
                del pending[sent]
        now = time.monotonic()
        for u in sorted(waiting - set(pending.values())):
            if left[u] and nodes[u] in online and now >= not_before[u]:
                ttl = max(1.0, deadline - now)  # a later reply is useless
                message = Message(request(u), nodes[u], kind, ttl=ttl, group_id=group)
                (sent,) = grid.push_messages([message])
                left[u] -= 1
                began[u] = online[nodes[u]]
                if sent:
                    pending[sent] = u
        for answer in grid.pull_messages(set(pending)) if pending else ():
            u = pending.pop(answer.metadata.reply_to_message_id, -1)
            if u not in waiting:
                continue  # replied before, or never asked
            if answer.has_error():
                tell(u, f"failed; it says {quoted(answer.error.reason or 'nothing')}")
                not_before[u] = time.monotonic() + RETRY_SECONDS
                continue
            try:
                if answer.metadata.src_node_id != nodes[u]:
                    raise WireError(f"it comes from node {answer.metadata.src_node_id}, not {nodes[u]}")
                refusal = refusals.read(answer, u)
                if refusal is not None and refusal.passes:
                    tell(u, refusal.words, f"; {refusal.remedy}")
                    not_before[u] = time.monotonic() + RETRY_SECONDS
                    continue
                if refusal is not None:
                    tell(u, refusal.words, f"; this line is not repeated. What you can do: {refusal.remedy}")
                    gathered.refused[u] = refusal.words
                    gathered.unwilling.add(u)
                else:
                    gathered.values[u] = receive(u, answer)
                    if told.pop(u, None):
                        log.info("%s: client %d takes part again", group, u)
            except WireError as error:
                gathered.refused[u] = str(error)
                log.warning("%s: reply of client %d rejected: %s", group, u, error)
            waiting.discard(u)
        if waiting and not pending and not any(left[u] for u in waiting):
            break  # no client left to ask
        if waiting:
            time.sleep(POLL_SECONDS)
    return gathered
