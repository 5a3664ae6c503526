"""Runs of random weights."""

from support.trained_runs import ranks as ranks
from support.trained_runs import run_of as run_of
