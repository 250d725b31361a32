"""Kernels whose code needs no GPU, and libraries of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import kernel_api as ka
from kernel_api import bundle
from support.code_kernels import CodeGemm
from support.data import arguments_for
from support.kernels import kernels_of
from support.registry import restored_registry


@contextlib.contextmanager
def registered_code() -> Iterator[type[ka.Provider]]:
    """Within it they are in the registry; bundles need their provider."""
    with restored_registry() as registry:
        yield registry.register(CodeGemm)
    bundle._families.clear()


def kernels() -> list[ka.Kernel]:
    return list(kernels_of(CodeGemm)[:3])


def arguments(device: str = "meta", **other: Any) -> ka.GemmArguments:
    return arguments_for(kernels()[0], 64, 64, 64, device=device, **other)


def write_libraries(folder: Path) -> Path:
    """Two kernels, one of them for two targets."""
    small, large = kernels()[:2]
    small.compile(arguments(), cc=90).export(folder / "small.so")
    large.compile(arguments(), cc=80).export(folder / "large80.so")
    large.compile(arguments(), cc=90).export(folder / "large90.so")
    return folder


def damaged(library: str | Path, change: Callable[[bytearray], None]) -> None:
    data = bytearray(Path(library).read_bytes())
    change(data)
    with open(library, "wb") as file:
        file.write(data)


def flip(where: float) -> Callable[[bytearray], None]:
    """A bit, at a share of the file."""

    def change(data: bytearray) -> None:
        data[int(where * (len(data) - 1))] ^= 0x20

    return change


def cut(share: float) -> Callable[[bytearray], None]:
    """All behind a share of the file."""
    return lambda data: data.__delitem__(slice(int(share * len(data)), None))
