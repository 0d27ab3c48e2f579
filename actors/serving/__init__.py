"""Engine thread, recovery, watchdog, heartbeat and crash journal of an actor."""
