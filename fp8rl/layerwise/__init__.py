"""Engine and learner compared inside: point by point of every layer, and linear by linear."""
