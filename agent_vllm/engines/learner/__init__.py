"""A learner as a checkpoint has it: unwrapped, unsharded, with adapters merged."""
