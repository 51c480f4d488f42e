"""Advantages, token log-probs, policy loss: pure functions. No sampling, no I/O, no writes into arguments.

Axes: G trajectories of a group, B rows, T tokens of a padded row, V vocabulary, N tokens picked out of B·T.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from pyvision_mini.policy import sampling_logits
from pyvision_mini.selection import FLAT


def group_advantages(rewards: Tensor | Sequence[float], normalize_std: bool = False) -> Tensor:
    """A_i = R_i − mean(R), shape [G] → [G], in the rewards' float dtype (float32 for a list or integers).

    A group whose rewards lie within FLAT gets exactly 0. Non-finite rewards get 0 and stay out of mean and std.
    """
    # No std division (Dr. GRPO, arXiv 2503.20783; PyVision-RL section 3.3): it up-weights groups that are nearly all
    # right or all wrong. normalize_std brings back GRPO's original form (arXiv 2402.03300), with the population std.
    is_float = isinstance(rewards, Tensor) and rewards.is_floating_point()
    dtype = rewards.dtype if is_float else torch.float32
    rewards_G = torch.as_tensor(rewards, dtype=torch.float64)
    finite_G = rewards_G.isfinite()
    kept = rewards_G[finite_G]
    # The range, not the std, tells a flat group: seven equal fp32 rewards of 0.7 have a non-zero mean difference.
    if kept.numel() < 2 or kept.max() - kept.min() <= FLAT:
        return torch.zeros_like(rewards_G, dtype=dtype)
    advantages_G = torch.where(finite_G, rewards_G - kept.mean(), 0.0)
    if normalize_std:
        advantages_G = advantages_G / (kept.std(correction=0) + 1e-6)
    return advantages_G.to(dtype)


def logprobs(logits_NV: Tensor, ids_N: Tensor, temperature: float = 1.0, suppressed: Sequence[int] = ()) -> Tensor:
    """log p(ids) under the sampling distribution, [N] fp32 and ≤ 0. Called chunk by chunk, so V never meets B·T.

    fp32 whatever the logits are: a bf16 log-softmax is off by 1e-2, more than a whole policy update.
    Suppressed ids are never sampled, so they never occur in ids_N (they would score −inf).
    """
    return _Logprobs.apply(sampling_logits(logits_NV, temperature, suppressed), ids_N)


class _Logprobs(torch.autograd.Function):
    """Writes one gradient of the logits' size, in place; autograd's own backward of the same takes four."""

    @staticmethod
    def forward(ctx, logits_NV: Tensor, ids_N: Tensor) -> Tensor:
        lse_N = logits_NV.logsumexp(-1)
        ctx.save_for_backward(logits_NV, ids_N, lse_N)
        return logits_NV.gather(-1, ids_N[:, None])[:, 0] - lse_N

    @staticmethod
    def backward(ctx, grad_N: Tensor) -> tuple[Tensor, None]:
        logits_NV, ids_N, lse_N = ctx.saved_tensors
        grad_NV = (logits_NV - lse_N[:, None]).exp_().mul_(-grad_N[:, None])             # −softmax · grad
        return grad_NV.scatter_add_(-1, ids_N[:, None], grad_N[:, None]), None


def entropy_from_logits(logits_NV: Tensor) -> Tensor:
    """Entropy in nats at each token, [N] fp32. Of the sampling distribution if these are policy.sampling_logits."""
    parts = logits_NV.split(16)                  # which stay in a CPU's cache: twice as fast
    return torch.cat([torch.special.entr(part.softmax(-1)).sum(-1) for part in parts])


def token_logprobs(logits_BTV: Tensor, ids_BT: Tensor, temperature: float = 1.0,
                   suppressed: Sequence[int] = ()) -> Tensor:
    """logp_BT[:, t] scores ids_BT[:, t] with the logits at t−1; [:, 0] is 0, nothing predicts the first token."""
    logp = logprobs(logits_BTV[:, :-1].flatten(0, 1), ids_BT[:, 1:].flatten(), temperature, suppressed)
    return F.pad(logp.view(ids_BT.shape[0], -1), (1, 0))


def policy_loss(logp_BT: Tensor, old_logp_BT: Tensor, adv_B: Tensor, mask_BT: Tensor, n_tokens: int | float | Tensor,
                clip_low: float = 0.2, clip_high: float = 0.2) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's clipped objective (arXiv 1707.06347), negated: Σ over masked-in tokens / n_tokens. No KL term, no entropy.

    n_tokens: action tokens of the whole optimizer step over all micro-batches and ranks, the one denominator; losses
    of micro-batches therefore add up. mask_BT is 1 on action tokens; what stands elsewhere (NaN, −inf) has no effect.
    Stats are detached sums over the tokens, to be added over micro-batches and divided by "tokens" in the end:
    tokens, clipped (the clip cut the gradient), kl (k3 estimate of KL(old‖new), nats). "ratio_max" alone is a maximum, 0
    without tokens.
    """
    mask_BT = mask_BT.bool()
    # Replaced before exp: a masked inf or NaN would come back as 0 · inf = NaN in the gradient.
    log_ratio_BT = torch.where(mask_BT, logp_BT - old_logp_BT, 0.0)
    ratio_BT = log_ratio_BT.exp()
    adv_B1 = adv_B.to(ratio_BT.dtype)[:, None]
    gain_BT = torch.minimum(ratio_BT * adv_B1, ratio_BT.clamp(1 - clip_low, 1 + clip_high) * adv_B1)
    loss = -torch.where(mask_BT, gain_BT, 0.0).sum() / max(n_tokens, 1)

    with torch.no_grad():
        too_high_BT = (ratio_BT > 1 + clip_high) & (adv_B1 > 0)
        too_low_BT = (ratio_BT < 1 - clip_low) & (adv_B1 < 0)
        stats = {"tokens": mask_BT.sum(), "clipped": (too_high_BT | too_low_BT).sum(),
                 "kl": (ratio_BT - 1 - log_ratio_BT).sum(),
                 "ratio_max": torch.where(mask_BT, ratio_BT, 0.0).max()}
    return loss, stats
