"""python -m libflash: this build and machine, the folders of the C files, a demonstration, a conformance kit, the benchmarks."""

from __future__ import annotations

import argparse
import importlib.resources
import os
import pathlib
import runpy
import sys
from collections.abc import Sequence


def package_folder() -> pathlib.Path:
    """The folder of the installed files. In an editable install it is not the folder of this source file."""
    return pathlib.Path(str(importlib.resources.files("libflash").joinpath("lib"))).parent


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m libflash",
        description="Exact attention for any DLPack array. Without an argument: what this installation is and finds.",
    )
    made.add_argument("--version", action="store_true", help="print the version")
    made.add_argument("--cmake-dir", action="store_true", help="print the folder for find_package(libflash), libflash_DIR")
    made.add_argument("--include-dir", action="store_true", help="print the folder of libflash.h")
    commands = made.add_subparsers(dest="command")
    commands.add_parser("info", help="version, build, processor, devices, kernels")
    commands.add_parser("demo", help="attention over a long text: time and memory against standard attention", add_help=False)
    commands.add_parser("conformance", help="the tests of libflash for any implementation of attention", add_help=False)
    commands.add_parser("bench", help="the benchmarks of the source tree", add_help=False)
    return made


def print_info() -> int:
    import libflash

    found = libflash.info()
    print(f"libflash {found['version']}")
    built_with_cuda = found["build"]["cuda architectures"] != ""  # else the line `cuda` below gives the reason
    for key, value in found["build"].items():
        if key != "version" and (built_with_cuda or not key.startswith("cuda")):
            print(f"  {'cuda compiler' if key == 'cuda' else key}: {value}")
    print(f"  cpu: {found['cpu']['isa']}, {found['cpu']['threads']} threads")
    print(f"  cuda: {found['cuda']}")
    for number, device in enumerate(found["devices"]):
        gigabytes = device["memory_bytes"] / 2**30
        print(f"  device {number}: {device['name']}, sm_{device['arch']}, {gigabytes:.0f} GiB")
    width = max(len(kernel["name"]) for kernel in found["kernels"])
    print("  kernels:")
    for kernel in found["kernels"]:
        print(f"    {kernel['name']:<{width}}  {'usable' if kernel['usable'] else 'no: ' + kernel['why_not']}")
    return 0


def is_source_tree(folder: pathlib.Path) -> bool:
    """Whether the folder is libflash's source tree: another project may have a tests/benchmark, too."""
    return (folder / "include" / "libflash.h").is_file() and (folder / "tests" / "benchmark").is_dir()


def bench(arguments: Sequence[str]) -> int:
    """Run a program of tests/benchmark, which exists only in libflash's source tree."""
    here = pathlib.Path.cwd()
    root = next(filter(is_source_tree, (here, *here.parents, pathlib.Path(__file__).parents[2])), None)
    if root is None:
        print("The benchmarks are programs under tests/benchmark of libflash's source tree; run this inside it.", file=sys.stderr)
        return 2
    folder = root / "tests" / "benchmark"
    programs = sorted(path for path in folder.glob("*.py") if not path.name.startswith("_"))
    names = [path.stem for path in programs]
    if not arguments or arguments[0] not in names:
        print(f"usage: python -m libflash bench NAME [OPTIONS]\n\nPrograms in {folder}:")
        for name in names:
            print(f"  {name}")
        return 0 if not arguments or arguments[0] in ("-h", "--help") else 2
    program = programs[names.index(arguments[0])]
    sys.argv = [str(program), *arguments[1:]]
    sys.path.insert(0, str(folder))
    runpy.run_path(str(program), run_name="__main__")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    chosen, rest = parser().parse_known_args(arguments)
    if chosen.command == "demo":
        from libflash import demo

        return int(demo.main(rest))
    if chosen.command == "conformance":
        from libflash import conformance

        return int(conformance.main(rest))
    if chosen.command == "bench":
        return bench(rest)
    if rest:
        parser().error(f"unknown argument {rest[0]}")
    folders = {"cmake_dir": package_folder() / "lib" / "cmake" / "libflash", "include_dir": package_folder() / "include"}
    if chosen.version:
        import libflash

        print(libflash.__version__)
        return 0
    for name, folder in folders.items():
        if getattr(chosen, name):
            print(folder)
            return 0
    return print_info()


if __name__ == "__main__":
    try:
        code = main()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of the output has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    sys.exit(code)
