"""What was used and what was saved, by tenant, model, lane and day."""
