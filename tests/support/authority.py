"""A private certificate authority, and a server's certificate of it for 127.0.0.1."""

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import NameOID


class Authority:
    """`certificate_file` is what clients trust, `server_file` has a server's key and certificates. Both are PEM.

    The server's key is one of RSA if `has_rsa`. If it `is_server`, the authority's own certificate is the server's, as
    `openssl req -x509` makes it. The server's certificate is for `host`, an address, and ends in `days`.
    """

    def __init__(
        self, folder: Path, *, has_rsa: bool = False, is_server: bool = False, host: str = "127.0.0.1", days: int = 2
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        own_key, of_curve = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
        server_key = rsa.generate_private_key(65537, 2048) if has_rsa else of_curve
        own_name, server_name = (
            x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)]) for text in ("tests of brokers", "127.0.0.1")
        )
        own = _builder(own_name, own_name, own_key).add_extension(x509.BasicConstraints(ca=True, path_length=0), True)
        address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(host))])
        server = _builder(server_name, own_name, server_key, days).add_extension(address, False)
        if is_server:
            server_key, own = own_key, own.add_extension(address, False)
        certificates = [
            builder.sign(own_key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM) for builder in (own, server)
        ]
        private = server_key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        self.certificate_file, self.server_file = folder / "authority.pem", folder / "server.pem"
        self.certificate_file.write_bytes(certificates[0])
        self.server_file.write_bytes(private + b"".join(certificates[:1] if is_server else reversed(certificates)))


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: int = 2
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=3))
        .not_valid_after(now + datetime.timedelta(days=days))
    )
