"""Adapters of `peft` on small models of `transformers`: made and trained for a step, or loaded from what we have saved.

Reads FAMILY and FOLDER of the environment, `tokens` and `targets`. Without OURS it makes FOLDER/base, FOLDER/start and, after
a step of SGD, FOLDER/trained, and leaves `logits` and `loss` of the start. With OURS it leaves `logits` of the adapters in
FOLDER/ours and `merged` of the model in FOLDER/merged."""

import os
import pathlib

outputs = globals().setdefault("outputs", {})
try:
    import peft
    import transformers
except ImportError as error:
    print(error)
    peft = None

SIZES = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": None, "tie_word_embeddings": True}
GPT2_SIZES = {"vocab_size": 61, "n_embd": 32, "n_inner": 48, "n_layer": 2, "n_head": 4, "n_positions": 64,
              "bos_token_id": 1, "eos_token_id": 2}
TARGETS = {"gpt2": ["c_attn", "c_fc"], "qwen2": ["q_proj", "v_proj", "down_proj"]}


def make(family, folder):
    config = transformers.AutoConfig.for_model(family, **(GPT2_SIZES if family == "gpt2" else SIZES))
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.1, 0.2)
    model.save_pretrained(folder / "base")
    adapted = peft.get_peft_model(model, peft.LoraConfig(
        r=4, lora_alpha=6, use_rslora=family == "gpt2", target_modules=TARGETS[family], fan_in_fan_out=family == "gpt2"))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.1)
    adapted.save_pretrained(folder / "start")
    logits = adapted(inputs["tokens"]).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), inputs["targets"].flatten())
    outputs["logits"], outputs["loss"] = logits.detach(), loss.detach()
    loss.backward()
    torch.optim.SGD([p for p in adapted.parameters() if p.requires_grad], lr=0.1).step()
    adapted.save_pretrained(folder / "trained")


def load(folder):
    base = transformers.AutoModelForCausalLM.from_pretrained(folder / "base")
    model = peft.PeftModel.from_pretrained(base, folder / "ours").eval()
    merged = transformers.AutoModelForCausalLM.from_pretrained(folder / "merged").eval()
    with torch.no_grad():
        outputs["logits"], outputs["merged"] = model(inputs["tokens"]).logits, merged(inputs["tokens"]).logits


if peft is not None:
    place = pathlib.Path(os.environ["FOLDER"])
    if "OURS" in os.environ:
        load(place)
    else:
        make(os.environ["FAMILY"], place)
