"""The sizes that estimates know: of extents that are nearly the same, one.

A server sees another number of tokens in every call. What estimates of tens of designs take is
spent once for all that are rounded up to the same multiple, see
:meth:`~kernel_api.kernel.Kernel.estimated_by`: few tiles have an extent that is none of these, so
as many are full, and waves as many.
"""

from __future__ import annotations

#: Up to an extent, the multiples that are told apart; beyond all of them the last.
_MULTIPLES = ((1024, 16), (2048, 32))
_BEYOND = 64


def told_apart(extent: int) -> int:
    """The extent in place of this one; of one element or none, itself."""
    if extent < 2:
        return extent
    multiple = next((multiple for most, multiple in _MULTIPLES if extent <= most), _BEYOND)
    return -(-extent // multiple) * multiple
