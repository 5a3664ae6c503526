"""The process group of one rank."""

from support.trained_runs import ranks as ranks
