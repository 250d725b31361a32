"""Pack exported kernels into a bundle, which discovery offers where there is no compiler.

The libraries come from "kernel-api compile --out" or from artifact.export. A process finds the
bundle's kernels by KERNEL_API_BUNDLE, or after kernel_api.load_bundle(path).
"""

from __future__ import annotations

import argparse

from kernel_api.cli._render import Output

HELP = "pack exported kernels for machines without a compiler"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("sources", nargs="+", help="libraries, or folders of them")
    parser.add_argument("--out", required=True, metavar="DIR", help="the bundle; may exist")


def run(options: argparse.Namespace, output: Output) -> int:
    """Always 0: what cannot be packed raises."""
    from kernel_api.bundle import pack

    names = pack(options.sources, options.out)
    data = {"bundle": options.out, "kernels": names}
    output.show(data, *names, f"{len(names)} kernels in {options.out}")
    return 0
