"""``python -m kernel_api`` is the command ``kernel-api``."""

import sys

from kernel_api.cli import main

sys.exit(main())
