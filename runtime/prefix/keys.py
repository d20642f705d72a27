"""Where do tenants' keys live? One file each; destroying it makes every name and header of that tenant meaningless.

    <root>/keys/<digest of the tenant's name>    0600: 32 random bytes, then the name in UTF-8

Processes that share a root share the keys: whoever makes one first wins. Where no key can be kept (read-only root), a tenant
gets one that lives as long as the process: nothing is shared beyond it, and nothing fails.
"""

from __future__ import annotations

import contextlib
import os
import secrets
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
    """The scopes of one cache directory, as this process sees them. Not thread-safe; file access takes microseconds."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._scopes: dict[TenantId, Scope] = {}
        self._fleeting: set[TenantId] = set()

    def scope(self, tenant: TenantId) -> Scope:
        """The tenant's scope; its key is made when there is none. Never raises for what the disk is like."""
        scope = self._scopes.get(tenant)
        if scope is None:
            key = self._stored_key(tenant)
            if key is None:
                self._fleeting.add(tenant)
                key = secrets.token_bytes(KEY_BYTES)
            scope = self._scopes[tenant] = tenant_scope(tenant, key)
        return scope

    def known(self) -> Known:
        """Looks at the disk again. Keys that another process destroyed are forgotten: `scope` then makes a new one."""
        scopes = {shared_scope()}
        is_complete = True
        on_disk: dict[TenantId, Scope] = {}
        try:
            names = os.listdir(self._root / KEYS_DIRECTORY)
        except FileNotFoundError:
            names = []
        except OSError:
            names, is_complete = [], False
        for name in names:
            try:
                found = _read(self._root / KEYS_DIRECTORY / name)
            except FileNotFoundError:
                continue
            except OSError:
                is_complete = False
                continue
            if found is not None and tenant_file_name(found[0]) == name:
                on_disk[found[0]] = tenant_scope(*found)
        if is_complete:
            for tenant, scope in list(self._scopes.items()):
                if tenant not in self._fleeting and on_disk.get(tenant) != scope:
                    del self._scopes[tenant]
        return Known((*scopes, *{*on_disk.values(), *self._scopes.values()}), is_complete)

    def destroy(self, tenant: TenantId) -> Scope | None:
        """Destroy the tenant's key, here and on the disk. Returns the scope it had, to find its files by once more.

        :raises OSError: the key's file cannot be removed; nothing has been forgotten.
        """
        path = self._path(tenant)
        scope = self._scopes.get(tenant)
        if scope is None:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                found = _read(path)
                scope = None if found is None else tenant_scope(tenant, found[1])
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            os.unlink(path)
        self._scopes.pop(tenant, None)
        self._fleeting.discard(tenant)
        return scope

    def _path(self, tenant: TenantId) -> Path:
        return self._root / KEYS_DIRECTORY / tenant_file_name(tenant)

    def _stored_key(self, tenant: TenantId) -> bytes | None:
        """From the disk, made there when absent or damaged; None when none can be kept."""
        path = self._path(tenant)
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
