"""A plug-in that misbehaves is a named warning; everything else still answers."""

import sys
import textwrap
import threading
import warnings

import pytest
from support.data import gemm_arguments
from support.kernels import CpuGemm, LoopGemm

import kernel_api as ka
from kernel_api import provider as provider_module
from kernel_api.errors import ArgumentError, FilterError, PluginWarning
from kernel_api.space import rule

ARGS = gemm_arguments(4, 4, 4)

#: Providers that have few kernels to enumerate.
OTHERS = ("torch", "reference")


def offered(kernels):
    return [k.metadata.kernel_name for k in kernels]


def others_answer(kernels):
    return set(OTHERS) <= {k.metadata.provider for k in kernels}


# Kernel classes that break generate_kernels ----------------------------------------------


class Raises(LoopGemm):
    @classmethod
    def generate_kernels(cls, metadata_filter, epilogue_args=None, cc=None):
        raise RuntimeError("no kernels today")


class RaisesOurError(LoopGemm):
    @classmethod
    def generate_kernels(cls, metadata_filter, epilogue_args=None, cc=None):
        raise ArgumentError("float7 names no element type")


class ReturnsNone(LoopGemm):
    @classmethod
    def generate_kernels(cls, metadata_filter, epilogue_args=None, cc=None):
        return None


class ReturnsNames(LoopGemm):
    @classmethod
    def generate_kernels(cls, metadata_filter, epilogue_args=None, cc=None):
        return ["a kernel", "another kernel"]


class ReturnsClasses(LoopGemm):
    @classmethod
    def generate_kernels(cls, metadata_filter, epilogue_args=None, cc=None):
        return [cls]


class ForgetsMetadata(LoopGemm):
    def __init__(self, metadata):
        pass


class SharesAName(LoopGemm):
    @classmethod
    def metadata_of_tile(cls, tile, name=None):
        return super().metadata_of_tile(tile, "the_same_name")


BROKEN_GENERATORS = {
    Raises: "no kernels today",
    RaisesOurError: "float7 names no element type",
    ReturnsNone: "generate_kernels returned NoneType; expected a list",
    ReturnsNames: "'a kernel', which is no kernel with metadata",
    ReturnsClasses: "which is no kernel with metadata",
    ForgetsMetadata: "metadata",
    SharesAName: "two different kernels share the name the_same_name",
}


def anew(kernel_class):
    """The class defined once more: a fault is told once for each class."""
    return type(kernel_class)(
        kernel_class.__name__, (kernel_class,), {"__module__": kernel_class.__module__}
    )


@pytest.mark.parametrize("broken", BROKEN_GENERATORS, ids=lambda c: c.__name__)
@pytest.mark.parametrize("args", [ARGS, None], ids=["query", "enumeration"])
def test_a_broken_generator_is_a_warning_that_names_it_and_the_others_answer(
    registry, broken, args
):
    provider = registry.register(anew(broken), CpuGemm)
    with pytest.warns(PluginWarning) as caught:
        kernels = ka.get_kernels(args, providers=[provider, *OTHERS])
    (text,) = [str(w.message) for w in caught]
    assert f"test_plugins.{broken.__name__} (provider {provider.name!r}) raised" in text
    assert BROKEN_GENERATORS[broken] in text
    assert others_answer(kernels)
    assert any(type(k) is CpuGemm for k in kernels)
    assert not any(isinstance(k, broken) for k in kernels)


@pytest.mark.parametrize("broken", BROKEN_GENERATORS, ids=lambda c: c.__name__)
@pytest.mark.filterwarnings("ignore::kernel_api.errors.PluginWarning")
def test_explain_gives_the_fault_of_a_broken_generator_as_the_reason(registry, broken):
    provider = registry.register(anew(broken))
    (rejection,) = ka.explain(ARGS, providers=[provider]).rejected
    assert rejection.family == broken.__name__
    assert rejection.rule == "plug-in fault"
    assert BROKEN_GENERATORS[broken] in rejection.reason


def of_one_name(name):
    class Named(LoopGemm):
        tiles = (16,)

        @classmethod
        def metadata_of_tile(cls, tile, _=None):
            return super().metadata_of_tile(tile, name)

    return Named


@pytest.mark.parametrize("args", [ARGS, None], ids=["query", "enumeration"])
def test_the_second_class_of_a_provider_with_a_name_is_left_out(registry, args):
    first, second = of_one_name("the_same_name"), of_one_name("the_same_name")
    provider = registry.register(first)
    second.__qualname__ = second.__name__ = second.family = "Second"
    provider.register(second)
    told = "of the same provider has a kernel of the name the_same_name, too; expected names of its"
    for _ in range(2):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            kernels = ka.get_kernels(args, providers=[provider])
        assert [type(kernel) for kernel in kernels] == [first]
    assert not caught
    (rejection,) = ka.explain(ARGS, providers=[provider]).rejected
    assert (rejection.family, rejection.rule) == ("Second", "plug-in fault")
    assert told in rejection.reason
    other = registry.register(of_one_name("the_same_name"))
    assert len(ka.get_kernels(args, providers=[provider, other])) == 2


@pytest.mark.parametrize("order", [("cpu", "meta"), ("meta", "cpu")])
def test_what_was_asked_before_decides_no_name(registry, order):
    """A class that a query is not for leaves its names to others."""
    for_cpu, for_gpu = of_one_name("the_same_name"), of_one_name("the_same_name")
    for_gpu.family, for_gpu.devices, for_gpu.__qualname__ = "Gpu", ("cuda",), "Gpu"
    provider = registry.register(for_cpu)
    provider.register(for_gpu)
    found = {
        device: [
            type(kernel)
            for kernel in ka.get_kernels(
                gemm_arguments(4, 4, 4, device=device),
                cc=None if device == "cpu" else 80,
                providers=[provider],
            )
        ]
        for device in order
    }
    assert found == {"cpu": [for_cpu], "meta": [for_gpu]}


# Kernel classes that break a query -------------------------------------------------------


class SupportsNone(LoopGemm):
    def _supports(self, args):
        return None


class SupportsRaises(LoopGemm):
    def _supports(self, args):
        raise KeyError("no such operand")


class RuleRaises(CpuGemm):
    @rule("a rule with a mistake in it")
    def _(args):
        return args.no_such_field


class AvailabilityRaises(LoopGemm):
    @classmethod
    def provider_status(cls):
        raise OSError("the compiler cannot be asked")


BROKEN_ANSWERS = {
    SupportsNone: "_supports returned None; expected a Status",
    SupportsRaises: "no such operand",
    RuleRaises: "no_such_field",
    AvailabilityRaises: "the compiler cannot be asked",
}


@pytest.mark.parametrize("broken", BROKEN_ANSWERS, ids=lambda c: c.__name__)
def test_a_broken_answer_is_a_warning_that_names_it_and_the_others_answer(registry, broken):
    registry.register(anew(broken), CpuGemm)
    with pytest.warns(PluginWarning, match=f"{broken.__name__}.*{BROKEN_ANSWERS[broken]}"):
        kernels = ka.get_kernels(ARGS)
    assert others_answer(kernels)
    assert any(type(k) is CpuGemm for k in kernels)
    assert not any(isinstance(k, broken) for k in kernels)


@pytest.mark.parametrize("prediction", ["fast", None, float("nan"), "raises"], ids=str)
@pytest.mark.filterwarnings("ignore::kernel_api.errors.PluginWarning")
def test_a_kernel_whose_prediction_is_no_number_is_offered_behind_those_with_one(
    registry, prediction
):
    class Odd(LoopGemm):
        def predict(self, args):
            if prediction == "raises":
                raise ZeroDivisionError("no model")
            return prediction

    class Modelled(LoopGemm):
        def predict(self, args):
            return 1e-3 * self.metadata.design.tile_shape[0]

    provider = registry.register(Odd, Modelled)
    kernels = ka.get_kernels(ARGS, providers=[provider, "torch"])
    assert [type(k).__name__ for k in kernels] == [
        "Modelled", "Modelled", "Odd", "Odd", "TorchGemm",
    ]  # fmt: skip
    assert [k.metadata.design.tile_shape[0] for k in kernels[:2]] == [16, 32]


def test_a_prediction_that_raises_is_a_warning(registry):
    class Odd(LoopGemm):
        def predict(self, args):
            raise ZeroDivisionError("no model")

    registry.register(Odd)
    with pytest.warns(PluginWarning, match="Odd.*ZeroDivisionError: no model"):
        ka.get_kernels(ARGS)


def test_a_fault_is_told_once(registry):
    class Noisy(LoopGemm):
        generate_kernels = Raises.generate_kernels

    registry.register(Noisy)
    with pytest.warns(PluginWarning):
        ka.get_kernels(ARGS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        offered = ka.get_kernels(gemm_arguments(8, 8, 8))
    assert Noisy not in {type(kernel) for kernel in offered}


# What the framework enforces whatever a plug-in does -------------------------------------


class IgnoresTheFilter(LoopGemm):
    @classmethod
    def generate_kernels(cls, metadata_filter, epilogue_args=None, cc=None):
        return [cls(cls.metadata_of_tile(tile)) for tile in cls.tiles]


def only_tile_16(metadata):
    return metadata.kernel_name.endswith("tile16")


@pytest.mark.parametrize("args", [ARGS, None], ids=["query", "enumeration"])
def test_a_filter_holds_for_kernels_that_ignore_it(registry, args):
    provider = registry.register(IgnoresTheFilter)
    asked = [provider, *OTHERS]
    kernels = ka.get_kernels(args, metadata_filter=only_tile_16, providers=asked)
    assert offered(kernels) == ["IgnoresTheFilter_tile16"]


class IgnoresTheTarget(LoopGemm):
    """Returns a Hopper kernel whatever architecture it is asked for."""

    devices = ("cuda",)

    @classmethod
    def metadata_of_tile(cls, tile, name=None):
        from dataclasses import replace

        return replace(super().metadata_of_tile(tile, name), targets=("sm_90a",), min_cc=0)


@pytest.mark.parametrize(("cc", "count"), [(90, 2), (100, 0), (80, 0)])
def test_a_target_holds_for_kernels_that_ignore_it(registry, cc, count):
    provider = registry.register(IgnoresTheTarget)
    args = gemm_arguments(4, 4, 4, device="meta")
    assert len(ka.get_kernels(args, cc=cc, providers=[provider])) == count
    assert len(ka.get_kernels(cc=cc, providers=[provider])) == count


def test_a_kernel_listed_twice_by_its_class_is_offered_once(registry):
    class Repeats(LoopGemm):
        tiles = (16, 16, 32)

    provider = registry.register(Repeats)
    assert len(ka.get_kernels(providers=[provider])) == 2
    assert len(ka.get_kernels(ARGS, providers=[provider])) == 2


def test_the_callers_own_filter_error_is_not_taken_for_a_plug_in_fault(registry):
    registry.register(LoopGemm)
    with pytest.raises(FilterError):
        ka.get_kernels(ARGS, metadata_filter=lambda metadata: metadata.no_such_field)


# Entry points ----------------------------------------------------------------------------

PLUG_IN = """
    import kernel_api as ka
    from support.kernels import LoopGemm

    class PlugIn(ka.Provider):
        name = "{name}"

    @PlugIn.register
    class PlugInGemm(LoopGemm):
        pass
"""


@pytest.fixture
def install(registry, tmp_path, monkeypatch):
    """Make distributions with an entry point importable, as an installed plug-in is."""
    modules = []

    def install(module, source, value=None, group="kernel_api.providers"):
        (tmp_path / f"{module}.py").write_text(textwrap.dedent(source))
        info = tmp_path / f"{module}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[{group}]\n{module} = {value or module}\n")
        modules.append(module)

    monkeypatch.syspath_prepend(tmp_path)
    yield install
    for module in modules:
        sys.modules.pop(module, None)


def test_an_installed_module_registers_its_kernels_on_the_next_scan(install):
    install("plug_in_module", PLUG_IN.format(name="from a module"))
    provider_module.rescan()
    kernels = ka.get_kernels(ARGS, providers=["from a module"])
    assert offered(kernels) == ["PlugInGemm_tile16", "PlugInGemm_tile32"]


def test_an_installed_provider_class_is_found_on_the_next_scan(install):
    install("plug_in_class", PLUG_IN.format(name="from a class"), "plug_in_class:PlugIn")
    provider_module.rescan()
    assert len(ka.get_kernels(ARGS, providers=["from a class"])) == 2
    assert "from a class" in {k.metadata.provider for k in ka.get_kernels(ARGS)}


def test_another_group_is_not_loaded(install):
    install("stranger", "raise RuntimeError('loaded')", group="somebody.elses")
    provider_module.rescan()
    assert others_answer(ka.get_kernels(ARGS))
    assert "stranger" not in sys.modules


@pytest.mark.parametrize(
    ("source", "value", "reason"),
    [
        ("raise RuntimeError('broken on import')", None, "broken on import"),
        ("import no_such_library", None, "no_such_library"),
        ("", "broken:NoSuchClass", "NoSuchClass"),
        ("class Thing: pass", "broken:Thing", "no Provider"),
        ("def thing(): pass", "broken:thing", "which is no Provider; expected a class that"),
        ("thing = 3", "broken:thing", "is 3, which is no Provider"),
        ("import sys\nsys.exit('no gpu')", None, r"SystemExit\('no gpu'\)"),
        ("import kernel_api as ka\nclass P(ka.Provider): pass", None, "needs a name"),
        ("import kernel_api as ka\nclass P(ka.Provider): name = 'torch'", None, "is taken"),
    ],
)
def test_a_broken_plug_in_is_a_warning_and_the_others_are_loaded(install, source, value, reason):
    install("broken", source, value)
    install("whole", PLUG_IN.format(name="whole"))
    provider_module.rescan()
    with pytest.warns(PluginWarning, match=reason) as caught:
        kernels = ka.get_kernels(ARGS)
    assert "'broken'" in str(caught[0].message)
    assert others_answer(kernels)
    assert "whole" in {k.metadata.provider for k in kernels}


@pytest.mark.parametrize(
    ("end", "value"), [("\nraise RuntimeError('late')", None), ("", "broken:NoSuchClass")]
)
def test_what_a_plug_in_registered_before_it_failed_is_left_out_with_it(install, end, value):
    more = """
        from support.kernels import CpuGemm
        from kernel_api.providers.torch import TorchProvider

        @TorchProvider.register
        class Among(CpuGemm):
            pass
    """
    source = PLUG_IN.format(name="half") + textwrap.indent(textwrap.dedent(more), "    ")
    install("broken", source + textwrap.indent(end, "    "), value)
    provider_module.rescan()
    with pytest.warns(PluginWarning, match="'broken' could not be loaded and is left out"):
        kernels = ka.get_kernels(ARGS)
    assert not {"PlugInGemm", "Among"} & {type(k).__name__ for k in kernels}
    assert "half" not in {p.name for p in provider_module.providers()}
    assert others_answer(kernels)


def test_a_plug_in_that_another_one_imports_before_it_fails_is_kept(install):
    install("a_broken", "import b_whole\nraise RuntimeError('late')")
    install("b_whole", PLUG_IN.format(name="whole"))
    provider_module.rescan()
    with pytest.warns(PluginWarning, match="'a_broken'"):
        kernels = ka.get_kernels(ARGS)
    assert "whole" in {k.metadata.provider for k in kernels}


def test_plug_ins_are_loaded_once(install):
    install("counted", "import sys\nsys.plug_in_loads = getattr(sys, 'plug_in_loads', 0) + 1")
    try:
        provider_module.rescan()
        for _ in range(3):
            ka.get_kernels(ARGS)
        assert sys.plug_in_loads == 1
    finally:
        del sys.plug_in_loads


def test_a_second_thread_that_asks_during_the_scan_gets_every_provider(install):
    slow = """
        import threading
        import kernel_api.provider as provider

        class Asking(threading.Thread):
            names = None
            def run(self):
                Asking.names = [p.name for p in provider.providers()]

        asking = Asking()
        asking.start()
        asking.join(0.5)
    """
    install("a_slow_one", slow)
    install("b_last", PLUG_IN.format(name="the last one"))
    provider_module.rescan()
    ka.get_kernels(ARGS)
    asking = sys.modules["a_slow_one"].asking
    asking.join(10)
    assert isinstance(asking, threading.Thread)
    assert not asking.is_alive()
    assert "the last one" in asking.names
