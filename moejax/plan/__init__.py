"""Plan a training run: compile, weigh and time it for a GPU cluster that is not there."""
