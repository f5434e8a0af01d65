"""Train the pocket model from scratch on two CPU cores: ``python -m bench.pocket.train``.

A small Llama (head_dim 64, grouped-query attention, RoPE) learns to recall passwords over a curriculum of lengths; it
moves to the next length when it recalls 90 % of the targets, and the last length is trained with the rate decaying to
zero. Every `--save-every` steps the state goes to ``--out`` (safetensors and JSON, written atomically); starting
the command again continues there. Batches depend only on the seed and the step, so a resumed run sees the same
documents.

Two choices are meant to make retrieval appear early: Muon for the hidden matrices, and an initialisation in which one
query head per KV head of the first layer prefers the previous token (or the one before it), see
`look_back`.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from safetensors.torch import load_file
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from bench.pocket.corpus import PAD, Documents, build_tokenizer
from bench.pocket.muon import Muon
from grace_opt._util.files import write_file, write_tensors

LENGTHS = (128, 256, 512, 1152)
MOST_FILLER = (0.0, 0.5, 0.9, 0.95)  # per length: at first nothing but facts
TOKENS_PER_STEP = 4608
RECALL_TO_MOVE_ON = 0.9
OTHER_WEIGHT = 0.05  # filler is unpredictable: most of the gradient should come from recall
ADAM_RATE, MUON_RATE, WARMUP, CLIP = 2e-3, 2e-2, 50, 1.0


def build_model(vocabulary: int, pad: int) -> LlamaForCausalLM:
    """The pocket architecture, initialised."""
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=256,
            intermediate_size=512,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=64,
            max_position_embeddings=LENGTHS[-1],
            tie_word_embeddings=True,
            rms_norm_eps=1e-5,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=pad,
        )
    )
    look_back(model)
    return model


@torch.no_grad()
def look_back(model: LlamaForCausalLM, frequencies: int = 8, sharpness: float = 5.4) -> None:
    """Let one query head per KV head of layer 0 prefer a fixed distance: 1 for the first KV head, 2 for the second, …

    Every embedding shares a constant first component. Query and key projections read it as two vectors whose product
    after RoPE, Σ cos(θ_f (Δ - distance)) over the highest frequencies, is largest at the wanted distance Δ. Training is
    free to change it.
    """
    config, embeddings = model.config, model.model.embed_tokens.weight
    embeddings.normal_(0.0, config.hidden_size**-0.5)
    embeddings[:, 0] = 1.0
    strength = sharpness / (config.hidden_size / 2) ** 0.5  # of a normalised embedding, half the norm is the constant
    attention, d = model.model.layers[0].self_attn, config.head_dim
    group = config.num_attention_heads // config.num_key_value_heads
    for kv in range(config.num_key_value_heads):
        for f in range(frequencies):
            angle = 10000 ** (-2 * f / d) * (kv + 1)
            attention.k_proj.weight[kv * d + f, 0] += strength
            attention.q_proj.weight[group * kv * d + f, 0] += strength * math.cos(angle)
            attention.q_proj.weight[group * kv * d + f + d // 2, 0] -= strength * math.sin(angle)


class Run:
    """Model, optimiser and curriculum state of one training run, kept in a folder."""

    def __init__(self, out: Path, seed: int, final_steps: int) -> None:
        self.out, self.seed, self.final_steps = out, seed, final_steps
        torch.manual_seed(seed)
        self.tokenizer = build_tokenizer()
        self.model = build_model(self.tokenizer.get_vocab_size(), self.tokenizer.token_to_id(PAD))
        self.named = dict(self.model.named_parameters())
        hidden = {n: p for n, p in self.named.items() if p.ndim == 2 and "embed" not in n}
        others = [p for n, p in self.named.items() if n not in hidden]
        self.adam = torch.optim.AdamW(others, lr=ADAM_RATE, betas=(0.9, 0.98), weight_decay=0.0)
        self.muon = Muon(hidden.values(), lr=MUON_RATE)
        self.state = {"step": 0, "stage": 0, "stage_step": 0, "recall": 0.0, "seconds": 0.0, "seed": seed}
        if (out / "state.json").exists():
            self._load()

    def _load(self) -> None:
        tensors = load_file(self.out / "checkpoint.safetensors")
        self.state = json.loads((self.out / "state.json").read_text())
        for name, p in self.named.items():
            p.data.copy_(tensors[f"model.{name}"])
            for optimizer in (self.adam, self.muon):
                prefix = f"state.{name}."
                values = {key.removeprefix(prefix): t for key, t in tensors.items() if key.startswith(prefix)}
                if any(p is q for g in optimizer.param_groups for q in g["params"]):
                    optimizer.state[p] = values

    def save(self) -> None:
        tensors = {f"model.{n}": p.data for n, p in self.named.items()}
        for n, p in self.named.items():
            for key, value in (*self.adam.state[p].items(), *self.muon.state[p].items()):
                tensors[f"state.{n}.{key}"] = value
        write_tensors(self.out / "checkpoint.safetensors", tensors, {})
        write_file(self.out / "state.json", json.dumps(self.state))

    def rate(self) -> float:
        """Factor on both learning rates."""
        if self.state["stage"] == len(LENGTHS) - 1:
            return 0.5 * (1 + math.cos(math.pi * self.state["stage_step"] / self.final_steps))
        return min(1.0, (self.state["step"] + 1) / WARMUP)

    @property
    def done(self) -> bool:
        return self.state["stage"] == len(LENGTHS) - 1 and self.state["stage_step"] >= self.final_steps

    def step(self) -> dict[str, float]:
        s, began = self.state, time.perf_counter()
        length = LENGTHS[s["stage"]]
        documents = Documents(self.tokenizer, seed=self.seed * 1_000_003 + s["step"])
        ids, target = documents.batch(TOKENS_PER_STEP // length, length, MOST_FILLER[s["stage"]])
        self.adam.param_groups[0]["lr"] = ADAM_RATE * self.rate()
        self.muon.param_groups[0]["lr"] = MUON_RATE * self.rate()
        logits = self.model(ids).logits[:, :-1]
        labels, recall = ids[:, 1:], target[:, 1:]
        losses = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)
        weight = torch.where(recall, 1.0, OTHER_WEIGHT)
        self.model.zero_grad()
        ((losses * weight).sum() / weight.sum()).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.adam.step()
        self.muon.step()
        accuracy = (logits.argmax(-1) == labels)[recall].float().mean().item()
        s["recall"] = 0.95 * s["recall"] + 0.05 * accuracy
        s["step"] += 1
        s["stage_step"] += 1
        s["seconds"] += time.perf_counter() - began
        if s["recall"] > RECALL_TO_MOVE_ON and s["stage"] < len(LENGTHS) - 1:
            s.update(stage=s["stage"] + 1, stage_step=0, recall=0.5)
        return {"recall_loss": losses[recall].mean().item(), "other_loss": losses[~recall].mean().item()}

    def export(self, folder: Path) -> None:
        """The shipped form: float16 weights, config, tokenizer, and how it was trained."""
        folder.mkdir(parents=True, exist_ok=True)
        done = {name: self.state[name] for name in ("step", "seconds", "seed")}
        write_file(folder / "training.json", json.dumps(done) + "\n")
        fast = PreTrainedTokenizerFast(tokenizer_object=self.tokenizer, pad_token=PAD, unk_token="<unk>")
        fast.save_pretrained(folder)
        self.model.half().save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, default=Path("runs/pocket"), help="folder of the checkpoint (default %(default)s)"
    )
    parser.add_argument("--export", type=Path, default=None, help="folder to write the finished model to")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--final-steps", type=int, default=700, help="steps at the last length (default %(default)s)")
    parser.add_argument("--save-every", type=int, default=50)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    run = Run(args.out, args.seed, args.final_steps)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns) as progress:
        bar = progress.add_task("training", total=len(LENGTHS))
        while not run.done:
            losses = run.step()
            s = run.state
            part = s["stage_step"] / args.final_steps if s["stage"] == len(LENGTHS) - 1 else s["recall"]
            progress.update(
                bar, completed=s["stage"] + part, description=f"step {s['step']} length {LENGTHS[s['stage']]}"
            )
            if s["step"] % args.save_every == 0:
                run.save()
                progress.console.print(
                    f"step {s['step']} length {LENGTHS[s['stage']]} recall {s['recall']:.3f} recall loss"
                    f" {losses['recall_loss']:.3f} other loss {losses['other_loss']:.3f} {s['seconds']:.0f} s",
                    soft_wrap=True,
                )
    run.save()
    if args.export:
        run.export(args.export)
        progress.console.print(f"wrote {args.export}")


if __name__ == "__main__":
    main()
