"""What each command does, behind the options that `runtime.cli` declares."""
