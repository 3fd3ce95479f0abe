"""One step of Muon and AdamW with masks on whole matrices in float64, from their definitions alone.

Jordan et al.'s Muon: momentum as a running mean, Nesterov's blend, five quintic Newton-Schulz steps on the matrix over
its Frobenius norm, the update scaled by sqrt(max(1, rows / columns)), decoupled weight decay.
"""

from __future__ import annotations

import math

import torch

A, B, C = 3.4445, -4.7750, 2.0315


def newton_schulz(matrix):
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    x = wide / (wide.norm() + 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = A * x + (B * gram + C * gram @ gram) @ x
    return x if matrix.shape[0] <= matrix.shape[1] else x.T


class Oracle:
    """Weights of a model and what the optimizer knows of each."""

    def __init__(self, model, muon, *, lr, adam_lr, decay, clip, momentum=0.95, betas=(0.9, 0.95), eps=1e-10):
        self.model, self.muon = model.double(), muon
        self.lr, self.adam_lr, self.decay, self.clip = lr, adam_lr, decay, clip
        self.momentum, self.betas, self.eps, self.steps = momentum, betas, eps, 0
        self.first = {name: torch.zeros_like(p) for name, p in self.model.named_parameters()}
        self.second = {name: torch.zeros_like(p) for name, p in self.model.named_parameters()}

    @torch.no_grad()
    def mask(self, masks):
        """Take the masks of a topology step."""
        named = dict(self.model.named_parameters())
        for name, active in masks.items():
            for values in (named[name], self.first[name], self.second[name]):
                values.mul_(active)

    def step(self, batches, masks):
        """(norm of the masked gradient, the dense gradients)"""
        self.model.zero_grad()
        for batch in batches:
            (self.model(*batch) / len(batches)).backward()
        with torch.no_grad():
            dense = {name: p.grad.clone() for name, p in self.model.named_parameters()}
            gradients = {name: gradient * masks.get(name, 1) for name, gradient in dense.items()}
            norm = math.sqrt(sum(float(g.square().sum()) for g in gradients.values()))
            factor = min(1.0, self.clip / (norm + 1e-6))
            self.steps += 1
            for name, weight in self.model.named_parameters():
                gradient, mean = factor * gradients[name], self.first[name]
                if name in self.muon:
                    mean.mul_(self.momentum).add_((1 - self.momentum) * gradient)
                    blend = (1 - self.momentum) * gradient + self.momentum * mean
                    rows, columns = weight.shape
                    update = newton_schulz(blend) * math.sqrt(max(1.0, rows / columns)) * masks.get(name, 1)
                    lr = self.lr
                else:
                    one, two = self.betas
                    mean.mul_(one).add_((1 - one) * gradient)
                    self.second[name].mul_(two).add_((1 - two) * gradient**2)
                    size = (self.second[name] / (1 - two**self.steps)).sqrt() + self.eps
                    update, lr = mean / (1 - one**self.steps) / size, self.adam_lr
                weight.mul_(1 - lr * self.decay).sub_(lr * update)
        return norm, dense
