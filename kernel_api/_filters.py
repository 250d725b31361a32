"""Which kernels a caller's filter keeps, by their metadata."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator

from kernel_api._numbers import truth
from kernel_api.errors import FilterError
from kernel_api.kernel import Kernel
from kernel_api.metadata import DesignMetadata, KernelMetadata

MetadataFilter = Callable[[KernelMetadata], bool]


def filtered(kernels: Iterable[Kernel], metadata_filter: MetadataFilter | None) -> list[Kernel]:
    """The kernels for whose metadata the filter is true; one without a design axis that it asks
    for is not kept.

    Raises FilterError if the filter raises, asks for an axis that no design has, or returns what is
    no bool.
    """
    if metadata_filter is None:
        return list(kernels)
    return [kernel for kernel in kernels if _is_kept(kernel.metadata, metadata_filter)]


def _is_kept(metadata: KernelMetadata, metadata_filter: MetadataFilter) -> bool:
    try:
        kept = metadata_filter(metadata)
    except Exception as error:
        text = f"metadata_filter raised on {metadata.kernel_name}: {error!r}"
        if isinstance(error, AttributeError) and error.name and error.obj is metadata.design:
            if any(_has(design, error.name) for design in _designs()):
                return False
            text = f"{text}; there is no axis {error.name}, there are {', '.join(design_axes())}"
        raise FilterError(text) from error
    is_kept = truth(kept)
    if is_kept is None:
        raise FilterError(
            f"metadata_filter returned {kept!r} for {metadata.kernel_name}; expected True or False"
        )
    return is_kept


def design_axes() -> list[str]:
    """The fields of all designs there are."""
    return sorted({one.name for design in _designs() for one in dataclasses.fields(design)})


def _has(design: type[DesignMetadata], name: str) -> bool:
    """Whether it is a field, a property or the like."""
    return hasattr(design, name) or name in {one.name for one in dataclasses.fields(design)}


def _designs(base: type[DesignMetadata] = DesignMetadata) -> Iterator[type[DesignMetadata]]:
    """Of the kernel classes that are registered, and whatever else is loaded."""
    yield base
    for one in base.__subclasses__():
        yield from _designs(one)
