"""Say which kernel families can compute a problem, and why the others cannot."""

from __future__ import annotations

import argparse

from kernel_api.cli._problem import add_problem_options, problem_arguments
from kernel_api.cli._query import add_provider_options, query
from kernel_api.cli._render import Output

HELP = "which families can compute a problem, and why the others cannot"


def add_options(parser: argparse.ArgumentParser) -> None:
    add_problem_options(parser, devices=("cpu", "cuda", "meta"), device="meta")
    add_provider_options(parser)


def run(options: argparse.Namespace, output: Output) -> int:
    """0 if a family accepts the problem, 1 if none does."""
    import kernel_api as ka

    explanation = ka.explain(problem_arguments(options), **query(options))
    output.show(explanation.to_dict(), str(explanation))
    return 0 if explanation.accepted else 1
