"""Searches bytes, files and processes for secrets, in every form in which a program may have written them."""

from __future__ import annotations

import base64
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

_EVERY_S = 0.1
_WHOLE_KEY = re.compile(rb"-----BEGIN PRIVATE KEY-----[A-Za-z0-9+/=\s]+-----END PRIVATE KEY-----\s*")
_LINE_BREAKS = re.compile(rb"\s|\\n")


def is_key_file(path: Path) -> bool:
    """Whether a file contains a private key, and nothing else."""
    return path.suffix in (".pem", ".key") and _WHOLE_KEY.fullmatch(path.read_bytes()) is not None


def _base64_forms(raw: bytes) -> Iterator[bytes]:
    """The base64 forms of bytes inside a longer text, which depend on the number of bytes before them."""
    for before in range(3):
        whole = base64.b64encode(bytes(before) + raw)
        first, last = -(-before * 8 // 6), (before + len(raw)) * 8 // 6
        yield whole[first:last]
        yield whole[first:last].replace(b"+", b"-").replace(b"/", b"_")


def _raw_forms(raw: bytes) -> Iterator[bytes]:
    yield raw
    yield raw.hex().encode()
    yield raw.hex().upper().encode()
    yield raw.hex(":").encode()
    yield str(int.from_bytes(raw, "big")).encode()
    yield from _base64_forms(raw)


def _scalar(pem: bytes) -> bytes:
    key = serialization.load_pem_private_key(pem, None)
    if isinstance(key, ec.EllipticCurvePrivateKey):
        return key.private_numbers().private_value.to_bytes(key.key_size // 8, "big")
    assert isinstance(key, ed25519.Ed25519PrivateKey)
    return key.private_bytes_raw()


class Secrets:
    """Secrets in all their forms, by a name that may be shown."""

    def __init__(self) -> None:
        self._forms: dict[str, set[bytes]] = {}

    def __len__(self) -> int:
        return len(self._forms)

    def add_text(self, name: str, text: str) -> None:
        """Add a password or a token."""
        self._forms[name] = {text.encode(), *_base64_forms(text.encode()), text.encode().hex().encode()}

    def add_token(self, name: str, token: str) -> None:
        """Add a token that is base64url of random bytes."""
        self.add_text(name, token)
        self._forms[name].update(_raw_forms(base64.urlsafe_b64decode(token + "=" * (-len(token) % 4))))

    def add_key(self, name: str, pem: bytes) -> None:
        """Add a private key: its PEM without line breaks, and its raw bytes."""
        body = b"".join(line for line in pem.splitlines() if line and b"-----" not in line)
        self._forms[name] = {body, *_raw_forms(_scalar(pem))}

    def add_key_files(self, folder: Path) -> list[Path]:
        """Add all private keys below a folder."""
        found = [path for path in sorted(folder.rglob("*")) if path.is_file() and is_key_file(path)]
        for path in found:
            self.add_key(str(path.relative_to(folder)), path.read_bytes())
        return found

    def in_bytes(self, content: bytes, but: str = "") -> list[str]:
        """The names of the secrets found in some bytes, except for one that is expected there."""
        joined = _LINE_BREAKS.sub(b"", content)
        return [
            name
            for name, forms in self._forms.items()
            if name != but and any(form in content or form in joined for form in forms)
        ]


class ProcessWatch:
    """Repeatedly records the arguments and environment of all descendants of this process while it is entered."""

    def __init__(self) -> None:
        self.arguments: set[str] = set()
        self.environments: set[str] = set()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> ProcessWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        here = psutil.Process(os.getpid())
        while not self._ended.wait(_EVERY_S):
            for child in here.children(recursive=True):
                try:
                    self.arguments.add("\0".join(child.cmdline()))
                    self.environments.add("\0".join(f"{name}={value}" for name, value in child.environ().items()))
                except psutil.Error:  # the process has just ended
                    continue
