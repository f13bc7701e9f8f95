"""Seals secrets with HPKE (RFC 9180), so that whoever holds the public key can write them and not read them."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Literal, get_args

from reactor.errors import Misuse, ReactorError

if TYPE_CHECKING:  # 6 MB that a reactor without keys does not pay
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
    from cryptography.hazmat.primitives.hpke import Suite

Purpose = Literal["access_token", "refresh_token", "journal"]

_PRIVATE = "reactor-private-1."
_PUBLIC = "reactor-public-1."
_KEY_BYTES = 32
_REMEMBERED = 256
_SEALED = re.compile(r"hpke1\.(?P<key_id>[0-9a-f]{8})\.(?P<body>[A-Za-z0-9_-]+)")


@cache
def _suite() -> Suite:
    from cryptography.hazmat.primitives.hpke import AEAD, KDF, KEM, Suite  # noqa: PLC0415

    return Suite(KEM.X25519, KDF.HKDF_SHA256, AEAD.AES_256_GCM)


class KeyMissing(ReactorError):
    """Sealed with a key that we do not hold, `key_id`: what it opens is out of reach until that key is back."""

    def __init__(self, key_id: str) -> None:
        super().__init__(f"sealed with the key {key_id}, which is not in REACTOR_TOKEN_KEY")
        self.key_id = key_id


class SealBroken(ReactorError):
    """No sealed text, or changed since, or sealed for another tenant, integration, account or purpose."""


class Keys:
    """The private keys of REACTOR_TOKEN_KEY: the first one seals, all of them open. Safe to share among threads."""

    def __init__(self, private_keys: Mapping[str, X25519PrivateKey]) -> None:
        self._private_keys = dict(private_keys)
        self.key_id = next(iter(self._private_keys))
        self.public = _PUBLIC + _encoded(self._private_keys[self.key_id].public_key().public_bytes_raw())
        # The hot path asks for the same tokens again: it is spared the decryption. Failures are not remembered.
        self._opened = lru_cache(maxsize=_REMEMBERED)(self._decrypt)

    @classmethod
    def parse(cls, text: str) -> Keys:
        """The keys of REACTOR_TOKEN_KEY's value: private keys of `reactor keygen`, separated by commas.

        Raises:
            Misuse: It holds anything else, or a key twice: one line that quotes nothing of it.
        """
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey  # noqa: PLC0415

        texts = [part.strip() for part in text.split(",")]
        private_keys: dict[str, X25519PrivateKey] = {}
        for number, key in enumerate(texts, 1):
            which = f"REACTOR_TOKEN_KEY: key {number} of {len(texts)}"
            raw = _raw_key(key, _PRIVATE)
            if key.startswith(_PUBLIC):
                raise Misuse(f"{which} is a public key; the reactor needs the private one of the pair")
            if raw is None:
                raise Misuse(f"{which} is not a whole {_PRIVATE}... text, as `reactor keygen` prints it")
            private = X25519PrivateKey.from_private_bytes(raw)
            key_id = _key_id(private.public_key().public_bytes_raw())
            if key_id in private_keys:
                raise Misuse(f"{which} has the id {key_id} of one before it")
            private_keys[key_id] = private
        return cls(private_keys)

    def __repr__(self) -> str:
        return f"Keys({', '.join(self._private_keys)})"

    def seal(self, value: str, *, tenant_id: str, integration: str, account: str = "", purpose: Purpose) -> str:
        """`value` sealed with the first key. See `seal`."""
        return seal(self.public, value, tenant_id=tenant_id, integration=integration, account=account, purpose=purpose)

    def open(self, sealed: str, *, tenant_id: str, integration: str, account: str = "", purpose: Purpose) -> str:
        """The value that was sealed for exactly this tenant, integration, account and purpose.

        Raises:
            KeyMissing: It was sealed with a key that is not here.
            SealBroken: It is no sealed text, was changed, or was sealed for somebody or something else.
        """
        return self._opened(sealed, _info(tenant_id, integration, account, purpose))

    def is_current(self, sealed: str) -> bool:
        """Whether the first key sealed it. False: seal it again, so that older keys can go."""
        return sealed.startswith(f"hpke1.{self.key_id}.")

    def _decrypt(self, sealed: str, info: bytes) -> str:
        from cryptography.exceptions import InvalidTag  # noqa: PLC0415

        key_id = key_id_of(sealed)
        private = self._private_keys.get(key_id)
        if private is None:
            raise KeyMissing(key_id)
        body = _decoded(sealed.rpartition(".")[2])
        # Raised below, out of reach of the error that would carry the plain bytes along as its context.
        with suppress(InvalidTag, ValueError):
            return _suite().decrypt(body or b"", private, info).decode()
        raise SealBroken("it does not open: changed, or sealed for another tenant, integration, account or purpose")


def seal(public_key: str, value: str, *, tenant_id: str, integration: str, account: str = "", purpose: Purpose) -> str:
    """`value` as a text that only the private key opens, and only for this tenant, integration, account and purpose.

    Any text goes in, the empty one and one with NUL included; sealing it twice gives two different texts. Its length
    can be told from outside.

    The public key is as `reactor keygen` prints it; tenant, integration and account are as in the row that the value
    goes into, letter by letter, with '' for no account.

    Raises:
        Misuse: The key or the purpose is none.
        TypeError: A tenant, integration or account is no text.
        ValueError: The value, tenant, integration or account holds a lone surrogate, which UTF-8 cannot write.
    """
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey  # noqa: PLC0415

    raw = _raw_key(public_key.strip(), _PUBLIC)
    if raw is None:
        raise Misuse(f"the public key is not a whole {_PUBLIC}... text, as `reactor keygen` prints it")
    plain = _utf8(value, "the value")
    info = _info(tenant_id, integration, account, purpose)
    try:
        body = _suite().encrypt(plain, X25519PublicKey.from_public_bytes(raw), info)
    except ValueError:  # a point of low order, that every private key would open
        raise Misuse("the public key is not one that can be sealed with") from None
    return f"hpke1.{_key_id(raw)}.{_encoded(body)}"


def generate() -> tuple[str, str]:
    """A new pair of keys: private, public."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey  # noqa: PLC0415

    private = X25519PrivateKey.generate()
    return (
        _PRIVATE + _encoded(private.private_bytes_raw()),
        _PUBLIC + _encoded(private.public_key().public_bytes_raw()),
    )


def key_id_of(sealed: str) -> str:
    """The id of the key that sealed it, as written at its front: nobody has vouched for it.

    Raises:
        SealBroken: It is no sealed text.
    """
    match = _SEALED.fullmatch(sealed)
    if match is None:
        raise SealBroken("it is not a sealed text")
    return match["key_id"]


def _info(tenant_id: str, integration: str, account: str, purpose: Purpose) -> bytes:
    """What a seal is bound to: the bytes that JavaScript's JSON.stringify gives, so that it can seal too."""
    if purpose not in get_args(Purpose):
        raise Misuse(f"the purpose of a seal is one of {', '.join(get_args(Purpose))}")
    if not all(isinstance(part, str) for part in (tenant_id, integration, account)):  # null would be bound as null
        raise TypeError("tenant_id, integration and account are texts ('' for no account)")
    bound = ["memory-reactor", 1, tenant_id, integration, account, purpose]
    text = json.dumps(bound, ensure_ascii=False, separators=(",", ":"))
    return _utf8(text, "the tenant, integration or account")


def _utf8(text: str, what: str) -> bytes:
    # Raised outside of the handler: a UnicodeEncodeError carries the text, and would come along as the context.
    with suppress(UnicodeEncodeError):
        return text.encode()
    raise ValueError(f"{what} holds a lone surrogate, which is half a character: it cannot be sealed")


def _key_id(public_raw: bytes) -> str:
    return hashlib.sha256(public_raw).hexdigest()[:8]


def _raw_key(text: str, prefix: str) -> bytes | None:
    raw = _decoded(text.removeprefix(prefix)) if text.startswith(prefix) else None
    return raw if raw is not None and len(raw) == _KEY_BYTES else None


def _encoded(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


def _decoded(text: str) -> bytes | None:
    """The bytes of base64url without padding; None where it is anything else.

    One text stands for one sequence of bytes: the spare bits at the end cannot be changed unseen.
    """
    with suppress(ValueError):
        raw = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
        return raw if _encoded(raw) == text else None
    return None
