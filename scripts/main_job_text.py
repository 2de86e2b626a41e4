#!/usr/bin/env python3
"""The text that `make train` learns: this repository's pages and sources at one commit, in tools/train/text/text.tar.xz.

    main_job_text.py unpack FOLDER        FOLDER/train and FOLDER/validation, unless they are there already
    main_job_text.py pack [--commit C]    writes the archive again from the commit that it names, byte for byte
    main_job_text.py vocabulary           trains tools/train/text/tokenizer.json on the training part
    main_job_text.py overlap              how much of the validation text the training text has as well

Whole files are held out: those whose group has a hash below VALIDATION_SHARE. A group is what belongs together, such as
a header, its source and the page of that name, so that no half of a pair tells the other one.
"""

import argparse
import fcntl
import hashlib
import io
import os
import pathlib
import subprocess
import sys
import tarfile
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[1]
HOME = ROOT / "tools/train/text"
ARCHIVE, VOCABULARY = HOME / "text.tar.xz", HOME / "tokenizer.json"
COMMIT = "f7e7174535fce1ea2bc461201a1080b80af40270"
TEXTS = ["README.md", "CONTRIBUTING.md", "docs", "include", "src", "examples", "tools"]
VALIDATION_SHARE = 0.06
TOKENS = 2048
EVERYWHERE = {"CMakeLists", "README"}  # names that say nothing about what a file belongs to
OVERLAP_LENGTH = 64  # bytes


def group_of(path):
    stem = path.name.split(".")[0]
    return str(path) if stem in EVERYWHERE else stem


def is_held_out(path):
    number = int.from_bytes(hashlib.sha256(group_of(path).encode()).digest()[:8], "big")
    return number < VALIDATION_SHARE * 2**64


def texts_at(commit):
    """Path and content of the text files at a commit, in order of kind and path: equals beside each other pack best."""
    git = ["git", "-C", str(ROOT), "archive", "--format=tar", commit, *TEXTS]
    made = subprocess.run(git, capture_output=True)
    if made.returncode != 0:
        sys.exit(f"main_job_text: expected commit {commit} in this repository, of which git says: "
                 f"{made.stderr.decode().strip()}; fetch the whole history, or name another by --commit")
    with tarfile.open(fileobj=io.BytesIO(made.stdout)) as files:
        found = [(pathlib.PurePosixPath(each.name), files.extractfile(each).read()) for each in files if each.isfile()]
    own = HOME.relative_to(ROOT)
    texts = [(path, text) for path, text in found if text and b"\0" not in text and not path.is_relative_to(own)]
    return sorted(texts, key=lambda text: (text[0].suffix, str(text[0])))


def pack(commit):
    texts = texts_at(commit)  # before the archive that is there is opened
    HOME.mkdir(parents=True, exist_ok=True)
    with tarfile.open(ARCHIVE, "w:xz", format=tarfile.USTAR_FORMAT, preset=9) as archive:
        for path, content in texts:
            entry = tarfile.TarInfo(f"{'validation' if is_held_out(path) else 'train'}/{path}")
            entry.size, entry.mode = len(content), 0o644
            archive.addfile(entry, io.BytesIO(content))
    print(f"{ARCHIVE.relative_to(ROOT)}: {ARCHIVE.stat().st_size} bytes")


def unpack(folder):
    """Into a folder beside it that then takes its place: one that is there is whole, whoever was interrupted."""
    checksum = hashlib.sha256(ARCHIVE.read_bytes()).hexdigest()
    stamp = folder / ".of"
    if stamp.is_file() and stamp.read_text() == checksum:
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".text-", dir=folder.parent) as made:
        made = pathlib.Path(made) / "text"
        with tarfile.open(ARCHIVE) as archive:
            for entry in archive:
                path = made / entry.name
                if not entry.isfile() or ".." in path.parts or not path.is_relative_to(made):
                    sys.exit(f"main_job_text: expected plain files in {ARCHIVE}, got {entry.name}")
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(archive.extractfile(entry).read())
        (made / stamp.name).write_text(checksum)
        take_place(made, folder, checksum)


def take_place(made, folder, checksum):
    """One of several that unpack at the same time comes first; the others find its folder, and leave it to its readers."""
    with open(folder.parent / f".{folder.name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        stamp = folder / ".of"
        if stamp.is_file() and stamp.read_text() == checksum:
            return
        if folder.exists():  # of another archive; it goes with what was made aside
            os.replace(folder, made.parent / "before")
        os.replace(made, folder)


def archived():
    """Path to content, of both parts."""
    parts = {"train": {}, "validation": {}}
    with tarfile.open(ARCHIVE) as archive:
        for entry in archive:
            part, path = entry.name.split("/", 1)
            parts[part][path] = archive.extractfile(entry).read()
    return parts


def make_vocabulary():
    """Byte-level BPE as GPT-2's; the validation text has no say in it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TOKENS, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    texts = archived()["train"]
    tokenizer.train_from_iterator((texts[path].decode(errors="replace") for path in sorted(texts)), trainer)
    tokenizer.save(str(VOCABULARY), pretty=False)
    print(f"{VOCABULARY.relative_to(ROOT)}: {tokenizer.get_vocab_size()} tokens")


def tell_overlap():
    """Of the pieces of the validation text, cut at multiples of their length, those that stand in the training text."""
    parts = archived()
    train = b"\n".join(parts["train"].values())
    at_any_place = {train[i : i + OVERLAP_LENGTH] for i in range(len(train) - OVERLAP_LENGTH + 1)}
    pieces = [
        text[i : i + OVERLAP_LENGTH]
        for text in parts["validation"].values()
        for i in range(0, len(text) - OVERLAP_LENGTH + 1, OVERLAP_LENGTH)
    ]
    both = sum(piece in at_any_place for piece in pieces)
    for part, texts in parts.items():
        print(f"{part}: {sum(map(len, texts.values()))} bytes in {len(texts)} files")
    print(f"{both / len(pieces):.1%} of the validation text in pieces of {OVERLAP_LENGTH} bytes is in the training text")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("unpack").add_argument("folder", type=pathlib.Path)
    commands.add_parser("pack").add_argument("--commit", default=COMMIT)
    commands.add_parser("vocabulary")
    commands.add_parser("overlap")
    options = parser.parse_args()
    if options.command == "unpack":
        unpack(options.folder)
    elif options.command == "pack":
        pack(options.commit)
    elif options.command == "vocabulary":
        make_vocabulary()
    else:
        tell_overlap()


if __name__ == "__main__":
    main()
