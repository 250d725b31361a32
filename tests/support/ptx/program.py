"""PTX text, parsed into the instructions of its kernel."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from support.ptx.errors import EmulationError


@dataclass(frozen=True)
class Register:
    name: str
    width: int  # bytes; 0 for a predicate


@dataclass(frozen=True)
class Special:
    """A register that the hardware sets, such as %tid.x."""

    name: str


@dataclass(frozen=True)
class Immediate:
    """A constant; of floating-point ones, the bits."""

    value: int

    def array(self, dtype: np.dtype) -> np.ndarray:
        """As an array of one element, which broadcasts."""
        if dtype.kind == "b":
            return np.array([self.value != 0])
        bits = self.value & ((1 << 8 * dtype.itemsize) - 1)
        return np.array([bits], f"u{dtype.itemsize}").view(dtype)


@dataclass(frozen=True)
class Symbol:
    """The name of a label, a parameter or a variable."""

    name: str


@dataclass(frozen=True)
class Vector:
    elements: tuple[Operand, ...]


@dataclass(frozen=True)
class Address:
    base: Operand
    offset: int


@dataclass(frozen=True)
class TensorAddress:
    """Coordinates within a tensor map, the fastest one first."""

    map: Operand
    coordinates: tuple[Operand, ...]


@dataclass(frozen=True)
class Pair:
    """Two results: a value and a predicate."""

    value: Operand
    predicate: Operand


@dataclass(frozen=True)
class Negated:
    """A predicate that is read negated."""

    predicate: Operand


Operand = (
    Register | Special | Immediate | Symbol | Vector | Address | TensorAddress | Pair | Negated
)


@dataclass(frozen=True)
class Instruction:
    name: str  # with all modifiers
    operands: tuple[Operand, ...]
    text: str
    guard: Register | None = None
    guard_negated: bool = False

    def registers_read(self) -> set[str]:
        target, *sources = self.operands or (None,)
        read = [*sources, self.guard]
        if isinstance(target, Address | TensorAddress):
            read.append(target)
        return set().union(*map(_registers, read))

    def registers(self) -> set[str]:
        """All that it reads or writes."""
        return set().union(*map(_registers, (*self.operands, self.guard)))


def _registers(operand: Operand | None) -> set[str]:
    if isinstance(operand, Register):
        return {operand.name}
    if isinstance(operand, Address):
        return _registers(operand.base)
    if isinstance(operand, Negated):
        return _registers(operand.predicate)
    if isinstance(operand, Vector):
        return set().union(*map(_registers, operand.elements))
    if isinstance(operand, TensorAddress):
        return set().union(*map(_registers, (operand.map, *operand.coordinates)))
    if isinstance(operand, Pair):
        return _registers(operand.value) | _registers(operand.predicate)
    return set()


@dataclass(eq=False)
class Program:
    """One kernel.

    Attributes:
        name: Of the kernel.
        instructions: In order.
        labels: The index of the instruction behind each.
        parameters: The bytes of each, in order.
        shared: Address of each variable in shared memory.
        static_shared_bytes: Where dynamic shared memory begins.
        threads: Of a block, as the kernel requires; None if it does not.
        blocks_together: That a multiprocessor is to have registers for.
    """

    name: str = ""
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    parameters: dict[str, int] = field(default_factory=dict)
    shared: dict[str, int] = field(default_factory=dict)
    static_shared_bytes: int = 0
    threads: int | None = None
    blocks_together: int = 1

    @cached_property
    def registers_read(self) -> set[str]:
        """By any instruction."""
        return set().union(*(one.registers_read() for one in self.instructions))

    @cached_property
    def registers_touched(self) -> list[frozenset[str]]:
        """By each instruction."""
        return [frozenset(one.registers()) for one in self.instructions]

    @cached_property
    def matrix_registers(self) -> frozenset[str]:
        """Those that wgmma reads or writes."""
        found: set[str] = set()
        for one in self.instructions:
            if one.name.startswith("wgmma.mma"):
                for operand in one.operands[:2]:
                    if isinstance(operand, Vector):
                        found |= {e.name for e in operand.elements if isinstance(e, Register)}
        return frozenset(found)


_KERNEL = re.compile(r"\.entry\s+([\w$]+)\s*\((.*?)\)([^{]*)\{", re.DOTALL)


def parse(text: str) -> Program:
    """The program in PTX text that holds exactly one kernel."""
    programs = parse_all(text)
    if len(programs) != 1:
        raise EmulationError(f"the text has {len(programs)} kernels; expected one")
    return programs[0]


def parse_all(text: str) -> list[Program]:
    """The kernels in PTX text, in order."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/", " ", text, flags=re.DOTALL)
    kernels = list(_KERNEL.finditer(text))
    return [
        _program(text[: kernels[0].start()], kernel, text[kernel.end() :]) for kernel in kernels
    ]


def _program(before: str, kernel: re.Match[str], body: str) -> Program:
    program = Program(kernel[1])
    for bits, name, count in re.findall(
        r"\.param\s+(?:\.align\s+\d+\s+)?\.[a-z](\d+)\s+([\w$]+)(?:\[(\d+)\])?", kernel[2]
    ):
        program.parameters[name] = int(bits) // 8 * int(count or 1)
    if threads := re.search(r"\.reqntid\s+(\d+)", kernel[3]):
        program.threads = int(threads[1])
    if together := re.search(r"\.minnctapersm\s+(\d+)", kernel[3]):
        program.blocks_together = int(together[1])
    _Body(program).read(before, body)
    program.instructions = _with_any_bytes(program.instructions)
    return program


_ANY_BYTES = Immediate(0xA5A5A5A5)


def _with_any_bytes(instructions: list[Instruction]) -> list[Instruction]:
    """Of vectors of bytes the compiler leaves out those that nobody looks at: `prmt` puts them
    together of registers which nothing writes. They hold anything."""
    permutes = [one for one in instructions if one.name.startswith("prmt")]
    others = (one.registers() for one in instructions if not one.name.startswith("prmt"))
    known = set().union(*others, *(_registers(one.operands[0]) for one in permutes))

    def replaced(one: Instruction) -> Instruction:
        if not one.name.startswith("prmt") or one.registers() <= known:
            return one
        target, *sources = one.operands
        read = (s if _registers(s) <= known else _ANY_BYTES for s in sources)
        return replace(one, operands=(target, *read))

    return [replaced(one) for one in instructions]


_STATEMENT = re.compile(
    r"\s*(?:(?P<open>\{)|(?P<close>\})|(?P<label>[\w$]+):|(?P<statement>[^;]+);)", re.DOTALL
)
_REGISTERS = re.compile(r"\.reg\s+\.([a-z]+)(\d*)\s+(.*)", re.DOTALL)
_SHARED = re.compile(
    r"(?P<extern>\.extern\s+)?\.shared\s+(?:\.align\s+(?P<align>\d+)\s+)?"
    r"\.[a-z](?P<bits>\d+)\s+(?P<name>[\w$]+)(?:\[(?P<count>\d*)\])?"
)


class _Body:
    """Reads the statements of a kernel; registers and labels belong to the braces they are in."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.scopes: list[dict[str, Register]] = [{}]
        self.open: list[int] = [0]  # the numbers of the scopes
        self.scopes_opened = 0
        self.label_scopes: dict[str, set[int]] = {}
        self.branches: list[tuple[int, list[int]]] = []  # indices of instructions; open scopes
        self.dynamic: list[str] = []

    def read(self, before: str, body: str) -> None:
        for shared in _SHARED.finditer(before):
            self._declare_shared(shared)
        position = 0
        while self.scopes:
            match = _STATEMENT.match(body, position)
            if match is None:
                raise EmulationError(f"this is no statement: {body[position:][:60]!r}")
            position = match.end()
            if match["open"]:
                self.scopes_opened += 1
                self.scopes.append({})
                self.open.append(self.scopes_opened)
            elif match["close"]:
                self.scopes.pop()
                self.open.pop()
            elif match["label"]:
                self._label(match["label"])
            else:
                self._statement(" ".join(match["statement"].split()))
        for index, scopes in self.branches:
            self._resolve(index, scopes)
        for name in self.dynamic:
            self.program.shared[name] = self.program.static_shared_bytes

    def _label(self, name: str) -> None:
        self.label_scopes.setdefault(name, set()).add(self.open[-1])
        self.program.labels[_label_of(name, self.open[-1])] = len(self.program.instructions)

    def _resolve(self, index: int, scopes: list[int]) -> None:
        """A branch goes to the label of the innermost braces around it."""
        branch = self.program.instructions[index]
        (target,) = branch.operands
        assert isinstance(target, Symbol)
        for scope in reversed(scopes):
            if scope in self.label_scopes.get(target.name, ()):
                resolved = (Symbol(_label_of(target.name, scope)),)
                self.program.instructions[index] = replace(branch, operands=resolved)
                return
        raise EmulationError(f"{branch.text!r} goes to a label that is not there")

    def _statement(self, text: str) -> None:
        if text.startswith(".pragma"):
            return
        if declared := _REGISTERS.fullmatch(text):
            self._declare_registers(*declared.groups())
        elif shared := _SHARED.fullmatch(text):
            self._declare_shared(shared)
        else:
            instruction = self._instruction(text)
            if re.fullmatch(r"bra(\.uni)?", instruction.name):
                self.branches.append((len(self.program.instructions), list(self.open)))
            self.program.instructions.append(instruction)

    def _declare_registers(self, kind: str, bits: str, names: str) -> None:
        width = 0 if kind == "pred" else int(bits) // 8
        # Braces within braces may declare a name again; it is another register.
        suffix = f"#{self.scopes_opened}" if len(self.scopes) > 1 else ""
        for name in re.split(r"\s*,\s*", names):
            if numbered := re.fullmatch(r"(.+)<(\d+)>", name):
                declared = [f"{numbered[1]}{i}" for i in range(int(numbered[2]))]
            else:
                declared = [name]
            for one in declared:
                self.scopes[-1][one] = Register(one + suffix, width)

    def _declare_shared(self, declared: re.Match[str]) -> None:
        if declared["extern"]:
            self.dynamic.append(declared["name"])
            return
        align = int(declared["align"] or 1)
        address = -(-self.program.static_shared_bytes // align) * align
        self.program.shared[declared["name"]] = address
        size = int(declared["bits"]) // 8 * int(declared["count"] or 1)
        self.program.static_shared_bytes = address + size

    def _instruction(self, text: str) -> Instruction:
        match = re.fullmatch(
            r"(?:@(?P<negated>!?)(?P<guard>\S+) )?(?P<name>\S+) ?(?P<rest>.*)", text
        )
        assert match is not None
        guard = self._operand(match["guard"]) if match["guard"] else None
        if guard is not None and not isinstance(guard, Register):
            raise EmulationError(f"{match['guard']} is no register in {text!r}")
        try:
            operands = tuple(map(self._operand, _split(match["rest"])))
        except ValueError as error:
            raise EmulationError(f"{error} in {text!r}") from None
        return Instruction(match["name"], operands, text, guard, match["negated"] == "!")

    def _operand(self, text: str) -> Operand:
        if text[0] == "{":
            return Vector(tuple(map(self._operand, _split(text[1:-1]))))
        if text[0] == "!":
            return Negated(self._operand(text[1:].strip()))
        if "|" in text:
            value, predicate = text.split("|")
            return Pair(self._operand(value.strip()), self._operand(predicate.strip()))
        if tensor := re.fullmatch(r"\[\s*([^,{]+?)\s*,\s*\{(.*)\}\s*\]", text):
            coordinates = tuple(map(self._operand, _split(tensor[2])))
            return TensorAddress(self._operand(tensor[1]), coordinates)
        if text[0] == "[":
            match = re.fullmatch(r"\[\s*([^\s+]+)\s*(?:\+\s*(-?\d+))?\s*\]", text)
            if match is None:
                raise ValueError(f"{text} is no address")
            return Address(self._operand(match[1]), int(match[2] or 0))
        for scope in reversed(self.scopes):
            if text in scope:
                return scope[text]
        if re.fullmatch(r"%\w+(\.[xyz])?", text):
            return Special(text)
        if re.fullmatch(r"[A-Za-z_$][\w$]*", text):
            return Symbol(text)
        return Immediate(_constant(text))


def _label_of(name: str, scope: int) -> str:
    return f"{name}#{scope}" if scope else name


def _split(text: str) -> Iterator[str]:
    """The operands between commas; braces and brackets hold theirs together."""
    return (part.strip() for part in re.findall(r"(?:\{[^}]*\}|\[[^\]]*\]|[^,{\[])+", text))


def _constant(text: str) -> int:
    if match := re.fullmatch(r"0[fFdD]([0-9A-Fa-f]+)", text):
        return int(match[1], 16)
    return int(text.removesuffix("U"), 0)
