"""Rollouts under stress: faults by a seed (`make soak`) and signals (`make stops`)."""
