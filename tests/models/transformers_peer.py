"""Small models of `transformers`: made and trained for a step, or loaded from what we have saved.

Reads FAMILY and FOLDER of the environment, `tokens` and `targets`. Without OURS it makes FOLDER/VARIANT/start and, after a
step of SGD and one of AdamW, FOLDER/VARIANT/trained, and leaves `VARIANT.logits` and `VARIANT.loss`. With OURS it leaves
`VARIANT.logits` of the folders FOLDER/VARIANT/ours, whose config it compares with that of `start`."""

import os
import pathlib

outputs = globals().setdefault("outputs", {})
try:
    import transformers
except ImportError as error:
    print(error)
    transformers = None

SIZES = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2}
GPT2_SIZES = {"vocab_size": 61, "n_embd": 32, "n_inner": 48, "n_layer": 2, "n_head": 4, "n_positions": 64,
              "bos_token_id": 1, "eos_token_id": 2}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 16}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 16}
# Not the ratio of 64 to 16.
OTHER_FACTOR = {**YARN, "factor": 6.0, "truncate": False, "beta_fast": 16.0, "beta_slow": 2.0}

VARIANTS = {
    "gpt2": {"tied": {"tie_word_embeddings": True}, "untied": {"tie_word_embeddings": False, "n_inner": None}},
    "llama": {
        "tied": {"tie_word_embeddings": True, "rope_parameters": LLAMA3},
        "untied": {"tie_word_embeddings": False, "rope_parameters": LINEAR, "attention_bias": True, "mlp_bias": True},
    },
    "qwen2": {
        "tied": {"tie_word_embeddings": True, "rope_parameters": YARN},
        "untied": {"tie_word_embeddings": False},
        "other_factor": {"tie_word_embeddings": False, "rope_parameters": OTHER_FACTOR},
        "mscale": {"tie_word_embeddings": False, "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3}},
        "attention_factor": {"tie_word_embeddings": False, "rope_parameters": {**YARN, "attention_factor": 1.7}},
    },
    "qwen3": {
        "tied": {"tie_word_embeddings": True, "head_dim": 16},
        "untied": {"tie_word_embeddings": False, "head_dim": 8, "attention_bias": True},
    },
}


def save(model, folder, tied):
    # In several files for one of the two.
    model.save_pretrained(folder, max_shard_size="20KB" if tied else "5GB")


def loss_of(model):
    logits = model(inputs["tokens"]).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), inputs["targets"].flatten())


def make(family, variant, options, folder):
    sizes = GPT2_SIZES if family == "gpt2" else SIZES
    config = transformers.AutoConfig.for_model(family, **{**sizes, **options})
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.1, 0.2)
    save(model, folder / "start", variant == "tied")
    with torch.no_grad():
        outputs[f"{variant}.logits"] = model(inputs["tokens"]).logits
        outputs[f"{variant}.loss"] = loss_of(model)
    for optimizer in (torch.optim.SGD(model.parameters(), lr=0.1),
                      torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-5, weight_decay=0.1)):
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()
    save(model, folder / "trained", variant == "tied")


def agrees(value, own):
    """Defaults may be written out, and both mscales are one attention_factor."""
    if isinstance(value, dict) and isinstance(own, dict):
        return all(own.get(name) == item for name, item in value.items() if name not in ("mscale", "mscale_all_dim"))
    return value == own


def check(variant, folder):
    model, found = transformers.AutoModelForCausalLM.from_pretrained(folder / "ours", output_loading_info=True)
    assert not any(found.values()), found
    model.eval()
    with torch.no_grad():
        outputs[f"{variant}.logits"] = model(inputs["tokens"]).logits
    start = transformers.AutoConfig.from_pretrained(folder / "start").to_dict()
    ours = model.config.to_dict()
    differ = {name: (value, ours.get(name)) for name, value in start.items()
              if name not in ("_name_or_path", "transformers_version", "n_inner") and not agrees(value, ours.get(name))}
    assert not differ, differ


if transformers is not None:
    for name, chosen in VARIANTS[os.environ["FAMILY"]].items():
        place = pathlib.Path(os.environ["FOLDER"]) / name
        if "OURS" in os.environ:
            check(name, place)
        else:
            make(os.environ["FAMILY"], name, chosen, place)
