"""The Python half of scripts/test-hf.

usage: test-hf.py exported|saved FOLDER

exported: FOLDER/NAME holds a model that we exported, tokens.json, and our logits.json: transformers
must give the same. Then transformers saves each model in FOLDER/NAME-saved, in several files.
saved: FOLDER/NAME-saved/logits.json is what we made of that.
"""
import json
import os
import sys

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

TOLERANCE = 1e-4


def logits(folder, tokens):
    model, report = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    for problem, names in report.items():
        if names:
            sys.exit(f"{folder}: {problem}: {names}")
    with torch.no_grad():
        return model, model.eval()(torch.tensor([tokens])).logits[0]


def load(folder, name):
    with open(os.path.join(folder, name)) as file:
        return json.load(file)


def main():
    mode, root = sys.argv[1:]
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    for name in ("untied", "tied", "grouped"):
        folder = os.path.join(root, name)
        tokens = load(folder, "tokens.json")
        model, theirs = logits(folder, tokens)
        ours = torch.tensor(load(folder if mode == "exported" else folder + "-saved", "logits.json")).view(theirs.shape)
        difference = (ours - theirs).abs().max().item()
        scale = theirs.abs().max().item()
        print(f"{name}, {mode}: largest difference {difference:.1e} of logits up to {scale:.2f}")
        if not difference <= TOLERANCE or scale < 0.1:
            sys.exit(f"{name}: more than {TOLERANCE}")
        if mode == "exported":
            saved = folder + "-saved"
            model.save_pretrained(saved, max_shard_size="100KB")
            with open(os.path.join(saved, "tokens.json"), "w") as file:
                json.dump(tokens, file)


if __name__ == "__main__":
    main()
