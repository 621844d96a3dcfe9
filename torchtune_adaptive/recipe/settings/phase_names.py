"""The names of a rollout's phases, in logs, keys of caches, and reports.

They are not in ``rollout``, whose modules import torch: what asks for a plan does without.
"""

GENERATION, SCORING, TRAINING = PHASES = "generation", "scoring", "training"
GATHERING, SHARDED_GENERATION = "gathering the policy", "generation with sharded weights"
"""What a rank does before it generates, where the policy is sharded; and what is done where that does not
fit."""
