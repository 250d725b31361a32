"""Programs that torch traces of a call, to be run by themselves."""

import torch
from torch.fx.experimental.proxy_tensor import make_fx


class Called(torch.nn.Module):
    def __init__(self, call):
        super().__init__()
        self.forward = call


def exported(call, given, **how):
    return torch.export.export(Called(call), tuple(given), **how)


def of_constants(given):
    return [one.detach() for one in given]


#: From a call and what it is given to a program that takes the same.
TRACERS = {
    "export": lambda call, given: exported(call, given).module(),
    "strict export": lambda call, given: exported(call, given, strict=True).module(),
    "decomposed": lambda call, given: exported(call, given).run_decompositions().module(),
    "export of constants": lambda call, given: exported(call, of_constants(given)).module(),
    "make_fx": lambda call, given: make_fx(call)(*given),
}
