"""Which torch is in this environment, and does it fit? It is read, not imported, which would take seconds."""

import importlib.util
import pathlib
import re
import typing
import warnings

from tessera._version import TORCH_KIND, TORCH_VERSION, VERSION

PACKAGE = pathlib.Path(__file__).resolve().parent
SUPPORTED = ("2.11", "2.12", "2.13", "2.14", "2.15")


class Torch(typing.NamedTuple):
    folder: pathlib.Path
    version: str  # "2.13.0+cu130"
    kind: str  # "cpu", or CUDA's major version: "cu13"

    @property
    def minor_version(self):
        return ".".join(self.version.split(".")[:2])


def find():
    """The torch that `import torch` would find; none if there is none."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return None
    folder = pathlib.Path(list(spec.submodule_search_locations)[0])
    path = folder / "version.py"
    text = path.read_text() if path.is_file() else ""
    version = re.search(r"^__version__ = '([^']+)'", text, re.MULTILINE)
    cuda = re.search(r"^cuda\b.*'(\d+)\.", text, re.MULTILINE)
    return Torch(folder, version[1] if version else "unknown", f"cu{cuda[1]}" if cuda else "cpu")


def in_words(kind):
    return {"cpu": "for CPUs", "cuda": "for CUDA"}.get(kind, f"for CUDA {kind[2:]}")


def why_not(torch):
    """What is wrong with it, and what to do; none if it fits."""
    expected = f"tessera {VERSION} expected torch {TORCH_VERSION} {in_words(TORCH_KIND)} in this environment, found "
    install = f"python -m pip install 'torch=={TORCH_VERSION}.*'"
    if torch is None:
        return f"{expected}none: {install}"
    is_for_cuda = TORCH_KIND == "cuda" and torch.kind != "cpu"  # built with a libtorch that does not tell its CUDA
    if torch.minor_version == TORCH_VERSION and (TORCH_KIND in ("cpu", torch.kind) or is_for_cuda):
        return None
    found = f"{expected}torch {torch.version} {in_words(torch.kind)} in {torch.folder}: "
    release = VERSION.partition("+")[0]
    if torch.minor_version not in SUPPORTED:
        return f"{found}{install} (Tessera works with {SUPPORTED[0]} to {SUPPORTED[-1]})"
    fits = f"tessera-{release}+torch{torch.minor_version}.{torch.kind}-py3-none-*.whl"
    return f"{found}install {fits}, the wheel that fits, or {install}"


def check():
    torch = find()
    problem = why_not(torch)
    if problem:
        raise ImportError(problem)
    if torch.kind != TORCH_KIND and TORCH_KIND == "cpu":
        warnings.warn(f"tessera {VERSION} trains on CPUs alone; for the GPUs of torch {torch.version} install "
                      f"the wheel +torch{TORCH_VERSION}.{torch.kind}", stacklevel=3)


def is_beside(torch):
    """Do programs and CMake find it by themselves, as they look beside the package?"""
    beside = PACKAGE.parent / "torch"
    return beside.exists() and beside.samefile(torch.folder)


def cmake_prefix_path():
    """For CMAKE_PREFIX_PATH: the package, and torch where it is in another folder."""
    torch = find()
    return str(PACKAGE) if is_beside(torch) else f"{PACKAGE};{torch.folder}"
