"""Waiting for a place: the online lane."""
