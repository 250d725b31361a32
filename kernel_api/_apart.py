"""Of calls that look like an earlier one, whether what they write lies clear of all else, as it did
then: addresses are what is new of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

#: Tensors that may not share memory: place and size in bytes of each, and whether they may be one
#: all the same.
Pair = tuple[int, int, int, int, bool]


def pairs_apart(
    spans: Mapping[str, int],
    written: Iterable[str],
    one_memory: Collection[frozenset[str]] = (),
) -> list[Pair]:
    """Tensors of which one is written. Outputs that are made for the call share memory with
    nothing, and are left out.

    Args:
        spans: Sizes in bytes of what a call gives, in order.
        one_memory: Pairs that may have the same.
    """
    places = {name: place for place, name in enumerate(spans)}
    outputs = [name for name in written if name in spans]
    pairs = {frozenset((one, other)) for one in outputs for other in spans if one != other}
    return [
        (
            *(places[one], spans[one], places[other], spans[other]),
            frozenset((one, other)) in one_memory,
        )
        for one, other in map(sorted, pairs)
    ]


def are_apart(addresses: Sequence[int], pairs: Iterable[Pair]) -> bool:
    """Whether tensors at these addresses share no memory that they may not share. Arguments look
    closer where they do: elements may lie between each other's."""
    for one, size, other, other_size, may_coincide in pairs:
        start, other_start = addresses[one], addresses[other]
        shared = start < other_start + other_size and other_start < start + size
        if shared and not (may_coincide and start == other_start):
            return False
    return True
