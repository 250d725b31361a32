"""List the registered kernels: what each one takes, how it is built, where it runs."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kernel_api.cli import _describe
from kernel_api.cli._query import add_limit_option, add_provider_options, query
from kernel_api.cli._render import Output, Table
from kernel_api.dtypes import DType, dtype

if TYPE_CHECKING:
    from kernel_api.metadata import KernelMetadata

HELP = "the registered kernels"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--family", metavar="TEXT", help="only families with TEXT in their name")
    parser.add_argument("--dtype", help="only kernels that take it for one of their operands")
    parser.add_argument(
        "--target", "--cc", dest="cc", help="only kernels that run there, such as 90 or sm_90a"
    )
    add_provider_options(parser)
    add_limit_option(parser)
    parser.add_argument(
        "--all", action="store_true", help="every kernel, where families would be counted"
    )


def run(options: argparse.Namespace, output: Output) -> int:
    """0 if there are kernels, 1 if none is left."""
    import kernel_api as ka

    found = [kernel.metadata for kernel in ka.get_kernels(**query(options))]
    if options.family:
        found = [m for m in found if options.family in _describe.family(m)]
    if options.dtype:
        wanted = dtype(options.dtype)
        found = [m for m in found if _takes(m, wanted)]
    shown = found[: options.limit]
    data = {"count": len(found), "kernels": (_row(m) for m in shown)}
    filters = (options.family, options.dtype, options.cc, options.providers, options.filter)
    if output.for_reader and not options.all and not options.limit and not any(filters):
        output.show(data, _families(found), _summary(found), "kernel-api list --all names them.")
    else:
        table = Table(_describe.COLUMNS, [_describe.row(m) for m in shown])
        more = len(found) - len(shown)
        notes = [f"{more} more are not shown."] if more else []
        output.show(data, *([table] if shown else []), _summary(found), *notes)
    return 0 if found else 1


def _row(metadata: KernelMetadata) -> dict[str, Any]:
    return {"family": _describe.family(metadata), **metadata.to_dict()}


def _takes(metadata: KernelMetadata, wanted: DType) -> bool:
    return any(t.dtype in (None, wanted) for t in metadata.operands.tensors.values())


def _families(found: Sequence[KernelMetadata]) -> Table:
    """One row per family: how many kernels, of which types, for which targets."""
    members: dict[tuple[str, str], list[KernelMetadata]] = {}
    for metadata in found:
        members.setdefault((_describe.family(metadata), metadata.provider), []).append(metadata)
    rows = [
        (
            family,
            provider,
            str(len(kernels)),
            str(len({k.operands for k in kernels})),
            str(len({k.design for k in kernels})),
            " ".join(dict.fromkeys(_describe.targets(k) for k in kernels)),
        )
        for (family, provider), kernels in members.items()
    ]
    return Table(("family", "provider", "kernels", "operands", "designs", "targets"), rows)


def _summary(found: Sequence[KernelMetadata]) -> str:
    by_provider = Counter(metadata.provider for metadata in found)
    families = len({metadata.kernel_class for metadata in found})
    counts = ", ".join(f"{name} {count}" for name, count in by_provider.items())
    total = f"{len(found)} {_plural('kernel', len(found))}"
    if not found:
        return total
    return f"{total} of {families} {_plural('family', families)}: {counts}"


def _plural(word: str, count: int) -> str:
    if count == 1:
        return word
    return f"{word[:-1]}ies" if word.endswith("y") else f"{word}s"
