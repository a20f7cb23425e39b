"""The README says only what is true: its program runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path


def test_the_program_runs() -> None:
    text = (Path(__file__).parent.parent / "README.md").read_text()
    [program] = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert (result.returncode, result.stdout) == (0, "b'reward'\n"), result.stderr
