"""Certificates and keys of one lab: an authority of its own, one server certificate, one key for service accounts."""

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

DAYS = 30
SERVER_NAMES = ("localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc")


def write_certificates(folder: Path) -> None:
    """ca.crt, tls.crt + tls.key (for every server on 127.0.0.1, and as a client), service-account.key + .pub."""
    folder.mkdir(parents=True, exist_ok=True)
    authority = ec.generate_private_key(ec.SECP256R1())
    server = ec.generate_private_key(ec.SECP256R1())
    accounts = ec.generate_private_key(ec.SECP256R1())
    root = _sign(authority, "untildone-lab", authority, None)
    leaf = _sign(server, "untildone-lab-server", authority, root)
    (folder / "ca.crt").write_bytes(root.public_bytes(serialization.Encoding.PEM))
    (folder / "tls.crt").write_bytes(leaf.public_bytes(serialization.Encoding.PEM))
    _write_key(folder / "tls.key", server)
    _write_key(folder / "service-account.key", accounts)
    (folder / "service-account.pub").write_bytes(
        accounts.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    )


def _sign(
    key: ec.EllipticCurvePrivateKey, name: str, authority: ec.EllipticCurvePrivateKey, root: x509.Certificate | None
) -> x509.Certificate:
    """The authority's own certificate when `root` is None, else a leaf below it."""
    now = datetime.datetime.now(datetime.UTC)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject if root is None else root.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=DAYS))
        .add_extension(x509.BasicConstraints(ca=root is None, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        # Python 3.13 refuses an authority without keyUsage and a leaf without authorityKeyIdentifier.
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()), critical=False)
        .add_extension(_usage(root is None), critical=True)
    )
    if root is not None:
        names: list[x509.GeneralName] = [x509.DNSName(n) for n in SERVER_NAMES]
        names.append(x509.IPAddress(ipaddress.ip_address("127.0.0.1")))
        usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        builder = builder.add_extension(x509.ExtendedKeyUsage(usages), critical=False)
    return builder.sign(authority, hashes.SHA256())


def _usage(authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=authority,
        crl_sign=authority,
        key_encipherment=not authority,
        content_commitment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _write_key(path: Path, key: ec.EllipticCurvePrivateKey) -> None:
    path.touch(mode=0o600)
    path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
        )
    )
