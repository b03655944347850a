"""`python -m tests.matrix` (`make matrix`): writes connector/MATRIX.md from the markers of the tests.

Invariant: the page depends on the tests' sources alone.
"""

from __future__ import annotations

from tests.matrix.rows import PAGE, page, rows

if __name__ == "__main__":
    made = rows()
    PAGE.write_text(page(made))
    print(f"{PAGE.name}: {len(made)} conditions")
