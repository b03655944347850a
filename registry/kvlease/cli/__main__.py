"""`python -m kvlease.cli`: the same as the `kvlease` command, for environments without its script."""

from __future__ import annotations

import sys

from kvlease.cli import main

sys.exit(main())
