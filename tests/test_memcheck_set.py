"""What compute-sanitizer looks at on a Hopper GPU has every family and kind; none is compiled."""

from support.memcheck import PROBLEMS, chosen

from kernel_api import provider

(CUTEDSL,) = provider.providers(["cutedsl"])
#: In place of these, Hopper has families of its own.
OLDER = ("sm80.gemm", "sm80.grouped", "sm80.sdpa")


def test_the_small_set_has_a_kernel_of_every_family_and_kind():
    found = [kernel for make in PROBLEMS.values() for kernel in chosen(make(), 90)]
    families = {one.family for one in CUTEDSL.families()}
    assert {one for one in families if not one.startswith(OLDER)} <= {k.family for k in found}
    designs = [kernel.metadata.design for kernel in found]
    for name, kinds in {
        "schedule": {"cooperative", "pingpong"},
        "swap_ab": {False, True},
        "stream_k": {False, True},
        "even_k": {False, True},
        "parallel": {False, True},
        "scheduler": {"static", "dynamic"},
    }.items():
        assert {getattr(design, name, None) for design in designs} >= kinds, name
    assert any(getattr(design, "split_k", 1) > 1 for design in designs)
