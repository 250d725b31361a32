"""The command line: ``kernel-api list | explain | verify | compile | cache | bundle | doctor``.

Exit codes: 0 yes, 1 no (no kernel, a wrong result, a failed compilation), 2 what was asked makes
no sense. Answers go to stdout, as JSON with ``--json``; progress and complaints go to stderr.
"""

from kernel_api.cli._main import main

__all__ = ["main"]
