"""Threads that begin at once, a process that is interrupted, and children of one whose threads
hold locks: each in a process of its own, which would otherwise hang these tests."""

import os
import subprocess
import sys
import textwrap
import types

import pytest

from kernel_api import provider
from kernel_api.utils import untraced

BEGINNING = """
import importlib, os, signal, sys, threading
import torch
import kernel_api as ka
from kernel_api import _float32, discovery, provider

def arguments():
    return ka.GemmArguments(torch.randn(8, 8), torch.randn(8, 8), torch.empty(8, 8))
"""


def printed(code):
    return in_fresh_interpreter(code, BEGINNING)


def in_fresh_interpreter(code, beginning="import importlib, sys\n"):
    """What a process prints; it fails where it takes a minute."""
    whole = beginning + textwrap.dedent(code)
    ran = subprocess.run(
        [sys.executable, "-c", whole], capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.split()


@pytest.mark.parametrize("name", ["cutedsl", "torch"])
def test_one_thread_may_import_a_provider_while_another_asks_for_the_first_time(name):
    found = printed(f"""
        def imports():
            importlib.import_module("kernel_api.providers.{name}")

        def asks():
            ka.get_kernels(arguments())

        threads = [threading.Thread(target=f, daemon=True) for f in (imports, asks)]
        for one in threads:
            one.start()
        for one in threads:
            one.join(30)
        print(*(one.is_alive() for one in threads), len(provider.providers(["{name}"])))
        """)
    assert found == ["False", "False", "1"]


@pytest.mark.parametrize("module", ["epilogue.graph", "tuning.heuristics"])
def test_one_thread_may_import_a_module_while_another_imports_its_package(module):
    found = in_fresh_interpreter(f"""
        import importlib.machinery, threading, time
        slow, failed = threading.Event(), []

        class Slow(importlib.machinery.SourceFileLoader):
            def exec_module(self, module):
                slow.set()
                time.sleep(0.2)
                super().exec_module(module)

        class Finder(importlib.machinery.PathFinder):
            @classmethod
            def find_spec(cls, name, path=None, target=None):
                found = super().find_spec(name, path, target)
                if name == "kernel_api":  # which both want first, and one holds its package
                    found.loader = Slow(name, found.origin)
                return found

        def imports(name):
            try:
                importlib.import_module(name)
            except Exception as error:
                failed.append(error)

        sys.meta_path.insert(0, Finder)
        names = "kernel_api.{module.partition(".")[0]}", "kernel_api.{module}"
        threads = [threading.Thread(target=imports, args=(one,), daemon=True) for one in names]
        threads[0].start()
        slow.wait()
        threads[1].start()
        for one in threads:
            one.join(30)
        print(*(one.is_alive() for one in threads), *failed)
        """)
    assert found == ["False", "False"]


@pytest.mark.parametrize("module", ["cutedsl.sdpa", "torch.elementwise"])
def test_a_first_query_that_is_interrupted_loses_no_kernel(module):
    found = printed(f"""
        class Interruption:
            armed = "kernel_api.providers.{module}"

            def find_spec(self, name, path=None, target=None):
                if name == self.armed:
                    self.armed = None
                    raise KeyboardInterrupt

        sys.meta_path.insert(0, Interruption())
        try:
            ka.get_kernels(arguments())
        except KeyboardInterrupt:
            print("interrupted")
        families = {{p.name: len(p.families()) for p in provider.providers()}}
        print(families["cutedsl"], families["torch"], families["reference"])
        """)
    families = {one.name: len(one.families()) for one in provider.providers()}
    expected = [str(families[name]) for name in ("cutedsl", "torch", "reference")]
    assert found == ["interrupted", *expected]


@pytest.mark.compile
def test_a_first_compilation_that_is_interrupted_can_be_repeated():
    """What the compiler has registered with native code cannot be registered again."""
    found = printed("""
        import importlib.machinery

        class Interrupted(importlib.machinery.SourceFileLoader):
            def exec_module(self, module):
                super().exec_module(module)
                sys.meta_path.remove(Finder)
                os.kill(os.getpid(), signal.SIGINT)

        class Finder(importlib.machinery.PathFinder):
            @classmethod
            def find_spec(cls, name, path=None, target=None):
                found = super().find_spec(name, path, target)
                if name == "cutlass._mlir.dialects._gpu_ops_gen":
                    found.loader = Interrupted(name, found.origin)
                return found

        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.meta_path.insert(0, Finder)
        os.environ["KERNEL_API_DISABLE_CACHE"] = "1"
        sizes = dict(dtype=torch.float16, device="meta")
        args = ka.GemmArguments(*(torch.empty(256, 256, **sizes) for _ in range(3)))
        kernel = ka.get_kernels(args, cc=80, providers=["cutedsl"])[0]
        try:
            kernel.compile(args, cc=80)
        except KeyboardInterrupt:
            print("interrupted")
        print(kernel.compile(args, cc=80).target)
        """)
    assert found == ["interrupted", "sm_80"]


def test_a_child_waits_for_no_thread_that_only_its_parent_has():
    found = printed("""
        args = arguments()
        ka.get_kernels(args)[0].run(args)
        done = threading.Event()

        def holds(lock, taken):
            with lock:
                taken.set()
                done.wait()

        of_modules = (discovery._lock, provider._lock, provider._scan_lock)
        for lock in (*of_modules, _float32._MATMUL._lock, _float32._CONV._lock):
            taken = threading.Event()
            threading.Thread(target=holds, args=(lock, taken), daemon=True).start()
            taken.wait()
        child = os.fork()
        if not child:
            signal.alarm(20)
            provider.registry_changed()
            other = arguments()
            ka.get_kernels(other)[0].run(other)
            ka.ops.gemm(torch.randn(4, 4), torch.randn(4, 4))
            os._exit(0)
        print(os.waitpid(child, 0)[1])
        done.set()
        """)
    assert found == ["0"]


def test_a_child_that_ends_leaves_its_parent_what_that_has_compiled():
    found = in_fresh_interpreter("""
        import os
        from kernel_api import parallel

        os.environ["KERNEL_API_DISABLE_CACHE"] = "1"
        cache = parallel.cache_to_share()
        child = os.fork()
        if not child:
            sys.exit()
        os.waitpid(child, 0)
        print(cache.root, cache.root.exists())
        """)
    root, is_there = found
    assert is_there == "True"
    assert not os.path.exists(root)


def test_a_child_has_the_precision_of_its_parent_back():
    found = printed("""
        torch.set_float32_matmul_precision("high")
        inside, done = threading.Event(), threading.Event()

        def multiplies():
            with _float32.products("ieee"):
                inside.set()
                done.wait()

        threading.Thread(target=multiplies, daemon=True).start()
        inside.wait()
        child = os.fork()
        if not child:
            signal.alarm(20)
            print(torch.get_float32_matmul_precision(), flush=True)
            ka.ops.gemm(torch.randn(4, 4), torch.randn(4, 4))
            os._exit(0)
        print(os.waitpid(child, 0)[1])
        done.set()
        """)
    assert found == ["high", "0"]


def test_calls_go_on_while_another_thread_imports_torch(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", types.ModuleType("torch"))  # as it is at first
    assert untraced(lambda: "answered")() == "answered"
