"""Masks: X25519 key agreement, HKDF-SHA256, and ChaCha20 key streams of full 256-bit keys.

    key of u and v   HKDF(X25519(private_u, public_v), salt = digest of the session, info = purpose and both ids)
    mask             the ChaCha20 key stream of that key, 8 bytes a number, modulo 2^bits

Keys are of one attempt at one round, so every key stream is used once and needs no nonce.
"""

import numpy as np

from fedncv.secure.fixed_point import Words, mask_of
from fedncv.secure.session import RefusedError, Session

KEY = 32


def new_key() -> bytes:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    return X25519PrivateKey.generate().private_bytes_raw()


def public_of(private: bytes) -> bytes:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def agreed(private: bytes, public: bytes, session: Session, purpose: str, first: int, second: int) -> bytes:
    """Return the key that two clients share for a purpose, in the direction from ``first`` to ``second``."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

    try:
        shared = X25519PrivateKey.from_private_bytes(private).exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:  # a public key of low order: the shared secret would be zero
        raise RefusedError("key", f"the keys of clients {first} and {second} do not agree on a secret") from None
    return derived(shared, session.digest, f"{purpose}/{first}/{second}".encode())


def derived(secret: bytes, salt: bytes, info: bytes) -> bytes:
    """Return HKDF-SHA256 of the secret, 32 bytes."""
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    return HKDF(hashes.SHA256(), KEY, salt, info).derive(secret)


def stream(key: bytes, numbers: int, bits: int) -> Words:
    """Return so many words of the key's ChaCha20 stream."""
    from cryptography.hazmat.primitives.ciphers import Cipher
    from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

    cipher = Cipher(ChaCha20(key, bytes(16)), mode=None).encryptor()
    return np.frombuffer(cipher.update(bytes(8 * numbers)), "<u8").astype(np.uint64) & mask_of(bits)


def self_mask(seed: bytes, session: Session, u: int) -> Words:
    """Return PRG(b_u)."""
    return stream(derived(seed, session.digest, f"self/{u}".encode()), session.numbers, session.bits)


def pair_mask(private: bytes, public: bytes, session: Session, u: int, v: int) -> Words:
    """Return what client u adds for client v: the same words, with opposite signs at both."""
    first, second = min(u, v), max(u, v)
    words = stream(agreed(private, public, session, "mask", first, second), session.numbers, session.bits)
    return words if u == first else (np.uint64(0) - words) & mask_of(session.bits)
