"""Measure what secure sums cost a client and the server: bytes, and seconds of the processor, without Flower.

    python bench/secure_sums.py                              LeNet5's numbers, 5, 20 and 100 clients
    python bench/secure_sums.py --clients 5 --numbers 1000000

All clients and the server are in this process. Their messages are those of a federation: JSON, and the masked vector
as bytes. Bytes are of one client in one round, from and to the server. Seconds are of the processor
(``time.process_time``), so other work on the machine changes them little; the client's are the mean of all clients. The
training itself is not counted. With ``--drop 1`` one client drops out, and the server takes its masks out.
"""

import argparse
import json
import sys
import time
from typing import Any

import numpy as np
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from fedncv.secure import client, server
from fedncv.secure.fixed_point import Words, signed
from fedncv.secure.session import Session
from fedncv.secure.settings import Settings
from fedncv.secure.signatures import roster_mark, sign

LENET5 = 44_470 + 44 + 2  # parameters, running statistics, and the counts of samples and of clipped numbers


def new_key() -> tuple[bytes, str]:
    key = ec.generate_private_key(ec.SECP384R1())
    form, plain = serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    private = key.private_bytes(serialization.Encoding.PEM, form, plain)
    return private, key.public_key().public_bytes(
        serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    ).decode()


def size(message: dict[str, Any]) -> int:
    """Return the bytes of a message: JSON, and the vector as it is."""
    vector = message.get("vector") or b""
    return len(json.dumps({name: value for name, value in message.items() if name != "vector"})) + len(vector)


def measure(clients: int, numbers: int, bits: int, drop: int) -> dict[str, float]:
    keys = {u: new_key() for u in range(clients)}
    roster = {u: key[1] for u, key in keys.items()}

    def signer(u: int) -> Any:
        return lambda session, kind, data: sign(keys[u][0], session, kind, data)

    members = {u: client.Member(u, signer(u), roster, 2) for u in range(clients)}
    memory = {u: client.Memory() for u in range(clients)}
    settings = Settings(threshold=clients * 2 // 3 + 1)
    session = Session(
        "bench", 1, 1, tuple(range(clients)), settings.threshold, settings.neighbours_of(clients), roster_mark(roster),
        "", numbers, bits,
    )  # fmt: skip
    x = {u: np.random.default_rng(u).integers(-(2**20), 2**20, numbers) for u in range(clients)}
    found = {"down": 0.0, "up": 0.0, "client": 0.0, "server": 0.0}

    def vector_of(u: int) -> Any:
        def vector(_: Session) -> Words:
            return np.asarray(x[u].astype(np.uint64) & np.uint64((1 << bits) - 1))

        return vector

    round = server.Round(session)
    while round.stage != "done":
        replies = {}
        for u in round.members():
            if round.stage == "masked" and u < drop:
                continue
            began = time.process_time()
            request = server.request(round, u)
            ready = time.process_time()
            memory[u], reply = client.answer(members[u], memory[u], round.stage, request, vector_of(u))
            ended = time.process_time()
            replies[u] = server.accept(roster, round, u, reply)
            found["server"] += ready - began + time.process_time() - ended
            found["client"] += (ended - ready) / clients
            found["down"] += size(dict(request)) / clients
            found["up"] += size(dict(reply)) / clients
        began = time.process_time()
        round = server.after(round, replies)
        found["server"] += time.process_time() - began
    began = time.process_time()
    total = signed(bits, server.unmasked(round))
    found["server"] += time.process_time() - began
    assert np.array_equal(total, sum(x[u] for u in round.survivors))
    return found | {"neighbours": session.neighbours or clients - 1}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[5, 20, 100])
    parser.add_argument("--numbers", type=int, default=LENET5)
    parser.add_argument("--bits", type=int, default=64)
    parser.add_argument("--drop", type=int, default=0)
    arguments = parser.parse_args()
    print(f"{arguments.numbers:,} numbers of {arguments.bits} bits; {arguments.drop} clients drop out before masking")
    print("| clients | neighbours | bytes down | bytes up | of which the vector | client, s | server, s |")
    print("|---:|---:|---:|---:|---:|---:|---:|")
    for clients in arguments.clients:
        m = measure(clients, arguments.numbers, arguments.bits, arguments.drop)
        vector = arguments.numbers * arguments.bits // 8
        print(
            f"| {clients} | {m['neighbours']:.0f} | {m['down']:,.0f} | {m['up']:,.0f} | {vector:,} "
            f"| {m['client']:.2f} | {m['server']:.2f} |",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
