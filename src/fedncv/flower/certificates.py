"""TLS certificates of the server, and a key with which each node proves its identity.

ca.key, ca.crt           a certificate authority for this federation only
server.key, server.crt   the server's, signed by the authority, for its host names and addresses
node.key, node.pub       one pair per client, ECDSA on P-384 in OpenSSH's format, as Flower requires
"""

import datetime
import ipaddress
import os
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedncv.store import write_atomically

VALID_DAYS = 825


def write_authority(folder: Path) -> None:
    """Write ca.key and ca.crt. Whoever has the key can impersonate the server."""
    key = ec.generate_private_key(ec.SECP384R1())
    write_secret(folder / "ca.key", _private(key))
    (folder / "ca.crt").write_bytes(_authority(key))


def renew_authority(folder: Path) -> None:
    """Write a new ca.crt for the same key: clients with the old one trust what is signed, until it expires."""
    write_atomically(folder / "ca.crt", _authority(_read_key(folder / "ca.key")), name="certificate")


def _authority(key: ec.EllipticCurvePrivateKey) -> bytes:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fedncv federation")])
    certificate = (
        _builder(name, name, key)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA384())
    )
    return certificate.public_bytes(serialization.Encoding.PEM)


def write_server(authority: Path, folder: Path, hosts: list[str]) -> None:
    """Write server.key and server.crt for these host names and addresses, and for the loopback interface."""
    key = ec.generate_private_key(ec.SECP384R1())
    names = [_host(host) for host in dict.fromkeys([*hosts, "localhost", "127.0.0.1", "::1"])]
    write_secret(folder / "server.key", _private(key))
    (folder / "server.crt").write_bytes(_server(authority, key, x509.SubjectAlternativeName(names)))
    (folder / "ca.crt").write_bytes((authority / "ca.crt").read_bytes())


def renew_server(authority: Path, folder: Path) -> None:
    """Write a new server.crt for the same key, names and addresses as the old one."""
    old = x509.load_pem_x509_certificate((folder / "server.crt").read_bytes())
    names = old.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    certificate = _server(authority, _read_key(folder / "server.key"), names)
    write_atomically(folder / "server.crt", certificate, name="certificate")
    write_atomically(folder / "ca.crt", (authority / "ca.crt").read_bytes(), name="certificate")


def _server(authority: Path, key: ec.EllipticCurvePrivateKey, names: x509.SubjectAlternativeName) -> bytes:
    ca_key = _read_key(authority / "ca.key")
    ca = x509.load_pem_x509_certificate((authority / "ca.crt").read_bytes())
    certificate = (
        _builder(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fedncv server")]), ca.subject, key)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(names, critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
        .sign(ca_key, hashes.SHA384())
    )
    return certificate.public_bytes(serialization.Encoding.PEM)


def _read_key(path: Path) -> ec.EllipticCurvePrivateKey:
    key = serialization.load_pem_private_key(path.read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    return key


def write_node(folder: Path) -> bytes:
    """Write node.key and node.pub; return the public key."""
    key = ec.generate_private_key(ec.SECP384R1())
    encoding = serialization.Encoding.PEM
    form, plain = serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    write_secret(folder / "node.key", key.private_bytes(encoding, form, plain))
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    (folder / "node.pub").write_bytes(public)
    return public


def write_secret(path: Path, data: bytes) -> None:
    """Write a file that only its owner can read, from its first byte on."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)


def _private(key: ec.EllipticCurvePrivateKey) -> bytes:
    form, plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    return key.private_bytes(serialization.Encoding.PEM, form, plain)


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(days=VALID_DAYS))
    )


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs,
        crl_sign=signs,
        encipher_only=False,
        decipher_only=False,
    )
