"""state_dict_peer.py PROGRAM: saves a state dict, lets the program train on, and loads what that has written."""

import importlib.util
import pathlib
import subprocess
import sys
import tempfile

MISSING = [name for name in ("torch", "safetensors") if importlib.util.find_spec(name) is None]


def main(program):
    import torch
    from safetensors.torch import load_file
    from torch import nn

    torch.manual_seed(1)
    features = nn.Sequential(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)), nn.ReLU())
    model = nn.ModuleDict({"features": features, "head": nn.Linear(8, 4)})
    features(torch.randn(4, 3, 6, 6))  # running statistics that are not the initial ones
    before = model["head"].weight.clone()
    with tempfile.TemporaryDirectory() as folder:
        saved, written = (str(pathlib.Path(folder) / name) for name in ("model.pt", "model.safetensors"))
        torch.save(model.state_dict(), saved)
        printed = subprocess.run([program, saved, written], check=True, capture_output=True, text=True).stdout
        model.load_state_dict(load_file(written))
    print(printed, end="")
    model.eval()
    with torch.no_grad():
        total = model["head"](model["features"](torch.ones(2, 3, 6, 6)).mean((2, 3))).sum().item()
    assert not torch.equal(before, model["head"].weight), "expected other weights than before"
    assert abs(total - float(printed.split()[-1])) < 1e-4 * max(1, abs(total)), f"Python's sum of outputs is {total}"
    print(f"Python computes the same, {total}")


if __name__ == "__main__":
    if MISSING:
        print(f"skipped: no {' and '.join(MISSING)} in {sys.executable}")
    else:
        main(sys.argv[1])
