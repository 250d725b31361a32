"""Options that say which kernels compete, and how long each may take; shared by what measures."""

from __future__ import annotations

import argparse

from kernel_api.cli._metadata_filter import MetadataFilter, condition
from kernel_api.cli._query import add_providers_option


def add_candidate_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--filter",
        action="append",
        type=condition,
        metavar="AXIS=VALUE",
        help="only kernels of that design, as tile=128x128x64 or family=sm90.gemm: what kernel-api "
        "list prints; values may be separated by commas; may be repeated",
    )
    add_providers_option(group, "only these; without torch, nothing is compared with it")
    group.add_argument(
        "--timeout",
        type=seconds,
        default=10.0,
        metavar="SECONDS",
        help="for each step of a candidate (default: 10)",
    )


def metadata_filter(options: argparse.Namespace) -> MetadataFilter | None:
    """The filter that ``--filter`` asks for; raises ArgumentError for an axis that there is not."""
    return MetadataFilter.checked(options.filter) if options.filter else None


def seconds(text: str) -> float:
    """A converter for argparse."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds") from None
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{value} is no number of seconds that is more than 0")
    return value
