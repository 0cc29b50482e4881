"""What a step will cost before it is paid for: memory and time of each role, searched or played on a virtual clock."""
