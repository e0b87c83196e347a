"""Waiting for a place at an engine: the online lane, and the batch lane in what it leaves."""
