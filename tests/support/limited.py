"""A process whose kernels take few multiprocessors: which of them compute what the reference does.

KERNEL_API_MULTIPROCESSORS=N python limited.py DEVICE [PROVIDER]

It prints as JSON how many they take at the beginning and, with another number in the environment,
at the end; names of kernels that are wrong, and why; and of every problem how many are right.
"""

import json
import os
import sys

import torch

import kernel_api as ka
from kernel_api import devices, fusions

KERNELS = 6  # of a family


def problems(device):
    """One of each kind of which kernels launch as many blocks as they may."""

    def new(*shape, element=torch.bfloat16):
        return torch.randn(shape, device=device).to(element)

    M, N, K, E = 1000, 1024, 512, 5
    offsets = torch.tensor([300, 300, 310, 700, 990], dtype=torch.int32, device=device)
    yield ka.GemmArguments(new(M, K), new(N, K).t(), new(M, N))
    yield fusions.gemm_residual(new(M, K), new(N, K).t(), out=new(M, N), C=new(M, N), beta=0.5)
    yield ka.GroupedGemmArguments(new(M, K), new(E, N, K).mT, new(M, N), offsets)
    yield fusions.grouped_gemm_wgrad(new(M, K).t(), new(M, N), offsets, out=new(E, K, N))
    q, k, v, out = (new(2, 8, 520, 64) for _ in range(4))
    yield ka.SdpaArguments(q, k, v, out)
    yield ka.SdpaArguments(q[:, :, :1], k, v, out[:, :, :1])
    yield fusions.rmsnorm_backward(
        new(M, N), new(M, N), dx=new(M, N), rstd=new(M, element=torch.float32).abs() + 0.5,
        weight=new(N), dweight=new(N),
    )  # fmt: skip


def taken(device):
    return devices.multiprocessors_of(torch.device(device, 0 if device == "cuda" else None))


def main(device, provider="cutedsl"):
    torch.manual_seed(0)
    at_first, wrong, right = taken(device), {}, []
    os.environ["KERNEL_API_MULTIPROCESSORS"] = "1"
    for args in problems(device):
        families = {}
        for kernel in ka.get_kernels(args, providers=[provider]):
            families.setdefault(kernel.family_name(), []).append(kernel)
        chosen = [
            kernel
            for kernels in families.values()
            for kernel in kernels[:: max(1, len(kernels) // KERNELS)]
        ]
        verdicts = {kernel.metadata.kernel_name: ka.verify(kernel, args) for kernel in chosen}
        wrong.update({name: str(one) for name, one in verdicts.items() if not one})
        right.append(sum(map(bool, verdicts.values())))
    print(json.dumps({"taken": [at_first, taken(device)], "wrong": wrong, "right": right}))


if __name__ == "__main__":
    main(*sys.argv[1:])
