"""Runs of random weights, the same ones each time, and no network."""

from support.trained_runs import ranks as ranks
from support.trained_runs import run_of as run_of
from support.trained_runs import same_weights as same_weights
