"""What the emulator refuses to do."""

from __future__ import annotations


class EmulationError(Exception):
    """The program does what it must not, or what the emulator does not know.

    The message names the instruction, and the block and thread where there is one.
    """


class FaultError(Exception):
    """A memory access by ``thread`` is wrong.

    Raised by memory, which knows no instructions; the block makes an EmulationError of it.
    """

    def __init__(self, thread: int, reason: str) -> None:
        super().__init__(reason)
        self.thread = thread
