"""The xor task: labels, products, noise, and how fast the documented optimizer learns it."""

from __future__ import annotations

import torch

from paramserver.worker.tasks.xor import Xor


def test_features_are_normal_with_three_products_and_labels_are_the_xor_of_two_signs():
    features, labels = Xor(d=5, num_samples=20_000).train_data().tensors
    assert features.shape == (20_000, 8)
    x0, x1 = features[:, 0], features[:, 1]
    assert torch.equal(labels.bool(), (x0 > 0) ^ (x1 > 0))
    assert torch.allclose(features[:, :5].mean(dim=0), torch.zeros(5), atol=0.03)
    assert torch.allclose(features[:, :5].std(dim=0), torch.ones(5), atol=0.03)
    products = torch.stack([x0 * x0, x1 * x1, x0 * x1], dim=1)
    assert torch.allclose(features[:, 5:] / products, (features[0, 5:] / products[0]).expand(20_000, 3))


def test_label_noise_flips_that_fraction_of_the_training_labels_and_nothing_else():
    clean, noisy = Xor(d=2, num_samples=20_000), Xor(d=2, num_samples=20_000, label_noise=0.2)
    (features, labels), (noisy_features, noisy_labels) = clean.train_data().tensors, noisy.train_data().tensors
    assert torch.equal(features, noisy_features)
    assert abs((labels != noisy_labels).float().mean().item() - 0.2) < 0.01
    model = clean.model()
    assert clean.evaluate(model) == noisy.evaluate(model)


def test_another_seed_is_another_data_set_and_held_out_samples_are_new():
    item, other = Xor(d=4, num_samples=10_000, seed=0), Xor(d=4, num_samples=10_000, seed=1)
    rows = [{row.numpy().tobytes() for row in task.train_data().tensors[0]} for task in (item, other)]
    held_out: set[bytes] = set()
    model = item.model()
    model.register_forward_pre_hook(lambda _, args: held_out.update(row.numpy().tobytes() for row in args[0]))
    item.evaluate(model)
    assert not rows[0] & rows[1]
    assert len(held_out) == 10_000
    assert not held_out & (rows[0] | rows[1])
