"""The paper's theory as numbers: memory, step time, search. No torch needed."""
