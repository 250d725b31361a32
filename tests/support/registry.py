"""Throwaway providers and kernel classes."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator

import kernel_api as ka
from kernel_api import provider

_numbers = itertools.count()


class Registry:
    """Makes providers for one test and registers classes with them."""

    def provider(self, name: str | None = None, rank: int = 0) -> type[ka.Provider]:
        """A new, empty provider."""
        name = name or f"throwaway{next(_numbers)}"
        return type(ka.Provider)(name, (ka.Provider,), {"name": name, "rank": rank})

    def register(self, *kernel_classes: type[ka.Kernel]) -> type[ka.Provider]:
        """Register the classes with a new provider, which is returned."""
        found = self.provider()
        for kernel_class in kernel_classes:
            found.register(kernel_class)
        return found


@contextlib.contextmanager
def restored_registry() -> Iterator[Registry]:
    """Whatever is registered inside is gone afterwards, and what was there before is back; so are
    the providers that classes know as theirs."""
    families = {found: dict(found._families) for found in provider.providers()}
    names = dict(provider._providers)
    owners = {one: one._provider for before in families.values() for one in before.values()}
    try:
        yield Registry()
    finally:
        for found in provider._providers.values():
            for one in found._families.values():
                if one in owners:
                    one._provider = owners[one]
                elif vars(one).get("_provider") is found:
                    del one._provider
        for found, before in families.items():
            found._families.clear()
            found._families.update(before)
        provider._providers.clear()
        provider._providers.update(names)
        provider.registry_changed()
