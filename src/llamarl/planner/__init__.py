"""The paper's theory as numbers: memory, step time, search. No torch needed, but for the forecast of a hand-over."""
