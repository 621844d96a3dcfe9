"""What is traced of a rollout, by name."""

GENERATION, SCORING, TRAINING = "generation", "scoring", "training"
"""The phases."""
GATHERING, SHARDED_GENERATION = "gathering the policy", "generation with sharded weights"
"""What a rank does before it generates, where the policy is sharded; and what is done where that does not
fit."""
