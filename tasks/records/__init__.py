"""Typed records that pass between stages and between processes; one file per owner."""
