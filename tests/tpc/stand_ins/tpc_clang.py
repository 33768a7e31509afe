"""In the place of tpc-clang: makes an object with the sections of a TPC kernel from the preprocessed source.

`.text` holds the code (the source without comments, blanks and folders), `.tpc_metadata` 262 bytes, `.source` what the
real compiler leaks: source text, folder and command line. A source that holds `#error` or no `main` is refused.
"""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys


def main(arguments: list[str]) -> int:
    """One command line of the compiler."""
    if arguments == ["--version"]:
        print("tpc-clang stand-in 2.7.33")
        return 0
    source, target = arguments[arguments.index("-c") + 1], arguments[arguments.index("-o") + 1]
    if "-march=gaudi2" not in arguments:
        print("error: no -march=gaudi2", file=sys.stderr)
        return 1
    defines = [argument for argument in arguments if argument.startswith("-D")]
    command = ["gcc", "-E", "-P", *defines, source]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode or not re.search(r"\bvoid\s+main\b", done.stdout):
        print(done.stderr or f"{source}: error: no main", file=sys.stderr)
        return 1
    code = " ".join(done.stdout.split()).encode()
    leaked = repr((pathlib.Path.cwd(), arguments, pathlib.Path(source).read_text())).encode()

    def section(name: str, content: bytes) -> str:
        values = ",".join(str(byte) for byte in content)
        return f'.section {name},"a"\n.byte {values}\n'

    assembly = ".text\n.byte " + ",".join(str(byte) for byte in code) + "\n"
    if "-DMXK_FID_INT4_PAIR=404" not in arguments:  # how a test asks for an object without them
        assembly += section(".tpc_metadata", bytes(index % 251 for index in range(262)))
    assembly += section(".source", leaked)
    return subprocess.run(
        ["gcc", "-x", "assembler", "-c", "-o", target, "-"], input=assembly, text=True, check=False
    ).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
