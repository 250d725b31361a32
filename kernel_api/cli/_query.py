"""Options that say which kernels are meant; shared by the commands."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from kernel_api.metadata import KernelMetadata


def add_provider_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--provider", action="append", metavar="NAME", help="only this provider; may be repeated"
    )
    parser.add_argument("--filter", metavar="TEXT", help="only kernels with TEXT in their name")


def add_limit_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--limit", type=at_least(1), metavar="COUNT", help="only the first COUNT kernels"
    )


def metadata_filter(options: argparse.Namespace) -> Callable[[KernelMetadata], bool] | None:
    """The filter for ``get_kernels`` that ``--filter`` asks for."""
    text: str | None = options.filter
    if text is None:
        return None
    return lambda metadata: text in metadata.kernel_name


#: The largest integers that torch takes for a size, and for a seed.
_MOST, _MOST_SEED = 2**63 - 1, 2**64 - 1


def at_least(lowest: int, most: int = _MOST) -> Callable[[str], int]:
    """A converter for argparse: an integer that is not below ``lowest``, nor above ``most``."""

    def integer(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is no integer") from None
        if value < lowest:
            raise argparse.ArgumentTypeError(f"{value} is less than {lowest}")
        if value > most:
            raise argparse.ArgumentTypeError(f"{value} is more than {most}")
        return value

    return integer


#: The same for what random numbers begin with.
seed = at_least(-_MOST - 1, _MOST_SEED)


def query(options: argparse.Namespace, cc: Any = None) -> dict[str, Any]:
    """The keyword arguments of ``get_kernels`` and ``explain``."""
    return {
        "metadata_filter": metadata_filter(options),
        "cc": cc if cc is not None else getattr(options, "cc", None),
        "providers": options.provider,
    }
