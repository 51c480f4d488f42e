"""Does it fit, and how long does a step take? `python bench/scaling.py | tee docs/logs/scaling.txt`; docs/scaling.md explains.

Parameters and FLOPs are counted on meta tensors of the real shapes, nothing is allocated; GPU speeds are the published ones
(dense bf16, HBM bandwidth), reached at 40 % by matrix products and at 60 % by memory reads: assumptions, no GPU was measured.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from pyvision_mini.trainer import HEAD_CHUNK  # noqa: E402

GB = 1e9
GPUS = {"A100 80 GB": (80, 312e12, 2.0e12), "H100 80 GB": (80, 989e12, 3.35e12), "RTX 4090 24 GB": (24, 165e12, 1.0e12)}
MFU, BANDWIDTH = 0.4, 0.6               # shares of the published numbers
RANKS = 8
# Text shapes of the published config.json files; the vision tower is the family's, with its output width.
SHAPES = {"3B": (2048, 36, 16, 2, 11008, 151936, True), "7B": (3584, 28, 28, 4, 18944, 152064, False),
          "32B": (5120, 64, 40, 8, 27648, 152064, False)}
# One trajectory of a 2-megapixel image: prompt, three tool turns with a crop each, the answer.
PROMPT, TURNS, SAMPLED, OBSERVED = 3000, 4, 300, 700
ROWS, TRAINED = 256, 128                # trajectories sampled and trained on per step, over all ranks
MICRO = {24: 8192, 80: 32768}           # --micro_batch_tokens by memory


def build(name: str) -> Qwen2_5_VLForConditionalGeneration:
    hidden, layers, heads, kv_heads, inner, vocab, tied = SHAPES[name]
    text = dict(hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads,
                intermediate_size=inner, vocab_size=vocab, tie_word_embeddings=tied,
                rope_parameters=dict(rope_type="default", rope_theta=1e6, mrope_section=[16, 24, 24]))
    vision = dict(depth=32, hidden_size=1280, intermediate_size=3420 if name != "32B" else 3456, num_heads=16, out_hidden_size=hidden)
    with torch.device("meta"):
        return Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=vision,
                                                                   tie_word_embeddings=tied)).to(torch.bfloat16)


def forward_flops(model: Qwen2_5_VLForConditionalGeneration, length: int) -> float:
    """FLOPs of one row of `length` tokens through the language model, without the head."""
    embeds = torch.empty(1, length, model.config.get_text_config().hidden_size, dtype=torch.bfloat16, device="meta")
    positions = torch.zeros(3, 1, length, dtype=torch.long, device="meta")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.model.language_model(inputs_embeds=embeds, position_ids=positions, use_cache=False)
    return counter.get_total_flops()


def main() -> None:
    length = PROMPT + TURNS * SAMPLED + (TURNS - 1) * OBSERVED
    print(f"{length} tokens a trajectory, {TURNS * SAMPLED} of them sampled; {ROWS} sampled and {TRAINED} trained on a step; "
          f"{RANKS} GPUs; torch {torch.__version__}")
    for name, (hidden, layers, heads, kv_heads, inner, vocab, tied) in SHAPES.items():
        model = build(name)
        total = sum(p.numel() for p in model.parameters())
        trained = total - sum(p.numel() for p in model.model.visual.parameters())
        cache = layers * 2 * kv_heads * (hidden // heads) * 2
        flops = forward_flops(model, length)
        print(f"\n{name}: {total / 1e9:.2f} billion parameters, {trained / 1e9:.2f} trained; cache {cache / 1000:.0f} kB a token; "
              f"forward {flops / length / 1e9:.1f} GFLOP a token at this length")
        for gpu, (memory, speed, bandwidth) in GPUS.items():
            tokens = MICRO[memory]
            # fp32 weights, gradients and two Adam moments sharded; a whole bf16 replica; at the start the whole fp32 model.
            sharded, replica, loading = 16 * trained / RANKS, 2 * total, 4 * total + 2 * total
            # Kept per layer by checkpointing, one layer's recomputed insides, and one chunk of fp32 logits with its gradient.
            activations = tokens * (layers * hidden + 6 * inner + 8 * hidden) * 2 + 3 * HEAD_CHUNK * vocab * 4
            update = sharded + replica + activations
            room = memory * 0.9 * GB - sharded - replica
            rows = int(room / (cache * length))
            line = (f"  {gpu:15} start {loading / GB:5.0f} GB, update {update / GB:5.0f} GB, cache for {max(rows, 0):4d} rows")
            if max(loading, update) > memory * GB or rows < 1:
                print(f"{line}: does not fit")
                continue
            waves = -(-ROWS // RANKS // rows)
            at_once = -(-ROWS // RANKS // waves)
            per_token = (2 * trained + at_once * cache * length / 2) / (BANDWIDTH * bandwidth)
            decode = waves * TURNS * SAMPLED * per_token
            prefill = (ROWS / RANKS / 8 * PROMPT + ROWS / RANKS * (TURNS - 1) * OBSERVED) * flops / length / (MFU * speed)
            learn = TRAINED / RANKS * 4 * flops / (MFU * speed)        # forward, again for checkpointing, backward twice
            print(f"{line}: decode {decode:4.0f} s, prefill {prefill:3.0f} s, update {learn:4.0f} s a step "
                  f"({1000 * per_token:.0f} ms a token and {at_once} rows)")


if __name__ == "__main__":
    main()
