"""What a run leaves behind: metrics, traces, rollouts, a live console."""
