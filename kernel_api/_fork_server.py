"""A process that has imported what workers need, and makes them by forking.

Importing torch and a compiler takes seconds, forking milliseconds. The server never touches a GPU,
so that what it forks may: to start from it is as clean as to start anew. It dies with the process
that uses it, its children with it, and what these have started; after some minutes of idleness it
ends by itself.

A child runs one function, ``target(channel)``, on a socket whose other end is a
:class:`Child` of the process that asked for it. Messages are lines of JSON.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import itertools
import json
import math
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any

from kernel_api import _locks, _log

logger = _log.logger(__name__)

_IDLE_SECONDS = 300.0
_LARGEST_REQUEST = 1 << 16
_LONGEST_WAIT = 2e6  # seconds; the system counts milliseconds in 31 bits

#: How long after its channel ended a child may take to be gone.
_DEATH_SECONDS = 10.0

#: What nobody does to himself by mistake.
_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

#: What is read while modules are imported: a server serves one state of these.
_READ_AT_IMPORT = ("CUTE_DSL_", "PYTHON", "LD_")

# The server imports what this process could, from the same places.
_BOOT = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from kernel_api._fork_server import _serve
_serve(int(sys.argv[2]), *map(json.loads, sys.argv[3:]))
"""


class Child:
    """A process that a server forked, seen from the process that asked for it."""

    def __init__(self, server: ForkServer, number: int, channel: socket.socket, end: int) -> None:
        self._server, self._number, self._channel, self._end = server, number, channel, end
        self._received = b""
        self._exit_code: int | None = None
        self._reaping = _locks.lock()

    def send(self, message: Any) -> None:
        """Raises OSError if it is dead."""
        self._channel.settimeout(None)
        self._channel.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, timeout_s: float | None = None) -> Any:
        """The next message.

        Raises:
            EOFError: it died.
            TimeoutError: there was none for so long.
        """
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while b"\n" not in self._received:
            left = None if until is None else until - time.monotonic()
            if left is not None and left <= 0:
                raise TimeoutError
            self._channel.settimeout(None if left is None else min(left, _LONGEST_WAIT))
            try:
                data = self._channel.recv(1 << 16)
            except ConnectionError:
                data = b""
            if not data:
                raise EOFError
            self._received += data
        line, _, self._received = self._received.partition(b"\n")
        return json.loads(line)

    def kill(self) -> None:
        """It is gone when this returns, unless the system cannot stop it within a minute."""
        self.kill_soon()
        self.exit_code(timeout_s=60.0)
        self.close()

    def kill_soon(self) -> None:
        """While another thread uses it: that one meets the end of the channel."""
        with contextlib.suppress(OSError):
            self._server.request({"kill": self._number})

    def close(self) -> None:
        """Let it end: it reads the end of its channel."""
        self._channel.close()

    def exit_code(self, timeout_s: float | None = None) -> int | None:
        """As :attr:`subprocess.Popen.returncode`; None if it still runs after so many seconds, or
        its server died before it could tell."""
        with self._reaping:
            if self._end >= 0 and _readable([self._end], timeout_s):
                told = os.read(self._end, 64)
                os.close(self._end)
                self._end = -1
                self._exit_code = int(told) if told else None
            return self._exit_code

    def is_alive(self) -> bool:
        """As far as its server has told, or would have: it lives no longer than its server."""
        self.exit_code(timeout_s=0.0)
        return self._end >= 0

    def was_killed(self) -> bool:
        """Whether it was stopped by somebody else: what it was at need not be to blame. Of a child
        whose channel has ended."""
        code = self.exit_code(timeout_s=_DEATH_SECONDS)
        return code is None or -code in _FROM_OUTSIDE

    def cause_of_death(self) -> str:
        """In words; of a child whose channel has ended."""
        code = self.exit_code(timeout_s=_DEATH_SECONDS)
        if code is None:
            return "for a reason that nobody saw"
        if code < 0:
            with contextlib.suppress(ValueError):
                return f"by {signal.Signals(-code).name}"
        return f"with exit code {code}"

    def __del__(self) -> None:
        if self._end >= 0:
            os.close(self._end)
            self._end = -1


class ForkServer:
    """Starts children that have the modules imported already, as far as these can be, and others
    never: what would import those as well, if they were there, does without."""

    def __init__(self, modules: tuple[str, ...], without: tuple[str, ...] = ()) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            texts = (
                json.dumps(sys.path),
                str(theirs.fileno()),
                json.dumps(modules),
                json.dumps(without),
                str(_IDLE_SECONDS),
            )
            self._process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, *texts],
                stdin=subprocess.DEVNULL,
                stdout=_stderr(),
                env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._control = ours
        self._numbers = itertools.count()
        self._lock = _locks.lock()

    def start(self, target: str, environment: Mapping[str, str]) -> Child:
        """A child that runs ``"module:function"`` with these environment variables.

        Raises:
            ConnectionError: the server is dead.
            OSError: there are no files left.
        """
        ours, theirs = socket.socketpair()
        end, told = os.pipe()
        number = next(self._numbers)
        try:
            with _in_memory(dict(environment)) as file:
                request = {"start": number, "target": target}
                self.request(request, theirs.fileno(), told, file.fileno())
        except OSError:
            ours.close()
            os.close(end)
            raise
        finally:
            theirs.close()
            os.close(told)
        return Child(self, number, ours, end)

    def request(self, message: Mapping[str, Any], *files: int) -> None:
        with self._lock:
            socket.send_fds(self._control, [json.dumps(message).encode()], files)

    def close(self) -> None:
        """Kill what it has started, and end."""
        self._control.close()
        self._process.wait()


def _stderr() -> int:
    """Where this process says what is wrong: what it prints itself is no place for others."""
    try:
        return subprocess.DEVNULL if sys.__stderr__ is None else sys.__stderr__.fileno()
    except ValueError:  # it is closed
        return subprocess.DEVNULL


def _in_memory(value: Any) -> IO[bytes]:
    """A file of JSON: environments may be longer than a message."""
    file = os.fdopen(os.memfd_create("kernel-api"), "w+b")
    file.write(json.dumps(value).encode())
    file.seek(0)
    return file


def _readable(files: Sequence[int], timeout_s: float | None) -> list[int]:
    """Those with something to read, or at their end; their numbers may be beyond what select()
    takes."""
    poll = select.poll()
    for file in files:
        poll.register(file, select.POLLIN)
    timeout_ms = None if timeout_s is None else math.ceil(min(timeout_s, _LONGEST_WAIT) * 1000)
    return [file for file, _ in poll.poll(timeout_ms)]


_servers: dict[tuple[Any, ...], ForkServer] = {}
_lock = _locks.lock()


def start(
    modules: tuple[str, ...],
    target: str,
    environment: Mapping[str, str],
    without: tuple[str, ...] = (),
) -> Child:
    """A child of a server that has imported these modules and cannot import others; it is started
    if there is none."""
    key = _key(modules, without)
    with _lock:
        for is_last in (False, True):
            server = _servers.get(key)
            if server is None:
                server = _servers[key] = ForkServer(modules, without)
            try:
                return server.start(target, environment)
            except ConnectionError:  # it was idle for long, or killed
                del _servers[key]
                server.close()
                if is_last:
                    raise
    raise AssertionError


def _key(modules: tuple[str, ...], without: tuple[str, ...] = ()) -> tuple[Any, ...]:
    """Of the server that has imported what this process would."""
    read = {n: v for n, v in sorted(os.environ.items()) if n.startswith(_READ_AT_IMPORT)}
    return (modules, without, tuple(sys.path), *read.items())


@atexit.register
def _close_all() -> None:
    while _servers:
        _servers.popitem()[1].close()


def _forget_in_child() -> None:
    """The servers of the process that was forked are not this one's."""
    _servers.clear()


os.register_at_fork(after_in_child=_forget_in_child)


# The server ----------------------------------------------------------------------------------


def _serve(control_file: int, modules: list[str], without: list[str], idle_s: float) -> None:
    global _IDLE_SECONDS
    _IDLE_SECONDS = idle_s  # of the process that started this one; children have it too
    control = socket.socket(fileno=control_file)
    sys.modules.update(dict.fromkeys(without))  # type: ignore[arg-type]
    gc.disable()  # a tenth of the time; there is nothing to collect yet
    for name in modules:
        try:
            importlib.import_module(name)
        except Exception as error:  # then children cannot import it either, and say so
            logger.info("%s is not imported ahead: %r", name, error)
    gc.freeze()  # what is never collected is never copied
    gc.enable()
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    server = os.getpid()
    children: dict[int, tuple[int, int]] = {}  # by pid: its number, and where its end is told
    while ready := _ready(control, woken, is_idle=not children):
        if woken in ready:
            os.read(woken, 4096)
            for pid, code in _ended():
                _, told = children.pop(pid, (0, -1))
                if told >= 0:
                    with contextlib.suppress(BrokenPipeError):  # nobody wants to know
                        os.write(told, str(code).encode())
                    os.close(told)
        if control.fileno() not in ready:
            continue
        data, files, *_ = socket.recv_fds(control, _LARGEST_REQUEST, 3)
        if not data:
            break
        message = json.loads(data)
        if "kill" in message:
            for pid in [p for p, (number, _) in children.items() if number == message["kill"]]:
                _kill_group(pid)
            continue
        channel, told, environment = files
        pid = os.fork()
        _lead_group(pid)
        if pid == 0:
            _die_with(server)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for file in (woken, wake, told, *(told for _, told in children.values())):
                os.close(file)
            control.close()
            _run(message["target"], channel, environment)
        os.close(channel)
        os.close(environment)
        children[pid] = (message["start"], told)
    for pid in children:
        _kill_group(pid)
    os._exit(0)


def _ready(control: socket.socket, woken: int, is_idle: bool) -> list[int]:
    """Empty after long idleness."""
    return _readable([control.fileno(), woken], _IDLE_SECONDS if is_idle else None)


def _lead_group(pid: int) -> None:
    """What a child starts is in its group. Both say so, as either may be the first."""
    with contextlib.suppress(OSError):  # it has ended, or said so itself
        os.setpgid(pid, pid)


def _kill_group(pid: int) -> None:
    with contextlib.suppress(OSError):
        os.killpg(pid, signal.SIGKILL)


def _ended() -> Iterator[tuple[int, int]]:
    flags = os.WEXITED | os.WNOHANG
    with contextlib.suppress(ChildProcessError):
        while found := os.waitid(os.P_ALL, 0, flags | os.WNOWAIT):
            _kill_group(found.si_pid)  # what it has left; until it is waited for, the number is its
            _, status = os.waitpid(found.si_pid, 0)
            yield found.si_pid, os.waitstatus_to_exitcode(status)


def _die_with(server: int) -> None:
    """Of the process that calls it, a child of the server."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != server:  # it died before that
        os._exit(1)


def _run(target: str, channel: int, environment: int) -> None:
    """In the child; does not return."""
    code = 1
    try:
        with os.fdopen(environment, "rb") as file:
            variables = json.load(file)
        os.environ.clear()
        os.environ.update(variables)
        module, _, name = target.partition(":")
        with socket.socket(fileno=channel) as one:
            getattr(importlib.import_module(module), name)(one)
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def messages(channel: socket.socket, is_idle: Callable[[], bool] | None = None) -> Iterator[Any]:
    """What a child is sent, until its channel ends.

    Args:
        is_idle: Whether it has nothing to lose: then it ends as well after some minutes without
            a message.
    """
    with channel.makefile("rb") as lines, contextlib.suppress(TimeoutError):
        while True:
            channel.settimeout(_IDLE_SECONDS if is_idle is not None and is_idle() else None)
            line = lines.readline()
            if not line:
                break
            channel.settimeout(None)
            yield json.loads(line)


def answer(channel: socket.socket, message: Any) -> None:
    """Of a child to the process that asked for it."""
    channel.sendall(json.dumps(message).encode() + b"\n")
