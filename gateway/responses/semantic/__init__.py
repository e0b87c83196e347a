"""Answers to questions that mean the same: which they are, and how sure that has to be. Needs the extra `semantic`."""
