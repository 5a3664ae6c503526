"""Collects facts about this machine; nothing is changed."""
