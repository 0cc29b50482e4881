"""The roles of a job: generator, reward, trainer, evaluator."""
