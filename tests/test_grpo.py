"""Advantages, token log-probs and the loss, checked against numbers worked out by hand."""

import math

import pytest
import torch

from pyvision_mini.grpo import entropy_from_logits, group_advantages, logprobs, policy_loss, token_logprobs
from pyvision_mini.policy import sampling_logits

torch.set_num_threads(1)
NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("reward", [0, 0.1, 1 / 3, 0.7, 0.9, 1.1])
@pytest.mark.parametrize("size", [2, 3, 7, 8, 16])
def test_a_constant_group_has_advantages_of_exactly_zero(reward, size, dtype):
    for normalize_std in (False, True):
        advantages = group_advantages(torch.full((size,), reward, dtype=dtype), normalize_std)
        assert advantages.tolist() == [0.0] * size


def test_advantages_are_the_reward_minus_the_mean_and_are_not_divided_by_the_std():
    # mean 0.5; std would be 0.5, so dividing would double these
    assert group_advantages(torch.tensor([1.0, 0.0, 1.0, 0.0])).tolist() == [0.5, -0.5, 0.5, -0.5]
    assert group_advantages([1.2, 0.0, 0.0, 0.0]).tolist() == pytest.approx([0.9, -0.3, -0.3, -0.3])  # mean 0.3


def test_normalize_std_divides_by_the_population_std():
    # mean 0.25, population variance (0.75² + 3 · 0.25²) / 4 = 0.1875
    std = math.sqrt(0.1875)
    assert group_advantages(torch.tensor([1.0, 0.0, 0.0, 0.0]), normalize_std=True).tolist() == pytest.approx(
        [0.75 / std, -0.25 / std, -0.25 / std, -0.25 / std], rel=1e-5)


def test_a_bad_reward_gets_zero_and_stays_out_of_the_mean():
    rewards = torch.tensor([1.0, NAN, 0.0, INF])
    assert group_advantages(rewards).tolist() == [0.5, 0.0, -0.5, 0.0]
    assert group_advantages(rewards, normalize_std=True).tolist() == pytest.approx([1.0, 0.0, -1.0, 0.0], abs=1e-5)
    assert rewards[0] == 1.0 and rewards[1].isnan()              # the argument is not written to


@pytest.mark.parametrize("rewards", [[0.7], [NAN], [NAN, NAN], [1.0, NAN], [-INF, INF, 0.5]])
def test_groups_without_two_good_rewards_have_zero_advantages(rewards):
    for normalize_std in (False, True):
        assert group_advantages(torch.tensor(rewards), normalize_std).tolist() == [0.0] * len(rewards)


def test_a_token_is_scored_by_the_logits_before_it():
    logits_BTV = torch.tensor([[[0.05, 0.05, 0.9], [0.3, 0.1, 0.6], [NAN] * 3]]).log()  # the last logits score nothing
    logp_BT = token_logprobs(logits_BTV, torch.tensor([[0, 2, 1]]))
    assert logp_BT[0].tolist() == pytest.approx([0.0, math.log(0.9), math.log(0.1)])


def test_the_temperature_divides_the_logits_and_suppressed_ids_have_no_share():
    logits_NV, ids_N = torch.tensor([[math.log(3.0), 0.0, 5.0]]), torch.tensor([0])
    assert logprobs(logits_NV, ids_N, suppressed=[2]).item() == pytest.approx(math.log(3 / 4))
    assert logprobs(logits_NV, ids_N, temperature=0.5, suppressed=[2]).item() == pytest.approx(math.log(9 / 10))
    assert logits_NV[0, 2] == 5.0                                # the argument is not written to


def test_the_entropy_is_that_of_the_sampling_distribution():
    logits_NV = torch.tensor([[0.0, 0.0, 9.0], [math.log(3.0), 0.0, 9.0]])
    half, warm = math.log(2), 0.75 * math.log(4 / 3) + 0.25 * math.log(4)
    cold = 0.9 * math.log(10 / 9) + 0.1 * math.log(10)
    assert entropy_from_logits(sampling_logits(logits_NV, 1.0, (2,))).tolist() == pytest.approx([half, warm])
    assert entropy_from_logits(sampling_logits(logits_NV, 0.5, (2,))).tolist() == pytest.approx([half, cold])


def test_half_precision_logits_are_normalised_in_fp32_and_never_give_a_positive_log_prob():
    torch.manual_seed(0)
    logits_NV = (torch.randn(64, 5000) * 4).bfloat16()
    logits_NV[:, 7] = 60.0                                       # a certain token: its log-prob rounds to 0, not above
    ids_N = torch.randint(0, 5000, (64,))
    ids_N[:32] = 7
    got_N = logprobs(logits_NV, ids_N)
    exact_N = torch.log_softmax(logits_NV.double(), -1)[torch.arange(64), ids_N]
    assert got_N.dtype == torch.float32 and (got_N <= 0).all()
    assert torch.allclose(got_N.double(), exact_N, atol=2e-5, rtol=0)


def test_suppressed_ids_leave_a_finite_gradient():
    logits_NV = torch.randn(3, 5, requires_grad=True)
    logprobs(logits_NV, torch.tensor([0, 1, 2]), suppressed=(3, 4)).sum().backward()
    assert logits_NV.grad.isfinite().all() and logits_NV.grad[:, 3:].abs().sum() == 0


def test_the_first_update_has_ratio_one_and_a_plain_policy_gradient():
    logp_BT = torch.tensor([[-1.0, -2.0], [-0.5, -3.0]], requires_grad=True)
    adv_B = torch.tensor([0.5, -0.25])
    loss, stats = policy_loss(logp_BT, logp_BT.detach(), adv_B, torch.tensor([[1, 1], [1, 0]]), n_tokens=3)
    loss.backward()
    assert loss.item() == pytest.approx(-(0.5 + 0.5 - 0.25) / 3)
    assert logp_BT.grad.flatten().tolist() == pytest.approx([-0.5 / 3, -0.5 / 3, 0.25 / 3, 0.0])
    assert stats["ratio_max"] == 1.0 and stats["kl"] == 0.0 and stats["clipped"] == 0


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_a_recomputed_log_prob_gives_ratio_exactly_one_at_every_temperature(temperature):
    torch.manual_seed(1)
    logits_BTV, ids_BT = torch.randn(2, 6, 11), torch.randint(0, 9, (2, 6))
    new, old = (token_logprobs(logits_BTV, ids_BT, temperature, suppressed=(9, 10)) for _ in range(2))
    _, stats = policy_loss(new, old, torch.ones(2), torch.ones(2, 6), n_tokens=12)
    assert stats["ratio_max"] == 1.0 and stats["kl"] == 0.0


@pytest.mark.parametrize("ratio, advantage, loss, gradient", [
    #  the ratio is clipped to [0.8, 1.3] where that makes the gain smaller; the gradient of the loss is −ratio · A or 0
    (1.5, 1.0, -1.3, 0.0),
    (1.5, -1.0, 1.5, 1.5),
    (0.5, 1.0, -0.5, -0.5),
    (0.5, -1.0, 0.8, 0.0),
    (1.25, 1.0, -1.25, -1.25),
])
def test_the_ratio_is_clipped_on_the_pessimistic_side_only(ratio, advantage, loss, gradient):
    old_BT = torch.tensor([[-1.0]])
    logp_BT = (old_BT + math.log(ratio)).requires_grad_()
    got, stats = policy_loss(logp_BT, old_BT, torch.tensor([advantage]), torch.ones(1, 1), 1, 0.2, 0.3)
    got.backward()
    assert got.item() == pytest.approx(loss)
    assert logp_BT.grad.item() == pytest.approx(gradient)
    assert stats["clipped"] == (gradient == 0)


def loss_and_gradient(logp_BT, old_BT, adv_B, mask_BT, n_tokens):
    logp_BT = logp_BT.clone().requires_grad_()
    loss, stats = policy_loss(logp_BT, old_BT, adv_B, mask_BT, n_tokens)
    loss.backward()
    return loss.item(), logp_BT.grad, stats


def batch():
    torch.manual_seed(2)
    logp_BT = -torch.rand(8, 5, dtype=torch.float64)
    mask_BT = (torch.rand(8, 5) < 0.6).long()
    return logp_BT, logp_BT + 0.1 * torch.randn(8, 5, dtype=torch.float64), torch.randn(8), mask_BT


@pytest.mark.parametrize("new, old", [(-1, -201), (-201, -1), (-INF, -1), (-1, -INF), (-INF, -INF), (NAN, NAN)])
def test_what_stands_at_masked_positions_changes_neither_loss_nor_gradient(new, old):
    logp_BT, old_BT, adv_B, mask_BT = batch()
    clean = loss_and_gradient(logp_BT, old_BT, adv_B, mask_BT, 20)
    hidden = mask_BT == 0
    dirty = loss_and_gradient(logp_BT.masked_fill(hidden, new), old_BT.masked_fill(hidden, old), adv_B, mask_BT, 20)
    assert dirty[0] == clean[0] and math.isfinite(clean[0]) and clean[0] != 0
    assert torch.equal(dirty[1], clean[1])
    assert {k: v.item() for k, v in dirty[2].items()} == {k: v.item() for k, v in clean[2].items()}


def test_all_rows_masked_give_a_zero_loss_zero_gradients_and_finite_stats():
    logp_BT, old_BT, adv_B, _ = batch()
    loss, gradient, stats = loss_and_gradient(logp_BT, old_BT, adv_B, torch.zeros(8, 5), 0)
    assert loss == 0.0 and torch.equal(gradient, torch.zeros_like(gradient))
    assert {k: v.item() for k, v in stats.items()} == dict.fromkeys(("tokens", "clipped", "kl", "ratio_max"), 0)


def test_one_masked_row_among_eight_gives_the_loss_without_it():
    rows = batch()
    rows[3][3] = 0                                               # the mask of row 3
    without = [torch.cat([t[:3], t[4:]]) for t in rows]
    assert loss_and_gradient(*rows, 20)[0] == pytest.approx(loss_and_gradient(*without, 20)[0], rel=1e-12)


@pytest.mark.parametrize("split", [1, 2, 4])
def test_micro_batches_share_one_denominator_so_losses_gradients_and_stats_add_up(split):
    rows = batch()
    n_tokens = int(rows[3].sum())
    whole = loss_and_gradient(*rows, n_tokens)
    parts = [loss_and_gradient(*part, n_tokens) for part in zip(*(t.split(split) for t in rows))]
    assert sum(p[0] for p in parts) == pytest.approx(whole[0], rel=1e-12)
    assert torch.allclose(torch.cat([p[1] for p in parts]), whole[1], atol=1e-12)
    for name in ("tokens", "clipped", "kl"):
        assert sum(p[2][name].item() for p in parts) == pytest.approx(whole[2][name].item())
    assert max(p[2]["ratio_max"] for p in parts) == whole[2]["ratio_max"]
    assert whole[2]["tokens"] == n_tokens > 0


def test_every_token_weighs_the_same_however_long_its_row_is():
    mask_BT = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0]])
    _, gradient_BT, _ = loss_and_gradient(torch.zeros(2, 4), torch.zeros(2, 4), torch.tensor([1.0, -1.0]), mask_BT, 5)
    assert gradient_BT[0].tolist() == pytest.approx([-0.2] * 4)
    assert gradient_BT[1].tolist() == pytest.approx([0.2, 0, 0, 0])
