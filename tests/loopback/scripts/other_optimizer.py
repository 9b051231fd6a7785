"""The model of onehot.py with another optimizer."""

import sys

import torch

import paramserver

model = torch.nn.Module()
model.seen = torch.nn.Parameter(torch.zeros(8 * int(sys.argv[1])))
with paramserver.connect() as session:
    session.optimizer(model, torch.optim.Adam(model.parameters(), lr=1.0))
