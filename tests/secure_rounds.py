"""Secure sums in one process: clients with keys of their own, and a server that can be told to cheat."""

import numpy as np
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from fedncv.secure import client, server
from fedncv.secure.fixed_point import signed, words
from fedncv.secure.session import Session
from fedncv.secure.signatures import roster_mark, sign

NUMBERS = 6
_KEYS = {}


def key_of(u):
    """The long-term key of client u, the same in all tests: private in OpenSSH's format, public as in a roster."""
    if u not in _KEYS:
        key = ec.generate_private_key(ec.SECP384R1())
        form, plain = serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
        private = key.private_bytes(serialization.Encoding.PEM, form, plain)
        public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
        _KEYS[u] = private, public.decode()
    return _KEYS[u]


class Clients:
    """Clients 0 to n - 1 with their numbers, which each of them remembers and stores as JSON."""

    def __init__(self, n, *, minimum=2, roster=None):
        self.roster = roster or {u: key_of(u)[1] for u in range(n)}
        self.members = {u: client.Member(u, self._signer(u), self.roster, minimum) for u in range(n)}
        self.memory = {u: client.Memory() for u in range(n)}
        self.x = {u: np.random.default_rng(u).integers(-(2**40), 2**40, NUMBERS) for u in range(n)}
        self.made = dict.fromkeys(range(n), 0)  # how often a client made its vector

    @staticmethod
    def _signer(u):
        return lambda session, kind, data: sign(key_of(u)[0], session, kind, data)

    def session(self, **changes):
        n = len(self.members)
        values = {
            "run": "first-0a1b", "round": 1, "attempt": 1, "cohort": tuple(range(n)), "threshold": n // 2 + 1,
            "neighbours": 0, "roster": roster_mark(self.roster), "layout": "aa", "numbers": NUMBERS, "bits": 64,
        }  # fmt: skip
        return Session(**values | changes)

    def ask(self, u, stage, request):
        """The client's reply; what it remembers goes through its JSON, as over a restart."""

        def vector(session):
            self.made[u] += 1
            return words(session.bits, self.x[u])

        memory, reply = client.answer(self.members[u], self.memory[u], stage, request, vector)
        self.memory[u] = client.memory_of(memory.to_json(), memory.vector)
        return reply

    def run(self, round, *, until="done", gone=None, spoil=None):
        """The round after all stages before ``until``. ``gone``: stage -> clients that do not answer from then on."""
        away = set()
        while round.stage != until:
            away |= set((gone or {}).get(round.stage, ()))
            replies = {}
            for u in round.members():
                if u not in away:
                    request = server.request(round, u)
                    if spoil is not None:
                        request = spoil(round.stage, u, request)
                    replies[u] = server.accept(self.roster, round, u, self.ask(u, round.stage, request))
            round = server.after(round, replies)
            round = server.round_of(round.to_json(), round.total)
        return round

    def total(self, ids):
        return sum(self.x[u] for u in ids)


def unmasked(round):
    return signed(round.session.bits, server.unmasked(round))
