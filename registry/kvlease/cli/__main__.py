"""`python -m kvlease.cli`: the same as the `kvlease` command, for environments without its script.

No behaviour of its own.
"""

from __future__ import annotations

import sys

from kvlease.cli import main

sys.exit(main())
