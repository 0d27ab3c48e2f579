"""The engine thread, recovery, watchdog, heartbeat and crash journal."""
