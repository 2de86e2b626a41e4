"""What pip puts on PATH starts the program of its name in the package. A module of its own, so that a torch that does not
fit is told in a line."""

import os
import sys


def environment_for(name, words):
    """Programs find libtorch beside the package by themselves. If it is elsewhere they are told where; `tessera run` is
    not: it does without, and what it starts was linked with a libtorch of its own."""
    from tessera import _torch

    environment = dict(os.environ)
    torch = _torch.find()
    if not _torch.is_beside(torch) and (name, words[:1]) != ("tessera", ["run"]):
        others = environment.get("LD_LIBRARY_PATH")
        environment["LD_LIBRARY_PATH"] = f"{torch.folder}/lib" + (f":{others}" if others else "")
    return environment


def start(name, words):
    """Becomes that program."""
    from tessera import _torch

    program = _torch.PACKAGE / "bin" / name
    os.execve(program, [str(program), *words], environment_for(name, words))


def main():
    try:
        import tessera  # noqa: F401
    except ImportError as error:
        sys.exit(f"error: {error}")
    start(os.path.basename(sys.argv[0]), sys.argv[1:])
