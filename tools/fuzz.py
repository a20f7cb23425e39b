"""Fuzzes what strangers and peers may send, guided by coverage: ``python tools/fuzz.py connection --inputs 1_000_000``.

Needs ``atheris`` (PyPI). The targets are those of ``tests/faults/fuzz_targets.py``; the corpus in
``tests/faults/corpus`` is the start. An input that breaks a target is written to a file ``crash-...``, and printed.
With ``--keep`` the corpus becomes the shortest of the inputs that reached new code.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FAULTS = ROOT / "tests" / "faults"
#: Inputs that the corpus of a target has, at most.
MOST_KEPT = 300


def main() -> int:
    parser = argparse.ArgumentParser(description="Fuzzes what strangers and peers may send, guided by coverage.")
    parser.add_argument(
        "target", choices=["frame", "description", "address", "exchange", "rank_message", "call", "connection"]
    )
    parser.add_argument("--inputs", type=int, default=1_000_000, help="how many inputs (1,000,000)")
    parser.add_argument("--seed", type=int, default=0, help="0: another one each time; printed")
    parser.add_argument("--keep", action="store_true", help="keeps what reached new code in the corpus")
    parser.add_argument("--in-process", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.in_process:
        return fuzz(options.target, options.in_process, options.inputs, options.seed)
    corpus = FAULTS / "corpus" / options.target
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder)
        for number, line in enumerate(corpus.read_text().split() if corpus.exists() else []):
            (found / str(number)).write_bytes(bytes.fromhex(line))
        again = [sys.executable, __file__, options.target, f"--seed={options.seed}"]
        status = subprocess.run([*again, f"--inputs={options.inputs}", f"--in-process={found}"]).returncode
        if status == 0 and options.keep:
            inputs = sorted((path.read_bytes().hex() for path in found.iterdir()), key=lambda line: (len(line), line))
            inputs = inputs[:MOST_KEPT]
            corpus.parent.mkdir(exist_ok=True)
            corpus.write_text("".join(f"{line or '00'}\n" for line in inputs))
            print(f"{len(inputs)} inputs in the corpus")
        return status


def instrumented(target: str) -> object:
    import atheris

    sys.path[:0] = [str(FAULTS.parent), str(ROOT)]
    with atheris.instrument_imports(include=["trio_ucx"]):
        from faults import fuzz_targets
    return fuzz_targets.TARGETS[target]


def fuzz(target: str, folder: Path, inputs: int, seed: int) -> int:
    import atheris

    arguments = [sys.argv[0], f"-runs={inputs}", f"-seed={seed}", "-max_len=600", "-print_final_stats=1", str(folder)]
    atheris.Setup(arguments, instrumented(target))
    atheris.Fuzz()
    return 0


if __name__ == "__main__":
    sys.exit(main())
