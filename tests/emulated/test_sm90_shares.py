"""How many blocks share keys of the attention gradient: the host code of a kernel, which launches
them, and who makes the workspace for what they leave have to come to the same number."""

import random
from typing import Any

import pytest
import torch
from support.ptx.kernel import EmulatedKernel
from support.sampling import some

import kernel_api as ka
from kernel_api import masks

pytestmark = pytest.mark.compile

MASKS = {"full": None, "causal": masks.Causal(), "a window": masks.SlidingWindow(50, 9)}
TILE = (64, 128)


def of_tile(metadata: Any) -> bool:
    return bool(metadata.design.tile_shape == TILE and not metadata.design.early)


def gradients(device: str, mask: Any, B: int, H_kv: int, sharing: int, S_q: int, S_kv: int) -> Any:
    def heads(count: int, length: int) -> torch.Tensor:
        return torch.empty(B, count, length, 128, dtype=torch.bfloat16, device=device)

    H = H_kv * sharing
    Q, K, V, out, dO = (heads(*o) for o in ((H, S_q), *((H_kv, S_kv),) * 2, *((H, S_q),) * 2))
    lse = torch.empty(B, H, S_q, device=device)
    made = (torch.empty_like(one) for one in (Q, K, V))
    return ka.SdpaBackwardArguments(Q, K, V, out, dO, lse, *made, mask=mask)


def sizes(seed: int) -> tuple[int, ...]:
    """Of few and of many rounds of blocks."""
    draw = random.Random(seed)
    sharing = draw.choice((1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24))
    lengths = (draw.choice((1, 64, 113, 500, 1000, 2048, 5000, 8192)) for _ in range(2))
    return (draw.randint(1, 9), draw.choice((1, 2, 4, 5, 8)), sharing, *lengths)


@pytest.mark.parametrize("name", some(MASKS, 2))
def test_what_is_launched_has_room(name):
    mask, found = MASKS[name], set()
    for seed in range(60):
        args = gradients("cpu", mask, *sizes(seed))
        offered = ka.get_kernels(
            gradients("meta", mask, *sizes(seed)), of_tile, cc="sm_90a", providers=["cutedsl"]
        )
        kernel = offered[0]
        compiled = EmulatedKernel.compile(kernel, args)
        (main,) = (one for one in compiled.launches(args) if "SdpaBackward_" in one.kernel)
        names = tuple(args.launch_values)
        blocks = args.B * args.H_kv * -(-args.S_kv // TILE[1])
        shares = kernel._shares(blocks, args.H // args.H_kv, args.S_q, names)
        assert main.grid == (blocks * shares, 1, 1), sizes(seed)
        of_launch = kernel._workspace_finder(names)(args.tensors, args.launch_values)
        assert of_launch == kernel.get_workspace_size(args)
        found.add(shares)
    assert len(found) > 3
