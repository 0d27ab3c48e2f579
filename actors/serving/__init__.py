"""Engine thread, recovery, watchdog, heartbeat and crash ledger of an actor."""
