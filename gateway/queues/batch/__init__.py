"""The batch lane: jobs whose lines are answered when there is room, each exactly once."""
