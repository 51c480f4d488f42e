"""Groups → one policy update, and the step loop around it: FSDP2, checkpoints, evaluation.

Axes: B rows of a micro-batch, T padded tokens, N action tokens of the micro-batch, V vocabulary, D hidden width.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from pyvision_mini.grpo import entropy_from_logits, logprobs
from pyvision_mini.policy import Policy, mrope_positions
from pyvision_mini.trajectory import Trajectory

HEAD_CHUNK = 1024  # action tokens whose logits exist at once: 0.6 GB in fp32 at Qwen's 151,936 ids


@dataclass
class MicroBatch:
    """Right-padded trajectories as the scorer takes them."""

    ids_BT: torch.Tensor
    attention_BT: torch.Tensor       # 1 on real tokens
    pos_3BT: torch.Tensor            # M-RoPE positions
    action_BT: torch.Tensor          # bool: sampled tokens
    features_PD: torch.Tensor        # vision features of all images, rows in order


def collate(policy: Policy, trajs: list[Trajectory], features: torch.Tensor | None = None) -> MicroBatch:
    """Trajectories → tensors; `features` replaces the stored ones (the cold start trains the vision tower too)."""
    B, T = len(trajs), max(len(traj.ids) for traj in trajs)
    ids, attention, action = (np.zeros((B, T), dtype=np.int64) for _ in range(3))
    pos = np.zeros((3, B, T), dtype=np.int64)
    for i, traj in enumerate(trajs):
        n = len(traj.ids)
        ids[i, :n], attention[i, :n], action[i, :n] = traj.ids, 1, traj.action_mask
        pos[:, i, :n] = mrope_positions(traj.ids, traj.grids, policy.image_id)
    if features is None:
        stored = [f for traj in trajs for f in traj.features]
        width = policy.model.config.get_text_config().hidden_size
        features = torch.cat(stored) if stored else torch.zeros(0, width, device=policy.device)
    ids, attention, action, pos = (torch.from_numpy(a).to(policy.device) for a in (ids, attention, action, pos))
    return MicroBatch(ids, attention, pos, action.bool(), features)


class Scorer(nn.Module):
    """The trained part of the policy as one module whose forward returns log-probs of action tokens only.

    A module of its own because FSDP2 gathers parameters at the root's forward: whatever uses the embeddings or the
    head has to run inside it.
    """

    def __init__(self, policy: Policy, temperature: float, checkpointing: bool):
        super().__init__()
        self.language_model, self.lm_head = policy.model.model.language_model, policy.model.lm_head
        self.image_id, self.suppressed, self.temperature = policy.image_id, policy.suppressed, temperature
        self.checkpointing = checkpointing
        if checkpointing:
            policy.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})

    def forward(self, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """→ (logp_BT, entropy_BT) in fp32: position t scores token t given all before it; 0 where nothing was sampled."""
        embeds = self.language_model.embed_tokens(batch.ids_BT)
        is_image = (batch.ids_BT == self.image_id)[..., None]
        embeds = embeds.masked_scatter(is_image, batch.features_PD.to(embeds.dtype))
        hidden = self.language_model(inputs_embeds=embeds, attention_mask=batch.attention_BT,
                                     position_ids=batch.pos_3BT, use_cache=False).last_hidden_state
        scored = batch.action_BT[:, 1:]
        hidden_ND, ids_N = hidden[:, :-1][scored], batch.ids_BT[:, 1:][scored]
        # The head runs chunk by chunk and again in the backward: no tensor of size tokens × vocabulary ever exists.
        parts = [checkpoint(self._head, h, i, use_reentrant=False)
                 for h, i in zip(hidden_ND.split(HEAD_CHUNK), ids_N.split(HEAD_CHUNK))]
        logp_BT, entropy_BT = (torch.zeros(batch.ids_BT.shape, device=hidden.device) for _ in range(2))
        if len(ids_N):
            where = torch.nn.functional.pad(scored, (1, 0))
            logp_BT = logp_BT.masked_scatter(where, torch.cat([p[0] for p in parts]))
            entropy_BT = entropy_BT.masked_scatter(where, torch.cat([p[1] for p in parts]))
        return logp_BT, entropy_BT

    def _head(self, hidden_ND: torch.Tensor, ids_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits_NV = self.lm_head(hidden_ND)
        entropy_N = entropy_from_logits(logits_NV.detach(), self.temperature, self.suppressed)
        return logprobs(logits_NV, ids_N, self.temperature, self.suppressed), entropy_N
