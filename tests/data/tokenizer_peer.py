"""Makes tokenizers with the package `tokenizers` and says what tokens they give.

Reads FOLDER (for the files) and REPOSITORY (whose sources they are trained on) of the environment, `texts` (bytes of all
texts) and `sizes` of each. Leaves by the name of each tokenizer: `NAME.tokens`, `NAME.counts` of each text."""

import json
import os
import pathlib

outputs = globals().setdefault("outputs", {})
try:
    import tokenizers
except ImportError as error:
    print(error)
    tokenizers = None

GPT4 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
        r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def byte_level(prefix=False, regex=True):
    return {"type": "ByteLevel", "add_prefix_space": prefix, "trim_offsets": True, "use_regex": regex}


def split(regex, behavior="Isolated", invert=False):
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": behavior, "invert": invert}


def digits(individual):
    return {"type": "Digits", "individual_digits": individual}


def sequence(*parts):
    return {"type": "Sequence", "pretokenizers": list(parts)}


VARIANTS = {
    "gpt2": byte_level(),
    "prefix": byte_level(prefix=True),
    "one_word": byte_level(regex=False),
    "gpt2_split": sequence(split(GPT2), byte_level(regex=False)),
    "gpt4": sequence(split(GPT4), byte_level(regex=False)),
    "gpt4_removed": sequence(split(GPT4.replace("{1,3}", ""), "Removed", True), byte_level(regex=False)),
    "gpt4_gpt2": sequence(split(GPT4), byte_level(prefix=True)),
    "digits": sequence(digits(True), byte_level()),
    "digit_runs": sequence(digits(False), byte_level(prefix=True)),
}


def trained():
    from tokenizers import decoders, models, pre_tokenizers, processors, trainers

    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.decoder = decoders.ByteLevel()
    root = pathlib.Path(os.environ["REPOSITORY"])
    sources = sorted(str(path) for path in [*(root / "docs").glob("*.md"), *(root / "include").rglob("*.h")])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train(sources, trainers.BpeTrainer(
        vocab_size=3000, special_tokens=["<|endoftext|>", "<|pad|>"], initial_alphabet=alphabet, show_progress=False))
    tokenizer.add_special_tokens(["<|endoftext|>!", "\n\n\n"])
    tokenizer.add_tokens(["new york", "  ", "étoile", "ing"])
    return json.loads(tokenizer.to_str())


def encode(name, description, texts):
    path = pathlib.Path(os.environ["FOLDER"]) / f"{name}.json"
    path.write_text(json.dumps(description))
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    encodings = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    outputs[f"{name}.tokens"] = torch.tensor([token for tokens in encodings for token in tokens])
    outputs[f"{name}.counts"] = torch.tensor([len(tokens) for tokens in encodings])


def write_all():
    raw, texts = bytes(inputs["texts"].tolist()), []
    for size in inputs["sizes"].tolist():
        texts.append(raw[:size].decode("utf-8", errors="replace"))
        raw = raw[size:]
    base = trained()
    for name, pre_tokenizer in VARIANTS.items():
        encode(name, {**base, "pre_tokenizer": pre_tokenizer}, texts)
    whole_words = {**base["model"], "ignore_merges": True}
    whole_words["vocab"] = {**whole_words["vocab"], "Ġzebra": len(whole_words["vocab"])}
    encode("ignore_merges", {**base, "model": whole_words, "added_tokens": base["added_tokens"][:2]}, texts)
    old_merges = {**base["model"], "merges": [" ".join(pair) for pair in base["model"]["merges"]]}
    encode("old_merges", {**base, "model": old_merges}, texts)


def write_classes():
    """`classes`: of every code point, 1 for a letter, 2 for a number, 3 for white space; 2 in `numeric`: a digit."""
    from tokenizers import Regex, pre_tokenizers

    letters = [chr(c) for c in range(0x110000) if not 0xD800 <= c < 0xE000]
    for output, patterns in {
        "classes": [pre_tokenizers.Split(Regex(regex), "removed") for regex in (r"\p{L}", r"\p{N}", r"\s")],
        "numeric": [None, pre_tokenizers.Digits(individual_digits=True)],
    }.items():
        classes = torch.zeros(0x110000, dtype=torch.uint8)
        for number, pattern in enumerate(patterns, 1):
            for start in range(0, len(letters), 4096) if pattern else []:
                block = letters[start : start + 4096]
                pieces = pattern.pre_tokenize_str("".join(block))
                if output == "classes":
                    found = set(block) - set("".join(text for text, _ in pieces))
                else:  # digits stand alone between runs of others; a single other between digits is in the middle
                    found = {c for c in block if [c] == [text for text, _ in pattern.pre_tokenize_str("a" + c)][1:]}
                for c in found:
                    classes[ord(c)] = number
        outputs[output] = classes


if tokenizers is not None:
    if "texts" in inputs:
        write_all()
    else:
        write_classes()
