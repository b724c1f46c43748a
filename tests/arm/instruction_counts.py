"""Instructions that the kernels for Arm execute, counted in the emulator: those of NEON against the portable code.

    python tests/arm/instruction_counts.py build/arm/libflash.so

Needs aarch64-linux-gnu-gcc, cc and qemu-aarch64 with plugins. Prints a table in Markdown (that of tests/benchmark/RESULTS.md);
fails where a kernel executes more instructions than the portable code. A count says nothing about time.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
INCLUDE = HERE.parents[1] / "include"
OPERATIONS = ("forward", "backward", "decode")
TYPES = ("f32", "f16", "bf16")


class Emulator:
    """The program operation.c, linked with a library, and the plugin that counts."""

    def __init__(self, library: Path, folder: Path) -> None:
        self.program, self.plugin = folder / "operation", folder / "count.so"
        source = [HERE / "operation.c", library, f"-Wl,-rpath,{library.parent}", "-o", self.program]
        subprocess.run(["aarch64-linux-gnu-gcc", "-std=c99", "-O1", f"-I{INCLUDE}", *map(str, source)], check=True)
        plugin = ["cc", "-std=c99", "-O1", "-shared", "-fPIC", str(HERE / "count_instructions.c"), "-o", str(self.plugin)]
        subprocess.run(plugin, check=True)

    def executed(self, operation: str, isa: str, dtype: str, calls: int) -> int:
        """Instructions of the whole program."""
        emulator = ["qemu-aarch64", "-L", "/usr/aarch64-linux-gnu", "-plugin", str(self.plugin), "-d", "plugin"]
        command = [*emulator, str(self.program), operation, f"{operation}_cpu_{isa}", dtype, str(calls)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        found = re.search(r"^instructions: (\d+)$", done.stderr, re.M)
        if done.returncode or not found:
            raise SystemExit(f"{' '.join(command)}: {done.stderr}")
        return int(found[1])

    def of_a_call(self, operation: str, isa: str, dtype: str) -> int:
        """The second call: the first also fills caches of the library."""
        return self.executed(operation, isa, dtype, 2) - self.executed(operation, isa, dtype, 1)


def main(library: str) -> int:
    worse = []
    with tempfile.TemporaryDirectory() as folder:
        emulator = Emulator(Path(library).resolve(), Path(folder))
        print("| operation | type | generic | neon | times fewer | neonbf16 | times fewer |\n|---|---|---:|---:|---:|---:|---:|")
        for operation in OPERATIONS:
            for dtype in TYPES:
                generic, *rest = (emulator.of_a_call(operation, isa, dtype) for isa in ("generic", "neon", "neonbf16"))
                cells = " | ".join(f"{count} | {generic / count:.2f}" for count in rest)
                print(f"| {operation} | {dtype} | {generic} | {cells} |", flush=True)
                worse += [(operation, dtype) for count in rest if count > generic]
    if worse:
        print(f"more instructions than the portable code: {worse}")
    return bool(worse)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
