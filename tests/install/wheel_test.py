#!/usr/bin/env python3
"""wheel_test.py BUILD PROJECT SCRATCH GENERATOR COMPILER: makes the wheel of a build and uses it as a user does, with
nothing but files of this machine, and without rights to write anywhere else if it may give them up."""

import os
import pathlib
import re
import shutil
import subprocess
import sys

BUILD, PROJECT, SCRATCH = (pathlib.Path(path) for path in sys.argv[1:4])
GENERATOR, COMPILER = sys.argv[4:]
ROOT = pathlib.Path(__file__).resolve().parents[2]
NOBODY = 65534
PYTHON = SCRATCH / "venv/bin/python"
HIDDEN = ("TESSERA_TORCH", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV", "CONDA_PREFIX", "CMAKE_PREFIX_PATH")


def cached(name):
    return re.search(rf"^{name}:\w+=(.*)$", (BUILD / "CMakeCache.txt").read_text(), re.MULTILINE)[1]


TORCH = pathlib.Path(cached("TESSERA_TORCH"))
VERSION = cached("TESSERA_PACKAGE_VERSION")
WANTED = re.fullmatch(r".*\+torch([\d.]+)\.\w+", VERSION)[1]
OTHER = "2.12" if WANTED == "2.11" else "2.11"


def as_user():
    """(arguments of subprocess.run to be nobody, the Python to make an environment of), if this is root and nobody can read
    what is needed; else without the first."""
    if os.geteuid() != 0:
        return {}, sys.executable
    user = {"user": NOBODY, "group": NOBODY, "extra_groups": []}
    needed = [TORCH / "lib/libtorch_cpu.so", PROJECT / "main.cpp", SCRATCH]
    check = 'for path; do test -r "$path" || exit 1; done; exec "$0" -c "import ensurepip, venv"'
    for python in (sys.executable, "/usr/bin/python3"):
        if subprocess.run(["sh", "-c", check, python, *needed], stderr=subprocess.DEVNULL, **user).returncode == 0:
            print("as nobody")
            return user, python
    print("as root: nobody can't read the build, or has no Python with ensurepip")
    return {}, sys.executable


def run(*words, fails=False, user={}):
    environment = {name: value for name, value in os.environ.items() if name not in HIDDEN}
    environment |= {"HOME": str(SCRATCH), "PATH": f"{PYTHON.parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1",
                    "PIP_NO_CACHE_DIR": "1"}
    print("+", *words, flush=True)
    result = subprocess.run([str(word) for word in words], env=environment, cwd=SCRATCH, stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT, text=True, **user)
    print(result.stdout, end="", flush=True)
    if (result.returncode != 0) != fails:
        sys.exit(f"expected {'a failure' if fails else 'success'}, got exit code {result.returncode}")
    return result.stdout


def expect(text, *words):
    for word in words:
        if word not in text:
            sys.exit(f"expected '{word}' above")


def make_wheel():
    make = ROOT / "packaging/wheel/make_wheel.py"
    wheel, = run(sys.executable, make, BUILD, SCRATCH / "wheel").splitlines()
    expect(wheel, f"tessera-{VERSION}-py3-none-linux_")
    return pathlib.Path(wheel)


def write_torch(folder, version, cuda="None"):
    folder.mkdir()
    (folder / "version.py").write_text(f"__version__ = '{version}'\ncuda: Optional[str] = {cuda}\n")


def check_messages(site, user):
    """What is told where torch is missing or does not fit, by import, by `python -m` and by programs."""
    install = f"python -m pip install 'torch=={WANTED}.*'"
    cases = ((None, "", (f"tessera {VERSION} expected torch {WANTED} ", "found none", install)),
             (f"{OTHER}.1+cpu", "None", (f"found torch {OTHER}.1+cpu for CPUs in {site}/torch",
                                         f"install tessera-0.1.0+torch{OTHER}.cpu-py3-none-*.whl", install)),
             (f"{OTHER}.1+cu126", "'12.6'", ("for CUDA 12 in", f"+torch{OTHER}.cu12-py3-none-*.whl")),
             ("2.4.0", "None", ("found torch 2.4.0", "Tessera works with 2.11 to 2.15", install)))
    for version, cuda, words in cases:
        if version:
            write_torch(site / "torch", version, cuda)
        expect(run(PYTHON, "-c", "import tessera", fails=True, user=user), "ImportError: ", *words)
        for command in ((PYTHON, "-m", "tessera", "--cmake"), ("tessera", "--version")):
            told = run(*command, fails=True, user=user)
            expect(told, "error: ", *words)
            if told.count("\n") != 1:
                sys.exit("expected one line")
        shutil.rmtree(site / "torch", ignore_errors=True)
    kind = VERSION.rpartition(".")[2]
    write_torch(site / "torch", f"{WANTED}.1", *(["'12.6'"] if kind == "cpu" else []))
    told = run(PYTHON, "-c", "import tessera", fails=kind != "cpu", user=user)
    expect(told, *(["trains on CPUs alone", f"+torch{WANTED}.cu12"] if kind == "cpu" else [f"torch {WANTED}.1 for CPUs"]))
    shutil.rmtree(site / "torch")


def check_programs(user):
    expect(run("tessera", "--version", user=user), "tessera 0.")
    expect(run(PYTHON, "-m", "tessera", "--version", user=user), "tessera 0.")
    run("tessera", "inspect", "--help", user=user)  # loads libtorch
    run("tessera-inspect", "--help", user=user)
    code = "import sys, tessera; print(tessera.__version__, 'torch' in sys.modules)"
    expect(run(PYTHON, "-c", code, user=user), f"{VERSION} False")


def configure(folder, *options, **expected):
    return run("cmake", "-S", PROJECT, "-B", folder, "-G", GENERATOR, f"-DCMAKE_CXX_COMPILER={COMPILER}", *options,
               **expected)


def configure_with_its_torch(folder, user):
    prefix = run(PYTHON, "-m", "tessera", "--cmake", user=user).strip()
    return prefix, configure(folder, f"-DCMAKE_PREFIX_PATH={prefix}", user=user)


def check_other_torch(prefix, user):
    """What CMake says of a libtorch of another minor version that the user names."""
    torch = SCRATCH / "other_torch"
    version = zip(("MAJOR", "MINOR", "PATCH"), f"{OTHER}.1".split("."))
    header = "".join(f"#define TORCH_VERSION_{part} {number}\n" for part, number in version)
    for name, text in (("ATen/ATen.h", ""), ("torch/headeronly/version.h", header)):
        (torch / "include" / name).parent.mkdir(parents=True)
        (torch / "include" / name).write_text(text)
    told = configure(SCRATCH / "build_other", f"-DCMAKE_PREFIX_PATH={prefix}", f"-DTESSERA_TORCH={torch}", fails=True,
                     user=user)
    expect(" ".join(told.split()), f"Tessera was built with libtorch {WANTED}.", f"{torch} is {OTHER}.1")


def main():
    shutil.rmtree(SCRATCH, ignore_errors=True)
    SCRATCH.mkdir(parents=True)
    user, python = as_user()
    wheel = make_wheel()
    if user:
        os.chown(SCRATCH, NOBODY, NOBODY)
    run(python, "-m", "venv", SCRATCH / "venv", user=user)
    run(PYTHON, "-m", "pip", "install", "--no-index", "--no-deps", "--no-compile", wheel, user=user)
    site = next((SCRATCH / "venv/lib").glob("python*/site-packages"))
    check_messages(site, user)

    # torch beside it, as pip installs it
    for name in ("torch", "nvidia"):
        if (TORCH.parent / name).exists():
            (site / name).symlink_to(TORCH.parent / name)
    check_programs(user)
    prefix, told = configure_with_its_torch(SCRATCH / "build", user)
    expect(f"[{prefix}]", f"[{site}/tessera]")
    expect(told, f"at {site}/torch ")
    check_other_torch(prefix, user)
    run("cmake", "--build", SCRATCH / "build", user=user)
    expect(run("tessera", "run", "-n", "2", "--", SCRATCH / "build/hello", user=user), "2 ranks")
    run(PYTHON, ROOT / "tests/style/check_runpaths.py", "--compiler", COMPILER, site / "tessera/bin",
        site / "tessera/lib", user=user)

    # torch elsewhere, as in an environment that sees the packages of another
    for name in ("torch", "nvidia"):
        (site / name).unlink(missing_ok=True)
    (site / "elsewhere.pth").write_text(f"{TORCH.parent}\n")
    check_programs(user)
    prefix, told = configure_with_its_torch(SCRATCH / "build_elsewhere", user)
    expect(f"[{prefix}]", f"[{site}/tessera;{TORCH}]")
    expect(told, f"at {TORCH} ")
    told = run("tessera", "run", "-n", "1", "--", "sh", "-c", 'echo "[$LD_LIBRARY_PATH]"', user=user)
    expect(told, "[]")  # programs are left to the libtorch that they were linked with
    run(PYTHON, "-m", "pip", "uninstall", "-y", "tessera", user=user)
    if (site / "tessera").exists():
        sys.exit(f"expected nothing to be left of {site}/tessera")


if __name__ == "__main__":
    main()
