"""Training samples and the learner of draft heads."""
