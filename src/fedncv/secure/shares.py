"""Shamir shares of 32-byte secrets, and their sealing for one receiver.

A secret is two blocks of 16 bytes, each shared over GF(2^128). A share is sealed with ChaCha20-Poly1305 under a
pairwise key of this attempt and this direction, which seals nothing else. The session, sender and receiver are
associated data.
"""

from collections.abc import Mapping

from fedncv.secure import masks
from fedncv.secure.session import RefusedError, Session

BLOCK = 16
SECRET = 2 * BLOCK
TAG = 16
NONCE = bytes(12)  # a key seals one message


def deal(secret: bytes, holders: list[int], threshold: int) -> dict[int, bytes]:
    """Return holder -> its share, so that any ``threshold`` of them give the secret. The place in the list counts."""
    from Crypto.Protocol.SecretSharing import Shamir

    assert len(secret) == SECRET
    blocks = [Shamir.split(threshold, len(holders), secret[at : at + BLOCK], False) for at in (0, BLOCK)]
    return {v: b"".join(block[i][1] for block in blocks) for i, v in enumerate(holders)}


def recover(shares: Mapping[int, bytes], holders: list[int], threshold: int) -> bytes:
    """Return the secret from the shares of ``threshold`` of the holders."""
    from Crypto.Protocol.SecretSharing import Shamir

    used = sorted(shares)[:threshold]
    if len(used) < threshold:
        raise RefusedError("few", f"{len(used)} shares, and {threshold} are needed")
    parts = [
        Shamir.combine([(holders.index(v) + 1, shares[v][at : at + BLOCK]) for v in used], False) for at in (0, BLOCK)
    ]
    return b"".join(parts)


def seal(data: bytes, private: bytes, public: bytes, session: Session, sender: int, receiver: int) -> bytes:
    """Return the data, sealed by the sender for the receiver."""
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

    key = masks.agreed(private, public, session, "shares", sender, receiver)
    return ChaCha20Poly1305(key).encrypt(NONCE, data, _about(session, sender, receiver))


def unseal(sealed: bytes, private: bytes, public: bytes, session: Session, sender: int, receiver: int) -> bytes:
    """Return what the sender sealed; raise RefusedError if it did not seal this for the receiver in this session."""
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

    key = masks.agreed(private, public, session, "shares", sender, receiver)
    try:
        return ChaCha20Poly1305(key).decrypt(NONCE, sealed, _about(session, sender, receiver))
    except InvalidTag:
        raise RefusedError("share", f"the share of client {sender} does not decrypt") from None


def _about(session: Session, sender: int, receiver: int) -> bytes:
    return session.digest + f"{sender}/{receiver}".encode()
