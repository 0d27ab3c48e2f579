"""The command line that jobs share: arguments, phases of a command, exit statuses, and messages on a terminal."""
