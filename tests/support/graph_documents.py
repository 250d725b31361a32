"""The documents of cuDNN's Python frontend: their code runs with nothing but the module renamed."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import NamedTuple

import torch

_ROOT = Path(__file__).resolve().parents[2]
_DOCUMENTS = _ROOT.parent / "shared" / "seeds"
_COPIES = _ROOT / "tests" / "data" / "graph_documents"

#: The documents by the name of the copy of their code.
DOCUMENTS = {
    "low_level_python_api": "low-level-python-api.txt",
    "python_api_reference": "python-api-reference.md",
}

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Block(NamedTuple):
    """Code of a document.

    Attributes:
        name: The heading above it, and its number if there are several.
        code: As it stands in the document.
    """

    name: str
    code: str

    def runnable(self) -> str:
        """The code with this library's module, on a device that is there."""
        code = re.sub(r"^import cudnn$", "import kernel_api.graph as cudnn", self.code, flags=re.M)
        return code.replace('"cuda"', f'"{DEVICE}"')


def blocks(document: str) -> list[Block]:
    """The code of a document; that of the copy where the document is not at hand."""
    path = _DOCUMENTS / DOCUMENTS[document]
    return of_text(path.read_text()) if path.exists() else copied_blocks(document)


def copied_blocks(document: str) -> list[Block]:
    return of_text((_COPIES / f"{document}.md").read_text())


def as_copy(document: str) -> str:
    """What the copy has to be: headings and code, without the text in between."""
    parts, heading = [f"The code of {DOCUMENTS[document]}, without its text.\n"], None
    for block in blocks(document):
        title = block.name.split(" | ")[0]
        if title != heading:
            parts.append(f"## {title}\n")
            heading = title
        parts.append(f"```python\n{block.code}\n```\n")
    return "\n".join(parts)


def of_text(text: str) -> list[Block]:
    """The code in Markdown's fences, or behind the notebook's prompts if there are any."""
    found = _cells(text) if "In [None]:" in text else _fences(text)
    blocks, counts = [], dict[str, int]()
    for heading, code in found:
        counts[heading] = number = counts.get(heading, 0) + 1
        blocks.append(Block(f"{heading} | {number}", code))
    return blocks


def _fences(text: str) -> list[tuple[str, str]]:
    pattern = re.compile(r"^#{1,6} ([^\n]+)$|^```python\n(.*?)^```$", re.M | re.S)
    heading, found = "", []
    for match in pattern.finditer(text):
        if match[1]:
            heading = match[1].strip()
        else:
            found.append((heading, match[2].rstrip("\n")))
    return found


def _cells(text: str) -> list[tuple[str, str]]:
    """Cells of a notebook that was printed: text follows code without a mark in between."""
    heading, found = "", []
    before, *cells = text.split("In [None]:\n")
    for rest in cells:
        heading = (re.findall(r"^#{2,6} (.+)$", before, re.M) or [heading])[-1].strip()
        code = _longest_code(re.split(r"^#{2,6} ", rest, flags=re.M)[0].splitlines())
        if ast.parse(code).body:
            found.append((heading, code))
        before = rest[len(code) :]
        fences = re.findall(r"^```python\n(.*?)^```$", before, re.M | re.S)
        found += [(heading, fence.rstrip("\n")) for fence in fences]
    return found


def _longest_code(lines: list[str]) -> str:
    """The longest run of lines from the first that is Python."""
    for end in range(len(lines), 0, -1):
        code = "\n".join(lines[:end])
        try:
            ast.parse(code)
        except SyntaxError:
            continue
        return code.strip("\n")
    return ""


if __name__ == "__main__":
    for name in DOCUMENTS:
        (_COPIES / f"{name}.md").write_text(as_copy(name))
