"""Where do tenants' keys live? One file each; destroying it makes every name and header of that tenant meaningless.

    <root>/keys/<digest of the tenant's name>    0600: 32 random bytes, then the name in UTF-8

Processes that share a root share the keys: whoever makes one first wins. Where no key can be kept (read-only root), a tenant
gets one that lives as long as the process: nothing is shared beyond it, and nothing fails.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from runtime.prefix import temporary
from runtime.prefix.hashing import KEY_BYTES, Scope, shared_scope, tenant_file_name, tenant_scope
from runtime.prefix.segment import open_regular
from runtime.protocol.ids import TenantId

KEYS_DIRECTORY: Final = "keys"
_MAX_FILE_BYTES: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class Known:
    """All scopes whose segments can be recognised. is_complete: False when keys could not be looked at, so that a segment of
    none of these scopes may still be someone's."""

    scopes: tuple[Scope, ...]
    is_complete: bool


class Keyring:
    """The scopes of one cache directory, as this process sees them. Any thread may use it.

    root: None keeps no key on a disk, so that all scopes are this process's own.
    """

    def __init__(self, root: Path | None) -> None:
        self._root = root
        self._lock = threading.Lock()
        """Held over the making, finding and destroying of one key (one small file), never over a look at the directory."""
        self._scopes: dict[TenantId, Scope] = {}
        self._fleeting: set[TenantId] = set()

    def scope(self, tenant: TenantId) -> Scope:
        """The tenant's scope; its key is made when there is none. Never raises for what the disk is like."""
        with self._lock:
            scope = self._scopes.get(tenant)
            if scope is None:
                key = self._stored_key(tenant)
                if key is None:
                    self._fleeting.add(tenant)
                    key = secrets.token_bytes(KEY_BYTES)
                scope = self._scopes[tenant] = tenant_scope(tenant, key)
            return scope

    def find(self, tenant: TenantId) -> Scope | None:
        """The tenant's scope, None when it has no key: then nothing of it is kept anywhere. Makes nothing, never raises."""
        with self._lock:
            scope = self._scopes.get(tenant) or self._read_scope(tenant)
            if scope is not None:
                self._scopes[tenant] = scope
            return scope

    def known(self) -> Known:
        """Looks at the disk again. Keys that another process destroyed are forgotten: `scope` then makes a new one."""
        with self._lock:
            before = dict(self._scopes)
        on_disk, is_complete = ({}, True) if self._root is None else _on_disk(self._root)
        with self._lock:
            if is_complete:
                # Only of what was there before the look: a key made meanwhile was not to be seen.
                for tenant, scope in before.items():
                    if tenant not in self._fleeting and on_disk.get(tenant) != scope and self._scopes.get(tenant) is scope:
                        del self._scopes[tenant]
            return Known((shared_scope(), *{*on_disk.values(), *self._scopes.values()}), is_complete)

    def scopes_of(self, tenant: TenantId) -> set[Scope]:
        """All scopes under which something of the tenant may be kept: here, and by the disk (another process may have made a new
        key since). Makes nothing, never raises."""
        with self._lock:
            return {scope for scope in (self._scopes.get(tenant), self._read_scope(tenant)) if scope is not None}

    def destroy(self, tenant: TenantId) -> Scope | None:
        """Destroy the tenant's key, here and on the disk. Returns the scope it had, to find its files by once more.

        :raises OSError: the key's file cannot be removed; nothing has been forgotten.
        """
        with self._lock:
            scope = self._scopes.get(tenant) or self._read_scope(tenant)
            if self._root is not None:
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                    os.unlink(_path(self._root, tenant))
            self._scopes.pop(tenant, None)
            self._fleeting.discard(tenant)
            return scope

    def _read_scope(self, tenant: TenantId) -> Scope | None:
        """From the disk; None also when its file cannot be read."""
        with contextlib.suppress(OSError):
            found = None if self._root is None else _read(_path(self._root, tenant))
            if found is not None and found[0] == tenant:
                return tenant_scope(tenant, found[1])
        return None

    def _stored_key(self, tenant: TenantId) -> bytes | None:
        """From the disk, made there when absent or damaged; None when none can be kept."""
        if self._root is None:
            return None
        path = _path(self._root, tenant)
        with contextlib.suppress(OSError):
            for _ in range(3):
                with contextlib.suppress(FileNotFoundError):
                    found = _read(path)
                    if found is not None and found[0] == tenant:
                        return found[1]
                    os.unlink(path)
                contents = secrets.token_bytes(KEY_BYTES) + tenant.encode("utf-8", "surrogatepass")
                with temporary.temporary_file(self._root) as (descriptor, written):
                    temporary.write_whole(descriptor, [contents])
                    temporary.give_name(written, path)  # another process may have been first: read what counts
        return None


def _path(root: Path, tenant: TenantId) -> Path:
    return root / KEYS_DIRECTORY / tenant_file_name(tenant)


def _on_disk(root: Path) -> tuple[dict[TenantId, Scope], bool]:
    """The scopes whose keys the disk has, and whether all keys could be looked at."""
    scopes: dict[TenantId, Scope] = {}
    try:
        names = os.listdir(root / KEYS_DIRECTORY)
    except OSError as error:
        return scopes, isinstance(error, FileNotFoundError)
    is_complete = True
    for name in names:
        try:
            found = _read(root / KEYS_DIRECTORY / name)
        except OSError as error:
            is_complete = is_complete and isinstance(error, FileNotFoundError)
            continue
        if found is not None and tenant_file_name(found[0]) == name:
            scopes[found[0]] = tenant_scope(*found)
    return scopes, is_complete


def _read(path: Path) -> tuple[TenantId, bytes] | None:
    """(tenant, key), or None when the file is no key. :raises OSError: it cannot be read."""
    descriptor = open_regular(path)
    try:
        contents = os.read(descriptor, _MAX_FILE_BYTES)
    finally:
        os.close(descriptor)
    try:
        name = contents[KEY_BYTES:].decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return None
    return (TenantId(name), contents[:KEY_BYTES]) if len(contents) >= KEY_BYTES else None
