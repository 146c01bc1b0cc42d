"""Long-term keys: the roster of all clients' public keys, and signatures by them.

A roster is client -> public key as OpenSSH writes it (ECDSA P-384, the key with which the client's node signs in).
Every client has it on its own disk, from the person who set the federation up. So the server can neither put its own
keys in place of a client's, nor invent clients.
"""

import hashlib
from collections.abc import Mapping

from fedncv.secure.session import RefusedError, Session, canonical

Roster = Mapping[int, str]
DOMAIN = b"fedncv/secure-sums/1/"  # other uses of the same key sign no text that begins like this


def roster_mark(roster: Roster) -> str:
    """Return the hash of all keys, without their comments."""
    keys = {str(u): " ".join(text.split()[:2]) for u, text in roster.items()}
    return hashlib.sha256(canonical(keys)).hexdigest()


def sign(private_key: bytes, session: Session, kind: str, data: bytes) -> bytes:
    """Return a signature by a private key in OpenSSH's format. ``kind`` says what is signed."""
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = serialization.load_ssh_private_key(private_key, None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise RefusedError("key", "the node key is not an ECDSA key")
    return key.sign(_signed(session, kind, data), ec.ECDSA(hashes.SHA384()))


def verify(roster: Roster, u: int, signature: bytes, session: Session, kind: str, data: bytes) -> None:
    """Raise RefusedError unless client u of the roster made the signature."""
    from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    if u not in roster:
        raise RefusedError("signature", f"client {u} is not in the roster")
    try:
        key = serialization.load_ssh_public_key(roster[u].encode())
        if not isinstance(key, ec.EllipticCurvePublicKey):
            raise ValueError("another kind of key")
        key.verify(signature, _signed(session, kind, data), ec.ECDSA(hashes.SHA384()))
    except (InvalidSignature, UnsupportedAlgorithm, ValueError):
        raise RefusedError("signature", f"the signature of client {u} ({kind}) is not by its key") from None


def _signed(session: Session, kind: str, data: bytes) -> bytes:
    return DOMAIN + kind.encode() + b"\0" + session.digest + data
