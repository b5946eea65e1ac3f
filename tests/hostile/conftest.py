"""The honest members of these tests are those of tests/processes."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "processes"))
