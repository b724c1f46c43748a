"""What a measurement depends on besides the sources: GPU, driver, toolkit, frameworks. Exit code 1 where nothing can be measured.

python tests/evidence/machine.py
"""

from __future__ import annotations

import json
import pathlib
import platform
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]


def table_kernels(text: str) -> dict[str, str]:
    """Name and folder of each kernel of kernels.table. units.cmake makes the names in the same way. A small kernel beside another
    one for the same problems is left out: builds for Hopper alone need not have it."""
    folders, small = {}, {}
    for line in text.splitlines():
        if not line[:1].islower():
            continue
        operation, folder, dtype, head_dims, *_, marks = line.split()
        name = f"{operation}_{folder}" + (f"_{dtype}" if dtype != "any" else "") + (f"_d{head_dims}" if head_dims != "-" else "")
        ending = "_statistics" if "statistics" in marks.split(",") else ""
        (small if "small" in marks.split(",") else folders)[name, ending] = folder
    alone = {(f"{name}_small", ending): folder for (name, ending), folder in small.items() if (name, ending) not in folders}
    return {name + ending: folder for (name, ending), folder in (folders | alone).items()}


def missing_kernels(table: str, built: list[str], architecture: int) -> list[str]:
    """Kernels of the table that this GPU can run and this library lacks. Evidence must be about all kernels."""
    folders = table_kernels(table)
    expected = [name for name, folder in folders.items() if folder != "sm90" or architecture == 90]
    return [name for name in expected if name not in built]


def driver() -> str:
    if shutil.which("nvidia-smi"):
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        found = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False).stdout.split()
        if found:
            return found[0]
    version = pathlib.Path("/proc/driver/nvidia/version")
    return version.read_text().splitlines()[0] if version.exists() else "unknown"


def main() -> int:
    import torch

    import libflash

    info = libflash.info()
    if not info["devices"] or not torch.cuda.is_available():
        print(f"no GPU to measure on: libflash reports {info['cuda']!r}", file=sys.stderr)
        return 1
    names = [kernel["name"] for kernel in info["kernels"] if kernel["backend"] != "cpu"]
    device = info["devices"][0]
    lacking = missing_kernels((ROOT / "libflash/cuda/kernels.table").read_text(), names, device["arch"])
    if lacking:
        print(f"this libflash lacks kernels of kernels.table: {', '.join(lacking)}; build all kernels", file=sys.stderr)
        return 1
    machine = {
        "gpu": device["name"],
        "gpus": len(info["devices"]),
        "gib": torch.cuda.get_device_properties(0).total_memory / 2**30,
        "setting": {
            "arch": device["arch"],
            "multiprocessors": device["multiprocessors"],
            "driver": driver(),
            "toolkit": info["build"].get("cuda", ""),
            "architectures": info["build"].get("cuda architectures", ""),
            "compiler": info["build"].get("compiler", ""),
            "libflash": info["version"],
            "kernels": len(names),
            "torch": torch.__version__,
            "cudnn": str(torch.backends.cudnn.version()),
            "python": platform.python_version(),
        },
    }
    print(json.dumps(machine))
    return 0


if __name__ == "__main__":
    sys.exit(main())
