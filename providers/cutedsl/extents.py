"""How large the extents of operands may be."""

from __future__ import annotations

from typing import Any

from kernel_api.space import Miss, rule

#: That are counted in 32 bits with room for a tile behind them.
MOST = 2**30


@rule("extents are counted in 32 bits, 2³⁰ at most")
def counted_in_32_bits(args: Any) -> bool | Miss:
    """Of every operand: a launch passes them all, those of functions and epilogues, too."""
    for name, operand in args.named_operands.items():
        if max(operand.shape, default=0) > MOST:
            return Miss(f"{name} has shape {operand.shape}")
    return True
