"""Loading and checking of a target, its drafter and the parts of a method; number of slots per engine."""
