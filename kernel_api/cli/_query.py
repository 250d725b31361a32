"""Options that say which kernels are meant; shared by the commands."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from kernel_api.cli._metadata_filter import Condition, MetadataFilter, condition
from kernel_api.metadata import KernelMetadata


def add_provider_options(parser: argparse.ArgumentParser) -> None:
    add_providers_option(parser, "only these")
    parser.add_argument(
        "--filter",
        action="append",
        type=_text_or_condition,
        metavar="TEXT",
        help="only kernels with TEXT in their name, or of a design, as tile=128x128x64; may be "
        "repeated",
    )


def add_providers_option(parser: argparse._ActionsContainer, help: str) -> None:
    parser.add_argument(
        *("--providers", "--provider"),
        action="extend",
        type=_names,
        metavar="NAME,NAME",
        help=f"{help}; may be repeated",
    )


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise argparse.ArgumentTypeError(f"{text!r} names none; expected such as cutedsl,torch")
    return names


def _text_or_condition(text: str) -> str | Condition:
    """No name of a kernel has an equals sign."""
    return condition(text) if "=" in text else text


def add_limit_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--limit", type=at_least(1), metavar="COUNT", help="only the first COUNT kernels"
    )


def metadata_filter(options: argparse.Namespace) -> Callable[[KernelMetadata], bool] | None:
    """The filter for ``get_kernels`` that ``--filter`` asks for; raises ArgumentError for an axis
    that there is not."""
    asked = options.filter or ()
    texts = [one for one in asked if isinstance(one, str)]
    if not asked:
        return None
    conditions = [one for one in asked if not isinstance(one, str)]
    of_design = MetadataFilter.checked(conditions) if conditions else MetadataFilter([])
    return lambda metadata: (
        all(text in metadata.kernel_name for text in texts) and of_design(metadata)
    )


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
        "providers": options.providers,
    }
