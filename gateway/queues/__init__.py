"""Waiting for a slot at an engine: the online lane, and the batch lane in what it leaves."""
